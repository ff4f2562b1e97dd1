"""Capacity sweeps: what-ifs over numbers of replicas and cache sizes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.contrib.auth.models import User

from controlplane.errors import ConflictError
from controlplane.models import Pool, ReplicaState
from telemetry.lab.costs import Price
from telemetry.lab.sweeps import Sweep, is_sweep, read_sweep, summaries, sweep_candidates
from telemetry.models import WhatIf, WhatIfState
from telemetry.services.lab.replays import capacities_of
from telemetry.services.lab.what_ifs import MAX_REPLICAS, create_what_if

SEARCHED = 30  # newest what-ifs


@dataclass(frozen=True, slots=True)
class PoolSweep:
    """The newest sweep of a pool. ``sweep`` is None until it is done."""

    what_if: WhatIf
    sweep: Sweep | None
    currency: str

    @property
    def summaries(self) -> list[str]:
        """What one replica fewer and one more would bring; [] without calibration."""
        return summaries(self.sweep, self.currency) if self.sweep else []

    @property
    def counted_requests(self) -> int | None:
        """Requests that the figures rest on."""
        return self.what_if.result["counted_requests"] if self.what_if.result else None


def create_sweep(
    pool: Pool, *, start: datetime | None = None, end: datetime | None = None, by: User | None = None
) -> WhatIf:
    """Queue a sweep around the pool's current size; errors as of ``create_what_if``, ConflictError without replicas."""
    replicas = pool.replicas.filter(state=ReplicaState.ACTIVE).count()
    if not replicas:
        raise ConflictError(f"Pool {pool.name} has no active replica.")
    sizes = capacities_of(pool, set()).tokens
    cache_tokens = sum(sizes.values()) // len(sizes) if sizes else None
    return create_what_if(
        pool, sweep_candidates(replicas, cache_tokens, max_replicas=MAX_REPLICAS), start=start, end=end, by=by
    )


def newest_sweep(pool: Pool) -> PoolSweep | None:
    """The newest finished sweep, else the newest open or failed one. Two queries."""
    rows = WhatIf.objects.filter(pool=pool).exclude(state=WhatIfState.CANCELLED)
    listed = [row for row in rows.defer("result")[:SEARCHED] if is_sweep(row.candidates)]
    if not listed:
        return None
    what_if = next((row for row in listed if row.state == WhatIfState.DONE), listed[0])
    price = Price.of(pool.costs)
    sweep = None
    if what_if.result is not None:
        sweep = read_sweep(what_if.candidates, what_if.result, _counted_s(what_if.result), price)
    return PoolSweep(what_if, sweep, price.currency if price else "")


def open_sweep(pool: Pool) -> WhatIf | None:
    """A sweep that is queued or running. One query."""
    rows = WhatIf.objects.filter(pool=pool, state__in=(WhatIfState.QUEUED, WhatIfState.RUNNING)).defer("result")
    return next((row for row in rows if is_sweep(row.candidates)), None)


def _counted_s(result: dict[str, Any]) -> float:
    start, end = (datetime.fromisoformat(result[name]) for name in ("counted_from", "to"))
    return (end - start).total_seconds()
