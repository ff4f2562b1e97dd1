"""Strategies that prefer a home: by a hash of the prefix or the session, in two tiers, or by the longest cached prefix.

Theory of operation. A strategy names a few homes of a request, in order of preference. The request goes to the first
home whose cost is at most ``slack_s`` of prefill above the least cost of all candidates, and otherwise to the replica
that ``lowest_cost`` chooses (``cached_prefix.py``). Costs are those of that strategy: queued tokens, and the request's
own uncached tokens. So a home is kept as long as the additional wait there is not longer than what its cached prefix
saves, and no queue runs further ahead of the others than by that and the slack, at any load. A popular prefix overflows
to other replicas, is cached there too, and has as many replicas as its work needs. The slack is for waiting: it is less
by what the home would prefill although the cheapest replica has it cached.

Hashes. ``prefix_hash`` takes the first replica in the ring order of the tier-1 prefix, ``session_affinity`` that of the
session. Under ``tiered`` the first ``replicas`` in the prefix's ring order share it, and each conversation (the tier-2
key) has an order of its own among them, by the highest hash of key and name (Thaler and Ravishankar, "Using name-based
mappings to increase hit rates", 1998), or by the ring if they are many. A replica that leaves moves only its own
conversations.

``cache_aware`` prefers the least loaded of the replicas with the longest cached prefix, then those with the next
shorter one, as long as it is ``min_hit_ratio`` of the prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from xxhash import xxh3_64_intdigest

from routing.balancing.candidates import Candidates, Choice, work_of
from routing.balancing.hash_ring import HashRing
from routing.balancing.replicas import GroupReplicas
from routing.balancing.residency import Match
from routing.balancing.strategies.cached_prefix import CostRule, match_prompt, preferred_key
from routing.balancing.strategies.holders import MAX_COMPARED, least_loaded_holders
from routing.balancing.strategies.strategy import Estimate, Keys, Strategy
from routing.schema import (
    AffinitySettings,
    CacheAwareSettings,
    LowestCostSettings,
    TieredSettings,
)
from routing.types import PrefixHash, Reason, TargetId

MAX_HOMES: Final = 3  # considered; the cheapest replica, which follows them, often has the prefix cached too


class HomeStrategy(Strategy):
    """Base: sends each request to the first of its homes that costs little more than the cheapest replica."""

    def __init__(self, replicas: GroupReplicas, settings: AffinitySettings) -> None:
        self._ring = replicas.ring
        self._residency = replicas.residency
        self._slack_s = settings.slack_s
        self._rule = CostRule(
            replicas.ring, LowestCostSettings(), by_rate=False, hits=replicas.residency.unrecorded_hits
        )

    def choose(self, keys: Keys, candidates: Candidates) -> Choice:
        """A home, or the cheapest replica; without a key the least loaded."""
        match = match_prompt(self._residency, keys)
        key = self._key(keys)
        if key is None:
            target = candidates.order.least_loaded()
            hit_tokens = match.tokens(candidates.by_name[target].bit, keys.prompt_tokens)
            return Choice(target, Reason.NO_KEY, hit_tokens=hit_tokens)
        homes = self._homes(key, keys, candidates)
        return self._rule.choose_home(match, key, keys.prompt_tokens, candidates, homes, self._slack_s)

    def estimate(self, keys: Keys, candidates: Candidates, targets: Sequence[TargetId]) -> list[Estimate]:
        """Predicted cached tokens and cost of some candidates."""
        match = match_prompt(self._residency, keys)
        key = self._key(keys)
        home = None if key is None else self._homes(key, keys, candidates)[0]
        members = [candidates.by_name[name] for name in targets]
        return self._rule.estimates(members, match, key or 0, keys.prompt_tokens, candidates, home)

    def preferred_count(self, _prefix: PrefixHash) -> int | None:
        """The first replica alone."""
        return 1

    def _key(self, keys: Keys) -> PrefixHash | None:
        """The key that names the homes; None if the request has none."""
        return keys.tier1

    def _homes(self, key: PrefixHash, _keys: Keys, candidates: Candidates) -> list[TargetId]:
        """The homes among the candidates, at least one."""
        return list(islice(self._eligible(key, candidates), 1))

    def _eligible(self, key: PrefixHash, candidates: Candidates) -> Iterator[TargetId]:
        """The candidates in the key's ring order."""
        return filter(candidates.loads.__contains__, self._ring.walk(key))


class PrefixHashStrategy(HomeStrategy):
    """Sends requests with the same tier-1 prefix to the same replica."""


class SessionAffinity(HomeStrategy):
    """Sends the requests of a session to the same replica."""

    def preferred_count(self, _prefix: PrefixHash) -> int | None:
        """Sessions, not prefixes, have homes."""
        return None

    def _key(self, keys: Keys) -> PrefixHash | None:
        return keys.session


class Tiered(HomeStrategy):
    """Assigns each tier-1 prefix a few replicas, and each conversation one of them."""

    def __init__(self, replicas: GroupReplicas, settings: TieredSettings) -> None:
        super().__init__(replicas, settings)
        self._replicas = settings.replicas

    def preferred_count(self, _prefix: PrefixHash) -> int | None:
        """The replicas that share each prefix."""
        return self._replicas

    def _homes(self, key: PrefixHash, keys: Keys, candidates: Candidates) -> list[TargetId]:
        group = dict.fromkeys(islice(self._eligible(key, candidates), self._replicas))
        return homes_among(group, keys.tier2, candidates, self._ring)


def homes_among(
    group: Collection[TargetId], conversation: PrefixHash | None, candidates: Candidates, ring: HashRing[TargetId]
) -> list[TargetId]:
    """A conversation's homes among the replicas of its prefix; empty if none of these is a candidate."""
    order: Iterable[TargetId] = group
    if conversation is not None and len(group) > MAX_COMPARED:
        order = filter(group.__contains__, ring.walk(conversation))
    elif conversation is not None:
        order = sorted(group, key=lambda name: xxh3_64_intdigest(name.encode(), conversation), reverse=True)
    return list(islice(filter(candidates.loads.__contains__, order), MAX_HOMES))


class CacheAware(HomeStrategy):
    """Sends each request to the replica with the longest cached prefix."""

    def __init__(self, replicas: GroupReplicas, settings: CacheAwareSettings) -> None:
        super().__init__(replicas, settings)
        self._min_hit_ratio = settings.min_hit_ratio

    def choose(self, keys: Keys, candidates: Candidates) -> Choice:
        """A replica with a long cached prefix, or the cheapest."""
        match = match_prompt(self._residency, keys)
        chain = keys.chain
        key = preferred_key(chain, match, None if chain else keys.tier1)
        homes = list(islice(self._holders(match, key, keys.prompt_tokens, candidates), MAX_HOMES))
        if not homes:
            return self._rule.choose(match, key, keys.prompt_tokens, candidates)
        return self._rule.choose_home(match, key, keys.prompt_tokens, candidates, homes, self._slack_s)

    def _holders(self, match: Match, key: int, prompt_tokens: int, candidates: Candidates) -> Iterator[TargetId]:
        """The least loaded replica with each sufficient prefix, the longest first."""
        unseen = candidates.mask
        for _blocks, holders, tokens in reversed(match.levels):
            if tokens < self._min_hit_ratio * prompt_tokens:
                return
            members = least_loaded_holders(holders & unseen, key, candidates)
            unseen &= ~holders
            if members:
                yield min(members, key=work_of).target
