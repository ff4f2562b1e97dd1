"""Keep a prompt's opening on one replica.

Keep a session on one replica.

Keep a prompt's opening on a few replicas, and each conversation on one of them.

Theory of operation. The tier-1 prefix names its first ``replicas`` homes: together they hold the opening. Among these
the conversation, the tier-2 key, has an order of its own, by the highest hash of key and name (Thaler and Ravishankar,
"Using name-based mappings to increase hit rates", 1998), so that one that leaves moves only its own conversations.
Where all of them are full the opening's later homes follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from xxhash import xxh3_64_intdigest

from routing.balancing.candidates import Candidates
from routing.balancing.hash_ring import HashRing, bounded_choice
from routing.balancing.replicas import GroupReplicas
from routing.balancing.strategies.strategy import Keys
from routing.schema import PrefixHashSettings, SessionAffinitySettings, TieredSettings
from routing.types import Choice, PrefixHash, Reason, TargetId


@dataclass(frozen=True, slots=True)
class PrefixHashStrategy:
    """Send a tier-1 prefix to the replica that its hash names, unless that replica is full."""

    ring: HashRing[TargetId]
    load_factor: float  # ratio to the mean load that still counts as room, >= 1
    min_bound: int  # requests that a replica may always hold

    @classmethod
    def build(cls, settings: PrefixHashSettings, replicas: GroupReplicas, _seed: int) -> PrefixHashStrategy:
        """The strategy for one group; where the prefix ends is settled by the keys that it is given."""
        return cls(replicas.ring, settings.load_factor, settings.min_bound)

    def choose(self, keys: Keys, candidates: Candidates) -> Choice:
        """The prefix's first home with room; without a prefix the least loaded."""
        key = keys.tier1
        if key is None:
            return Choice(candidates.order.least_loaded(), Reason.NO_KEY)
        return bounded_choice(self.ring.walk(key), candidates, self.load_factor, self.min_bound)


@dataclass(frozen=True, slots=True)
class SessionAffinity:
    """Send a session to the replica that its key names, unless that replica is full."""

    ring: HashRing[TargetId]
    load_factor: float  # ratio to the mean load that still counts as room, >= 1
    min_bound: int  # requests that a replica may always hold

    @classmethod
    def build(cls, settings: SessionAffinitySettings, replicas: GroupReplicas, _seed: int) -> SessionAffinity:
        """The strategy for one group."""
        return cls(replicas.ring, settings.load_factor, settings.min_bound)

    def choose(self, keys: Keys, candidates: Candidates) -> Choice:
        """The session's first home with room; without a session key the least loaded."""
        key = keys.session
        if key is None:
            return Choice(candidates.order.least_loaded(), Reason.NO_KEY)
        return bounded_choice(self.ring.walk(key), candidates, self.load_factor, self.min_bound)


@dataclass(frozen=True, slots=True)
class Tiered:
    """Send an opening to its replicas, and a conversation to one of them."""

    ring: HashRing[TargetId]
    replicas: int  # that share one opening, >= 1
    load_factor: float  # ratio to the mean load that still counts as room, >= 1
    min_bound: int  # requests that a replica may always hold

    @classmethod
    def build(cls, settings: TieredSettings, replicas: GroupReplicas, _seed: int) -> Tiered:
        """The strategy for one group."""
        return cls(replicas.ring, settings.replicas, settings.load_factor, settings.min_bound)

    def choose(self, keys: Keys, candidates: Candidates) -> Choice:
        """The conversation's first home with room among the opening's, else the opening's next; or the least loaded."""
        opening = keys.tier1
        if opening is None:
            return Choice(candidates.order.least_loaded(), Reason.NO_KEY)
        order = self._order(opening, keys.tier2, candidates)
        return bounded_choice(order, candidates, self.load_factor, self.min_bound)

    def _order(
        self, opening: PrefixHash, conversation: PrefixHash | None, candidates: Candidates
    ) -> Iterator[TargetId]:
        preferred_replicas = (target for target in self.ring.walk(opening) if target in candidates)
        group = list(islice(preferred_replicas, self.replicas))
        if conversation is not None:
            group.sort(key=lambda name: xxh3_64_intdigest(name.encode(), conversation), reverse=True)
        yield from group
        yield from preferred_replicas
