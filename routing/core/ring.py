"""Home order: the replicas in the order in which a key prefers them.

Theory of operation. Consistent hashing: each replica owns points on a circle of 48-bit positions, hashed from its
name, so a key's order depends on names and weights alone, never on addresses, health or list order, and every router
computes the same one. A replica that joins or leaves moves only the keys of its own points. Each entry of the sorted
list packs a position and a replica's index into one integer, so that one bisection finds a home; the list is what a
thousand replicas cost: about 7 MB, and 60 ms to build. A hot key, whose first homes are full, is walked far by every
request: those few walks are remembered as far as anybody went. Source: Karger et al., "Consistent Hashing and Random
Trees", 1997.

Who asks for a single home, and not for an order, has it from several places that its key names: the shares of the
circle that belong to those who are nearest to one of them differ less.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterator, Mapping
from itertools import chain
from weakref import WeakValueDictionary

from xxhash import xxh3_64_intdigest

from routing.core.types import PrefixHash, ReplicaId
from routing.schema.homes import points_of

LONG_WALK = 16  # replicas, after which a walk is remembered, for its key is hot and its first homes are full
LONG_WALKS = 64  # keys whose walks are remembered

PROBES = 3  # places that a key names
NEAR = 16  # points behind each place that are looked at

_CIRCLE = (1 << 64) - 1
_STRIDE = 0xD1B54A32D192ED03  # odd, and its bits in no pattern: one place says nothing of the next
_INDEX_BITS = 16  # up to 65,536 replicas on one ring
_INDEX = (1 << _INDEX_BITS) - 1


class HashRing:
    """A circle of replicas, by name and weight (relative capacity, > 0)."""

    __slots__ = ("__weakref__", "_long_walks", "_names", "_points")

    def __init__(self, weights: Mapping[ReplicaId, float]) -> None:
        self._names = sorted(weights)
        self._long_walks: dict[PrefixHash, _LongWalk] = {}
        points = points_of(weights)
        self._points = sorted(
            (xxh3_64_intdigest(name.encode(), number) & ~_INDEX) | index
            for index, name in enumerate(self._names)
            for number in range(points[name])
        )

    def __len__(self) -> int:
        return len(self._names)

    def nearest(self, key: int, among: Container[ReplicaId]) -> ReplicaId | None:
        """Whose point follows one of the key's ``PROBES`` places the closest; None where nobody's is near any of them.

        Shares differ by 4 % instead of the 8 of first homes, and one that leaves moves only its own keys all the same,
        for whoever was the nearest still is. 1.5 us; 4 where few of the ring are asked for, who may not be near.
        Source: Appleton and O'Reilly, "Multi-probe consistent hashing", 2015.
        """
        points, names = self._points, self._names
        least, nearest = _CIRCLE, None
        place = key & _CIRCLE
        for _ in range(PROBES):
            first = bisect_left(points, place) - len(points)  # from the end, so that what follows the last is the first
            for at in range(first, min(first + NEAR, first + len(points))):
                point = points[at]
                name = names[point & _INDEX]
                if name in among:
                    distance = (point - place) & _CIRCLE
                    if distance < least:
                        least, nearest = distance, name
                    break
            place = place * _STRIDE & _CIRCLE
        return nearest

    def walk(self, key: PrefixHash) -> Iterator[ReplicaId]:
        """Distinct replicas, clockwise from the key, each found only when it is asked for."""
        known = self._long_walks.get(key)
        return self._clockwise(key) if known is None else iter(known)

    def _clockwise(self, key: PrefixHash) -> Iterator[ReplicaId]:
        points, names = self._points, self._names
        if not points:
            return
        start = bisect_left(points, key & ~_INDEX) % len(points)
        first = points[start] & _INDEX
        yield names[first]  # and most walks end here
        seen = {first}
        for at in chain(range(start + 1, len(points)), range(start)):
            index = points[at] & _INDEX
            if index not in seen:
                seen.add(index)
                yield names[index]
                if len(seen) == len(names):
                    return
                if len(seen) == LONG_WALK:
                    self._remember(key)

    def _remember(self, key: PrefixHash) -> None:
        """Keep what the next walks of this key meet."""
        if key not in self._long_walks:
            if len(self._long_walks) == LONG_WALKS:
                del self._long_walks[next(iter(self._long_walks))]
            self._long_walks[key] = _LongWalk(self._clockwise(key))


class _LongWalk:
    """The walk of a hot key: each replica is found once, and every later walk begins with those that were found."""

    __slots__ = ("_ahead", "_met")

    def __init__(self, ahead: Iterator[ReplicaId]) -> None:
        self._met: list[ReplicaId] = []
        self._ahead = ahead

    def __iter__(self) -> Iterator[ReplicaId]:
        at = 0
        while True:
            found = self._met[at:]
            at += len(found)
            yield from found
            if at == len(self._met):
                replica = next(self._ahead, None)
                if replica is None:
                    return
                self._met.append(replica)


def shared_ring(weights: Mapping[ReplicaId, float]) -> HashRing:
    """The ring of these replicas, the same object for everyone who holds it at the time.

    So a new configuration that leaves names and weights alone, as nearly all do, builds no ring.
    """
    key = tuple(sorted(weights.items()))
    ring = _rings.get(key)
    if ring is None:
        ring = _rings[key] = HashRing(weights)
    return ring


_rings: WeakValueDictionary[tuple[tuple[ReplicaId, float], ...], HashRing] = WeakValueDictionary()
