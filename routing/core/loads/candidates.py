"""The replicas that a request may go to.

Who they are is fixed: whenever that changes a new object is made, which costs O(replicas). What is asked of them is
made when it is first asked for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping
from itertools import accumulate

from routing.core.loads.book import Load, LoadBook
from routing.core.loads.candidate import Candidate
from routing.core.loads.recent import Recent
from routing.core.loads.work_order import WorkOrder
from routing.core.types import TargetId


class Candidates:
    """Eligible replicas of one group."""

    def __init__(
        self,
        weights: Mapping[TargetId, float],
        book: LoadBook,
        seed: int = 0,
        bits: Mapping[TargetId, int] | None = None,
        shares: Mapping[TargetId, float] | None = None,
    ) -> None:
        self.weights = weights  # relative capacity, > 0
        self.weight = sum(weights.values())
        self.loads: Mapping[TargetId, Load] = {name: book.load(name) for name in weights}
        self.bits: Mapping[TargetId, int] = {} if bits is None else bits  # in the residency's masks
        self._shares: Mapping[TargetId, float] = {} if shares is None else shares  # of weights, where below 1
        self._whole: Candidates | None = None
        self._book = book
        self._seed = seed
        self._members: list[Candidate] | None = None  # from here on: made when they are first asked for
        self._cumulative: list[float] | None = None
        self._by_name: dict[TargetId, Candidate] | None = None
        self._by_bit: dict[int, Candidate] | None = None
        self._mask: int | None = None
        self._greatest_weight: float | None = None
        self._is_even: bool | None = None
        self._order: WorkOrder | None = None
        self._recent: Recent | None = None

    def __len__(self) -> int:
        return len(self.loads)

    def __contains__(self, target: object) -> bool:
        return target in self.loads

    def __iter__(self) -> Iterator[TargetId]:
        return iter(self.loads)

    def without(self, excluded: Collection[TargetId]) -> Candidates:
        """The same replicas but for some, for a request that was already refused by those. O(replicas)."""
        kept = {name: weight for name, weight in self.weights.items() if name not in excluded}
        rest = Candidates(kept, self._book, self._seed, self.bits, self._shares)
        rest._whole = self.whole
        return rest

    @property
    def whole(self) -> Candidates:
        """Those that these were taken out of, where some refused a request; else these."""
        return self if self._whole is None else self._whole

    def prepare(self) -> Iterator[None]:
        """Make what is else made when it is first asked for; stops where others may have their turn.

        Where there is nobody, nobody asks.
        """
        if not self.loads:
            return
        for make in (lambda: self.members, lambda: self.mask, lambda: self.by_name, lambda: self.is_even):
            make()
            yield
        self.order.least_loaded()

    @property
    def members(self) -> list[Candidate]:
        """Everybody, in one list."""
        members = self._members
        if members is None:
            bits, weights, shares = self.bits, self.weights, self._shares
            members = self._members = [
                Candidate(name, load, weights[name], bits.get(name, 0), shares.get(name, 1.0))
                for name, load in self.loads.items()
            ]
        return members

    def drawn(self, chance: float) -> Candidate:
        """Whoever a number from 0 to below 1 draws, each with the chance that its weight says."""
        cumulative = self._cumulative
        if cumulative is None:
            cumulative = self._cumulative = list(accumulate(self.weights.values()))
        at = bisect_right(cumulative, chance * cumulative[-1])
        return self.members[min(at, len(self.members) - 1)]

    @property
    def by_name(self) -> dict[TargetId, Candidate]:
        """The same by name."""
        by_name = self._by_name
        if by_name is None:
            by_name = self._by_name = {member.target: member for member in self.members}
        return by_name

    @property
    def by_bit(self) -> dict[int, Candidate]:
        """The same by bit."""
        by_bit = self._by_bit
        if by_bit is None:
            by_bit = self._by_bit = {member.bit: member for member in self.members if member.bit}
        return by_bit

    @property
    def mask(self) -> int:
        """The bits of all."""
        mask = self._mask
        if mask is None:
            mask = self._mask = sum(self.by_bit)
        return mask

    @property
    def greatest_weight(self) -> float:
        """Of the candidate with the most capacity."""
        weight = self._greatest_weight
        if weight is None:
            weight = self._greatest_weight = max(self.weights.values())
        return weight

    @property
    def is_even(self) -> bool:
        """Whether all have the same weight."""
        is_even = self._is_even
        if is_even is None:
            is_even = self._is_even = self.greatest_weight == min(self.weights.values())
        return is_even

    def only(self, names: Collection[TargetId], whole: Candidates | None = None) -> Candidates:
        """Some of them, in this order. O(names). ``whole``: those that they are left of, if some refused a request."""
        weights = {name: self.weights[name] for name in names}
        some = Candidates(weights, self._book, self._seed, self.bits, self._shares)
        some._whole = whole
        return some

    @property
    def recent(self) -> Recent:
        """Who had how much of the requests of late."""
        recent = self._recent
        if recent is None:
            recent = self._recent = Recent(self.members, self._book)
        return recent

    @property
    def order(self) -> WorkOrder:
        """Who has how much work."""
        order = self._order
        if order is None:
            order = self._order = WorkOrder(self.by_name, self._book, self._seed)
        return order

    def now_s(self) -> float:
        """The load book's time."""
        return self._book.clock()
