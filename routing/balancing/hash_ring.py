"""Hash ring: the replicas in the order in which a key prefers them.

Theory of operation. Consistent hashing: each replica owns points on a ring of 46-bit positions, hashed from its name. A
key's order depends on names and weights only, never on addresses, health or list order, so every router computes the
same one. A replica that joins or leaves moves only the keys of its own points. A thousand replicas take 7 MB, and 0.1 s
to build. Source: Karger et al., "Consistent Hashing and Random Trees", 1997.

``nearest`` gives a single preferred replica from several positions of a key: the nearest replica behind any of them.
The shares of replicas differ less than those of first points.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterator, Mapping
from itertools import chain
from typing import Any, Final, Generic

from xxhash import xxh3_64_intdigest

from routing.schema.ring import points_of
from routing.types import NameT, PrefixHash

PROBES: Final = 3  # positions that a key has in ``nearest``
NEAR_POINTS: Final = 16  # points examined behind each position
MAX_SHARED_POINTS: Final = 500_000  # of the rings that ``shared_ring`` retains: 20 MB

_HASH_MASK: Final = (1 << 64) - 1
_STRIDE: Final = 0xD1B54A32D192ED03  # odd, with irregular bits, so that the positions of a key are independent
_INDEX_BITS: Final = 16  # of MAX_ON_RING replicas and ranks (schema/ring.py)
_INDEX_MASK: Final = (1 << _INDEX_BITS) - 1
_POSITION_BITS: Final = 62 - _INDEX_BITS  # upper bits of a hash: with an index, what a compiled int can hold
_DROPPED_BITS: Final = 64 - _POSITION_BITS
_RING_SIZE: Final = 1 << _POSITION_BITS


class HashRing(Generic[NameT]):
    """A ring of replicas, by name and weight (relative capacity, > 0)."""

    def __init__(self, weights: Mapping[NameT, float]) -> None:
        self._names = sorted(weights)
        points = points_of(weights)
        self.points = sorted(  # position and index, in one integer each
            xxh3_64_intdigest(hashed, number) >> _DROPPED_BITS << _INDEX_BITS | index
            for index, (name, hashed) in enumerate((name, _hash_input(name)) for name in self._names)
            for number in range(points[name])
        )

    def __len__(self) -> int:
        return len(self._names)

    def nearest(self, key: int, among: Container[NameT]) -> NameT | None:
        """The owner in ``among`` whose point is nearest behind one of the key's ``PROBES`` positions; None if none is.

        Shares differ by 4 % instead of the 8 % of first points, and a replica that leaves still moves only its own
        keys. 0.5 us compiled, or 3 us if few of the ring are in ``among`` and far away. Source: Appleton and O'Reilly,
        "Multi-probe consistent hashing", 2015.
        """
        nearest, least_distance, hash_ = None, _RING_SIZE, key & _HASH_MASK
        points, names = self.points, self._names
        for _ in range(PROBES):
            position = hash_ >> _DROPPED_BITS
            first = bisect_left(points, position << _INDEX_BITS) - len(points)  # negative: the first follows the last
            for at in range(first, first + min(NEAR_POINTS, len(points))):
                point = points[at]
                distance = ((point >> _INDEX_BITS) - position) & (_RING_SIZE - 1)
                if distance >= least_distance:
                    break
                name = names[point & _INDEX_MASK]
                if name in among:
                    nearest, least_distance = name, distance
                    break
            hash_ = hash_ * _STRIDE & _HASH_MASK
        return nearest

    def walk(self, key: PrefixHash) -> Iterator[NameT]:
        """Distinct replicas, clockwise from the key, computed lazily."""
        points, names = self.points, self._names
        if not points:
            return
        start = bisect_left(points, key >> _DROPPED_BITS << _INDEX_BITS) % len(points)
        first = points[start] & _INDEX_MASK
        yield names[first]  # most walks end here
        seen = {first}
        for at in chain(range(start + 1, len(points)), range(start)):
            index = points[at] & _INDEX_MASK
            if index not in seen:
                seen.add(index)
                yield names[index]
                if len(seen) == len(names):
                    return


_shared: dict[tuple[tuple[Any, float], ...], HashRing[Any]] = {}  # the one that was used last is the last


def shared_ring(weights: tuple[tuple[NameT, float], ...]) -> HashRing[NameT]:
    """The ring of these replicas, sorted by name: a new configuration rarely changes names and weights."""
    known = _shared.pop(weights, None)
    ring = _shared[weights] = HashRing(dict(weights)) if known is None else known
    while len(_shared) > 1 and sum([len(retained.points) for retained in list(_shared.values())]) > MAX_SHARED_POINTS:
        _shared.pop(next(iter(_shared)), None)  # a configuration may be prepared in a thread meanwhile
    return ring


def _hash_input(name: str) -> bytes:
    """The bytes that a name's points are hashed from, at least four.

    XXH3 adds the seed to inputs of up to three bytes, so ``vm1`` and ``vm2`` would have the same points in another
    order.
    """
    return name.encode().ljust(4, b"\0")
