"""What each replica probably still holds in its prefix cache, as this router sent it there.

Theory of operation. Prompts arrive as chains of block hashes, each of which stands for its block and everything
before it. Blocks that were always met together form a *run*, of at most ``run_tokens``; a run is found by its first
hash, and because hashes are chained one comparison of its last hash says that all of it is met. Where a prompt leaves
a run half way the run is split there, once. A run carries one integer with a bit for each replica that holds it, so a
thousand replicas are matched at the cost of four, and the walk ends where nobody holds the next block.

Each replica has an LRU of runs, bounded by the blocks that its engine has room for and by an age. A prompt's runs are
entered tail first, so that its tail is evicted before its head, as vLLM does it. All replicas together are bounded as
well: then they give up their oldest runs in turn. A prompt is entered when it is dispatched, before it is there: of a
burst that shares a cold prefix only the first request is charged for it. If the request comes to nothing its new
entries are taken back.

What a replica was believed to hold is checked against the cached tokens that it reports. Of an LRU cache that has
lost a prefix everything used longer ago is gone as well, so after ``MISSES`` answers in a row that had much less than
was expected, all that the replica last used up to then is forgotten. Predictions that lean on something dispatched in
the last ``SETTLED_S`` do not count: it may be on its way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from math import inf
from typing import Final

from routing.core.types import ReplicaId

BLOCK_TOKENS: Final = 64  # of a block of the canonical prompt, as its length is estimated
RUN_TOKENS: Final = 1024  # the longest run, unless a single block is longer
DEFAULT_TOKENS: Final = 262_144  # that a replica is taken to hold until its engine has told: 16,384 blocks of 16
MAX_ENTRIES: Final = 262_144  # runs of all replicas together; about 0.7 KiB each where no two share one
TTL_S: Final = 1200.0  # since last used
SETTLED_S: Final = 5.0  # after which a dispatched prompt has been prefilled, or never will be
MISSES: Final = 3  # in a row, until a replica's old entries are forgotten
MISS_RATIO: Final = 0.5  # delivered / predicted tokens below which a prediction was wrong
FULL_RATIO: Final = 0.9  # of its capacity: what a full cache holds at least, for runs go as a whole
MIN_CHECKED_TOKENS: Final = 256  # predictions of fewer say nothing

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
        return cls(hashes, hashes[-1], len(hashes), mask)


class Match:
    """How much of a prompt each replica holds, by its longest known opening."""

    __slots__ = ("block_tokens", "levels", "reuse_ratio")

    def __init__(self, levels: list[tuple[int, int]], block_tokens: int, reuse_ratio: float) -> None:
        self.levels = levels  # (blocks, mask of those who hold at least so many), the shortest opening first
        self.block_tokens = block_tokens
        self.reuse_ratio = reuse_ratio  # the residency's

    @property
    def blocks(self) -> int:
        """Of the longest opening that anybody holds."""
        return self.levels[-1][0] if self.levels else 0

    @property
    def holders(self) -> int:
        """Mask of everybody who holds at least a block."""
        return self.levels[0][1] if self.levels else 0

    def tokens(self, bit: int) -> int:
        """Tokens that the replica with this bit holds."""
        for blocks, mask in reversed(self.levels):
            if mask & bit:
                return blocks * self.block_tokens
        return 0


class Holding:
    """What one replica is believed to hold, the least recently used first."""

    __slots__ = ("bit", "blocks", "capacity", "delivered", "misses", "predicted", "replica", "runs", "suspect_s")

    def __init__(self, replica: ReplicaId, bit: int, capacity: int) -> None:
        self.replica = replica
        self.bit = bit
        self.capacity = capacity  # blocks
        self.blocks = 0  # of all runs
        self.runs: OrderedDict[Run, float] = OrderedDict()  # with the time of their last use
        self.predicted = 0.0  # cached tokens expected, of requests whose answer told
        self.delivered = 0.0  # cached tokens that the same answers told
        self.misses = 0  # predictions in a row that were wrong
        self.suspect_s = 0.0  # latest use of what those missed

    def old_s(self, now_s: float) -> float:
        """What a full cache last used before this time is nearer to its eviction than to its last use."""
        return (next(iter(self.runs.values())) + now_s) / 2


class Stay:
    """One dispatched prompt's place in the residency: confirmed by the answer, or taken back."""

    __slots__ = ("_fresh", "_holding", "_leans_on_s", "_now_s", "_predicted_ratio", "_residency")

    def __init__(
        self,
        residency: Residency,
        holding: Holding,
        fresh: list[Run],
        now_s: float,
        leans_on_s: float,
        predicted_ratio: float,
    ) -> None:
        self._residency = residency
        self._holding = holding
        self._fresh = fresh  # runs that this prompt brought
        self._now_s = now_s
        self._leans_on_s = leans_on_s  # when the replica last used what it already had of the prompt
        self._predicted_ratio = predicted_ratio  # cached tokens / prompt tokens

    def confirm(self, prompt_tokens: int, cached_tokens: int) -> None:
        """The answer says how much was cached; both in the engine's tokens."""
        predicted = self._predicted_ratio * prompt_tokens
        holding = self._holding
        holding.predicted += predicted
        holding.delivered += min(cached_tokens, predicted)
        if predicted < MIN_CHECKED_TOKENS or self._now_s - self._leans_on_s < SETTLED_S:
            return
        if cached_tokens >= MISS_RATIO * predicted:
            holding.misses = 0
            return
        holding.suspect_s = max(holding.suspect_s, self._leans_on_s) if holding.misses else self._leans_on_s
        holding.misses += 1
        if holding.misses >= MISSES:
            holding.misses = 0
            self._residency.forget_until(holding.replica, holding.suspect_s)

    def take_back(self) -> None:
        """The prompt was never prefilled: drop what it brought and nobody has used since."""
        self._residency.drop(self._holding, self._fresh, self._now_s)
        self._fresh = []


