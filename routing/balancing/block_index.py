"""Block index: the blocks of prompts, shared by their prefixes, and the estimated cached blocks of each replica.

Theory of operation. Each hash of a chain identifies its block and everything before it. Blocks that always occurred
together form a *run* of bounded length. A run is found by its first hash, and because hashes are chained, comparing its
last hash shows that all of it matches. Where a prompt diverges within a run, the run is split there, once. A run has
one integer with a bit for each replica that has it cached, so matching a thousand replicas costs as much as matching
four, and a walk ends where no replica has the next block. A run that no replica has any more is dropped.

Tokens. The router sees bytes, and texts differ in their tokens per byte: code, JSON, languages. A new run gets the
estimate of its model's mean ratio. The first response to a prompt that contains it reports the tokens of the whole
prompt; what is left after the runs that are known already is spread evenly over the new ones. So the tokens up to the
end of each turn of a conversation are known exactly, and a replica's capacity is compared with real tokens.

Tails. Chains end with the last whole block of a prompt, and the router does not hash responses. Engines cache the rest
of the prompt and the generated tokens too, and the next turn of a conversation finds them there. A *tail* stands for
these tokens of one chain: a run of its own, found by the chain's last hash and evicted before it. It is added empty
with the prompt and gets its length when the response reports its tokens. Whether the next turn really begins with the
generated text depends on the client and the tokenizer, so ``TailReuse`` learns the share of tails that prompts which
continued their chains found cached, and predictions count that share. A tail that was found is dropped, because the
longer chain now stands for the same tokens.

Branches. Where prompts diverge, for example after a system prompt, they also share a part of the next block, and no
tail is there. ``Branches`` stores how many tokens were found cached after such a block.

Cached blocks of a replica: an LRU of runs, grouped by the prompt that last used them. A *use* is one prompt that was
sent to the replica: its runs from the first block to the tail. A run belongs to the use that contained it last, so an
older use retains only its last runs. Uses are ordered by time, and of the oldest one the last run is evicted first. A
prompt also uses all runs before a run, so these belong to the same use or to a later one: no run outlives the run
before it. If a run is split, its new head is inserted before it in its use.

A replica's bit in the masks of runs is its number here. A number is reused when its replica was removed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from math import inf
from typing import Final

from routing.types import TargetId

Chain = Sequence[int]
Level = tuple[int, int, int]  # blocks of a prefix, mask of the replicas with at least that many, tokens of the prefix
ALL_BITS: Final = -1  # a mask with every bit
MAX_PROMPTS: Final = 4000  # after so many, all counts are halved
MIN_POPULAR: Final = 4  # recent prompts up to which blocks are not popular, such as the turns of a conversation


class BlockRun:
    """Consecutive blocks that always occurred together, and the replicas that have them cached."""

    __slots__ = ("before", "counted_at", "hashes", "is_learned", "last", "length", "mask", "prompts", "tokens")

    def __init__(self, hashes: Chain, last: int, length: int, mask: int, tokens: int, *, is_learned: bool) -> None:
        self.before: BlockRun | None = None  # the run that every prompt has before this one; None: it is the first
        self.hashes = hashes
        self.last = last
        self.length = length  # blocks
        self.mask = mask
        self.tokens = tokens  # of the engine's tokenizer, see ``is_learned``
        self.is_learned = is_learned  # whether an engine has reported the tokens; else they are estimated
        self.prompts = 0  # recent prompts that contain it, as of ``counted_at``
        self.counted_at = 0  # number of times that all counts were halved

    @classmethod
    def of_hashes(cls, hashes: Chain, mask: int, tokens: int, *, is_learned: bool) -> BlockRun:
        """A run of these blocks, at least one."""
        return BlockRun(hashes, hashes[-1], len(hashes), mask, tokens, is_learned=is_learned)

    def follows(self, run: BlockRun) -> bool:
        """Whether every prompt with this run has the other one before it."""
        before = self.before
        while before is not None and before is not run:
            before = before.before
        return before is run


class BlockIndex:
    """All runs that some replica has, by their first hash."""

    def __init__(self, max_run_blocks: int) -> None:
        self._max_run_blocks = max_run_blocks
        self._by_first: dict[int, BlockRun] = {}
        self._walked_chain: Chain | None = None  # the chain that was matched last, unless its runs changed since
        self._walked: list[BlockRun] = []  # its matching runs
        self._prompts = 0  # recent prompts
        self._halvings = 0
        self.entries = 0  # one for each run and replica that has it; callers that set a bit count it

    def __len__(self) -> int:
        return len(self._by_first)

    def levels(self, chain: Chain) -> list[Level]:
        """The cached prefixes of a prompt, the shortest first. 0.2 us a run."""
        by_first, levels = self._by_first, []
        mask, at, end, tokens = ALL_BITS, 0, len(chain), 0
        self._walked_chain, self._walked = chain, (walked := [])
        while at < end:
            run = by_first.get(chain[at])
            if run is None or not (holders := mask & run.mask):
                break
            if holders != mask:
                if at:
                    levels.append((at, mask, tokens))
                mask = holders
            after = at + run.length
            if after > end or chain[after - 1] != run.last:
                shared = _shared_blocks(run.hashes, chain, at)
                at += shared
                tokens += run.tokens * shared // run.length
                break
            walked.append(run)
            at = after
            tokens += run.tokens
        if at:
            levels.append((at, mask, tokens))
        return levels

    def path(
        self,
        chain: Chain,
        on_split: Callable[[BlockRun, BlockRun], None],
        block_tokens: float,
        *,
        is_learned: bool = False,
    ) -> list[BlockRun]:
        """The runs of a whole prompt, new ones for unknown blocks. Reuses the walk of ``levels``.

        ``on_split`` is called for a run that is split: with its new head, and with the run, which keeps the rest.
        Each block of a new run has ``block_tokens``.
        """
        path: list[BlockRun] = []
        by_first, at, end = self._by_first, 0, len(chain)
        if chain is self._walked_chain:
            path, self._walked_chain = self._walked, None
            for walked in path:
                at += walked.length
        while at < end:
            run = by_first.get(chain[at])
            if run is None:
                hashes = chain[at : at + self._max_run_blocks]
                run = BlockRun.of_hashes(hashes, 0, int(len(hashes) * block_tokens), is_learned=is_learned)
                by_first[chain[at]] = run
                run.before = path[-1] if path else None
            elif at + run.length > end or chain[at + run.length - 1] != run.last:
                head = self._split(run, _shared_blocks(run.hashes, chain, at))
                on_split(head, run)
                run = head
            path.append(run)
            at += run.length
        return path

    def common_key_at(self, max_share: float) -> int:
        """Number of blocks before the one whose hash is the key of the common replica, for the last matched prompt.

        That is the first block that at most ``max_share`` of recent prompts contain, or at most ``MIN_POPULAR``. So all
        prompts of a document or a conversation have the same common replica, and those with a popular system prompt
        have many. A block that is not recorded counts as rare, so routers agree whether or not they have recorded it.
        """
        blocks, limit, halvings = 0, max(MIN_POPULAR, max_share * self._prompts), self._halvings
        for run in self._walked:
            if run.prompts >> (halvings - run.counted_at) <= limit:
                break
            blocks += run.length
        return blocks

    def count_prompt(self, path: Sequence[BlockRun], max_share: float) -> None:
        """Count a prompt with these runs: for the popular ones and the first other one, whose count limits the rest."""
        self._prompts += 1
        if self._prompts >= MAX_PROMPTS:
            self._prompts //= 2
            self._halvings += 1
        limit, halvings = max(MIN_POPULAR, max_share * self._prompts), self._halvings
        for run in path:
            run.prompts = (run.prompts >> (halvings - run.counted_at)) + 1
            run.counted_at = halvings
            if run.prompts <= limit:
                break

    def run_with_block(self, chain: Chain, at: int) -> BlockRun | None:
        """The run that contains the block after the first ``at`` of a chain; None if no replica has that block."""
        start = 0
        while start <= at < len(chain):
            run = self._by_first.get(chain[start])
            if run is None:
                return None
            if at < start + run.length:
                return run if run.hashes[at - start] == chain[at] else None
            start += run.length
        return None

    def whole_run(self, chain: Chain, at: int) -> BlockRun | None:
        """The run that begins after the first ``at`` blocks of a chain, if the chain contains all of it."""
        run = self._by_first.get(chain[at]) if at < len(chain) else None
        if run is None or at + run.length > len(chain) or chain[at + run.length - 1] != run.last:
            return None
        return run

    def run_starting_with(self, key: int) -> BlockRun | None:
        """The run with this first hash; None if no replica has one."""
        return self._by_first.get(key)

    def add(self, run: BlockRun) -> None:
        """Add a run that no replica has yet."""
        self._by_first[run.hashes[0]] = run

    def remove(self, run: BlockRun, bit: int) -> None:
        """Record that the replica with this bit no longer has a run."""
        self.entries -= 1
        run.mask ^= bit
        if not run.mask:
            self._walked_chain = None
            # A prompt whose first blocks were evicted may have kept later ones, and a new run begins with the same.
            if self._by_first.get(run.hashes[0]) is run:
                del self._by_first[run.hashes[0]]

    def _split(self, run: BlockRun, length: int) -> BlockRun:
        """Split a run's first blocks off into a new run with the same replicas, which is returned."""
        self._walked_chain = None
        tokens = run.tokens * length // run.length
        head = BlockRun.of_hashes(run.hashes[:length], run.mask, tokens, is_learned=run.is_learned)
        head.prompts, head.counted_at = run.prompts, run.counted_at
        head.before, run.before = run.before, head
        run.hashes = run.hashes[length:]
        run.length -= length
        run.tokens -= tokens
        self._by_first[head.hashes[0]] = head
        self._by_first[run.hashes[0]] = run
        self.entries += run.mask.bit_count()
        return head


