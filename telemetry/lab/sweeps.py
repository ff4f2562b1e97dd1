"""A capacity sweep: what-if candidates that differ in the number of replicas or in the cache of each.

``read_sweep`` accepts any what-if whose candidates differ only in such a size, so curves are also drawn for numbers
that a user entered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from telemetry.lab.costs import Price
from telemetry.lab.predictions import Verdict

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
    """Curves of a sweep, ascending by size; each contains the current size."""

    by_replicas: list[SweepPoint]
    by_cache: list[SweepPoint]
    current: SweepPoint
    is_calibrated: bool
    problems: list[str]

    @property
    def curves(self) -> dict[str, list[SweepPoint]]:
        """Both curves by the quantity on the x-axis."""
        return {"replicas": self.by_replicas, "cache": self.by_cache}


def read_sweep(
    candidates: Sequence[Mapping[str, Any]], result: Mapping[str, Any], counted_s: float, price: Price | None
) -> Sweep:
    """The curves of a finished what-if that is a sweep; ``counted_s``: seconds of traffic that the figures cover."""
    rows = [_point(row, counted_s, price) for row in result["candidates"]]
    current = rows[0]
    pairs = list(zip(candidates, rows[1:], strict=True))
    by_replicas = [point for candidate, point in pairs if "replicas" in candidate]
    by_cache = [point for candidate, point in pairs if "cache_tokens" in candidate]
    return Sweep(
        sorted([current, *by_replicas], key=lambda point: point.replicas) if by_replicas else [],
        sorted([current, *by_cache], key=lambda point: point.cache_tokens) if by_cache else [],
        current,
        result["calibration"]["is_calibrated"],
        list(result["calibration"]["problems"]),
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


def summaries(sweep: Sweep, currency: str = "") -> list[str]:
    """What one replica fewer and one more would bring; [] without calibration."""
    if not sweep.is_calibrated:
        return []
    by_count = {point.replicas: point for point in sweep.by_replicas}
    count = sweep.current.replicas
    texts = [
        _sentence(label, by_count[count + step], sweep.current, currency)
        for label, step in (("One replica fewer", -1), ("One replica more", 1))
        if count + step in by_count
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
    parts = []
    for name, interval, unit in (
        ("hit rate", point.difference["hit_rate"], "points"),
        ("TTFT p50", point.difference["ttft_p50"], "%"),
        ("TTFT p95", point.difference["ttft_p95"], "%"),
    ):
        if interval is not None:
            parts.append(f"{name} {100 * interval['low']:+.0f} to {100 * interval['high']:+.0f} {unit}")
    text = f"{label}: {', '.join(parts)} ({_WORDS.get(point.verdict, 'no verdict')})."
    if point.verdict == Verdict.OVERLOAD or point.money_per_day is None or current.money_per_day is None:
        return text
    change = point.money_per_day - current.money_per_day
    return f"{text} It would {'cost' if change > 0 else 'save'} {abs(change):,.2f} {currency}".rstrip() + " a day."
