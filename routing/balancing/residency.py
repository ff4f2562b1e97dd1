"""What each replica probably still holds in its prefix cache, as this router sent it there.

Theory of operation. Prompts arrive as chains of block hashes and are kept as runs of blocks (``block_index.py``). Each
replica has an LRU of runs (``replica_blocks.py``), bounded by the blocks that its engine has room for and by an age. A
prompt's runs are entered tail first, so that its tail is evicted before its head, as vLLM does it. All replicas
together are bounded as well: then they give up their oldest runs in turn. A prompt is entered when it is dispatched,
before it is there: of a burst that shares a cold prefix only the first request is charged for it. If the request comes
to nothing its new entries are taken back; if it is answered, the answer is held against what was expected
(``residency.py``).

One prompt at a replica, from its dispatch on: what it was believed to find there is checked against the answer.

Theory of operation. A replica reports cached tokens. Of an LRU cache that has lost a prefix everything used longer ago
is gone as well, so after ``MISSES`` answers in a row that had much less than was expected, all that the replica last
used up to then is forgotten. Predictions that lean on something dispatched in the last ``SETTLED_S`` do not count: it
may be on its way.

The response also says how long the prompt's tail is (``block_index.py``), and whether the tail of the turn before was
there.

Whether full caches are crowded: how much of what they were about to push out is asked for after all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from routing.balancing.block_index import BlockIndex, BlockRun, Branches, Chain, Tail, TailReuse, tail_key, tail_tokens
from routing.balancing.replica_blocks import ReplicaBlocks, ReplicaBlockTables, Use
from routing.types import BLOCK_TOKENS, TargetId

SETTLED_S: Final = 5.0  # after which a dispatched prompt has been prefilled, or never will be
MISSES: Final = 3  # in a row, until a replica's old entries are forgotten
MISS_RATIO: Final = 0.5  # delivered / predicted tokens below which a prediction was wrong
MIN_CHECKED_TOKENS: Final = 256  # predictions of fewer say nothing
MIN_TAIL_TOKENS: Final = 32  # of a tail that teaches anything: shorter ones are less than the estimate is off
WHOLE_RATIO: Final = 0.9  # of what stands before a tail: with less of it cached, it says nothing whether the tail was
FOUND_RATIO: Final = 0.5  # of a tail: with so much of it cached, the chain behind it stands for the same tokens


class RequestResidency:
    """One dispatched prompt's place in the residency: confirmed by the answer, or taken back."""

    __slots__ = (
        "_before",
        "_before_tokens",
        "_branches",
        "_chain",
        "_held_tokens",
        "_holding",
        "_known",
        "_leans_on_s",
        "_prompt_tokens",
        "_tail",
        "_tails",
        "_use",
    )

    def __init__(
        self,
        holding: ReplicaBlocks,
        chain: Chain,
        known: int,
        use: Use,
        leans_on_s: float,
        prompt_tokens: int,
        held_tokens: int,
        learnt: tuple[TailReuse, Branches],
        tail: BlockRun | None,
        before: BlockRun | None,
    ) -> None:
        self._holding = holding
        self._chain = chain
        self._known = known  # blocks that it found; this prompt brought the others
        self._use = use
        self._leans_on_s = leans_on_s  # when the replica last used what it already had of the prompt
        self._prompt_tokens = prompt_tokens  # estimated, as the next
        self._held_tokens = held_tokens  # of the blocks that it found
        self._tails, self._branches = learnt
        self._tail = tail  # its own; None where tails are not kept yet
        self._before = before  # the tail of the prompt that it goes on from, if it goes on
        self._before_tokens = tail_tokens(before) if before is not None else 0

    def confirm(self, prompt_tokens: int, cached_tokens: int, generated_tokens: int | None = None) -> None:
        """The answer says how much was cached; all in the engine's tokens."""
        if self._prompt_tokens <= 0 or prompt_tokens <= 0:
            return
        scale = prompt_tokens / self._prompt_tokens  # the engine's tokens for each estimated one
        self._learn_tails(scale, cached_tokens, generated_tokens)
        predicted = min(1.0, self._held_tokens / self._prompt_tokens) * prompt_tokens
        if predicted < MIN_CHECKED_TOKENS or self._use.used_s - self._leans_on_s < SETTLED_S:
            return
        holding = self._holding
        if cached_tokens >= MISS_RATIO * predicted:
            holding.misses = 0
            return
        holding.suspect_s = max(holding.suspect_s, self._leans_on_s) if holding.misses else self._leans_on_s
        holding.misses += 1
        if holding.misses >= MISSES:
            holding.misses = 0
            holding.evict_until(holding.suspect_s)

    def _learn_tails(self, scale: float, cached_tokens: int, generated_tokens: int | None) -> None:
        """Give the prompt's own tail its length, and look whether the one before it was in the cache."""
        holding, tail = self._holding, self._tail
        if generated_tokens is not None:
            holding.keeps_tails = True
        if isinstance(tail, Tail):
            blocks = len(self._chain)
            block_tokens = self._held_tokens // self._known if self._known else holding.block_tokens
            rest = max(0, self._prompt_tokens - blocks * block_tokens)
            tail.tokens = int(rest + (generated_tokens or 0) / scale)
            holding.lengthen(tail, round(tail.tokens / block_tokens))
        if not 0 < self._known < len(self._chain) or cached_tokens < WHOLE_RATIO * scale * self._held_tokens:
            return
        found_tokens, before = cached_tokens / scale - self._held_tokens, self._before
        if before is None:
            self._branches.learn(self._chain[self._known - 1], found_tokens, self._held_tokens, holding.block_tokens)
        elif self._before_tokens >= MIN_TAIL_TOKENS:
            self._tails.learn(found_tokens / self._before_tokens)
            if found_tokens > FOUND_RATIO * self._before_tokens:
                holding.drop(before)

    def take_back(self) -> None:
        """The prompt was never prefilled: drop what it brought and nobody has used since."""
        self._holding.take_back(self._use, len(self._chain) - self._known)
        self._chain = ()