def _shared_blocks(hashes: Chain, chain: Chain, at: int) -> int:
    """How many of ``hashes`` match ``chain`` from ``at`` on, at least the first; by bisection, as they are chained."""
    low, high = 1, min(len(hashes), len(chain) - at)
    while low < high:
        middle = (low + high + 1) // 2
        if hashes[middle - 1] == chain[at + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


MAX_SAMPLES: Final = 64  # of tail reuse
MAX_BRANCHES: Final = 4096  # in each of two generations
# Share of a new number of tokens in the estimate. Prompts differ in their tokens per byte, and to predict too many is
# worse than too few.
FEWER_SHARE: Final = 0.4
MORE_SHARE: Final = 0.1
MAX_BRANCH_BLOCKS: Final = 1.5  # prompts may share so much after the block where they diverge, with the template
MAX_DENSITY_RATIO: Final = 0.5  # a prefix may have more tokens than estimated by this share of the estimate

_TAIL_KEY_MASK: Final = 0x9E37_79B9_7F4A_7C15  # makes a tail's key different from its chain's last hash


class Tail(BlockRun):
    """The cached tokens after a chain, which are no blocks of it: its ``length`` is 0."""

    __slots__ = ()

    def __init__(self, key: int) -> None:
        super().__init__((key,), key, 0, 0, 0, is_learned=True)


class TailReuse:
    """Share of tails that next turns found cached, 0 to 1."""

    def __init__(self) -> None:
        self.ratio = 0.0
        self._samples = 0

    def learn(self, cached_ratio: float) -> None:
        """Add the share of a tail that was cached for the next turn; clipped to 0 to 1."""
        self._samples = min(self._samples + 1, MAX_SAMPLES)
        self.ratio += (min(max(cached_ratio, 0.0), 1.0) - self.ratio) / self._samples


class Branches:
    """Blocks after which prompts diverge, with the tokens that they share after the block.

    The estimate falls faster than it rises.
    """

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}  # by the hash of the block
        self._older_tokens: dict[int, int] = {}  # the previous generation

    def learn(self, hash_: int, extra_tokens: float, expected_tokens: int, block_tokens: int) -> None:
        """Record that ``extra_tokens`` more (or fewer) than the ``expected_tokens`` up to a block were cached.

        Large values are ignored: they come from a longer prefix that was assumed to be evicted.
        """
        if extra_tokens <= MAX_BRANCH_BLOCKS * block_tokens + MAX_DENSITY_RATIO * expected_tokens:
            known = self._tokens.get(hash_) or self._older_tokens.get(hash_) or extra_tokens
            share = FEWER_SHARE if extra_tokens < known else MORE_SHARE
            self._tokens[hash_] = int(known + share * (extra_tokens - known))
            if len(self._tokens) >= MAX_BRANCHES:
                self._older_tokens, self._tokens = self._tokens, {}

    def tokens(self, hash_: int) -> int:
        """Expected cached tokens after a block; 0 if unknown."""
        tokens = self._tokens.get(hash_)
        return self._older_tokens.get(hash_, 0) if tokens is None else tokens


