"""The replica that holds most of the prompt, unless that one is full.

Theory of operation. Of those who hold the longest known prefix the least loaded is preferred. Whether it gets the
request is a question of its own load alone: a gate on how far the fleet's loads lie apart would give up affinity
everywhere as soon as one replica is hot. Where it is full, those who hold the next shorter prefix follow, as long as
that is ``min_hit_ratio`` of the prompt, and then the least loaded of all. That is also who gets a prompt of which
nobody holds so much; among equally loaded ones it goes by the home order of its first unknown block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from routing.balancing.candidates import Candidate, Candidates, work_of
from routing.balancing.cost import CostRule, lightest, preferred_key
from routing.balancing.hash_ring import Room
from routing.balancing.replicas import GroupReplicas
from routing.balancing.residency import Match, Residency
from routing.balancing.strategies.strategy import Keys, Weighed
from routing.schema import CacheAwareSettings
from routing.types import Choice, Reason, TargetId


@dataclass(frozen=True, slots=True)
class CacheAware:
    """Follow the longest cached prefix as far as load allows."""

    by_load: CostRule  # for whoever has no preferred replica, or none with room
    residency: Residency
    min_hit_ratio: float  # of a prompt that must be held to count
    load_factor: float  # ratio to the mean load that still counts as room, >= 1
    min_bound: int  # requests that a replica may always hold

    @classmethod
    def build(cls, settings: CacheAwareSettings, replicas: GroupReplicas, _seed: int) -> CacheAware:
        """The strategy for one group."""
        by_load = CostRule(replicas.ring, alpha=0.0, by_rate=False)
        return cls(by_load, replicas.residency, settings.min_hit_ratio, settings.load_factor, settings.min_bound)

    def choose(self, keys: Keys, candidates: Candidates) -> Choice:
        """The preferred replica with room, else the least loaded."""
        chain = keys.chain
        match = self.residency.match(chain, keys.block_tokens)
        key = preferred_key(chain, match, None if chain else keys.tier1)
        room = Room(candidates, self.load_factor, self.min_bound)
        refused: list[TargetId] = []
        for member, hit_tokens in self._preferred(match, key, keys.prompt_tokens, candidates):
            target = member.target
            if room.at(target):
                return Choice(target, Reason.HIT, tuple(refused), room.bound(target), hit_tokens)
            refused.append(target)
        other = self.by_load.choose(match, key, keys.prompt_tokens, candidates)
        reason = Reason.SPILL if refused else Reason.COLD
        return Choice(other.target, reason, tuple(refused), hit_tokens=other.hit_tokens)

    def weigh(self, keys: Keys, candidates: Candidates, targets: Sequence[TargetId]) -> list[Weighed]:
        """What each of some candidates holds of the prompt."""
        match = self.residency.match(keys.chain, keys.block_tokens)
        return [Weighed(match.tokens(candidates.by_name[name].bit, keys.prompt_tokens)) for name in targets]

    def _preferred(
        self, match: Match, key: int, prompt_tokens: int, candidates: Candidates
    ) -> Iterator[tuple[Candidate, int]]:
        """Of each depth that counts, the deepest first, the least loaded holder, and the tokens that it holds."""
        unseen = candidates.mask
        for blocks, holders in reversed(match.levels):
            hit_tokens = min(blocks * match.block_tokens, prompt_tokens)
            if hit_tokens < self.min_hit_ratio * prompt_tokens:
                return
            members = lightest(holders & unseen, key, candidates)
            unseen &= ~holders
            if members:
                yield min(members, key=work_of), hit_tokens
