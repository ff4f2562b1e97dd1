"""The replica where a request costs least: what waits there, and what it would have to prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from routing.core.cost.rule import CostRule, home_key
from routing.core.group_replicas import GroupReplicas
from routing.core.loads.candidates import Candidates
from routing.core.residency.residency import Residency
from routing.core.types import Choice, TargetId
from routing.schema import LowestCostSettings
from routing.strategies.strategy import Keys, Weighed


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
        key = home_key(chain, match, None if chain else keys.tier1)
        return self.rule.choose(match, key, keys.prompt_tokens, candidates)

    def weigh(self, keys: Keys, candidates: Candidates, targets: Sequence[TargetId]) -> list[Weighed]:
        """What each of some candidates holds of the prompt, and its cost."""
        match, tokens = self.residency.match(keys.chain, keys.block_tokens), keys.prompt_tokens
        members = [candidates.by_name[name] for name in targets]
        costs = self.rule.costs(members, match, tokens, candidates)
        return [Weighed(match.tokens(member.bit, tokens), cost) for member, cost in zip(members, costs, strict=True)]
