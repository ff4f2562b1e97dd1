"""Which openings are worth sending to a replica that joins, with a request body for each.

Theory of operation. A request counts for its opening: the tier-1 key, in its task group. Counts fade with time, as
growing weights do instead of shrinking counts (``shares.py``), so that an opening's weight stands for its rate, and its
worth is tokens times rate. At most ``2 * KEPT`` openings are counted; then only the ``KEPT`` worthiest stay. A body is
kept once an opening has come again, cut where the opening ends (``cutting.py``), because what came once may never come
again. All bodies together have a limit in bytes: then those of the least worth go, and an opening whose body went is
asked for one again only when it has come twice as often. Nothing here leaves the process's memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from heapq import nlargest
from typing import Final, NamedTuple, Protocol

from routing.core.types import PrefixHash, TargetId

KEPT: Final = 512  # openings counted at least
AGAIN: Final = 2  # times an opening comes until its body is kept
OVERHEAD_BYTES: Final = 512  # of an opening beside its body
LARGEST: Final = 1 / 8  # of all memory, that one body may take
_LARGE: Final = 1e100

OpeningKey = tuple[str, PrefixHash]  # task group, "" for the pool's own requests, and tier-1 key


class Cut(NamedTuple):
    """A request for an opening and nothing behind it."""

    path: str
    body: bytes
    tokens: int  # estimated
    blocks: array[int]  # chained hashes of its whole blocks
    adapter: str = ""  # that a replica must hold; "" for none

    @property
    def bytes(self) -> int:
        """What it takes in memory, roughly."""
        return len(self.body) + 8 * len(self.blocks) + OVERHEAD_BYTES


class Sized(Protocol):
    """Who can tell how long a request's opening is."""

    @property
    def tier1_tokens(self) -> int:
        """Its estimated tokens."""
        ...


class Opening:
    """How often an opening comes, and the request for it, once it is kept."""

    __slots__ = ("ask_at", "cut", "meetings", "tokens", "weight")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens  # estimated
        self.weight = 0.0
        self.meetings = 0
        self.ask_at = AGAIN  # meetings
        self.cut: Cut | None = None

    @property
    def worth(self) -> float:
        """Tokens by rate, to compare by."""
        return self.weight * self.tokens


class Openings:
    """Those of one pool. Times are seconds of any one clock that never goes back."""

    __slots__ = ("_bytes", "_half_life_s", "_max_bytes", "_min_tokens", "_origin_s", "_seen")

    def __init__(self, half_life_s: float, max_bytes: int, min_tokens: int) -> None:
        self._half_life_s = half_life_s
        self._max_bytes = max_bytes
        self._min_tokens = min_tokens  # of an opening that is worth a body
        self._origin_s: float | None = None  # when a request weighs 1
        self._seen: dict[OpeningKey, Opening] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._seen)

    @property
    def bytes(self) -> int:
        """Roughly what the kept requests take in memory."""
        return self._bytes

    def configure(self, half_life_s: float, max_bytes: int, min_tokens: int) -> None:
        """Go by these settings; what is known stays."""
        if half_life_s != self._half_life_s:
            self._rescale(max((it.weight for it in self._seen.values()), default=1.0))
            self._half_life_s, self._origin_s = half_life_s, None
        self._max_bytes, self._min_tokens = max_bytes, min_tokens
        self._make_room()

    def count(self, key: OpeningKey, now_s: float, size: Sized) -> bool:
        """Count a request; whether ``keep`` should be told what to send for its opening. 0.5 us."""
        opening = self._seen.get(key) or self._new(key, size)
        weight = self._weight(now_s)  # first, for it may make all weights smaller, this opening's too
        opening.weight += weight
        opening.meetings += 1
        if opening.cut is not None or opening.meetings < opening.ask_at or opening.tokens < self._min_tokens:
            return False
        opening.ask_at = 2 * opening.meetings
        return True

    def keep(self, key: OpeningKey, cut: Cut) -> None:
        """Remember what to send for an opening, unless others are worth more and there is no room for all."""
        opening = self._seen.get(key)
        if opening is not None and opening.cut is None and cut.bytes <= LARGEST * self._max_bytes:
            opening.cut = cut
            self._bytes += cut.bytes
            self._make_room()

    def chosen(
        self, homes: Callable[[OpeningKey, Cut], list[TargetId]], max_prefixes: int, max_tokens: int
    ) -> Iterator[tuple[Cut, TargetId]]:
        """The worthiest that have ``homes``, each with each of them, the worthiest first, as the limits have room."""
        kept = sorted(self._seen.items(), key=lambda item: item[1].worth, reverse=True)
        for key, opening in kept:
            cut = opening.cut
            for home in homes(key, cut) if cut else ():
                if cut and cut.tokens <= max_tokens and max_prefixes:
                    max_tokens -= cut.tokens
                    max_prefixes -= 1
                    yield cut, home
            if not max_prefixes:
                return

    def _new(self, key: OpeningKey, size: Sized) -> Opening:
        if len(self._seen) >= 2 * KEPT:
            self._drop_all_but(KEPT)
        opening = self._seen[key] = Opening(size.tier1_tokens)
        return opening

    def _weight(self, now_s: float) -> float:
        """Of a request that comes now."""
        if self._origin_s is None:
            self._origin_s = now_s
        weight: float = 2.0 ** min((now_s - self._origin_s) / self._half_life_s, 1000.0)
        if weight > _LARGE:
            self._rescale(weight)
            self._origin_s, weight = now_s, 1.0
        return weight

    def _rescale(self, unit: float) -> None:
        """Make all weights smaller together."""
        for opening in self._seen.values():
            opening.weight /= unit

    def _make_room(self) -> None:
        """Where bodies take too much, let those of the least worth go, until there is a tenth to spare."""
        if self._bytes <= self._max_bytes:
            return
        kept = sorted((it for it in self._seen.values() if it.cut), key=lambda it: it.worth, reverse=True)
        while kept and self._bytes > 0.9 * self._max_bytes:
            self._let_go(kept.pop())

    def _drop_all_but(self, count: int) -> None:
        worthiest = nlargest(count, self._seen.items(), key=lambda item: item[1].worth)
        for key in self._seen.keys() - {key for key, _ in worthiest}:
            self._let_go(self._seen[key])
        self._seen = dict(worthiest)

    def _let_go(self, opening: Opening) -> None:
        if opening.cut is not None:
            self._bytes -= opening.cut.bytes
            opening.cut, opening.ask_at = None, 2 * opening.meetings
