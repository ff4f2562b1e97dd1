"""The replicas that a request may go to, with the sums that strategies ask for.

Theory of operation. Membership is fixed: whenever it changes a new object is made, which costs O(replicas). Loads
change under it with every request, so the sums follow the book's journal: bringing them up to date costs the changes
since the last question, at most O(replicas), and nothing is counted for groups that nobody asks about. The least
loaded is the head of a heap whose outdated entries are dropped when they surface. Equal work goes to the replica
whose load changed longest ago, at first in an order hashed with the seed: a fixed order would send every idle
router's next request, and everything that a quickly failing replica refuses, to the same one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from routing.core.loads.book import Load, LoadBook
from routing.core.loads.recent import Recent
from routing.core.types import TargetId

WORK_CLASSES: Final = 64  # by the powers of two of their tokens
MOST_WORK: Final = 2.0**62  # tokens from which on all are of one class: of a replica with next to no weight
REQUEST_TOKENS: Final = 80  # work of a running request beside its prompt: a step's fixed 0.010 s at 8,000 tokens/s


class Member(NamedTuple):
    """One candidate with what its cost is made of."""

    target: TargetId
    load: Load
    weight: float
    bit: int  # in the residency's masks; 0 where nothing is known of it
    share: float = 1.0  # of its weight that it has; less while it starts slowly


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
        self._position = book.position
        self._counted: dict[TargetId, int] = {}  # of each, as counted: twice its requests, and 1 if any waits
        self._running = 0
        self._busy = 0
        self._heap: list[tuple[float, int, TargetId]] = []  # (work, stamp, target); empty until it is asked for
        self._current: dict[TargetId, int] = {}  # stamp of each target's entry that counts
        self._stamp = 0
        self._by_work = [0] * WORK_CLASSES  # masks of those that are in the heap
        self._class: dict[TargetId, int] = {}
        self._members: list[Member] | None = None  # from here on: made when they are first asked for
        self._cumulative: list[float] | None = None
        self._by_name: dict[TargetId, Member] | None = None
        self._by_bit: dict[int, Member] | None = None
        self._mask: int | None = None
        self._greatest_weight: float | None = None
        self._is_even: bool | None = None
        self._recent: Recent | None = None
        self._start_over()

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
        self.least_loaded()

    @property
    def members(self) -> list[Member]:
        """Everybody, in one list."""
        members = self._members
        if members is None:
            bits, weights, shares = self.bits, self.weights, self._shares
            members = self._members = [
                Member(name, load, weights[name], bits.get(name, 0), shares.get(name, 1.0))
                for name, load in self.loads.items()
            ]
        return members

    def drawn(self, chance: float) -> Member:
        """Whoever a number from 0 to below 1 draws, each with the chance that its weight says."""
        cumulative = self._cumulative
        if cumulative is None:
            cumulative = self._cumulative = list(accumulate(self.weights.values()))
        at = bisect_right(cumulative, chance * cumulative[-1])
        return self.members[min(at, len(self.members) - 1)]

    @property
    def by_name(self) -> dict[TargetId, Member]:
        """The same by name."""
        by_name = self._by_name
        if by_name is None:
            by_name = self._by_name = {member.target: member for member in self.members}
        return by_name

    @property
    def by_bit(self) -> dict[int, Member]:
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
    def running(self) -> int:
        """Requests running at all of them together."""
        self._catch_up()
        return self._running

    @property
    def busy_ratio(self) -> float:
        """Share of them that have prompts to prefill, 0 to 1."""
        self._catch_up()
        return self._busy / len(self.loads)

    def work(self, target: TargetId) -> float:
        """Outstanding work, in tokens by the replica's weight."""
        load = self.loads[target]
        return (load.waiting_tokens + REQUEST_TOKENS * load.running) / self.weights[target]

    def now_s(self) -> float:
        """The load book's time."""
        return self._book.clock()

    def least_loaded(self) -> TargetId:
        """The replica with the least work; of several, the one whose load changed longest ago."""
        self._catch_up()
        if not self._heap:
            self._fill_heap()
        heap, current = self._heap, self._current
        while heap[0][1] != current[heap[0][2]]:
            heappop(heap)
        return heap[0][2]

    def by_work(self) -> list[int]:
        """Masks of those with about as much work, each class up to twice that of the one before, from none on."""
        self._catch_up()
        if not self._heap:
            self._fill_heap()
        return self._by_work

    def _catch_up(self) -> None:
        """Take in what changed since the last time, the longest ago first."""
        book = self._book
        behind = book.position - self._position
        if not behind:
            return
        changes = book.changes_since(self._position) if behind <= 8 * len(self.loads) + 64 else None
        self._position = book.position
        if changes is None:
            self._start_over()
            return
        counted = self._counted
        for load in changes if not self._heap else reversed(dict.fromkeys(reversed(changes))):
            before = counted.get(load.target)
            if before is None:
                continue
            now = 2 * load.running + (load.waiting_tokens > 0)
            if now != before:
                self._running += now // 2 - before // 2
                self._busy += now % 2 - before % 2
                counted[load.target] = now
            if self._heap:
                self._push(load.target)

    def _start_over(self) -> None:
        """Sum anew, because too much has changed to look at each change."""
        self._counted = {name: 2 * load.running + (load.waiting_tokens > 0) for name, load in self.loads.items()}
        self._running = sum(counted // 2 for counted in self._counted.values())
        self._busy = sum(counted % 2 for counted in self._counted.values())
        self._heap = []

    def _fill_heap(self) -> None:
        """Line up everybody; equals in an order that differs each time and between routers."""
        for name in sorted(self.loads, key=lambda name: xxh3_64_intdigest(name.encode(), self._seed + self._stamp)):
            self._push(name)

    def _push(self, target: TargetId) -> None:
        """Enter a replica's present work; its older entry no longer counts."""
        self._stamp += 1
        self._current[target] = self._stamp
        work = self.work(target)
        heappush(self._heap, (work, self._stamp, target))
        number = int(work).bit_length() if work < MOST_WORK else WORK_CLASSES - 1
        if number != self._class.get(target):
            self._classify(target, number)
        if len(self._heap) > 4 * len(self.loads) + 64:
            self._heap = [entry for entry in self._heap if entry[1] == self._current[entry[2]]]
            heapify(self._heap)

    def _classify(self, target: TargetId, number: int) -> None:
        """Count a replica to another class of work."""
        bit, by_work, before = self.bits.get(target, 0), self._by_work, self._class.get(target)
        if before is not None:
            by_work[before] ^= bit
        by_work[number] ^= bit
        self._class[target] = number
