"""Advice on a shared or offloaded cache tier for a pool, from its breakdown and its captured requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from controlplane.models import Pool
from telemetry.lab.breakdown import Breakdown
from telemetry.lab.costs import DAY_S, PrefillRate
from telemetry.lab.shared_cache import CacheTier, Gaps, Situation, TierAdvice, advise, describe
from telemetry.models import CapacityCurve
from telemetry.services.lab.costs import PoolSavings


@dataclass(frozen=True, slots=True)
class SharedCache:
    """The baseline without a tier, and the advice on each tier. Ratios are of the prompt tokens; None: unknown."""

    delivered_ratio: float | None
    reachable_ratio: float | None
    lost_ratio: float | None  # to capacity and fragmentation: what a tier can add
    placement_ratio: float | None  # to spreading and placement: what a policy can add without a tier
    gaps: Gaps | None
    tiers: list[TierAdvice]

    @property
    def summaries(self) -> list[str]:
        """One sentence for each tier."""
        return [describe(found) for found in self.tiers]

    @property
    def notes(self) -> list[str]:
        """Limits of the advice."""
        if self.gaps is None or not self.gaps.error_tokens:
            return []
        return [
            "Only a part of the block hashes was captured, so the length of a lost prefix is known to about "
            f"{2 * self.gaps.error_tokens:,.0f} tokens only."
        ]

    def as_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "delivered_ratio": self.delivered_ratio,
            "reachable_ratio": self.reachable_ratio,
            "lost_ratio": self.lost_ratio,
            "placement_ratio": self.placement_ratio,
            "requests": self.gaps.requests if self.gaps else None,
            "tiers": [
                {**asdict(found), "summary": summary} for found, summary in zip(self.tiers, self.summaries, strict=True)
            ],
            "notes": self.notes,
        }


def shared_cache_of(
    pool: Pool, savings: PoolSavings | None, rate: PrefillRate, curve: CapacityCurve | None, tiers: Sequence[CacheTier]
) -> SharedCache:
    """Advice from the savings of a window and the pool's curve. No query."""
    breakdown = savings.breakdown if savings else None
    lost = _between(breakdown, "reachable", "split")
    gaps = Gaps.read(curve.gaps) if curve is not None and curve.gaps is not None else None
    situation = Situation(
        kv_bytes=pool.kv_bytes_per_token,
        prefill_rate=rate.tokens_per_s,
        gaps=gaps,
        lost_tokens=None if lost is None or savings is None else lost * DAY_S / savings.measured_s,
        computed_tokens=savings.pool.computed_per_day.tokens if savings else None,
        price=savings.price if savings else None,
    )
    return SharedCache(
        breakdown.ratio(breakdown.delivered) if breakdown else None,
        breakdown.ratio(breakdown.reachable) if breakdown else None,
        breakdown.ratio(lost) if breakdown else None,
        breakdown.ratio(_between(breakdown, "split", "predicted")) if breakdown else None,
        gaps,
        [advise(tier, situation) for tier in tiers],
    )


def _between(breakdown: Breakdown | None, upper: str, lower: str) -> float | None:
    """Tokens lost between two terms of the breakdown; None if one is unknown."""
    if breakdown is None:
        return None
    above, below = getattr(breakdown, upper), getattr(breakdown, lower)
    return None if above is None or below is None else max(0.0, above - below)
