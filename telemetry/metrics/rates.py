"""Two marks of a source -> one reading: what was added, over how long, and how far to trust it.

| state | means | additions |
|---|---|---|
| first | nothing to compare with yet | unknown |
| ok | one interval since the mark before | the difference |
| gap | scrapes were missed in between, no restart: resolution is lost, totals are not (H10) | the difference |
| reset | the source restarted in between: what it counted before its end is lost (H10) | the whole count |
| stale | the scrape failed (H12) | unknown |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from telemetry.metrics.counters import Mark, added_buckets, added_counters, is_new_epoch
from telemetry.metrics.histograms import Buckets

ACCOUNTED = 0.9995  # share of responses from which on a hit rate is shown as that of all
GAP_INTERVALS = 1.5  # more than this between two marks: a scrape was missed
SET_BACK_S = 120.0  # a mark this far in the past is no late scrape: somebody set the clock back


class ReadingState(StrEnum):
    """How a reading came about."""

    OK = "ok"
    FIRST = "first"
    RESET = "reset"
    GAP = "gap"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class Addition:
    """What a source counted between two marks; names that are missing are unknown."""

    state: ReadingState
    interval_s: float | None = None  # seconds that the additions cover
    counters: Mapping[str, float] = field(default_factory=dict)
    histograms: Mapping[str, Buckets] = field(default_factory=dict)


def advance(before: Mark | None, now: Mark, *, interval_s: float, absent_is_zero: bool = False) -> Addition | None:
    """The reading that ``now`` makes after ``before``; None for a scrape that is late or a duplicate."""
    if before is None or before.at_s - now.at_s > SET_BACK_S:
        return Addition(ReadingState.FIRST)
    if now.at_s <= before.at_s or now.taken_s <= before.taken_s:
        return None
    elapsed = now.taken_s - before.taken_s
    if is_new_epoch(before, now):
        return Addition(ReadingState.RESET, elapsed, dict(now.counters), dict(now.histograms))
    state = ReadingState.GAP if now.at_s - before.at_s > GAP_INTERVALS * interval_s else ReadingState.OK
    return Addition(
        state,
        elapsed,
        added_counters(before, now, absent_is_zero=absent_is_zero),
        added_buckets(before, now, absent_is_zero=absent_is_zero),
    )


def total_known(values: Iterable[float | None]) -> int | None:
    """The sum of those that are known, a whole number; None where none is."""
    known = [value for value in values if value is not None]
    return int(sum(known)) if known else None


def ratio(part: float | None, whole: float | None) -> float | None:
    """``part / whole``; None where either is unknown or nothing was asked (H11)."""
    return part / whole if part is not None and whole else None


def accounted_ratio(reported: float | None, completed: float | None) -> float | None:
    """Share of successful responses that said how many tokens were cached, 0 to 1 (H16).

    None where no response is known. ``reported`` is None where none has ever said so.
    """
    return min((reported or 0) / completed, 1.0) if completed else None


def hit_rate_ratio(queries: float | None, hits: float | None, external_hits: float | None = None) -> float | None:
    """Total reuse: cached tokens of every tier / queried tokens, both summed over the window first (H1, H2, H3).

    External queries are a subset of the queries, so they are never added to the denominator.
    """
    return ratio(None if hits is None else hits + (external_hits or 0.0), queries)