def tail_key(chain: Chain, blocks: int) -> int:
    """The first hash of the tail of a prompt whose chain has ``blocks`` (>= 1)."""
    return chain[blocks - 1] ^ _TAIL_KEY_MASK


def tail_tokens(run: BlockRun) -> int:
    """A tail's tokens; 0 for a run whose first hash equals a tail's key by chance."""
    return run.tokens if isinstance(run, Tail) else 0


FULL_RATIO: Final = 0.9  # of the capacity: what a full cache has at least, because whole runs are evicted
COMPACT_AT: Final = 8  # runs at the start of a use's list that later uses own before the list is compacted


class Use:
    """One prompt at one replica; the runs that no later prompt used are ``path[first:]``.

    ``path[first - 1]``, if ``first`` is not 0, is the run before them.
    """

    __slots__ = ("evicted", "first", "is_prefilled", "is_running", "path", "used_s")

    def __init__(self, path: list[BlockRun], used_s: float) -> None:
        self.is_running = False  # the engine cannot evict the blocks of a running request
        self.is_prefilled = False  # a response shows it
        self.path = path  # from the prompt's first block on, unless compacted; it may end with a Tail
        self.first = 0
        self.evicted = 0  # blocks that were removed from the end of ``path``
        self.used_s = used_s


class ServedPrompt:
    """A prompt with a complete response: what the engine reported of it."""

    def __init__(
        self,
        chain: Chain,
        sent_s: float,
        tokens_per_block: float,
        prompt_tokens: int,
        cached_tokens: int,
        generated_tokens: int | None,
    ) -> None:
        self.chain = chain
        self.sent_s = sent_s
        self.tokens_per_block = tokens_per_block  # of the engine, for each block of the chain
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = cached_tokens
        self.generated_tokens = generated_tokens  # None: not reported