class Residency:
    """Who holds what. Times are seconds of any one clock that never goes back."""

    __slots__ = (
        "_block_tokens",
        "_capacity",
        "_entries",
        "_free",
        "_holdings",
        "_max_entries",
        "_pushed_out",
        "_reused",
        "_run_blocks",
        "_slots",
        "_starts",
        "_ttl_s",
        "_turn",
        "_walked",
        "_walked_chain",
        "reuse_ratio",
    )

    def __init__(
        self,
        block_tokens: int = BLOCK_TOKENS,
        run_tokens: int = RUN_TOKENS,
        max_entries: int = MAX_ENTRIES,
        ttl_s: float = TTL_S,
    ) -> None:
        self._block_tokens = block_tokens
        self._run_blocks = max(1, run_tokens // block_tokens)
        self._max_entries = max_entries
        self._ttl_s = ttl_s
        self._starts: dict[int, Run] = {}  # by first hash
        self._walked_chain: Chain | None = None  # what was matched last, unless its runs have changed since
        self._walked: list[Run] = []  # the runs that it begins with
        self._holdings: dict[ReplicaId, Holding] = {}
        self._slots: list[Holding | None] = []  # by number of their bit
        self._free: list[int] = []  # numbers that nobody has
        self._entries = 0  # runs of all replicas
        self._turn = 0  # whose oldest run goes next where all are too many
        self.reuse_ratio = 0.0  # of what full caches have not used for long: the share asked for before it is evicted
        self._reused = 0.0  # blocks of that, of late
        self._pushed_out = 0.0  # and blocks that were evicted
        self._capacity = 0  # of all replicas, in blocks

    def __len__(self) -> int:
        """Entries, one for each run and replica that holds it."""
        return self._entries

    @property
    def runs(self) -> int:
        """Distinct runs."""
        return len(self._starts)

    @property
    def block_tokens(self) -> int:
        """Tokens that a block of a chain stands for."""
        return self._block_tokens

    # --- replicas ---

    def settle(self, replica: ReplicaId, capacity_tokens: int | None = None) -> Holding:
        """A replica's holding, which begins empty; from now on of this capacity, None where the engine has not told."""
        blocks = max(1, (DEFAULT_TOKENS if capacity_tokens is None else capacity_tokens) // self._block_tokens)
        holding = self._holdings.get(replica)
        if holding is None:
            if not self._free:
                self._free.append(len(self._slots))
                self._slots.append(None)
            number = self._free.pop()
            holding = self._holdings[replica] = self._slots[number] = Holding(replica, 1 << number, 0)
        self._capacity += blocks - holding.capacity
        holding.capacity = blocks
        return holding

    def holding(self, replica: ReplicaId) -> Holding | None:
        """What is believed of a replica; None of one that nobody settled."""
        return self._holdings.get(replica)

    def replica(self, bit: int) -> ReplicaId | None:
        """Whose bit it is; None for nobody's."""
        number = bit.bit_length() - 1
        holding = self._slots[number] if number < len(self._slots) else None
        return holding.replica if holding else None

    def forget(self, replica: ReplicaId) -> None:
        """Drop a replica and all that it held. O(its own runs)."""
        holding = self._holdings.pop(replica, None)
        if holding is not None:
            while holding.runs:
                self._evict_oldest(holding)
            self._capacity -= holding.capacity
            number = holding.bit.bit_length() - 1
            self._slots[number] = None
            self._free.append(number)

    def forget_all_but(self, replicas: Iterable[ReplicaId]) -> None:
        """Drop all other replicas."""
        for replica in self._holdings.keys() - set(replicas):
            self.forget(replica)

    def forget_until(self, replica: ReplicaId, used_s: float) -> None:
        """Drop what a replica last used at this time or before."""
        holding = self._holdings.get(replica)
        while holding and holding.runs and next(iter(holding.runs.values())) <= used_s:
            self._evict_oldest(holding)

    # --- prompts ---

    def match(self, chain: Chain) -> Match:
        """How much of a prompt each replica holds. 0.2 us a run; it changes only that ``insert`` walks less."""
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
        return Match(levels, self._block_tokens, self.reuse_ratio)

    def insert(self, replica: ReplicaId, chain: Chain, now_s: float, prompt_tokens: int = 0) -> Stay:
        """Enter a prompt that is being sent to a replica; ``prompt_tokens`` is its estimated length."""
        holding = self._holdings.get(replica) or self.settle(replica)
        path, bit, runs = self._path(chain), holding.bit, holding.runs
        fresh: list[Run] = []
        held_blocks, leans_on_s = 0, now_s
        old_s = -inf if holding.blocks < FULL_RATIO * holding.capacity else holding.old_s(now_s)
        for run in path:
            if run.mask & bit:
                if (used_s := runs[run]) < old_s:
                    self._reused += run.length
                if not fresh:
                    held_blocks += run.length
                    leans_on_s = used_s
            else:
                run.mask |= bit
                holding.blocks += run.length
                fresh.append(run)
        for run in reversed(path):
            runs[run] = now_s
            runs.move_to_end(run)
        self._entries += len(fresh)
        self._make_room(holding, now_s)
        held = held_blocks * self._block_tokens
        ratio = min(1.0, held / prompt_tokens) if prompt_tokens else 0.0
        return Stay(self, holding, fresh, now_s, leans_on_s, ratio)

    def drop(self, holding: Holding, runs: Iterable[Run], used_s: float) -> None:
        """Drop runs of one replica that were last used at this time."""
        for run in runs:
            if holding.runs.get(run) == used_s:
                del holding.runs[run]
                self._dropped(holding, run)

    # --- the runs ---

    def _path(self, chain: Chain) -> list[Run]:
        """The runs of a prompt, new ones where nobody has met its blocks."""
        path: list[Run] = []
        starts, at, end = self._starts, 0, len(chain)
        if chain is self._walked_chain:
            path, self._walked_chain = self._walked, None
            for known in path:
                at += known.length
        while at < end:
            run = starts.get(chain[at])
            if run is None:
                run = starts[chain[at]] = Run.of(chain[at : at + self._run_blocks], 0)
            elif at + run.length > end or chain[at + run.length - 1] != run.last:
                run = self._split(run, _shared(run.hashes, chain, at))
            path.append(run)
            at += run.length
        return path

    def _split(self, run: Run, length: int) -> Run:
        """Cut a run's first blocks off. The new head counts as used just now, so that the tail goes before it."""
        self._walked_chain = None
        head = Run.of(run.hashes[:length], run.mask)
        run.hashes = run.hashes[length:]
        run.length -= length
        self._starts[head.hashes[0]] = head
        self._starts[run.hashes[0]] = run
        for holding in self._holders(run.mask):
            holding.runs[head] = holding.runs[run]
            self._entries += 1
        return head

    def _holders(self, mask: int) -> list[Holding]:
        return [holding for holding in self._slots if holding and holding.bit & mask]

    # --- eviction ---

    def _make_room(self, holding: Holding, now_s: float) -> None:
        """Evict what has no room at this replica, what is too old here and at one other, and what all have too many."""
        runs, too_old_s = holding.runs, now_s - self._ttl_s
        if holding.blocks > holding.capacity:
            self._pushed_out += holding.blocks - holding.capacity
            while holding.blocks > holding.capacity:
                self._evict_oldest(holding)
            self._judge_reuse()
        while runs and next(iter(runs.values())) < too_old_s:
            self._evict_oldest(holding)
        self._turn = turn = (self._turn + 1) % len(self._slots)
        other = self._slots[turn]
        while other and other.runs and next(iter(other.runs.values())) < too_old_s:
            self._evict_oldest(other)
        while self._entries > self._max_entries:
            self._turn = turn = (self._turn + 1) % len(self._slots)
            other = self._slots[turn]
            if other and other.runs:
                self._evict_oldest(other)

    def _judge_reuse(self) -> None:
        """What the latest turnover of the caches says about what they push out."""
        judged = self._reused + self._pushed_out
        self.reuse_ratio = self._reused / judged
        if judged > self._capacity:
            self._reused /= 2
            self._pushed_out /= 2

    def _evict_oldest(self, holding: Holding) -> None:
        run, _used_s = holding.runs.popitem(last=False)
        self._dropped(holding, run)

    def _dropped(self, holding: Holding, run: Run) -> None:
        """A replica no longer holds a run."""
        holding.blocks -= run.length
        self._entries -= 1
        run.mask ^= holding.bit
        if not run.mask:
            self._walked_chain = None
            del self._starts[run.hashes[0]]


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
