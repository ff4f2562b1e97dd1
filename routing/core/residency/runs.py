"""Which blocks prompts have in common, and who holds them: an index that a chain of block hashes is walked along.

Theory of operation. Each hash of a chain stands for its block and everything before it. Blocks that were always met
together form a *run*, of a bounded length; a run is found by its first hash, and because hashes are chained one
comparison of its last hash says that all of it is met. Where a prompt leaves a run half way the run is split there,
once. A run carries one integer with a bit for each replica that holds it, so a thousand replicas are matched at the
cost of four, and the walk ends where nobody holds the next block. A run that nobody holds any more is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

Chain = Sequence[int]
EVERYBODY: Final = -1  # a mask with every bit


class Run:
    """Consecutive blocks that were always met together, and who holds them."""

    __slots__ = ("hashes", "last", "length", "mask")

    def __init__(self, hashes: Chain, last: int, length: int, mask: int) -> None:
        self.hashes = hashes
        self.last = last
        self.length = length
        self.mask = mask

    @classmethod
    def of(cls, hashes: Chain, mask: int) -> Run:
        """A run of these blocks, at least one."""
        return Run(hashes, hashes[-1], len(hashes), mask)


class Runs:
    """All runs that somebody holds, by their first hash."""

    __slots__ = ("_longest", "_starts", "_walked", "_walked_chain", "entries")

    def __init__(self, longest: int) -> None:
        self._longest = longest  # blocks of a new run
        self._starts: dict[int, Run] = {}
        self._walked_chain: Chain | None = None  # what was matched last, unless its runs have changed since
        self._walked: list[Run] = []  # the runs that it begins with
        self.entries = 0  # one for each run and replica that holds it; whoever sets a bit counts it

    def __len__(self) -> int:
        return len(self._starts)

    def levels(self, chain: Chain) -> list[tuple[int, int]]:
        """``(blocks, mask of those who hold at least so many)``, the shortest prefix first. 0.2 us a run."""
        starts, levels = self._starts, []
        mask, at, end = EVERYBODY, 0, len(chain)
        self._walked_chain, self._walked = chain, (walked := [])
        while at < end:
            run = starts.get(chain[at])
            if run is None or not (held := mask & run.mask):
                break
            if held != mask:
                if at:
                    levels.append((at, mask))
                mask = held
            after = at + run.length
            if after > end or chain[after - 1] != run.last:
                at += _shared(run.hashes, chain, at)
                break
            walked.append(run)
            at = after
        if at:
            levels.append((at, mask))
        return levels

    def path(self, chain: Chain, split: Callable[[Run, Run], None]) -> list[Run]:
        """A whole prompt's runs, new ones where nobody has met its blocks; what ``levels`` walked is not walked again.

        ``split`` is told of a run that parts here: its new head, and the run itself, which is the tail from now on.
        """
        path: list[Run] = []
        starts, at, end = self._starts, 0, len(chain)
        if chain is self._walked_chain:
            path, self._walked_chain = self._walked, None
            for known in path:
                at += known.length
        while at < end:
            run = starts.get(chain[at])
            if run is None:
                run = starts[chain[at]] = Run.of(chain[at : at + self._longest], 0)
            elif at + run.length > end or chain[at + run.length - 1] != run.last:
                head = self._split(run, _shared(run.hashes, chain, at))
                split(head, run)
                run = head
            path.append(run)
            at += run.length
        return path

    def starting_with(self, key: int) -> Run | None:
        """The run that begins with a hash; None where nobody holds one."""
        return self._starts.get(key)

    def add(self, run: Run) -> None:
        """Enter a run that nobody holds yet."""
        self._starts[run.hashes[0]] = run

    def let_go(self, run: Run, bit: int) -> None:
        """The replica with this bit no longer holds a run."""
        self.entries -= 1
        run.mask ^= bit
        if not run.mask:
            self._walked_chain = None
            del self._starts[run.hashes[0]]

    def _split(self, run: Run, length: int) -> Run:
        """Cut a run's first blocks off, and hand them back as a run with the same holders."""
        self._walked_chain = None
        head = Run.of(run.hashes[:length], run.mask)
        run.hashes = run.hashes[length:]
        run.length -= length
        self._starts[head.hashes[0]] = head
        self._starts[run.hashes[0]] = run
        self.entries += run.mask.bit_count()
        return head


def _shared(hashes: Chain, chain: Chain, at: int) -> int:
    """How many of ``hashes`` stand in ``chain`` from ``at`` on, at least the first; being chained, by halves."""
    low, high = 1, min(len(hashes), len(chain) - at)
    while low < high:
        middle = (low + high + 1) // 2
        if hashes[middle - 1] == chain[at + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