OnResponse = Callable[[ServedPrompt], None]
MAX_EVICTED: Final = 131_072  # evicted runs of all replicas together whose first hashes are kept
CAPACITY_SAMPLES: Final = 3.0  # of whether evicted blocks were still cached, before the capacity changes
_CAPACITY_FADE: Final = 0.9  # weight of the earlier samples, for each new one
CAPACITY_STEP: Final = 4.0  # factor by which the capacity grows
MIN_EVICTED_RATIO: Final = 0.25  # of the reported capacity: a block is a sample if so much was evicted after it
MAX_CAPACITY_RATIO: Final = 64.0  # of the estimated to the reported capacity
MAX_OLDER_USES: Final = 256  # uses that are searched for blocks after an evicted one


class ReplicaBlocks:
    """The estimated cached blocks of one replica."""

    def __init__(self, target: TargetId, bit: int, index: BlockIndex) -> None:
        self.target = target
        self.bit = bit
        self._index = index
        self.capacity = 0  # tokens, of all cache tiers together
        self.capacity_tokens = 0  # of the GPU cache
        self.capacity_ratio = 1.0  # of both capacities, learnt from blocks that were found after an eviction
        # First hashes of runs evicted above the capacity, with ``evicted_tokens`` then; and those evicted before them.
        self.evicted: dict[int, int] = {}
        self.older_evicted: dict[int, int] = {}
        self.evicted_tokens = 0  # above the capacity, ever
        self._found = self._sought = 0.0  # recent prompts that began with evicted blocks, and how many found them
        self.reported_tokens: int | None = None  # capacity as the engine reports it; None: not yet
        self.tokens = 0  # of all runs
        self.runs: dict[BlockRun, Use] = {}  # with their last use
        self.uses: OrderedDict[Use, None] = OrderedDict()  # the oldest first, each with at least one run
        self.uses_tails = False  # set by the first response that reports its generated tokens
        self.misses = 0  # wrong predictions in a row
        self.zero_hits = 0  # predicted hits in a row of which no token was cached
        self.zero_since_s = 0.0  # when the first of them was sent
        self.caches_nothing = False  # whether the engine seems to run without prefix caching
        self.missed_used_s = 0.0  # latest earlier use of the blocks that were missed
        self.losses = 0  # wrong predictions for prefixes last used before ``lost_s``, and no right one since
        self.lost_s = 0.0  # when the first of them was sent
        self.on_response: OnResponse | None = None  # set while the engine's KV events are followed
        self.is_full = False  # whether events have shown that the engine evicts blocks
        self.expires = True  # whether blocks have an age limit; not if all events of the engine are known

    def stale_before_s(self, now_s: float) -> float:
        """Blocks last used before this time are closer to eviction than to their last use; -inf if not full."""
        if not self.uses or not (self.is_full or self.tokens >= FULL_RATIO * self.capacity):
            return -inf
        return (next(iter(self.uses)).used_s + now_s) / 2

    @property
    def oldest_s(self) -> float:
        """The time of the oldest use; there must be one."""
        return next(iter(self.uses)).used_s

    def add_use(self, path: list[BlockRun], now_s: float) -> Use:
        """Record that a prompt with these runs, each with this replica's bit, is sent now. ``path`` is not copied."""
        use, runs = Use(path, now_s), self.runs
        for run in path:
            if (before := runs.get(run)) is not None:
                if before.path[before.first] is not run:
                    self._evict_stranded(before, run)
                before.first += 1  # a later use owns its first run
                if before.first == len(before.path):
                    del self.uses[before]
                elif before.first >= COMPACT_AT and 2 * before.first >= len(before.path):
                    del before.path[: before.first - 1]  # the last of them stays, for snapshots
                    before.first = 1
            runs[run] = use
        if path:
            self.uses[use] = None
        return use

    def _evict_stranded(self, use: Use, run: BlockRun) -> None:
        """Evict what a use owns before a run: its blocks are in other runs of the prompt that has this run now.

        That happens if the prefix of a running request was evicted, with a later use that owned it, and came back.
        """
        while (stranded := use.path[use.first]) is not run:
            use.first += 1
            del self.runs[stranded]
            self.tokens -= stranded.tokens
            self._index.remove(stranded, self.bit)

    def on_split(self, head: BlockRun, tail: BlockRun) -> None:
        """A cached run was split: its new head belongs to the same use, before it."""
        use = self.runs[head] = self.runs[tail]
        use.path.insert(use.path.index(tail, use.first), head)

    def evict(self) -> None:
        """Evict the last run of the oldest use; there must be one."""
        self._evict_last(next(iter(self.uses)))

    def evict_before(self, used_s: float) -> None:
        """Evict what was last used before this time, except what running requests use."""
        while self.uses and self.oldest_s < used_s:
            use = next(iter(self.uses))
            if use.is_running:
                self._touch(use, used_s)
            else:
                self._evict_last(use)

    def _touch(self, use: Use, used_s: float) -> None:
        """Make a use the latest one, not earlier than the one that is now: ``uses`` is in order of time."""
        use.used_s = max(used_s, next(reversed(self.uses)).used_s)
        self.uses.move_to_end(use)

    def _oldest_evictable(self) -> Use:
        """The oldest use, without those of running requests, unless there are no others."""
        for _ in range(len(self.uses)):
            use = next(iter(self.uses))
            if not use.is_running:
                return use
            self._touch(use, use.used_s)
        return next(iter(self.uses))

    def evict_excess(self, max_evicted: int) -> int:
        """Evict what exceeds the capacity; the number of tokens.

        Remembers at most ``max_evicted`` such runs, and at least half as many.
        """
        capacity, evicted = self.capacity, self.evicted
        excess = self.tokens - capacity
        while self.tokens > capacity:
            use = self._oldest_evictable()
            path = use.path
            while self.tokens > capacity and use.first < len(path):
                run = path[-1]
                self._evict_last(use)
                self.evicted_tokens += run.tokens
                if run.length:
                    evicted[run.hashes[0]] = self.evicted_tokens
        if len(evicted) >= max_evicted // 2:
            self.older_evicted, self.evicted = evicted, {}
        return max(0, excess)

    def take_evicted(self, chain: Chain, hit_blocks: int) -> int | None:
        """Tokens evicted above the capacity since the first block that is not cached was; None if it was not.

        Forgets that it was.
        """
        if hit_blocks >= len(chain) or not (self.evicted or self.older_evicted):
            return None
        first_hash = chain[hit_blocks]
        evicted_at = self.evicted.pop(first_hash, None)
        if evicted_at is None:
            evicted_at = self.older_evicted.pop(first_hash, None)
        return None if evicted_at is None else self.evicted_tokens - evicted_at

    def learn_capacity(self, is_found: bool, evicted_tokens: int) -> None:
        """Learn from a prompt with evicted blocks whether the engine still had them, as with a lower cache tier.

        Ignored if little was evicted since: an engine may have such blocks because it evicts in another order.
        """
        if evicted_tokens < MIN_EVICTED_RATIO * self.capacity_tokens:
            return
        self._sought = _CAPACITY_FADE * self._sought + 1.0
        self._found = _CAPACITY_FADE * self._found + (1.0 if is_found else 0.0)
        if 2.0 * self._found > CAPACITY_SAMPLES and 2.0 * self._found > self._sought:
            self.set_capacity_ratio(CAPACITY_STEP * self.capacity_ratio)

    def set_capacity_ratio(self, ratio: float) -> None:
        """Set the ratio of the capacity of all cache tiers to that of the GPU cache, at least 1."""
        self._found = self._sought = 0.0
        self.capacity_ratio = min(max(1.0, ratio), MAX_CAPACITY_RATIO)
        self.capacity = int(self.capacity_ratio * self.capacity_tokens)

    def evict_until(self, used_s: float) -> None:
        """Evict everything that was last used at this time or before."""
        while self.uses and self.oldest_s <= used_s:
            self.evict()

    def evict_run(self, run: BlockRun) -> None:
        """Evict a cached run and everything after it.

        That is what follows it in its own use, and older uses that contain it. The run stays if more than
        ``MAX_OLDER_USES`` are older than its own, because an LRU cache evicts those first.
        """
        owner, older = self.runs[run], []
        for use in islice(self.uses, MAX_OLDER_USES):
            if use is owner:
                break
            if use.path[use.first].follows(run):
                older.append(use)
        else:
            return
        for use in older:
            while use in self.uses:
                self._evict_last(use)
        while run in self.runs:
            self._evict_last(owner)

    def roll_back(self, use: Use, new_blocks: int) -> None:
        """Remove a prompt's tail and its last ``new_blocks``, except those that later prompts used."""
        new_blocks -= use.evicted
        while use in self.uses and (new_blocks > 0 or not use.path[-1].length):
            new_blocks -= use.path[-1].length
            self._evict_last(use)

    def drop(self, tail: BlockRun) -> None:
        """Remove a tail, which is the last run of its use, if it is cached."""
        use = self.runs.get(tail)
        if use is not None:
            self._evict_last(use)

    def _evict_last(self, use: Use) -> None:
        run = use.path.pop()
        del self.runs[run]
        if use.first == len(use.path):
            del self.uses[use]
        use.evicted += run.length
        self.tokens -= run.tokens
        self._index.remove(run, self.bit)


