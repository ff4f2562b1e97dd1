"""``cache_aware``: the longest cached prefix, as long as its replica is not full.

``CacheAware`` prefers the least loaded of the replicas with the longest cached prefix. Whether that replica gets the
request depends on its own load only: if the difference of loads across the fleet decided, one hot replica would disable
affinity everywhere. If it is full, replicas with the next shorter prefix follow, as long as that is ``min_hit_ratio``
of the prompt, and then the least loaded of all. A prompt of which no replica has so much cached also goes to the least
loaded; among equals, the first uncached block decides by ring order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from routing.balancing.candidates import Candidate, Candidates, Choice, work_of
from routing.balancing.hash_ring import HashRing, LoadBound
from routing.balancing.residency import Match, Residency
from routing.balancing.strategies.cached_prefix import CostRule, match_prompt, preferred_key
from routing.balancing.strategies.holders import least_loaded_holders
from routing.balancing.strategies.strategy import Estimate, Keys, Strategy
from routing.schema import CacheAwareSettings, LowestCostSettings
from routing.types import Reason, TargetId


class CacheAware(Strategy):
    """Sends each request to the replica with the longest cached prefix, until it is full."""

    def __init__(self, ring: HashRing[TargetId], residency: Residency, settings: CacheAwareSettings) -> None:
        self._by_load = CostRule(ring, LowestCostSettings(alpha=0.0), by_rate=False)  # if no preferred replica accepts
        self._residency = residency
        self._settings = settings

    def choose(self, keys: Keys, candidates: Candidates) -> Choice:
        """The preferred replica that accepts, else the least loaded."""
        chain = keys.chain
        match = match_prompt(self._residency, keys)
        key = preferred_key(chain, match, None if chain else keys.tier1)
        bound = LoadBound(candidates, self._settings.load_factor, self._settings.min_bound)
        skipped: list[TargetId] = []
        for member, hit_tokens in self._preferred(match, key, keys.prompt_tokens, candidates):
            target = member.target
            if bound.accepts(target):
                return Choice(target, Reason.HIT, tuple(skipped), bound.bound(target), hit_tokens)
            skipped.append(target)
        fallback = self._by_load.choose(match, key, keys.prompt_tokens, candidates)
        reason = Reason.SPILL if skipped else Reason.COLD
        return Choice(fallback.target, reason, tuple(skipped), hit_tokens=fallback.hit_tokens)

    def estimate(self, keys: Keys, candidates: Candidates, targets: Sequence[TargetId]) -> list[Estimate]:
        """Predicted cached tokens of some candidates."""
        match = match_prompt(self._residency, keys)
        return [Estimate(match.tokens(candidates.by_name[name].bit, keys.prompt_tokens)) for name in targets]

    def _preferred(
        self, match: Match, key: int, prompt_tokens: int, candidates: Candidates
    ) -> Iterator[tuple[Candidate, int]]:
        """The least loaded replica with each sufficient prefix, the longest first, and its cached tokens."""
        unseen = candidates.mask
        for _blocks, holders, tokens in reversed(match.levels):
            hit_tokens = min(tokens, prompt_tokens)
            if hit_tokens < self._settings.min_hit_ratio * prompt_tokens:
                return
            members = least_loaded_holders(holders & unseen, key, candidates)
            unseen &= ~holders
            if members:
                yield min(members, key=work_of), hit_tokens
