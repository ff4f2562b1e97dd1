"""One replica that a request may go to.

How the requests of late are shared out: who had more than is fair, and may give one up.

Theory of operation. Work that waits spreads a busy fleet. Where caches keep a fleet idle nothing waits, and whoever
holds what most prompts begin with costs least for all of them: it gets them all, and nobody is in its way until the
traffic grows. So a replica that had more than ``SHARE`` times its fair share of the requests of late, and ``FEW`` more
at that, gives one up to a replica that had no more than its own, that has no more work (nobody waits for the sake of
balance), and that would have to prefill only ``WORTH`` tokens more for each request that the first one had too many.
What many prompts begin with thus comes to be at as many replicas as its share of the traffic asks for, each paid for by
one prefill, and the more of it there is to prefill, the longer it stays where it is.

Who of some replicas has how much work: sums, the least loaded, and those that have about as much.

Theory of operation. Loads change with every request, so what is kept here follows the book's journal: bringing it up
to date costs the changes since the last question, at most O(replicas), and nothing is counted where nobody asks. The
least loaded is the head of a heap whose outdated entries are dropped when they surface. Equal work goes to the replica
whose load changed longest ago, at first in an order hashed with the seed: a fixed order would send every idle
router's next request, and everything that a quickly failing replica refuses, to the same one.

The replicas that a request may go to.

Who they are is fixed: whenever that changes a new object is made, which costs O(replicas). What is asked of them is
made when it is first asked for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from routing.balancing.load_tracker import Load, LoadTracker
from routing.types import TargetId

REQUEST_TOKENS: Final = 80  # work of a running request beside its prompt: a step's fixed 0.010 s at 8,000 tokens/s


class Candidate(NamedTuple):
    """A target with what its cost is made of."""

    target: TargetId
    load: Load
    weight: float
    bit: int  # in the residency's masks; 0 where nothing is known of it
    share: float = 1.0  # of its weight that it has; less while it starts slowly


def work_of(candidate: Candidate) -> float:
    """Outstanding work, in tokens by the replica's weight."""
    load = candidate.load
    return (load.waiting_tokens + REQUEST_TOKENS * load.running) / candidate.weight


SHARE: Final = 1.15  # ratio to the fair share of recent requests
FEW: Final = 8.0  # requests: chance, or one conversation
WORTH: Final = 600.0  # tokens to prefill, 0.075 s at 8,000 a second, to be rid of one request beyond both


class RecentShares:
    """The shares of some replicas. What all of them had is summed up once in as many changes as there are replicas."""

    __slots__ = ("_at", "_book", "_fair", "_members", "_modest", "_summed_weight", "_weight")

    def __init__(self, members: Sequence[Candidate], book: LoadTracker) -> None:
        self._members = members
        self._weight = sum([member.weight for member in members])
        self._book = book
        self._at: int | None = None  # in the book, when they were summed up
        self._summed_weight = 0.0  # what a request counted then
        self._fair = 0.0  # the limit of a replica of weight 1, but for ``FEW``
        self._modest: int | None = None  # made when it is first asked for

    def excess(self, member: Candidate) -> float:
        """Requests of late that a member had too many; below 0 where it had fewer than it may."""
        book = self._book
        if self._at is None or book.position - self._at > len(self._members) or book.weight_now < self._summed_weight:
            self._sum_up()
        return (member.load.recent - self._fair * member.weight) / book.weight_now - FEW

    def modest(self) -> int:
        """The bits of those who had not too many, as of the last sum."""
        if self._modest is None:
            self._modest = sum([member.bit for member in self._members if self.excess(member) <= 0])
        return self._modest

    def _sum_up(self) -> None:
        self._at, self._summed_weight = self._book.position, self._book.weight_now
        self._fair = SHARE * sum([member.load.recent for member in self._members]) / self._weight
        self._modest = None


WORK_CLASSES: Final = 64  # by the powers of two of their tokens
MAX_WORK: Final = 2.0**62  # tokens from which on all are of one class: of a replica with next to no weight


