"""The replica where a request costs least: what waits there, and what it would have to prefill."""

from __future__ import annotations

from dataclasses import dataclass

from routing.core.candidates import Candidates
from routing.core.cost import CostRule, home_key
from routing.core.fleet import Fleet
from routing.core.residency import Residency
from routing.core.types import Choice
from routing.schema import LowestCostSettings
from routing.strategies.strategy import Keys


@dataclass(frozen=True, slots=True)
class LowestCost:
    """Weigh what waits against what is cached, in tokens."""

    rule: CostRule
    residency: Residency

    @classmethod
    def build(cls, settings: LowestCostSettings, fleet: Fleet) -> LowestCost:
        """The strategy for one group."""
        return cls(CostRule(fleet.ring, settings.alpha, by_rate=False), fleet.residency)

    def choose(self, keys: Keys, candidates: Candidates) -> Choice:
        """The candidate with the least cost."""
        chain = keys.chain
        match = self.residency.match(chain)
        key = home_key(chain, match, None if chain else keys.tier1)
        return self.rule.choose(match, key, keys.prompt_tokens, candidates)
