"""What a client saw: counts per task group, and TTFT in a histogram of bounded size."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

GROWTH = 1.05  # a bucket's width: quantiles are right to 5 %
FLOOR_S = 0.001


class Durations:
    """Seconds, in buckets that grow by 5 %."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.count = 0
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.count += 1
        self.total_s += seconds
        self._buckets[max(0, math.ceil(math.log(max(seconds, 1e-9) / FLOOR_S, GROWTH)))] += 1

    def merge(self, other: Durations) -> None:
        """Take in another's."""
        self._buckets += other._buckets
        self.count += other.count
        self.total_s += other.total_s

    def quantile(self, q: float) -> float | None:
        """The middle of the bucket in which the share ``q`` is reached; None of nothing."""
        left = q * self.count
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                return float(FLOOR_S * GROWTH ** (bucket - 0.5))
        return None

    def summary(self) -> dict[str, float | None]:
        """Mean, p50, p95 and p99, None of nothing."""
        mean = self.total_s / self.count if self.count else None
        return {"mean": mean, "p50": self.quantile(0.5), "p95": self.quantile(0.95), "p99": self.quantile(0.99)}


@dataclass(slots=True)
class Tally:
    """Figures of one task group, or of all."""

    requests: int = 0  # sent
    ok: int = 0
    errors: Counter[str] = field(default_factory=Counter)  # by kind
    usage_reported: int = 0  # answers that told their cached tokens
    prompt_tokens: int = 0  # of those answers
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft: Durations = field(default_factory=Durations)

    @property
    def hit_rate(self) -> float | None:
        """Cached tokens / prompt tokens of the answers that told; None where none did."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    def merge(self, other: Tally) -> None:
        """Take in another group's figures."""
        self.requests += other.requests
        self.ok += other.ok
        self.errors += other.errors
        self.usage_reported += other.usage_reported
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.completion_tokens += other.completion_tokens
        self.ttft.merge(other.ttft)

    def report(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "requests": self.requests,
            "ok": self.ok,
            "errors": dict(sorted(self.errors.items())),
            "usage_reported": self.usage_reported,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "hit_rate": self.hit_rate,
            "ttft_s": self.ttft.summary(),
        }


def total(groups: dict[str, Tally]) -> Tally:
    """All groups together."""
    everything = Tally()
    for tally in groups.values():
        everything.merge(tally)
    return everything


def one_line(tally: Tally, seconds: float) -> str:
    """A summary for a terminal; ``-`` for what is unknown."""
    errors = sum(tally.errors.values())
    p50, p95 = tally.ttft.quantile(0.5), tally.ttft.quantile(0.95)
    rate = tally.hit_rate
    return (
        f"{tally.requests / seconds:.1f} requests/s, {errors} errors, hit rate "
        f"{'-' if rate is None else f'{100 * rate:.1f} %'}, TTFT p50 {_seconds(p50)}, p95 {_seconds(p95)}"
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"
