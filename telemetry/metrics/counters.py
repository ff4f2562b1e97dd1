"""Increases of cumulative counters between two scrapes of one source, with resets and gaps recognized.

Theory of operation. A source is one engine of a replica, or one label set of a router. All its counters start at 0
together, so they share resets: when the source reports another start time, or when any of its counters decreased, all
of them were reset (H8, H9). Without a reset the increase is the difference; after a reset it is the whole count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from telemetry.metrics.histograms import Buckets, subtract

CLOCK_SLACK_S = 1.0  # a start time is derived from a boot time that may wobble
GAP_INTERVALS = 1.5  # more than this between two scrapes: one was missed
SET_BACK_S = 120.0  # a previous scrape this far in the future is not a late one: the clock was set back


class ReadingState(StrEnum):
    """Whether the increases of a reading are known and complete."""

    OK = "ok"  # one interval since the previous scrape
    FIRST = "first"  # no previous scrape: the increases are unknown
    RESET = "reset"  # the source restarted: what it counted after the previous scrape and before the restart is lost
    GAP = "gap"  # scrapes were missed: the totals are complete, the resolution is not (H10)
    STALE = "stale"  # the scrape failed: the increases are unknown (H12)


@dataclass(frozen=True, slots=True)
class RawCounters:
    """The cumulative counters of a source at one scrape. A counter that the source does not have is absent, not 0."""

    due_s: float  # Unix time at which the scrape was due
    scraped_s: float  # Unix time at which the response arrived
    counters: Mapping[str, float]
    histograms: Mapping[str, Buckets] = field(default_factory=dict)
    started_s: float | None = None  # process_start_time_seconds; absent behind several API servers (H9)
    created_s: float | None = None  # creation time of the counters; absent likewise
    boot: str | None = None  # a router's identifier of its process


@dataclass(frozen=True, slots=True)
class Increase:
    """What a source counted between two scrapes; names that are missing are unknown."""

    state: ReadingState
    interval_s: float | None = None  # seconds that the increases cover
    counters: Mapping[str, float] = field(default_factory=dict)
    histograms: Mapping[str, Buckets] = field(default_factory=dict)


def increase(
    previous: RawCounters | None, current: RawCounters, *, interval_s: float, absent_is_zero: bool = False
) -> Increase | None:
    """The increase from ``previous`` to ``current``; None if ``current`` is a late or a duplicate scrape.

    ``absent_is_zero``: a counter that was absent in ``previous`` was 0 then; otherwise its increase is unknown.
    """
    if previous is None or previous.due_s - current.due_s > SET_BACK_S:
        return Increase(ReadingState.FIRST)
    if current.due_s <= previous.due_s or current.scraped_s <= previous.scraped_s:
        return None
    elapsed_s = current.scraped_s - previous.scraped_s
    if _is_reset(previous, current):
        covered_s = _uptime_s(current, elapsed_s)
        return Increase(ReadingState.RESET, covered_s, dict(current.counters), dict(current.histograms))
    state = ReadingState.GAP if current.due_s - previous.due_s > GAP_INTERVALS * interval_s else ReadingState.OK
    counters = {
        name: value - previous.counters.get(name, 0.0)
        for name, value in current.counters.items()
        if absent_is_zero or name in previous.counters
    }
    histograms = {}
    for name, buckets in current.histograms.items():
        if (earlier := previous.histograms.get(name)) is not None:
            histograms[name] = subtract(buckets, earlier)
        elif absent_is_zero:
            histograms[name] = buckets
    return Increase(state, elapsed_s, counters, histograms)


def _is_reset(previous: RawCounters, current: RawCounters) -> bool:
    return (
        _time_changed(previous.started_s, current.started_s)
        or _time_changed(previous.created_s, current.created_s)
        or (previous.boot is not None and current.boot is not None and previous.boot != current.boot)
        or any(current.counters.get(name, value) < value for name, value in previous.counters.items())
        or any(
            _decreased(buckets, current.histograms[name])
            for name, buckets in previous.histograms.items()
            if name in current.histograms
        )
    )


def _uptime_s(current: RawCounters, elapsed_s: float) -> float:
    """Seconds that counters cover after a reset: since the source started, or since the last scrape if unknown.

    After an outage of an hour, a rate over that hour would be far too low. A start time before the last scrape, or in
    the future, is that of another clock.
    """
    started = [at for at in (current.started_s, current.created_s) if at is not None]
    uptime_s = current.scraped_s - max(started, default=0.0)
    return uptime_s if 0.0 < uptime_s < elapsed_s else elapsed_s


def _time_changed(previous: float | None, current: float | None) -> bool:
    return previous is not None and current is not None and abs(current - previous) > CLOCK_SLACK_S


def _decreased(previous: Buckets, current: Buckets) -> bool:
    return previous.edges != current.edges or current.total < previous.total  # edges are chosen at start (T3)