class ReplicaBlockTables:
    """The cached blocks of all replicas, by replica and by bit."""

    def __init__(self, index: BlockIndex) -> None:
        self.index = index
        self.by_target: dict[TargetId, ReplicaBlocks] = {}  # read-only for others
        self.engine_block_tokens: dict[int, int] = {}  # by bit; 1: not known
        self._by_number: list[ReplicaBlocks | None] = []
        self._free_numbers: list[int] = []  # numbers of removed replicas
        self._turn = 0
        self.capacity = 0  # tokens, of the GPU caches of all

    def replicas_of_mask(self, mask: int) -> list[ReplicaBlocks]:
        """The replicas with these bits. 0.2 us each; 100 us for most of a thousand."""
        if 4 * mask.bit_count() > len(self._by_number):
            return [replica for replica in self._by_number if replica and replica.bit & mask]
        replicas = []
        while mask:
            bit = mask & -mask
            if replica := self._by_number[bit.bit_length() - 1]:
                replicas.append(replica)
            mask ^= bit
        return replicas

    def next_in_turn(self) -> ReplicaBlocks | None:
        """The replica whose blocks are to be evicted next, each in turn; None for a removed one. There must be one."""
        self._turn = turn = (self._turn + 1) % len(self._by_number)
        return self._by_number[turn]

    def expire(self, used_s: float) -> None:
        """At the next replica in turn, evict what was last used before this time."""
        self._turn = turn = (self._turn + 1) % len(self._by_number)  # as ``next_in_turn``, for each request
        replica = self._by_number[turn]
        if replica is not None and replica.expires:
            while replica.uses and replica.oldest_s < used_s:
                replica.evict()

    def add(self, target: TargetId, tokens: int) -> ReplicaBlocks:
        """Add a replica, initially without blocks, or change the capacity of one, in tokens."""
        replica = self.by_target.get(target)
        if replica is None:
            if not self._free_numbers:
                self._free_numbers.append(len(self._by_number))
                self._by_number.append(None)
            number = self._free_numbers.pop()
            replica = ReplicaBlocks(target, 1 << number, self.index)
            self.by_target[target] = self._by_number[number] = replica
        self.capacity += tokens - replica.capacity_tokens
        replica.capacity_tokens = tokens
        replica.capacity = int(replica.capacity_ratio * tokens)
        return replica

    def set_tokens(self, run: BlockRun, tokens: int) -> None:
        """Set the tokens of a run at all replicas that have it: an engine has reported them."""
        for replica in self.replicas_of_mask(run.mask):
            replica.tokens += tokens - run.tokens
        run.tokens, run.is_learned = tokens, True

    def remove_all_but(self, targets: Iterable[TargetId]) -> None:
        """Remove all other replicas and their blocks. O(their runs)."""
        for target in self.by_target.keys() - set(targets):
            replica = self.by_target.pop(target)
            replica.evict_until(inf)
            self.capacity -= replica.capacity_tokens
            self.engine_block_tokens.pop(replica.bit, None)
            number = replica.bit.bit_length() - 1
            self._by_number[number] = None
            self._free_numbers.append(number)
