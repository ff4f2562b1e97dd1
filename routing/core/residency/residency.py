"""What each replica probably still holds in its prefix cache, as this router sent it there.

Theory of operation. Prompts arrive as chains of block hashes and are kept as runs of blocks (``runs.py``). Each
replica has an LRU of runs (``holdings.py``), bounded by the blocks that its engine has room for and by an age. A
prompt's runs are entered tail first, so that its tail is evicted before its head, as vLLM does it. All replicas
together are bounded as well: then they give up their oldest runs in turn. A prompt is entered when it is dispatched,
before it is there: of a burst that shares a cold prefix only the first request is charged for it. If the request comes
to nothing its new entries are taken back; if it is answered, the answer is held against what was expected
(``stay.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from routing.core.residency.holdings import Holding, Holdings
from routing.core.residency.reuse import Reuse
from routing.core.residency.runs import Chain, Run, Runs
from routing.core.residency.stay import Stay
from routing.core.residency.tails import Branches, Tail, TailReuse, tail_key, tail_tokens
from routing.core.types import BLOCK_TOKENS, TargetId

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
        self._runs = Runs(max(1, run_tokens // block_tokens))
        self._holdings = Holdings(self._runs)
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

    def settle(self, target: TargetId, capacity_tokens: int | None = None) -> Holding:
        """A replica's holding, which begins empty; from now on of this capacity, None where the engine has not told."""
        tokens = DEFAULT_TOKENS if capacity_tokens is None else capacity_tokens
        return self._holdings.settle(target, tokens, self._block_tokens)

    def resize(self, target: TargetId, block_tokens: int) -> None:
        """Let a replica have room for as many blocks as follow from so many tokens in each."""
        holding = self._holdings.by_target.get(target)
        if holding is not None and holding.block_tokens != block_tokens:
            self._holdings.resize(holding, block_tokens)

    def holding(self, target: TargetId) -> Holding | None:
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
    ) -> Stay:
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
        return Stay(
            holding, chain, known, use, leans_on_s, prompt_tokens, held, (self.tails, self.branches), tail, before
        )

    def _tail(self, holding: Holding, key: int) -> Run:
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

    def _split(self, head: Run, tail: Run) -> None:
        """A run parted, at all who hold it."""
        for holding in self._holdings.of_mask(tail.mask):
            holding.split(head, tail)

    def _make_room(self, holding: Holding, now_s: float) -> None:
        """Evict what has no room at this replica, what is too old at the next in turn, and what all have too many."""
        if (without_room := holding.blocks - holding.capacity) > 0:
            while holding.blocks > holding.capacity:
                holding.evict()
            self.reuse.pushed_out(without_room, self._holdings.capacity)
        self._holdings.expire(now_s - self._ttl_s)
        while self._runs.entries > self._max_entries:
            if (other := self._holdings.next()) and other.runs:
                other.evict()
