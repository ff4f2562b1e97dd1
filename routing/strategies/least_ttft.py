"""The replica where a request is likely to have its first token soonest."""

from __future__ import annotations

from routing.core.cost.rule import CostRule
from routing.core.group_replicas import GroupReplicas
from routing.schema import LeastTtftSettings
from routing.strategies.lowest_cost import LowestCost


class LeastTtft(LowestCost):
    """Weigh what waits against what is cached, in seconds: by the prefill rate that each replica showed."""

    @classmethod
    def build(cls, settings: LeastTtftSettings, replicas: GroupReplicas, _seed: int) -> LeastTtft:  # type: ignore[override]
        """The strategy for one group."""
        return cls(CostRule(replicas.ring, settings.alpha, by_rate=True), replicas.residency)
