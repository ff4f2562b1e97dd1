"""A fleet without a router: loads, and cached blocks of one prompt."""

from __future__ import annotations

from routing.balancing.candidates import Candidates
from routing.balancing.hash_ring import HashRing
from routing.balancing.load_tracker import LoadTracker
from routing.balancing.residency import Residency
from routing.balancing.strategies.cached_prefix import CostRule, preferred_key
from routing.schema import LowestCostSettings
from routing.types import ReplicaId
from tests.routing.building import names

PROMPT = list(range(1000, 1010))  # ten blocks


class Fleet:
    """Replicas with loads and cached prefixes of one prompt of ten blocks."""

    def __init__(self, count: int, weights: dict[str, float] | None = None, block_tokens: int = 10) -> None:
        self.names = names(count)
        self.tracker = LoadTracker(lambda: 0.0)
        self.residency = Residency(block_tokens=block_tokens)
        self.weights = {name: (weights or {}).get(name, 1.0) for name in self.names}
        bits = {name: self.residency.add_replica(name).bit for name in self.names}
        self.candidates = Candidates(self.weights, self.tracker, bits=bits)
        self.ring = HashRing(self.weights)

    def hold(self, replica: ReplicaId, blocks: int) -> None:
        self.residency.insert(replica, PROMPT[:blocks], 0.0)

    def queue(self, replica: ReplicaId, tokens: int) -> None:
        self.tracker.dispatch(replica, tokens)

    def finish_requests(self, replica: ReplicaId, requests: int) -> None:
        for _ in range(requests):
            self.tracker.dispatch(replica, 0).end()

    def choose(self, tokens: int = 100, alpha: float = 2.0, *, by_rate: bool = False):
        match = self.residency.match(PROMPT)
        rule = CostRule(self.ring, LowestCostSettings(alpha=alpha), by_rate=by_rate)
        sole = rule.sole_holder(match, tokens, self.candidates)
        return sole or rule.choose(match, preferred_key(PROMPT, match, None), tokens, self.candidates)

    def preferred_of(self, key: int, candidates: Candidates | None = None) -> ReplicaId:
        """The choice for an uncached prompt while all replicas are idle."""
        match, rule = self.residency.match([key]), CostRule(self.ring, LowestCostSettings(), by_rate=False)
        return rule.choose(match, key, 100, candidates or self.candidates).target
