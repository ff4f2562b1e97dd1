"""Strategies by consistent hashing with bounded load: on the prefix, on the session, or on both in two tiers.

Two tiers: the tier-1 prefix selects the first ``replicas`` in its ring order, which together have it cached. Each
conversation (the tier-2 key) has an order of its own among these replicas, by the highest hash of key and name (Thaler
and Ravishankar, "Using name-based mappings to increase hit rates", 1998). So a replica that leaves moves only its own
conversations. If all of these replicas are full, the next ones in the prefix's ring order follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from xxhash import xxh3_64_intdigest

from routing.balancing.candidates import Candidates, Choice
from routing.balancing.hash_ring import HashRing, bounded_choice
from routing.balancing.strategies.strategy import Keys, Strategy
from routing.schema import BoundedLoad, TieredSettings
from routing.types import PrefixHash, Reason, TargetId


class _BoundedHashing(Strategy):
    """Base: sends each key to the first replica in its ring order that accepts the request."""

    def __init__(self, ring: HashRing[TargetId], settings: BoundedLoad) -> None:
        self.ring = ring
        self.load_factor = settings.load_factor
        self.min_bound = settings.min_bound

    def _by_key(self, key: PrefixHash | None, candidates: Candidates) -> Choice:
        """The first replica in the key's ring order that accepts; without a key the least loaded."""
        if key is None:
            return Choice(candidates.order.least_loaded(), Reason.NO_KEY)
        return bounded_choice(self.ring.walk(key), candidates, self.load_factor, self.min_bound)


class PrefixHashStrategy(_BoundedHashing):
    """Sends requests with the same tier-1 prefix to the same replica, until it is full."""

    def choose(self, keys: Keys, candidates: Candidates) -> Choice:
        """The first replica of the prefix that accepts; without a prefix the least loaded."""
        return self._by_key(keys.tier1, candidates)


class SessionAffinity(_BoundedHashing):
    """Sends the requests of a session to the same replica, until it is full."""

    def choose(self, keys: Keys, candidates: Candidates) -> Choice:
        """The first replica of the session that accepts; without a session the least loaded."""
        return self._by_key(keys.session, candidates)


class Tiered(_BoundedHashing):
    """Assigns each tier-1 prefix a few replicas, and each conversation one of them."""

    def __init__(self, ring: HashRing[TargetId], settings: TieredSettings) -> None:
        super().__init__(ring, settings)
        self._replicas = settings.replicas

    def choose(self, keys: Keys, candidates: Candidates) -> Choice:
        """The conversation's first replica that accepts, else the prefix's next; without a prefix the least loaded."""
        prefix = keys.tier1
        if prefix is None:
            return self._by_key(None, candidates)
        order = self._order(prefix, keys.tier2, candidates)
        return bounded_choice(order, candidates, self.load_factor, self.min_bound)

    def _order(self, prefix: PrefixHash, conversation: PrefixHash | None, candidates: Candidates) -> Iterator[TargetId]:
        """The prefix's first replicas in an order hashed with the conversation, then the rest in ring order."""
        ring_order = filter(candidates.loads.__contains__, self.ring.walk(prefix))
        group = list(islice(ring_order, self._replicas))
        if conversation is not None:
            group.sort(key=lambda name: xxh3_64_intdigest(name.encode(), conversation), reverse=True)
        yield from group
        yield from ring_order
