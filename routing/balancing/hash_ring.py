"""Home order: the replicas in the order in which a key prefers them.

Theory of operation. Consistent hashing: each replica owns points on a circle of 46-bit positions, hashed from its
name, so a key's order depends on names and weights alone, never on addresses, health or list order, and every router
computes the same one. A replica that joins or leaves moves only the keys of its own points. The circle is cut into
arcs of a few points each, and of each arc it is known which point comes first, so that a key finds its home in a step
or two among any number of replicas. Of a thousand that takes 9 MB, and 0.1 s to build. A hot key, whose first homes are
full, is walked far by every request: those few walks are remembered as far as anybody went. Source: Karger et al.,
"Consistent Hashing and Random Trees", 1997.

Who asks for a single home, and not for an order, has it from several places that its key names: the shares of the
circle that belong to those who are nearest to one of them differ less.

Bounded load: keep to the home order, but never push a replica past its share.

Theory of operation. A replica has room while it holds fewer than ``load_factor`` times its share, by weight, of all
requests that the candidates would hold with this one, or fewer than ``min_bound``. The first in home order that has
room gets the request, so a hot key spills to the same second and third home every time, and those become warm too.
Somebody always has room, for the shares of all add up to at least all requests.
Source: Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2016.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import chain
from typing import Final, Generic

from xxhash import xxh3_64_intdigest

from routing.balancing.candidates import Candidates
from routing.schema.ring import points_of
from routing.types import Choice, NameT, PrefixHash, Reason, TargetId

LONG_WALK: Final = 16  # replicas, after which a walk is remembered, for its key is hot and its first homes are full
LONG_WALKS: Final = 64  # keys whose walks are remembered

PROBES: Final = 3  # places that a key names
NEAR: Final = 16  # points behind each place that are looked at

ARC_POINTS: Final = 4  # on each arc, about

_HASH: Final = (1 << 64) - 1
_STRIDE: Final = 0xD1B54A32D192ED03  # odd, and its bits in no pattern: one place says nothing of the next
_INDEX_BITS: Final = 16  # of MAX_ON_RING replicas and ranks, and no pool has more (schema/hash_ring.py)
_INDEX: Final = (1 << _INDEX_BITS) - 1
_PLACE_BITS: Final = 62 - _INDEX_BITS  # of a hash, the upper ones: with an index as much as a compiled int holds
_DROPPED_BITS: Final = 64 - _PLACE_BITS
_CIRCLE: Final = 1 << _PLACE_BITS


class HashRing(Generic[NameT]):
    """A circle of replicas, by name and weight (relative capacity, > 0)."""

    __slots__ = ("_arc_bits", "_first", "_long_walks", "_names", "_points")

    def __init__(self, weights: Mapping[NameT, float]) -> None:
        self._names = sorted(weights)
        self._long_walks: dict[PrefixHash, _LongWalk[NameT]] = {}
        points = points_of(weights)
        self._points = sorted(  # place and index, in one integer each
            xxh3_64_intdigest(hashed, number) >> _DROPPED_BITS << _INDEX_BITS | index
            for index, (name, hashed) in enumerate((name, _hashed(name)) for name in self._names)
            for number in range(points[name])
        )
        self._arc_bits = _PLACE_BITS - (len(self._points) // ARC_POINTS).bit_length()
        self._first = self._first_points()

    def _first_points(self) -> list[int]:
        """Of each arc, the first point that is not before it."""
        first: list[int] = []
        bits = self._arc_bits + _INDEX_BITS
        for at, point in enumerate(self._points):
            missing = (point >> bits) + 1 - len(first)
            if missing > 0:
                first += [at] * missing
        return first + [len(self._points)] * ((_CIRCLE >> self._arc_bits) - len(first))

    def __len__(self) -> int:
        return len(self._names)

    def nearest(self, key: int, among: Container[NameT]) -> NameT | None:
        """Whose point follows one of the key's ``PROBES`` places the closest; None where nobody's is near any of them.

        Shares differ by 4 % instead of the 8 of first homes, and one that leaves moves only its own keys all the same,
        for whoever was the nearest still is. 0.5 us, compiled; 3 where few of the ring are asked for, who may be far.
        Source: Appleton and O'Reilly, "Multi-probe consistent hashing", 2015.
        """
        nearest, least, hash_ = None, _CIRCLE, key & _HASH
        for _ in range(PROBES):
            name, distance = self._next(hash_ >> _DROPPED_BITS, among)
            if distance < least:
                nearest, least = name, distance
            hash_ = hash_ * _STRIDE & _HASH
        return nearest

    def _next(self, place: int, among: Container[NameT]) -> tuple[NameT | None, int]:
        """Whose point follows a place first, and how far behind it; None where nobody's is among the next ``NEAR``."""
        points, names = self._points, self._names
        first = self._behind(place) - len(points)  # from the end, so that what follows the last point is the first
        for at in range(first, first + min(NEAR, len(points))):
            point = points[at]
            name = names[point & _INDEX]
            if name in among:
                return name, ((point >> _INDEX_BITS) - place) & (_CIRCLE - 1)
        return None, _CIRCLE

    def _behind(self, place: int) -> int:
        """The first point that is not before a place; behind the last one, their number."""
        points, sought = self._points, place << _INDEX_BITS
        at, end = self._first[place >> self._arc_bits], len(points)
        while at < end and points[at] < sought:
            at += 1
        return at

    def walk(self, key: PrefixHash) -> Iterator[NameT]:
        """Distinct replicas, clockwise from the key, each found only when it is asked for."""
        known = self._long_walks.get(key)
        return self._clockwise(key) if known is None else iter(known)

    def _clockwise(self, key: PrefixHash) -> Iterator[NameT]:
        points, names = self._points, self._names
        if not points:
            return
        start = self._behind(key >> _DROPPED_BITS) % len(points)
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