class LeastLoadedOrder:
    """The work of some replicas, as of now each time that it is asked."""

    def __init__(self, candidates: Mapping[TargetId, Candidate], book: LoadTracker, seed: int) -> None:
        self._candidates = candidates
        self._book = book
        self._seed = seed
        self._position = book.position
        self._counted: dict[TargetId, int] = {}  # of each, by ``_count``, as it is in the sums
        self._running = 0
        self._busy = 0
        self._heap: list[tuple[float, int, TargetId]] = []  # (work, stamp, target); empty until it is asked for
        self._current: dict[TargetId, int] = {}  # stamp of each target's entry that counts
        self._stamp = 0
        self._by_work = [0] * WORK_CLASSES  # masks of those that are in the heap
        self._class: dict[TargetId, int] = {}
        self._start_over()

    @property
    def running(self) -> int:
        """Requests running at all of them together."""
        self._catch_up()
        return self._running

    @property
    def busy_ratio(self) -> float:
        """Share of them that have prompts to prefill, 0 to 1."""
        self._catch_up()
        return self._busy / len(self._candidates)

    def least_loaded(self) -> TargetId:
        """The replica with the least work; of several, the one whose load changed longest ago."""
        self._line_up()
        heap, current = self._heap, self._current
        while heap[0][1] != current[heap[0][2]]:
            heappop(heap)
        return heap[0][2]

    def classes(self) -> list[int]:
        """Masks of those with about as much work, each class up to twice that of the one before, from none on."""
        self._line_up()
        return self._by_work

    def _line_up(self) -> None:
        """Have everybody in the heap; at first equals in an order that differs each time and between routers."""
        self._catch_up()
        if not self._heap:
            salt = self._seed + self._stamp
            for name in sorted(self._candidates, key=lambda name: xxh3_64_intdigest(name.encode(), salt)):
                self._push(name)

    def _catch_up(self) -> None:
        """Take in what changed since the last time, the longest ago first."""
        book = self._book
        behind = book.position - self._position
        if not behind:
            return
        changes = book.changes_since(self._position) if behind <= 8 * len(self._candidates) + 64 else None
        self._position = book.position
        if changes is None:
            self._start_over()
            return
        counted = self._counted
        for load in changes if not self._heap else reversed(dict.fromkeys(reversed(changes))):
            before = counted.get(load.target)
            if before is None:
                continue
            now = _count(load)
            if now != before:
                self._running += now // 2 - before // 2
                self._busy += now % 2 - before % 2
                counted[load.target] = now
            if self._heap:
                self._push(load.target)

    def _start_over(self) -> None:
        """Sum anew, because too much has changed to look at each change."""
        self._counted = {name: _count(candidate.load) for name, candidate in self._candidates.items()}
        self._running = sum(counted // 2 for counted in self._counted.values())
        self._busy = sum(counted % 2 for counted in self._counted.values())
        self._heap = []

    def _push(self, target: TargetId) -> None:
        """Enter a replica's present work; its older entry no longer counts."""
        self._stamp += 1
        self._current[target] = self._stamp
        candidate = self._candidates[target]
        work = work_of(candidate)
        heappush(self._heap, (work, self._stamp, target))
        number = int(work).bit_length() if work < MAX_WORK else WORK_CLASSES - 1
        if number != self._class.get(target):
            self._classify(candidate, number)
        if len(self._heap) > 4 * len(self._candidates) + 64:
            self._heap = [entry for entry in self._heap if entry[1] == self._current[entry[2]]]
            heapify(self._heap)

    def _classify(self, candidate: Candidate, number: int) -> None:
        """Count a replica to another class of work."""
        by_work, before = self._by_work, self._class.get(candidate.target)
        if before is not None:
            by_work[before] ^= candidate.bit
        by_work[number] ^= candidate.bit
        self._class[candidate.target] = number


def _count(load: Load) -> int:
    """A load's requests and whether any waits, as one number."""
    return 2 * load.running + (load.waiting_tokens > 0)


class Candidates:
    """Eligible replicas of one group."""

    def __init__(
        self,
        weights: Mapping[TargetId, float],
        book: LoadTracker,
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
        self._order: LeastLoadedOrder | None = None
        self._recent: RecentShares | None = None

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
    def recent(self) -> RecentShares:
        """Who had how much of the requests of late."""
        recent = self._recent
        if recent is None:
            recent = self._recent = RecentShares(self.members, self._book)
        return recent

    @property
    def order(self) -> LeastLoadedOrder:
        """Who has how much work."""
        order = self._order
        if order is None:
            order = self._order = LeastLoadedOrder(self.by_name, self._book, self._seed)
        return order

    def now_s(self) -> float:
        """The load book's time."""
        return self._book.clock()
