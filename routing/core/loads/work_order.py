"""Who of some replicas has how much work: sums, the least loaded, and those that have about as much.

Theory of operation. Loads change with every request, so what is kept here follows the book's journal: bringing it up
to date costs the changes since the last question, at most O(replicas), and nothing is counted where nobody asks. The
least loaded is the head of a heap whose outdated entries are dropped when they surface. Equal work goes to the replica
whose load changed longest ago, at first in an order hashed with the seed: a fixed order would send every idle
router's next request, and everything that a quickly failing replica refuses, to the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from typing import Final

from xxhash import xxh3_64_intdigest

from routing.core.loads.book import Load, LoadBook
from routing.core.loads.candidate import Candidate, work_of
from routing.core.types import TargetId

WORK_CLASSES: Final = 64  # by the powers of two of their tokens
MOST_WORK: Final = 2.0**62  # tokens from which on all are of one class: of a replica with next to no weight


class WorkOrder:
    """The work of some replicas, as of now each time that it is asked."""

    def __init__(self, candidates: Mapping[TargetId, Candidate], book: LoadBook, seed: int) -> None:
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
        number = int(work).bit_length() if work < MOST_WORK else WORK_CLASSES - 1
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
