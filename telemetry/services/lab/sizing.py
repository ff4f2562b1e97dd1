"""Everything about a pool's capacity and cost over a window: bytes, savings, the newest sweep, a shared cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from controlplane.kv_cache import KvBytes
from controlplane.models import Pool
from telemetry.lab.costs import PrefillRate
from telemetry.lab.shared_cache import Tier
from telemetry.metrics.windows import Window
from telemetry.services.lab.breakdowns import curve_of
from telemetry.services.lab.costs import PoolSavings, prefill_rate_of, savings_in
from telemetry.services.lab.shared_cache import SharedCache, shared_cache_of
from telemetry.services.lab.sweeps import PoolSweep, newest_sweep


@dataclass(frozen=True, slots=True)
class Sizing:
    """Figures of a pool's capacity and cost; None: unknown."""

    kv_bytes: KvBytes | None
    rate: PrefillRate
    savings: PoolSavings | None
    sweep: PoolSweep | None
    shared_cache: SharedCache

    def as_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "kv_bytes_per_token": self.kv_bytes.bytes_per_token if self.kv_bytes else None,
            "kv_notes": list(self.kv_bytes.notes) if self.kv_bytes else [],
            "prefill_rate": asdict(self.rate),
            "savings": self.savings and self.savings.as_json(),
            "sweep": self.sweep and _sweep_as_json(self.sweep),
            "shared_cache": self.shared_cache.as_json(),
        }


def sizing_of(pool: Pool, window: Window, tiers: Sequence[Tier]) -> Sizing:
    """Sizing of a pool. A fixed number of queries."""
    rate = prefill_rate_of(pool, window.end)
    savings = savings_in(pool, window, rate)
    return Sizing(
        pool.kv_bytes, rate, savings, newest_sweep(pool), shared_cache_of(pool, savings, rate, curve_of(pool), tiers)
    )


def _sweep_as_json(found: PoolSweep) -> dict[str, Any]:
    sweep = found.sweep
    return {
        "what_if": found.what_if.pk,
        "state": found.what_if.state,
        "is_calibrated": sweep.is_calibrated if sweep else None,
        "problems": sweep.problems if sweep else [],
        "requests": found.counted_requests,
        "by_replicas": [asdict(point) for point in sweep.by_replicas] if sweep else [],
        "by_cache": [asdict(point) for point in sweep.by_cache] if sweep else [],
        "summaries": found.summaries,
    }
