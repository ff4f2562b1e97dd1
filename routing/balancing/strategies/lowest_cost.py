"""The replica where a request costs least: what waits there, and what it would have to prefill.

The replica where a request is likely to have its first token soonest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from routing.balancing.candidates import Candidates
from routing.balancing.cost import CostRule, preferred_key
from routing.balancing.replicas import GroupReplicas
from routing.balancing.residency import Residency
from routing.balancing.strategies.strategy import Keys, Weighed
from routing.schema import LeastTtftSettings, LowestCostSettings
from routing.types import Choice, TargetId


@dataclass(frozen=True, slots=True)
class LowestCost:
    """Weigh what waits against what is cached, in tokens."""

    rule: CostRule
    residency: Residency

    @classmethod
    def build(cls, settings: LowestCostSettings, replicas: GroupReplicas, _seed: int) -> LowestCost:
        """The strategy for one group."""
        return cls(CostRule(replicas.ring, settings.alpha, by_rate=False), replicas.residency)

    def choose(self, keys: Keys, candidates: Candidates) -> Choice:
        """The candidate with the least cost."""
        chain = keys.chain
        match = self.residency.match(chain, keys.block_tokens)
        sole = self.rule.sole_holder(match, keys.prompt_tokens, candidates)
        if sole is not None:
            return sole
        key = preferred_key(chain, match, None if chain else keys.tier1)
        return self.rule.choose(match, key, keys.prompt_tokens, candidates)

    def weigh(self, keys: Keys, candidates: Candidates, targets: Sequence[TargetId]) -> list[Weighed]:
        """What each of some candidates holds of the prompt, and its cost."""
        match, tokens = self.residency.match(keys.chain, keys.block_tokens), keys.prompt_tokens
        members = [candidates.by_name[name] for name in targets]
        costs = self.rule.costs(members, match, tokens, candidates)
        return [Weighed(match.tokens(member.bit, tokens), cost) for member, cost in zip(members, costs, strict=True)]


class LeastTtft(LowestCost):
    """Weigh what waits against what is cached, in seconds: by the prefill rate that each replica showed."""

    @classmethod
    def build(cls, settings: LeastTtftSettings, replicas: GroupReplicas, _seed: int) -> LeastTtft:  # type: ignore[override]
        """The strategy for one group."""
        return cls(CostRule(replicas.ring, settings.alpha, by_rate=True), replicas.residency)