class Reuse:
    """Counts of blocks, of the latest turnover of all caches together."""

    __slots__ = ("_pushed_out", "_reused", "ratio")

    def __init__(self) -> None:
        self.ratio = 0.0  # of what full caches have not used for long: the share asked for before it is evicted
        self._reused = 0.0  # blocks of that, of late
        self._pushed_out = 0.0  # and blocks that were evicted

    def asked_for(self, blocks: int) -> None:
        """Blocks of a full cache that had not been used for long."""
        self._reused += blocks

    def pushed_out(self, blocks: int, capacity: int) -> None:
        """Blocks that had no room, and the capacity of all caches together: by then older counts have halved."""
        self._pushed_out += blocks
        judged = self._reused + self._pushed_out
        self.ratio = self._reused / judged
        if judged > capacity:
            self._reused /= 2
            self._pushed_out /= 2


RUN_TOKENS: Final = 1024  # the longest run, unless a single block is longer
DEFAULT_TOKENS: Final = 262_144  # that a replica is taken to hold until its engine has told: 16,384 blocks of 16
MAX_ENTRIES: Final = 262_144  # runs of all replicas together; at most 0.6 KiB each, where no two share one
TTL_S: Final = 1200.0  # since last used


class Match:
    """How much of a prompt each replica holds, by its longest known prefix."""

    __slots__ = (
        "_branches",
        "_chain",
        "block_tokens",
        "branch_tokens",
        "levels",
        "reuse_ratio",
        "tail_mask",
        "tail_tokens",
    )

    def __init__(
        self, chain: Chain, levels: list[tuple[int, int]], branches: Branches, block_tokens: int, reuse_ratio: float
    ) -> None:
        self._chain = chain
        self._branches = branches
        self.levels = levels  # (blocks, mask of those who hold at least so many), the shortest prefix first
        self.block_tokens = block_tokens
        self.reuse_ratio = reuse_ratio  # the residency's
        self.tail_tokens = self.tail_mask = 0  # expected behind the longest known prefix, and who holds them
        self.branch_tokens = 0  # expected there at others who hold that prefix

    @property
    def blocks(self) -> int:
        """Of the longest prefix that anybody holds."""
        return self.levels[-1][0] if self.levels else 0

    def tokens(self, bit: int, prompt_tokens: int) -> int:
        """Tokens that the replica with this bit holds, at most the prompt's, whose length is an estimate."""
        levels = self.levels
        if levels and levels[-1][1] & bit:
            return self.longest_tokens(bit, prompt_tokens)
        for blocks, mask in reversed(levels):
            if mask & bit:
                behind = self._branches.tokens(self._chain[blocks - 1])
                return min(blocks * self.block_tokens + behind, prompt_tokens)
        return 0

    def longest_tokens(self, bit: int, prompt_tokens: int) -> int:
        """The same of a replica that holds the longest known prefix; there is one."""
        behind = self.tail_tokens if self.tail_mask & bit else self.branch_tokens
        return min(self.levels[-1][0] * self.block_tokens + behind, prompt_tokens)