def _hashed(name: str) -> bytes:
    """What a name's points are hashed from, at least four bytes.

    Of fewer XXH3 adds a number to them, so that ``vm1`` and ``vm2`` would have the same points in another order.
    """
    return name.encode().ljust(4, b"\0")


class _LongWalk(Generic[NameT]):
    """The walk of a hot key: each replica is found once, and every later walk begins with those that were found."""

    __slots__ = ("_ahead", "_met")

    def __init__(self, ahead: Iterator[NameT]) -> None:
        self._met: list[NameT] = []
        self._ahead = ahead

    def __iter__(self) -> Iterator[NameT]:
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


class Room:
    """Who has room for one more request, by the loads of this moment."""

    __slots__ = ("_all_weights", "_loads", "_min_bound", "_requests", "_weights")

    def __init__(self, candidates: Candidates, load_factor: float, min_bound: int) -> None:
        self._loads = candidates.loads
        self._weights = candidates.weights
        self._all_weights = candidates.weight
        self._requests = load_factor * (candidates.order.running + 1)
        self._min_bound = min_bound

    def at(self, target: TargetId) -> bool:
        """Whether a candidate has room: with this request it holds no more than ``bound``."""
        running = self._loads[target].running
        return running < self._min_bound or running < self._share(target)

    def bound(self, target: TargetId) -> int:
        """Requests that a candidate may hold, this one included."""
        return max(self._min_bound, math.ceil(self._share(target)))

    def _share(self, target: TargetId) -> float:
        return self._requests * self._weights[target] / self._all_weights


def bounded_choice(
    home_order: Iterable[TargetId], candidates: Candidates, load_factor: float, min_bound: int
) -> Choice:
    """The first home with room; ``home_order`` may name replicas that are no candidates.

    Of an order that leaves candidates out, where nobody has room, the least loaded of all.
    """
    room = Room(candidates, load_factor, min_bound)
    refused: list[TargetId] = []
    for target in home_order:
        if target not in candidates.loads:
            continue
        if room.at(target):
            return Choice(target, Reason.SPILL if refused else Reason.AFFINITY, tuple(refused), room.bound(target))
        refused.append(target)
    return Choice(candidates.order.least_loaded(), Reason.SPILL, tuple(refused))
