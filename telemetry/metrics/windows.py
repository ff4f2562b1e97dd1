"""Time windows and their steps, chart series, and the rows of the overview.

Also the block rounding limit of one prompt (H7): the last token of a prompt is always computed and hits end on a block
boundary, so at most ``floor((n - 1) / block) * block`` of ``n`` tokens can come from the cache. How much could be
reused at all is the reachable share (``telemetry/storage/reachable.py``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

# Steps that divide a day evenly, so that every chart's points fall on round times.
STEPS_S = (1, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)
POINTS = 300  # what a chart of a few hundred pixels can show


class PointState(StrEnum):
    """Whether a point has a value, and why not. Every state but OK goes with None, never with 0."""

    OK = "ok"
    NO_TRAFFIC = "no_traffic"  # scraped, and no tokens were queried: the rate is undefined (H11)
    STALE = "stale"  # scrapes were due and failed (H12)
    NOT_REPORTED = "not_reported"  # the engines were scraped and do not have this figure
    UNKNOWN = "unknown"  # no scrape was due, or there is no previous one


@dataclass(frozen=True, slots=True)
class Window:
    """The time from ``start`` (excluded) to ``end`` (included), drawn in steps of ``step_s`` seconds.

    A reading at ``t`` covers the time before ``t``, so the step that starts at ``s`` contains the readings of
    ``s < t <= s + step``.
    """

    start: datetime
    end: datetime
    step_s: float

    def __post_init__(self) -> None:
        if self.start.tzinfo is None or self.end.tzinfo is None:
            raise ValueError("a window needs aware times")
        if self.end <= self.start or self.step_s <= 0:
            raise ValueError("a window needs an end after its start and a step above 0 s")

    @classmethod
    def last(cls, seconds: float, *, until: datetime, step_s: float | None = None) -> Window:
        """The ``seconds`` before ``until``; the start is moved back to a whole step, so that refreshes agree."""
        step = step_s or choose_step(seconds)
        start = math.floor((until.timestamp() - seconds) / step) * step
        return cls(datetime.fromtimestamp(start, UTC), until, step)

    @property
    def length_s(self) -> float:
        return (self.end - self.start).total_seconds()

    def starts(self) -> list[datetime]:
        """The start of each step, ascending; the last step may be cut short by the window's end."""
        count = math.ceil(self.length_s / self.step_s - 1e-9)
        return [self.start + timedelta(seconds=index * self.step_s) for index in range(count)]


def choose_step(length_s: float, *, shortest_s: float = 5, points: int = POINTS) -> float:
    """The shortest round step, no shorter than the scrape interval, that draws a length in at most ``points`` steps."""
    for step in STEPS_S:
        if step >= shortest_s and length_s / step <= points:
            return float(step)
    return float(STEPS_S[-1] * math.ceil(length_s / STEPS_S[-1] / points))


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart. ``states`` and ``band`` run parallel to ``points``."""

    label: str
    points: list[tuple[datetime, float | None]]  # (start of the step, value), ascending, None for a gap
    states: list[PointState] = field(default_factory=list)
    # The bucket that contains a quantile (T5), or an error band.
    band: list[tuple[float, float] | None] = field(default_factory=list)
    note: str = ""  # shown beside the chart, such as edges merged inexactly (T3)


@dataclass(frozen=True, slots=True)
class ReachableShare:
    """Reachable tokens of prompts / all tokens of the same prompts, with its basis."""

    ratio: float  # 0 to 1
    standard_error: float  # of ``ratio``, from block sampling and the number of requests
    requests: int
    start: datetime  # of the first bin
    end: datetime  # of the last bin, or of the window
    delivered_ratio: float | None  # reported cached / prompt tokens in the same bins; None: no response reported any

    def as_json(self) -> dict[str, Any]:
        return {
            "ratio": self.ratio,
            "standard_error": self.standard_error,
            "requests": self.requests,
            "from": self.start.isoformat(),
            "to": self.end.isoformat(),
            "delivered_ratio": self.delivered_ratio,
        }


@dataclass(frozen=True, slots=True)
class FleetTiles:
    """The figures at the top of the overview; None is unknown."""

    hit_rate_ratio: float | None = None  # cached / queried tokens, total reuse, engine counters (H2, H3)
    hit_rate_state: PointState = PointState.UNKNOWN
    reachable: ReachableShare | None = None  # what one unbounded cache would have reused
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    ttft_source: str | None = None  # the clock: "router" or "engine" (T1)
    ttft_timed_ratio: float | None = None  # timed responses / all responses; engines time all
    plain_p50_s: float | None = None  # latency of responses that were not streamed, routers' clock
    plain_p95_s: float | None = None
    requests_per_s: float | None = None
    waiting: float | None = None
    replicas_up: int | None = None
    replicas_total: int | None = None
    read_at: datetime | None = None  # the newest successful reading


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """One row of the table of replicas."""

    name: str
    pool: str
    state: str  # set by the operator: active, draining, disabled
    health: str  # as scraped: up, down, stale, cold, unknown
    hit_rate_ratio: float | None = None
    hit_rate_state: PointState = PointState.UNKNOWN
    ttft_p50_s: float | None = None  # engine's clock
    ttft_p95_s: float | None = None
    running: float | None = None
    waiting: float | None = None
    kv_usage_ratio: float | None = None
    requests_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    reason: str = ""  # why it is not up


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One task group, from routers' counters; ``name`` is "" for requests of no group."""

    name: str
    pool: str
    hit_rate_ratio: float | None = None  # cached / prompt tokens of responses that reported both (H16)
    hit_rate_state: PointState = PointState.UNKNOWN
    reachable: ReachableShare | None = None
    ttft_p50_s: float | None = None  # router's clock
    ttft_p95_s: float | None = None
    ttft_timed_ratio: float | None = None  # timed responses / all responses
    plain_p50_s: float | None = None  # latency of responses that were not streamed, routers' clock
    plain_p95_s: float | None = None
    requests_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    failed_ratio: float | None = None  # requests failed by a replica or the router / all
    rejected_ratio: float | None = None  # responses with a client error (4xx) / all requests
    accounted_ratio: float | None = None  # share of successful responses in the hit rate (H16)


def cacheable_tokens(prompt_tokens: int, block_tokens: int) -> int:
    """Tokens of one prompt that a perfectly warm cache could supply."""
    if prompt_tokens < 0 or block_tokens < 1:
        raise ValueError("expected prompt_tokens >= 0 and block_tokens >= 1")
    return max(prompt_tokens - 1, 0) // block_tokens * block_tokens
