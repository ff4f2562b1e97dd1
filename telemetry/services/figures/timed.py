"""Quantiles of response times, and what share of responses a TTFT of routers rests on (T1b)."""

from __future__ import annotations

from collections.abc import Iterable

from telemetry.metrics.histograms import Merged, quantile
from telemetry.storage import sums


def timed_ratio(ttft: Merged | None, plain: Merged | None) -> float | None:
    """Responses whose first token routers timed / those and the plain ones; None where there are neither."""
    timed, others = (part.buckets.total if part else 0 for part in (ttft, plain))
    return timed / (timed + others) if timed + others else None


def timed_note(ttft: Iterable[Merged], plain: Iterable[Merged]) -> str:
    """What a TTFT of routers rests on, in words; "" where that is every response, or none."""
    ratio = timed_ratio(sums.remerged(ttft), sums.remerged(plain))
    return "" if ratio is None or ratio == 1 else f"Of streamed responses: {ratio:.0%} of all."


def share_of_responses(some: Iterable[Merged], every: Iterable[Merged]) -> float | None:
    """Responses counted in some histograms / in all of them, at most 1; None where there are none."""
    part, whole = sums.remerged(some), sums.remerged(every)
    total = whole.buckets.total if whole else 0
    return min(1.0, (part.buckets.total if part else 0) / total) if total else None


def quantile_s(merged: Merged | None, q: float) -> float | None:
    """A quantile in seconds; None for no observations."""
    found = quantile(merged.buckets, q) if merged else None
    return found.value if found else None
