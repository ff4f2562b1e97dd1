"""Cumulative counters of one source, and what was added between two looks at them.

Theory of operation. A ``Mark`` is everything that one source (an engine of a replica, or one label set of a router)
had counted at one moment. All counters of a source live and die together, so they share an epoch: when its process
says it is another one, or when ANY of its counters has fallen, a new epoch starts for all of them (H8). Within an
epoch the addition is the difference; in a new epoch it is the whole count, since the source began at 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from telemetry.metrics.histograms import Buckets, subtract

CLOCK_SLACK_S = 1.0  # a start time is derived from a boot time that may wobble


@dataclass(frozen=True, slots=True)
class Mark:
    """What a source had counted when it was scraped. A counter it does not have is absent, not 0."""

    at_s: float  # Unix time at which the scrape was due
    taken_s: float  # Unix time at which the answer came
    counters: Mapping[str, float]
    histograms: Mapping[str, Buckets] = field(default_factory=dict)
    started_s: float | None = None  # process_start_time_seconds; absent behind several API servers (H9)
    created_s: float | None = None  # when the counters were created; likewise
    boot: str | None = None  # a router's own name for one life of its process


def is_new_epoch(before: Mark, now: Mark) -> bool:
    """Whether the source began to count anew in between."""
    return (
        _moved(before.started_s, now.started_s)
        or _moved(before.created_s, now.created_s)
        or (before.boot is not None and now.boot is not None and before.boot != now.boot)
        or any(now.counters[name] < value for name, value in before.counters.items() if name in now.counters)
        or any(
            _fell(value, now.histograms[name]) for name, value in before.histograms.items() if name in now.histograms
        )
    )


def _moved(before: float | None, now: float | None) -> bool:
    return before is not None and now is not None and abs(now - before) > CLOCK_SLACK_S


def _fell(before: Buckets, now: Buckets) -> bool:
    return before.edges != now.edges or now.total < before.total  # edges are chosen at start (T3)


def added_counters(before: Mark, now: Mark, *, absent_is_zero: bool) -> dict[str, float]:
    """What was counted within one epoch. A counter that was absent before is unknown, unless absence means 0."""
    return {
        name: value - before.counters.get(name, 0.0)
        for name, value in now.counters.items()
        if absent_is_zero or name in before.counters
    }


def added_buckets(before: Mark, now: Mark, *, absent_is_zero: bool) -> dict[str, Buckets]:
    """What histograms observed within one epoch, by the same rule."""
    added: dict[str, Buckets] = {}
    for name, later in now.histograms.items():
        earlier = before.histograms.get(name)
        if earlier is None and absent_is_zero:
            added[name] = later
        elif earlier is not None and (difference := subtract(later, earlier)) is not None:
            added[name] = difference
    return added