class Residency:
    """Who holds what. Times are seconds of any one clock that never goes back."""

    __slots__ = ("_block_tokens", "_holdings", "_max_entries", "_runs", "_ttl_s", "branches", "reuse", "tails")

    def __init__(
        self,
        block_tokens: int = BLOCK_TOKENS,
        run_tokens: int = RUN_TOKENS,
        max_entries: int = MAX_ENTRIES,
        ttl_s: float = TTL_S,
    ) -> None:
        self._block_tokens = block_tokens
        self._max_entries = max_entries
        self._ttl_s = ttl_s
        self._runs = BlockIndex(max(1, run_tokens // block_tokens))
        self._holdings = ReplicaBlockTables(self._runs)
        self.reuse = Reuse()
        self.tails = TailReuse()
        self.branches = Branches()

    def __len__(self) -> int:
        """Entries, one for each run and replica that holds it."""
        return self._runs.entries

    @property
    def runs(self) -> int:
        """Distinct runs."""
        return len(self._runs)

    @property
    def block_tokens(self) -> int:
        """Tokens that a block of a chain stands for."""
        return self._block_tokens

    # --- replicas ---

    def settle(self, target: TargetId, capacity_tokens: int | None = None) -> ReplicaBlocks:
        """A replica's holding, which begins empty; from now on of this capacity, None where the engine has not told."""
        tokens = DEFAULT_TOKENS if capacity_tokens is None else capacity_tokens
        return self._holdings.settle(target, tokens, self._block_tokens)

    def resize(self, target: TargetId, block_tokens: int) -> None:
        """Let a replica have room for as many blocks as follow from so many tokens in each."""
        holding = self._holdings.by_target.get(target)
        if holding is not None and holding.block_tokens != block_tokens:
            self._holdings.resize(holding, block_tokens)

    def holding(self, target: TargetId) -> ReplicaBlocks | None:
        """What is believed of a replica; None of one that nobody settled."""
        return self._holdings.by_target.get(target)

    def forget_all_but(self, targets: Iterable[TargetId]) -> None:
        """Drop all other replicas."""
        self._holdings.remove_all_but(targets)

    # --- prompts ---

    def match(self, chain: Chain, block_tokens: int | None = None) -> Match:
        """How much of a prompt each replica holds. It changes only that ``insert`` walks less.

        ``block_tokens``: estimated tokens of this prompt's blocks; None where all blocks have as many.
        """
        levels = self._runs.levels(chain)
        match = Match(chain, levels, self.branches, block_tokens or self._block_tokens, self.reuse.ratio)
        if levels and (blocks := levels[-1][0]) < len(chain):
            match.branch_tokens = self.branches.tokens(chain[blocks - 1])
            tail = self._runs.starting_with(tail_key(chain, blocks))
            if tail is not None:
                match.tail_mask, match.tail_tokens = tail.mask, int(self.tails.ratio * tail_tokens(tail))
        return match

    def insert(
        self, target: TargetId, chain: Chain, now_s: float, prompt_tokens: int = 0, block_tokens: int | None = None
    ) -> RequestResidency:
        """Enter a prompt that is being sent to a replica; ``prompt_tokens`` is its estimated length.

        ``block_tokens`` are as in ``match``.
        """
        holding = self._holdings.by_target.get(target) or self.settle(target)
        path, bit, runs = self._runs.path(chain, self._split), holding.bit, holding.runs
        fresh = known = 0  # runs that it brings, blocks before the first of them
        leans_on_s, stale_s = now_s, holding.stale_s(now_s)
        for run in path:
            if run.mask & bit:
                if (used_s := runs[run].used_s) < stale_s:
                    self.reuse.asked_for(run.length)
                if not fresh:
                    known += run.length
                    leans_on_s = used_s
            else:
                run.mask |= bit
                holding.blocks += run.length
                fresh += 1
        tail = before = None
        if path and holding.keeps_tails:
            if 0 < known < len(chain):
                before = self._runs.starting_with(tail_key(chain, known))
                if before is not None and not before.mask & bit:
                    before = None
            tail = self._tail(holding, tail_key(chain, len(chain)))
            path.append(tail)
        use = holding.enter(path, now_s)
        self._runs.entries += fresh
        self._make_room(holding, now_s)
        held = known * (block_tokens or self._block_tokens)
        return RequestResidency(
            holding, chain, known, use, leans_on_s, prompt_tokens, held, (self.tails, self.branches), tail, before
        )

    def _tail(self, holding: ReplicaBlocks, key: int) -> BlockRun:
        """What stands behind a chain with this key, which the holding has from now on."""
        tail = self._runs.starting_with(key)
        if tail is None:
            tail = Tail(key)
            self._runs.add(tail)
        if not tail.mask & holding.bit:
            tail.mask |= holding.bit
            holding.blocks += tail.length
            self._runs.entries += 1
        return tail

    def _split(self, head: BlockRun, tail: BlockRun) -> None:
        """A run parted, at all who hold it."""
        for holding in self._holdings.of_mask(tail.mask):
            holding.split(head, tail)

    def _make_room(self, holding: ReplicaBlocks, now_s: float) -> None:
        """Evict what has no room at this replica, what is too old at the next in turn, and what all have too many."""
        if (without_room := holding.blocks - holding.capacity) > 0:
            while holding.blocks > holding.capacity:
                holding.evict()
            self.reuse.pushed_out(without_room, self._holdings.capacity)
        self._holdings.expire(now_s - self._ttl_s)
        while self._runs.entries > self._max_entries:
            if (other := self._holdings.next()) and other.runs:
                other.evict()
