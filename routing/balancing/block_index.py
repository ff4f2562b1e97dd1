"""Which blocks prompts have in common, and who holds them: an index that a chain of block hashes is walked along.

Theory of operation. Each hash of a chain stands for its block and everything before it. Blocks that were always met
together form a *run*, of a bounded length; a run is found by its first hash, and because hashes are chained one
comparison of its last hash says that all of it is met. Where a prompt leaves a run half way the run is split there,
once. A run carries one integer with a bit for each replica that holds it, so a thousand replicas are matched at the
cost of four, and the walk ends where nobody holds the next block. A run that nobody holds any more is forgotten.

What a replica's cache holds behind a prompt's last whole block: the rest of the prompt, and the generated tokens.

Theory of operation. Chains end with the last whole block of a prompt, and the router hashes no responses. Engines keep
both: the generated tokens take room as all others do, and a conversation's next turn finds them. A *tail* stands for
them, one for each chain and its holders: a run of its own, found by the chain's last hash and evicted before it. It is
entered empty with the prompt and gets its length when the response reports its tokens.

Whether the next turn really begins with what was generated depends on the client and the tokenizer, so ``TailReuse``
learns it: the share of tails that was found in the cache by the prompts that went on behind their chains. Predictions
count that share. A tail that was found is dropped, for the longer chain stands for the same tokens now.

Where prompts part, as behind a system prompt, they share a part of the next block too, and no tail stands there. How
many tokens were found behind such a place is remembered (``Branches``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

Chain = Sequence[int]
EVERYBODY: Final = -1  # a mask with every bit


class BlockRun:
    """Consecutive blocks that were always met together, and who holds them."""

    __slots__ = ("hashes", "last", "length", "mask")

    def __init__(self, hashes: Chain, last: int, length: int, mask: int) -> None:
        self.hashes = hashes
        self.last = last
        self.length = length
        self.mask = mask

    @classmethod
    def of(cls, hashes: Chain, mask: int) -> BlockRun:
        """A run of these blocks, at least one."""
        return BlockRun(hashes, hashes[-1], len(hashes), mask)


class BlockIndex:
    """All runs that somebody holds, by their first hash."""

    __slots__ = ("_longest", "_starts", "_walked", "_walked_chain", "entries")

    def __init__(self, longest: int) -> None:
        self._longest = longest  # blocks of a new run
        self._starts: dict[int, BlockRun] = {}
        self._walked_chain: Chain | None = None  # what was matched last, unless its runs have changed since
        self._walked: list[BlockRun] = []  # the runs that it begins with
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

    def path(self, chain: Chain, split: Callable[[BlockRun, BlockRun], None]) -> list[BlockRun]:
        """A whole prompt's runs, new ones where nobody has met its blocks; what ``levels`` walked is not walked again.

        ``split`` is told of a run that parts here: its new head, and the run itself, which is the tail from now on.
        """
        path: list[BlockRun] = []
        starts, at, end = self._starts, 0, len(chain)
        if chain is self._walked_chain:
            path, self._walked_chain = self._walked, None
            for known in path:
                at += known.length
        while at < end:
            run = starts.get(chain[at])
            if run is None:
                run = starts[chain[at]] = BlockRun.of(chain[at : at + self._longest], 0)
            elif at + run.length > end or chain[at + run.length - 1] != run.last:
                head = self._split(run, _shared(run.hashes, chain, at))
                split(head, run)
                run = head
            path.append(run)
            at += run.length
        return path

    def starting_with(self, key: int) -> BlockRun | None:
        """The run that begins with a hash; None where nobody holds one."""
        return self._starts.get(key)

    def add(self, run: BlockRun) -> None:
        """Enter a run that nobody holds yet."""
        self._starts[run.hashes[0]] = run

    def let_go(self, run: BlockRun, bit: int) -> None:
        """The replica with this bit no longer holds a run."""
        self.entries -= 1
        run.mask ^= bit
        if not run.mask:
            self._walked_chain = None
            del self._starts[run.hashes[0]]

    def _split(self, run: BlockRun, length: int) -> BlockRun:
        """Cut a run's first blocks off, and hand them back as a run with the same holders."""
        self._walked_chain = None
        head = BlockRun.of(run.hashes[:length], run.mask)
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


MEMORY: Final = 64  # samples that count
MAX_BRANCHES: Final = 4096  # places remembered at least, and twice as many at most
MAX_BLOCKS_WALKED: Final = 1.5  # that prompts share behind a block where they part, the template's tokens included
MAX_DENSITY_RATIO: Final = (
    0.5  # share of a prefix's estimate that it may have more tokens than other texts of as many bytes
)

_TAIL: Final = 0x9E37_79B9_7F4A_7C15  # tells a tail's key from its chain's last hash


class Tail(BlockRun):
    """The tokens behind a chain; ``length`` is in blocks, as of any run."""

    __slots__ = ("tokens",)

    def __init__(self, key: int) -> None:
        super().__init__((key,), key, 0, 0)
        self.tokens = 0  # estimated, in the scale of prompts' estimates


class TailReuse:
    """How much of tails the next turns found, 0 to 1."""

    __slots__ = ("_samples", "ratio")

    def __init__(self) -> None:
        self.ratio = 0.0
        self._samples = 0

    def learn(self, found_ratio: float) -> None:
        """Take in what one turn found of the tail before it; below 0 counts as 0, above 1 as 1."""
        self._samples = min(self._samples + 1, MEMORY)
        self.ratio += (min(max(found_ratio, 0.0), 1.0) - self.ratio) / self._samples


class Branches:
    """Places where prompts part: the tokens that they share behind their last common block."""

    __slots__ = ("_fading", "_tokens")

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}  # by the hash of that block
        self._fading: dict[int, int] = {}  # the generation before

    def learn(self, hash_: int, found_tokens: float, held_tokens: int, block_tokens: int) -> None:
        """So many tokens more were cached than the ``held_tokens`` that were estimated up to a block; or fewer.

        Far more come from a longer prefix that was taken to be evicted.
        """
        if found_tokens <= MAX_BLOCKS_WALKED * block_tokens + MAX_DENSITY_RATIO * held_tokens:
            self._tokens[hash_] = int(found_tokens)
            if len(self._tokens) >= MAX_BRANCHES:
                self._fading, self._tokens = self._tokens, {}

    def tokens(self, hash_: int) -> int:
        """What to expect behind a block; 0 where nothing is known."""
        found = self._tokens.get(hash_)
        return self._fading.get(hash_, 0) if found is None else found


def tail_key(chain: Chain, blocks: int) -> int:
    """Where the tail is found of a prompt whose chain ends after so many blocks (>= 1)."""
    return chain[blocks - 1] ^ _TAIL


def tail_tokens(run: BlockRun) -> int:
    """A tail's tokens; 0 of any other run, whose first hash happens to be a tail's key."""
    return run.tokens if isinstance(run, Tail) else 0
