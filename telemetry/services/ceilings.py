"""How high hit rates could be at most (H7): token-weighted, of the prompts that routers saw."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from telemetry.metrics.rates import ratio
from telemetry.metrics.windows import Window
from telemetry.services.overview import Pools, names_of
from telemetry.storage.answers import answers_by_replica
from telemetry.storage.sums import router_sums


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Ratios, 0 to 1; None, or no entry, where no prompt's ceiling is known: no traffic, or an unknown block size."""

    by_pool: dict[str, float | None] = field(default_factory=dict)
    by_group: dict[tuple[str, str], float | None] = field(default_factory=dict)  # (pool, group)
    by_replica: dict[tuple[str, str], float | None] = field(default_factory=dict)  # (pool, replica)


def ceilings(pools: Pools, window: Window) -> Ceilings:
    """Of some pools, or of all, beside every hit rate. 2 queries."""
    groups, _ = router_sums(names_of(pools), window, whole=True)
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for row in groups:
        sums[row.pool][0] += row.cacheable_tokens or 0
        sums[row.pool][1] += row.ceiling_prompt_tokens or 0
    replicas = answers_by_replica(names_of(pools), window)
    return Ceilings(
        by_pool={pool: ratio(cacheable, prompt) for pool, (cacheable, prompt) in sums.items()},
        by_group={(row.pool, row.group): ratio(row.cacheable_tokens, row.ceiling_prompt_tokens) for row in groups},
        by_replica={key: ratio(side.cacheable_tokens, side.ceiling_prompt_tokens) for key, side in replicas.items()},
    )
