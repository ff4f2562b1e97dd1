"""A capacity sweep: what-if candidates that differ in the number of replicas or in the cache of each.

``with_curves`` accepts any what-if whose candidates differ only in such a size, so curves are also drawn for numbers
that a user entered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from telemetry.lab.costs import Price
from telemetry.lab.predictions import Difference, Interval, Verdict, describe

STEPS = (-2, -1, 1, 2, 4)  # replicas added
MULTIPLES = (0.5, 2, 4)  # of the cache of each replica
MIN_POINTS = 3  # of a sweep, without the current size


def sweep_candidates(replicas: int, cache_tokens: int | None, *, max_replicas: int) -> list[dict[str, Any]]:
    """Candidates around ``replicas``, of 1 to ``max_replicas``, and around ``cache_tokens`` of each; None: unknown."""
    counts = [replicas + step for step in STEPS if 1 <= replicas + step <= max_replicas]
    by_count = [{"name": _replicas(count), "replicas": count} for count in counts]
    if cache_tokens is None:
        return by_count
    sizes = [(multiple, round(multiple * cache_tokens)) for multiple in MULTIPLES if multiple * cache_tokens >= 1]
    return by_count + [{"name": f"cache x {multiple:g}", "cache_tokens": tokens} for multiple, tokens in sizes]


def _replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count} replicas"


def is_sweep(candidates: Sequence[Mapping[str, Any]]) -> bool:
    """Whether each candidate changes only the number of replicas, or only the cache size."""
    return len(candidates) >= MIN_POINTS and all(
        ("replicas" in candidate) != ("cache_tokens" in candidate)
        and not candidate.get("settings")
        and not candidate.get("groups")
        for candidate in candidates
    )


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One size of a pool, and what was predicted for it."""

    name: str
    replicas: int
    cache_tokens: int  # of each replica
    figures: Mapping[str, Any] | None  # telemetry.lab.predictions.Figures; None: it could not be replayed
    difference: Mapping[str, Any] | None  # from the current size; None: this is the current size
    verdict: str
    reason: str  # why there are no figures
    money_per_day: float | None  # of all replicas
    prefill_s_per_day: float | None  # of replicas, extrapolated

    @property
    def is_current(self) -> bool:
        """Whether the pool has this size."""
        return self.difference is None and self.figures is not None


@dataclass(frozen=True, slots=True)
class Sweep:
    """A what-if that is a sweep, with its curves ascending by size; each contains the current size."""

    what_if: int
    state: str
    reason: str  # why it failed
    end: datetime  # of its traffic
    is_calibrated: bool | None = None  # None, here and below: it is not done
    problems: list[str] = field(default_factory=list)
    requests: int | None = None  # that the figures rest on
    by_replicas: list[SweepPoint] = field(default_factory=list)
    by_cache: list[SweepPoint] = field(default_factory=list)
    summaries: list[str] = field(default_factory=list)  # what one replica fewer and one more would bring

    @property
    def curves(self) -> dict[str, list[SweepPoint]]:
        """Both curves by the quantity on the x-axis."""
        return {"replicas": self.by_replicas, "cache": self.by_cache}

    @property
    def current(self) -> SweepPoint:
        """The current size. Only of a sweep that is done."""
        return next(point for point in (*self.by_replicas, *self.by_cache) if point.is_current)


def with_curves(
    sweep: Sweep, candidates: Sequence[Mapping[str, Any]], result: Mapping[str, Any], price: Price | None
) -> Sweep:
    """The sweep with the result of its what-if."""
    start, end = (datetime.fromisoformat(result[name]) for name in ("counted_from", "to"))
    rows = [_point(row, (end - start).total_seconds(), price) for row in result["candidates"]]
    current, pairs = rows[0], list(zip(candidates, rows[1:], strict=True))
    by_replicas = [point for candidate, point in pairs if "replicas" in candidate]
    by_cache = [point for candidate, point in pairs if "cache_tokens" in candidate]
    calibration = result["calibration"]
    currency = price.currency if price else ""
    return replace(
        sweep,
        is_calibrated=calibration["is_calibrated"],
        problems=list(calibration["problems"]),
        requests=result["counted_requests"],
        by_replicas=sorted([current, *by_replicas], key=lambda point: point.replicas) if by_replicas else [],
        by_cache=sorted([current, *by_cache], key=lambda point: point.cache_tokens) if by_cache else [],
        summaries=_summaries(by_replicas, current, currency) if calibration["is_calibrated"] else [],
    )


def _point(row: Mapping[str, Any], counted_s: float, price: Price | None) -> SweepPoint:
    replicas, figures = row["replicas"], row["figures"]
    prefill_s = figures and figures["prefill_gpu_s"]
    return SweepPoint(
        row["name"],
        replicas,
        round(row["cache_tokens"] / replicas),
        figures,
        row["difference"],
        row["verdict"],
        row["reason"],
        price.replica_day * replicas if price else None,
        prefill_s * 86_400 / counted_s if prefill_s is not None and counted_s > 0 else None,
    )


def _summaries(by_replicas: Sequence[SweepPoint], current: SweepPoint, currency: str) -> list[str]:
    """What one replica fewer and one more would bring."""
    by_count = {point.replicas: point for point in by_replicas}
    texts = [
        _sentence(label, by_count[current.replicas + step], current, currency)
        for label, step in (("One replica fewer", -1), ("One replica more", 1))
        if current.replicas + step in by_count
    ]
    return [text for text in texts if text]


_WORDS = {
    "better": "better",
    "worse": "worse",
    "overload": "overload: queues grow until the end",
    "mixed": "one figure better, another worse",
    "same": "no difference beyond the uncertainty",
}


def _sentence(label: str, point: SweepPoint, current: SweepPoint, currency: str) -> str:
    if point.figures is None or point.difference is None:
        return f"{label}: {point.reason}" if point.reason else ""
    difference = Difference(**{name: value and Interval(**value) for name, value in point.difference.items()})
    text = f"{describe(label, difference)} ({_WORDS.get(point.verdict, 'no verdict')})."
    if point.verdict == Verdict.OVERLOAD or point.money_per_day is None or current.money_per_day is None:
        return text
    change = point.money_per_day - current.money_per_day
    return f"{text} It would {'cost' if change > 0 else 'save'} {abs(change):,.2f} {currency}".rstrip() + " a day."
