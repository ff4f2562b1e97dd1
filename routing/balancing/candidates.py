"""The eligible replicas of a request, with their loads, and orders of them by load and by recent traffic.

``Candidates`` never change: when eligibility changes, a new object is made, which costs O(replicas).

Recent shares. Waiting work balances a busy fleet. Where caches keep a fleet idle, no request waits, and the replica
with the most popular prefix cached would get all requests for it until traffic grows. So a replica yields a request if
it had more than ``FAIR_RATIO`` times its fair share of recent requests, and ``MIN_EXCESS`` requests more. The request
goes to a replica that had no more than its fair share and has no more work, so that no request waits for balance's
sake. That replica may have to prefill at most ``EXCESS_TOKENS`` more for each request in excess. Popular prefixes thus
spread to as many replicas as their share of the traffic needs, at the cost of one prefill each. A longer prefix spreads
later.

Order by load. Loads change with every request, so sums and order follow the load tracker's journal: an update costs the
changes since the last query, at most O(replicas), and nothing is computed without a query. The least loaded replica is
the head of a heap whose outdated entries are dropped when they reach the top. Among equals the replica whose load
changed longest ago is first, initially in an order hashed with the seed. With a fixed order, the routers of an idle
fleet would all choose the same replica, and a replica that quickly fails would attract all requests.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from routing.balancing.load_tracker import Load, LoadTracker
from routing.balancing.residency import ShareByTokens
from routing.types import Reason, TargetId

REQUEST_TOKENS: Final = 80  # work of a running request besides its prompt: a step's fixed 0.010 s at 8,000 tokens/s


class Choice:
    """The target of a request, and why it was chosen."""

    def __init__(
        self,
        target: TargetId,
        reason: Reason,
        skipped: tuple[TargetId, ...] = (),
        hit_tokens: int | None = None,
        common_hits: ShareByTokens | None = None,
        unrecorded_hit_tokens: int = 0,
    ) -> None:
        self.target = target
        self.reason = reason
        self.skipped = skipped  # homes at which the request would wait too long
        self.hit_tokens = hit_tokens  # predicted cached tokens there; None: not computed
        self.common_hits = common_hits  # learns from the response; None: the target is not the common replica
        self.unrecorded_hit_tokens = unrecorded_hit_tokens  # expected beyond ``hit_tokens``: other routers sent them

    def uncached_tokens(self, prompt_tokens: int) -> int:
        """Predicted tokens of a prompt to prefill at the target."""
        return max(0, prompt_tokens - (self.hit_tokens or 0) - self.unrecorded_hit_tokens)


class Candidate(NamedTuple):
    """An eligible target, with the values that its cost is computed from."""

    target: TargetId
    load: Load
    weight: float
    bit: int  # in the residency's masks; 0 if the residency does not know it
    share: float = 1.0  # of its full weight; below 1 during slow start


def work_of(candidate: Candidate) -> float:
    """Outstanding work, in tokens divided by the replica's weight."""
    load = candidate.load
    return (load.waiting_tokens + REQUEST_TOKENS * load.running) / candidate.weight


FAIR_RATIO: Final = 1.15  # times its fair share: what a replica may have of recent requests
MIN_EXCESS: Final = 8.0  # requests above that, which may be chance or one conversation
EXCESS_TOKENS: Final = 600.0  # tokens to prefill, 0.075 s at 8,000 a second, for yielding one request in excess


class RecentShares:
    """Shares of recent requests. The total is recomputed once in as many changes as there are replicas."""

    def __init__(self, members: Sequence[Candidate], tracker: LoadTracker) -> None:
        self._members = members
        self._weight = sum([member.weight for member in members])
        self._tracker = tracker
        self._position: int | None = None  # of the tracker, when the total was computed
        self._request_weight = 0.0  # of the tracker at that time
        self._fair_requests = 0.0  # requests allowed for a weight of 1, without ``MIN_EXCESS``
        self._mask_without_excess: int | None = None

    def excess(self, member: Candidate) -> float:
        """Recent requests above a member's fair share; negative below it."""
        tracker = self._tracker
        if (
            self._position is None
            or tracker.position - self._position > len(self._members)
            or tracker.request_weight < self._request_weight
        ):
            self._position, self._request_weight = tracker.position, tracker.request_weight
            self._fair_requests = FAIR_RATIO * sum([member.load.recent for member in self._members]) / self._weight
            self._mask_without_excess = None
        return (member.load.recent - self._fair_requests * member.weight) / tracker.request_weight - MIN_EXCESS

    def mask_without_excess(self) -> int:
        """A mask of the members without excess, by the latest total."""
        if self._mask_without_excess is None:
            self._mask_without_excess = sum([member.bit for member in self._members if self.excess(member) <= 0])
        return self._mask_without_excess


WORK_CLASSES: Final = 64  # by powers of two of tokens
MAX_WORK: Final = 2.0**62  # tokens; more is in the last class, of a replica with next to no weight


