"""The replica where a request costs least: what waits there, and what it would have to prefill.

Theory of operation. The cost of a replica is its outstanding work plus ``alpha`` times the tokens of this prompt that
it does not hold, by its weight. Costs within ``TIE_TOKENS`` of the least count as equal, and go by the home order of
the first block that nobody holds: a new branch of a known prompt, or a new prompt, has the same home at every router,
as long as that one is lightly loaded. Entering a prompt when it is dispatched is what keeps a burst together.
"""

from __future__ import annotations

from dataclasses import dataclass

from routing.core.candidates import Candidates
from routing.core.fleet import Fleet
from routing.core.residency import Match, Residency
from routing.core.ring import HashRing
from routing.core.shortlist import shortlist
from routing.core.types import Choice, PrefixHash, Reason, ReplicaId
from routing.schema import LowestCostSettings
from routing.strategies.strategy import Keys

TIE_TOKENS = 80.0  # a step's fixed cost: less than the estimates are off


@dataclass(frozen=True, slots=True)
class LowestCost:
    """Weigh waiting work against what is cached."""

    ring: HashRing
    residency: Residency
    alpha: float  # of a token to prefill, beside one that waits

    @classmethod
    def build(cls, settings: LowestCostSettings, fleet: Fleet) -> LowestCost:
        """The strategy for one group."""
        return cls(fleet.ring, fleet.residency, settings.alpha)

    def choose(self, keys: Keys, candidates: Candidates) -> Choice:
        """The candidate with the least cost."""
        chain = keys.chain
        match = self.residency.match(chain)
        key = _home_key(keys, match)
        walk = self.ring.walk(PrefixHash(key))
        costs = {name: self.cost(name, keys, candidates, match) for name in shortlist(candidates, match, walk, key)}
        limit = min(costs.values()) + TIE_TOKENS
        tied = [name for name, cost in costs.items() if cost <= limit]
        chosen = tied[0] if len(tied) == 1 else next(name for name in self.ring.walk(PrefixHash(key)) if name in tied)
        hit_tokens = min(match.tokens(candidates.bits[chosen]), keys.prompt_tokens)
        return Choice(chosen, Reason.HIT if hit_tokens else Reason.COLD, hit_tokens=hit_tokens)

    def cost(self, replica: ReplicaId, keys: Keys, candidates: Candidates, match: Match) -> float:
        """Tokens: what waits at a replica and what this request adds, by the replica's weight."""
        uncached = max(0, keys.prompt_tokens - match.tokens(candidates.bits[replica]))
        return candidates.work(replica) + self.alpha * uncached / candidates.weights[replica]


def _home_key(keys: Keys, match: Match) -> int:
    """What names a home: the first block that nobody holds, else the last one, else the tier-1 prefix."""
    chain = keys.chain
    return chain[min(match.blocks, len(chain) - 1)] if chain else keys.tier1 or 0