class LeastLoadedOrder:
    """Which of some replicas are busy, and their order by work, up to date at each query."""

    def __init__(self, candidates: Mapping[TargetId, Candidate], tracker: LoadTracker, seed: int) -> None:
        self._candidates = candidates
        self._tracker = tracker
        self._seed = seed
        self._position = tracker.position
        self._busy: set[TargetId] = set()  # with prompts to prefill
        self._heap: list[tuple[float, int, TargetId]] = []  # (work, stamp, target); empty until first use
        self._current: dict[TargetId, int] = {}  # stamp of each target's valid entry
        self._stamp = 0
        self._by_work = [0] * WORK_CLASSES  # masks of the targets in the heap
        self._work_class: dict[TargetId, int] = {}
        self._recount()

    @property
    def busy_ratio(self) -> float:
        """Share of these replicas with prompts to prefill, 0 to 1."""
        self._update()
        return len(self._busy) / len(self._candidates)

    def least_loaded(self) -> TargetId:
        """The replica with the least work; among equals, the one whose load changed longest ago."""
        self._build_heap()
        heap, current = self._heap, self._current
        while heap[0][1] != current[heap[0][2]]:
            heappop(heap)
        return heap[0][2]

    def work_classes(self) -> list[int]:
        """Masks of replicas with similar work, the least first; each class has up to twice the work before it."""
        self._build_heap()
        return self._by_work

    def _build_heap(self) -> None:
        """Update the heap. In a new one, the order of equal entries differs each time and between routers."""
        self._update()
        if not self._heap:
            salt = self._seed + self._stamp
            for name in sorted(self._candidates, key=lambda name: xxh3_64_intdigest(name.encode(), salt)):
                self._push(name)

    def _update(self) -> None:
        """Apply the changes since the last query, the oldest first."""
        tracker = self._tracker
        behind = tracker.position - self._position
        if not behind:
            return
        changes = tracker.changes_since(self._position) if behind <= 8 * len(self._candidates) + 64 else None
        self._position = tracker.position
        if changes is None:
            self._recount()
            return
        for load in reversed(dict.fromkeys(reversed(changes))):
            if load.target not in self._candidates:
                continue
            (self._busy.add if load.waiting_tokens else self._busy.discard)(load.target)
            if self._heap:
                self._push(load.target)

    def _recount(self) -> None:
        """Start again from all loads, where there are too many changes to apply."""
        self._busy = {name for name, candidate in self._candidates.items() if candidate.load.waiting_tokens}
        self._heap = []

    def _push(self, target: TargetId) -> None:
        """Add an entry with a replica's current work, which invalidates its older entry."""
        self._stamp += 1
        self._current[target] = self._stamp
        candidate = self._candidates[target]
        work = work_of(candidate)
        heappush(self._heap, (work, self._stamp, target))
        work_class = int(work).bit_length() if work < MAX_WORK else WORK_CLASSES - 1
        before = self._work_class.get(target)
        if work_class != before:
            if before is not None:
                self._by_work[before] ^= candidate.bit
            self._by_work[work_class] ^= candidate.bit
            self._work_class[target] = work_class
        if len(self._heap) > 4 * len(self._candidates) + 64:
            self._heap = [entry for entry in self._heap if entry[1] == self._current[entry[2]]]
            heapify(self._heap)


class Candidates:
    """Eligible replicas of one group."""

    def __init__(
        self,
        weights: Mapping[TargetId, float],
        tracker: LoadTracker,
        seed: int = 0,
        bits: Mapping[TargetId, int] | None = None,
        shares: Mapping[TargetId, float] | None = None,
    ) -> None:
        self.weights = weights  # relative capacity, > 0
        self.bits: Mapping[TargetId, int] = {} if bits is None else bits  # in the residency's masks
        self._shares: Mapping[TargetId, float] = {} if shares is None else shares  # of weights, where below 1
        self.loads: Mapping[TargetId, Load] = {name: tracker.load(name) for name in weights}
        self.members = [
            Candidate(name, load, weights[name], self.bits.get(name, 0), self._shares.get(name, 1.0))
            for name, load in self.loads.items()
        ]
        self.by_name = {member.target: member for member in self.members}
        self.by_bit = {member.bit: member for member in self.members if member.bit}
        self.mask = sum(self.by_bit)  # the bits of all
        self.greatest_weight = max(weights.values(), default=0.0)
        self._unfiltered: Candidates | None = None
        self.recent = RecentShares(self.members, tracker)
        self.clock = tracker.clock
        self._tracker = tracker
        self._seed = seed
        self._cumulative: list[float] | None = None  # from here on: computed on first use
        self._order: LeastLoadedOrder | None = None

    def __len__(self) -> int:
        return len(self.loads)

    def __contains__(self, target: object) -> bool:
        return target in self.loads

    def __iter__(self) -> Iterator[TargetId]:
        return iter(self.loads)

    def without(self, excluded: Collection[TargetId]) -> Candidates:
        """The same replicas except some that already failed for a request. O(replicas)."""
        return self.subset([name for name in self.weights if name not in excluded], self.unfiltered)

    def subset(self, names: Collection[TargetId], unfiltered: Candidates | None = None) -> Candidates:
        """The candidates with these names, in this order. O(names). ``unfiltered``: the candidates before a retry."""
        weights = {name: self.weights[name] for name in names}
        subset = Candidates(weights, self._tracker, self._seed, self.bits, self._shares)
        subset._unfiltered = unfiltered
        return subset

    @property
    def unfiltered(self) -> Candidates:
        """The candidates before replicas that failed a request were removed; ``self`` if none were removed."""
        return self if self._unfiltered is None else self._unfiltered

    def draw(self, chance: float) -> Candidate:
        """The candidate for a random number from 0 to below 1; each has a probability by its weight."""
        cumulative = self._cumulative
        if cumulative is None:
            cumulative = self._cumulative = list(accumulate(self.weights.values()))
        at = bisect_right(cumulative, chance * cumulative[-1])
        return self.members[min(at, len(self.members) - 1)]

    @property
    def order(self) -> LeastLoadedOrder:
        """Which are busy, and the order by work."""
        order = self._order
        if order is None:
            order = self._order = LeastLoadedOrder(self.by_name, self._tracker, self._seed)
        return order
