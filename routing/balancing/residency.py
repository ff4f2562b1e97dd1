"""Estimated residency: which blocks each replica probably has cached, as a result of the requests sent there.

``SentPrompt`` is what was sent, and what was known of it then; ``SentPrompt.confirm`` learns from what is reported, in
one order; ``Residency`` and ``block_index.py`` are what is known.

Theory of operation. Prompts are chains of block hashes, stored as runs of blocks (``block_index.py``). Each replica has
an LRU of runs (``ReplicaBlocks``), limited by its engine's capacity and by age. All replicas together are limited
as well; above that limit they evict their oldest runs in turn. The tail of a prompt is evicted before its head, as in
vLLM. A prompt is added when it is dispatched, before it is prefilled, so that of a burst with the same uncached prefix
only the first request is charged for it. If the request fails before a response, its new blocks are rolled back.

Feedback. A response reports its cached tokens. In an LRU cache that lost a prefix, everything used longer ago is gone
too, so after ``MAX_MISSES`` responses in a row with far fewer cached tokens than predicted, everything that the replica
last used before those prefixes is evicted here. If as many prefixes last used before the first such response were
missing, and none was found, the engine has lost everything (its cache was cleared), so everything from before is
evicted. Predictions that rely on a prompt without a response, dispatched in the last ``MAX_PREFILL_S``, are not
checked, because its prefill may not be over. Responses also give the lengths of tails and teach their reuse. If no
response of ``ZERO_HITS`` in a row, over ``ZERO_HITS_S``, reports any cached token where some were predicted, the engine
probably runs without prefix caching: nothing is expected there until a response does.

Other routers. Several routers before the same replicas, and several workers of one router, each record only what
they sent themselves, unless they share their state (``routing/sharing``). If responses report more
cached tokens than were recorded, there are other routers. From then on each prompt has a *common replica*: the
preferred replica that all routers compute alike, by the session that a header names or else by
``BlockIndex.common_key_at``, so that they find each other's cached prefixes without communication. The router learns
which share of the unrecorded tokens was cached at common replicas, and expects that share there of the next prompt. The
share depends on the number of these tokens. It is learnt separately for prompts of which at most a popular beginning is
recorded, and for others.

In a cost, each expected token counts as ``HIT_WEIGHT`` tokens; together they count at most as all unrecorded tokens. A
prompt placed on another replica also costs later turns their cache hits, because other routers send them to the common
replica. Each such prompt also lowers the learnt share, so that fewer prompts are sent to common replicas. With a weight
of 1, both the share and the hits would remain low.

A router that is alone finds no unrecorded tokens cached, and places requests as if there were no common replicas.

KV events. Where an engine publishes what it stores and evicts (``routing/kv_events``), that corrects its blocks: they
have no age limit, and evictions by estimate only happen above the capacity that the events show.

Cache tiers. Engines that offload KV blocks to the host's memory or to disks have more cached than their GPU cache has
room for, which is all that they report. What was evicted here for lack of capacity is remembered for a while, and a
response shows whether blocks that were evicted long ago were still cached. If they were, the capacity grows
(``ReplicaBlocks.learn_capacity``); if predictions turn out wrong, it shrinks to what is left. A block in a lower tier
counts as cached. With other routers the capacity does not grow, because then the blocks may be cached again by their
requests.

``Reuse`` measures whether full caches are crowded: how much of their old blocks is requested again before eviction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Final

from routing.balancing.block_index import (
    MAX_EVICTED,
    BlockIndex,
    BlockRun,
    Branches,
    Chain,
    Level,
    ReplicaBlocks,
    ReplicaBlockTables,
    ServedPrompt,
    Tail,
    TailReuse,
    tail_key,
    tail_tokens,
)
from routing.types import BLOCK_TOKENS, TargetId

MIN_TOKENS: Final = 256  # a smaller number is neither expected nor learnt
MIN_PART: Final = 0.1  # of the recorded tokens, whose estimate may be off: a smaller part teaches nothing
MARGIN_TOKENS: Final = 96  # 1.5 blocks, which prompts may share after their recorded blocks without another router
MIN_RATIO: Final = 0.01  # of unrecorded tokens cached, which shows that there are other routers
HIT_WEIGHT: Final = 20.0  # of an expected token in a cost
HALF_LIFE: Final = 256  # samples
PRIOR_SAMPLES: Final = 16.0  # weight of the mean over all numbers of tokens in the share of one
MAX_BITS: Final = 24  # of a number of tokens

_FADE: Final = 0.5 ** (1 / HALF_LIFE)


class ShareByTokens:
    """The mean share of some tokens that were cached, by their number in powers of two."""

    def __init__(self) -> None:
        self._total, self._samples = 0.0, PRIOR_SAMPLES  # sum of shares, faded, and number of samples
        self._by_bits, self._samples_by_bits = [0.0] * MAX_BITS, [0.0] * MAX_BITS

    @property
    def mean(self) -> float:
        """The mean over all numbers of tokens, 0 to 1; low while there are few samples."""
        return self._total / self._samples

    def learn(self, tokens: int, share: float) -> None:
        """Add a sample."""
        bits = min(tokens.bit_length(), MAX_BITS - 1)
        self._by_bits[bits] = _FADE * self._by_bits[bits] + share
        self._samples_by_bits[bits] = _FADE * self._samples_by_bits[bits] + 1.0
        self._total = _FADE * self._total + share
        self._samples = _FADE * self._samples + 1.0

    def ratio(self, tokens: int) -> float:
        """The expected share of so many tokens, 0 to 1."""
        if tokens < MIN_TOKENS:
            return 0.0
        bits = min(tokens.bit_length(), MAX_BITS - 1)
        return (self._by_bits[bits] + PRIOR_SAMPLES * self.mean) / (self._samples_by_bits[bits] + PRIOR_SAMPLES)


class UnrecordedHits:
    """Shares of the unrecorded tokens that were cached, at any replica and at common replicas."""

    def __init__(self) -> None:
        self.has_other_routers = False  # whether other routers send prompts to these replicas
        # At the common replica of a prompt of which at most a popular beginning is recorded, and of any other prompt.
        self.of_new = ShareByTokens()
        self.of_recorded = ShareByTokens()
        self._anywhere = ShareByTokens()

    def learn(self, tokens: int, cached_tokens: float, common_hits: ShareByTokens | None) -> None:
        """Record that of ``tokens`` (> 0) that were not recorded ``cached_tokens`` were cached, clipped to 0 to all.

        ``common_hits``: the share that learns too, if the replica is the prompt's common replica.
        """
        share = min(max(cached_tokens / tokens, 0.0), 1.0)
        self._anywhere.learn(tokens, share)
        self.has_other_routers = self._anywhere.mean >= MIN_RATIO
        if common_hits is not None:
            common_hits.learn(tokens, share)


MAX_PREFIX_SHARE: Final = 0.12  # of a replica's part of all prompts; a more frequent prefix has several common replicas
MAX_PREFILL_S: Final = 5.0  # a prompt that was dispatched longer ago has been prefilled, or never will be
MAX_MISSES: Final = 3  # in a row, until a replica's old blocks are evicted
ZERO_HITS: Final = 16  # predicted hits in a row without a cached token, until nothing is expected
ZERO_HITS_S: Final = 30.0  # longer than prompts wait for their prefill
MISS_RATIO: Final = 0.5  # delivered / predicted tokens below which a prediction was wrong
MIN_CHECKED_TOKENS: Final = 256  # smaller predictions are not checked
MIN_TAIL_TOKENS: Final = 32  # shorter tails are within the estimate's error and teach nothing
FOUND_RATIO: Final = 0.5  # of an evicted run's tokens that must be cached for the engine to have it still
PREFIX_RATIO: Final = 0.9  # of the prefix before a tail; if less of it is cached, the tail's state is unknown
MIN_REPLACED_RATIO: Final = 0.5  # of a tail that must be cached for the longer chain to replace it
MAX_SCALE: Final = 8.0  # reported / estimated tokens of the new part of a prompt, at most, and its inverse at least


class SentPrompt:
    """A prompt that was sent to a replica, and what was known of it then; its response teaches the rest."""

    def __init__(
        self,
        residency: Residency,
        replica: ReplicaBlocks,
        chain: Chain,
        now_s: float,
        prompt_tokens: int,
        block_tokens: int,
        common_hits: ShareByTokens | None,
    ) -> None:
        self._residency = residency
        self._replica = replica
        self._chain = chain
        self._sent_s = now_s
        self._prompt_tokens = prompt_tokens  # estimated by the mean ratio of the model
        self._block_tokens = block_tokens  # of each block, by the same ratio
        self._common_hits = common_hits  # None: the replica is not the prompt's common replica
        self._hit_blocks = self._hit_tokens = 0  # cached beginning; all further blocks are new at the replica
        self._known_blocks = self._known_tokens = 0  # first blocks whose tokens an engine has reported
        self._prefix_used_s = now_s  # when the replica last used the cached part of the prompt
        self._is_checked = False  # that part has been prefilled
        self._tail: BlockRun | None = None  # its own; None where tails are not used yet
        self._previous_tail: BlockRun | None = None  # of the prompt that this one continues, if any
        self._previous_tail_tokens = 0
        self._evicted_tokens: int | None = None  # since the first new block was, above the capacity; None: it was not
        path = residency.index.path(chain, residency.on_split, block_tokens)
        residency.index.count_prompt(path, residency.max_share)
        new_runs, is_known = self._walk(path, now_s), True
        for run in path:
            is_known = is_known and run.is_learned
            if is_known:
                self._known_blocks += run.length
                self._known_tokens += run.tokens
        if new_runs:
            self._evicted_tokens = replica.take_evicted(chain, self._hit_blocks)
        if path and replica.uses_tails:
            if self._hit_blocks < len(chain):
                self._previous_tail = residency.cached_tail(replica, chain, self._hit_blocks)
            if self._previous_tail is not None:
                self._previous_tail_tokens = tail_tokens(self._previous_tail)
            self._tail = residency.add_tail(replica, tail_key(chain, len(chain)), path[-1])
            path.append(self._tail)
        self.use = replica.add_use(path, now_s)
        residency.index.entries += new_runs

    def _walk(self, path: list[BlockRun], now_s: float) -> int:
        """Record the prompt's runs at the replica; how many are new there."""
        replica, new_runs, stale_before_s = self._replica, 0, self._replica.stale_before_s(now_s)
        bit, runs = replica.bit, replica.runs
        for run in path:
            if run.mask & bit:
                earlier = runs[run]
                if earlier.used_s < stale_before_s:
                    self._residency.reuse.count_reused(run.tokens)
                if not new_runs:
                    self._hit_blocks += run.length
                    self._hit_tokens += run.tokens
                    self._prefix_used_s = earlier.used_s
                    self._is_checked = earlier.is_prefilled or now_s - earlier.used_s >= MAX_PREFILL_S
            else:
                run.mask |= bit
                replica.tokens += run.tokens
                new_runs += 1
        return new_runs

    def confirm(self, prompt_tokens: int, cached_tokens: int, generated_tokens: int | None = None) -> None:
        """Learn from a response, in the order of the calls. All arguments are counts by the engine's tokenizer."""
        self.use.is_prefilled = True
        if self._prompt_tokens <= 0 or prompt_tokens <= 0:
            return
        rest_tokens = self._learn_tokens(prompt_tokens)  # first: sizes of what the others compare
        if (on_response := self._replica.on_response) is not None:
            blocks, chain = len(self._chain), self._chain
            tokens_per_block = (prompt_tokens - rest_tokens) / blocks if blocks else float(self._block_tokens)
            served = ServedPrompt(chain, self._sent_s, tokens_per_block, prompt_tokens, cached_tokens, generated_tokens)
            on_response(served)
        # What a lower tier had is no other router's work.
        if self._evicted_tokens is None or not self._learn_capacity(self._evicted_tokens, prompt_tokens, cached_tokens):
            self._learn_unrecorded_hits(prompt_tokens, cached_tokens)
        self._learn_tails(rest_tokens, cached_tokens, generated_tokens)
        predicted = min(self._hit_tokens, prompt_tokens)
        self._learn_caching(predicted, cached_tokens)
        self._learn_misses(predicted, cached_tokens)  # last: it evicts

    def _learn_misses(self, predicted: int, cached_tokens: int) -> None:
        """Evict what the replica last used before prefixes that it had lost, once enough responses have shown that."""
        if predicted < MIN_CHECKED_TOKENS or not self._is_checked:
            return
        replica, used_s = self._replica, self._prefix_used_s
        if cached_tokens >= MISS_RATIO * predicted:
            replica.misses = 0
            if used_s < replica.lost_s:
                replica.losses = 0
            return
        self._learn_loss(used_s)
        replica.missed_used_s = max(replica.missed_used_s, used_s) if replica.misses else used_s
        replica.misses += 1
        if replica.misses >= MAX_MISSES:
            replica.misses = 0
            replica.evict_until(replica.missed_used_s)
            if replica.capacity_ratio > 1.0:
                replica.set_capacity_ratio(replica.tokens / replica.capacity_tokens)

    def _learn_loss(self, used_s: float) -> None:
        """Learn whether the replica has lost everything, from a prefix last used at ``used_s`` that was not cached.

        An empty cache misses every prefix that was last used before, and no other one. So hits of prefixes that were
        used since the first miss show nothing.
        """
        replica = self._replica
        if not replica.losses or used_s >= replica.lost_s:
            replica.losses, replica.lost_s = 0, self._sent_s
        replica.losses += 1
        if replica.losses >= MAX_MISSES:
            replica.losses = 0
            replica.evict_before(replica.lost_s)

    def _learn_tokens(self, prompt_tokens: int) -> int:
        """Learn the tokens of blocks whose tokens were not known; the tokens after the prompt's last whole block."""
        chain, index, block_tokens = self._chain, self._residency.index, self._block_tokens
        at, tokens = self._known_blocks, self._known_tokens
        run = index.whole_run(chain, at)
        while run is not None and run.is_learned:  # another response has reported them meanwhile
            at += run.length
            tokens += run.tokens
            run = index.whole_run(chain, at)
        estimate, reported = self._prompt_tokens - at * block_tokens, max(0, prompt_tokens - tokens)
        if estimate <= 0:
            return 0
        scale = min(max(reported / estimate, 1 / MAX_SCALE), MAX_SCALE)
        while run is not None:
            self._residency.replicas.set_tokens(run, int(scale * run.length * block_tokens))
            at += run.length
            run = index.whole_run(chain, at)
        return reported * max(0, self._prompt_tokens - len(chain) * block_tokens) // estimate

    def _learn_caching(self, predicted: int, cached_tokens: int) -> None:
        """Learn whether the engine caches prefixes at all."""
        replica, sent_s = self._replica, self._sent_s
        if cached_tokens:
            replica.zero_hits, replica.caches_nothing = 0, False
        elif predicted >= MIN_CHECKED_TOKENS:
            if not replica.zero_hits:
                replica.zero_since_s = sent_s
            replica.zero_hits += 1
            replica.caches_nothing = replica.zero_hits >= ZERO_HITS and sent_s - replica.zero_since_s >= ZERO_HITS_S

    def _learn_capacity(self, evicted_tokens: int, prompt_tokens: int, cached_tokens: int) -> bool:
        """Learn whether the engine still had blocks that were evicted here; whether it had."""
        replica, unrecorded = self._replica, prompt_tokens - self._hit_tokens
        is_found = cached_tokens - self._hit_tokens > FOUND_RATIO * min(unrecorded, RUN_TOKENS)
        if replica.on_response is None and not self._residency.unrecorded_hits.has_other_routers:
            replica.learn_capacity(is_found, evicted_tokens)
        return is_found

    def _learn_unrecorded_hits(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Learn how many of the tokens that were not recorded at the replica were cached."""
        recorded = self._hit_tokens + self._previous_tail_tokens
        tokens = prompt_tokens - recorded
        if tokens < MIN_TOKENS + MIN_PART * recorded:
            return
        margin = MARGIN_TOKENS if recorded else 0
        self._residency.unrecorded_hits.learn(tokens, cached_tokens - recorded - margin, self._common_hits)

    def set_tail(self, prompt_tokens: int, generated_tokens: int | None) -> None:
        """Set the tokens of the prompt's own tail, from a response that does not report cached tokens."""
        if self._prompt_tokens > 0 and prompt_tokens > 0:
            self._learn_tails(self._learn_tokens(prompt_tokens), 0, generated_tokens)

    def _learn_tails(self, rest_tokens: int, cached_tokens: int, generated_tokens: int | None) -> None:
        """Set the tokens of the prompt's own tail, and learn whether the previous tail was cached.

        The latter only if all of the prefix before it was cached.
        """
        replica, tail = self._replica, self._tail
        if generated_tokens is not None:
            replica.uses_tails = True
        if tail is not None:
            self._residency.replicas.set_tokens(tail, rest_tokens + (generated_tokens or 0))
        if not 0 < self._hit_blocks < len(self._chain) or cached_tokens < PREFIX_RATIO * self._hit_tokens:
            return
        extra_tokens, previous = cached_tokens - self._hit_tokens, self._previous_tail
        if previous is None:
            last_hit = self._chain[self._hit_blocks - 1]
            self._residency.branches.learn(last_hit, extra_tokens, self._hit_tokens, self._block_tokens)
        elif self._previous_tail_tokens >= MIN_TAIL_TOKENS:
            self._residency.tails.learn(extra_tokens / self._previous_tail_tokens)
            if extra_tokens > MIN_REPLACED_RATIO * self._previous_tail_tokens:
                replica.drop(previous)

    def restore_tail(self, tokens: int) -> None:
        """Set the tokens of the prompt's tail, which a snapshot has."""
        if self._tail is not None:
            self._residency.replicas.set_tokens(self._tail, tokens)

    def roll_back(self) -> None:
        """The prompt was never prefilled: remove its new blocks that no other prompt has used since."""
        self._replica.roll_back(self.use, len(self._chain) - self._hit_blocks)
        self._chain = ()


class Reuse:
    """Share of the old blocks of full caches that is requested again, over about one turnover of all caches."""

    def __init__(self) -> None:
        self.ratio = 0.0  # share of long unused tokens that are requested again before eviction
        self._reused = 0.0  # such tokens that were requested again recently
        self._evicted = 0.0  # recent evictions, in tokens

    def count_reused(self, tokens: int) -> None:
        """Count requested tokens of a full cache that were unused for long."""
        self._reused += tokens

    def count_evicted(self, tokens: int, capacity: int) -> None:
        """Count evicted tokens; older counts halve after as many as the ``capacity`` of all caches together."""
        self._evicted += tokens
        total = self._reused + self._evicted
        self.ratio = self._reused / total
        if total > capacity:
            self._reused /= 2
            self._evicted /= 2


RUN_TOKENS: Final = 1024  # the longest run, unless a single block is longer
DEFAULT_TOKENS: Final = 262_144  # capacity until the engine has reported one: 16,384 blocks of 16 tokens
MAX_ENTRIES: Final = 262_144  # runs of all replicas together; at most 0.6 KiB each, if no two share one
TTL_S: Final = 1200.0  # since last used
MAX_PLACED: Final = 1024  # prompts that wait for a publisher; further ones are not published

Placed = tuple[TargetId, int, Chain]  # where a prompt was sent, estimated tokens of each block, the prompt


class Match:
    """How much of a prompt each replica has cached, by the longest cached prefix."""

    def __init__(
        self,
        chain: Chain,
        levels: list[Level],
        branches: Branches,
        engine_block_tokens: Mapping[int, int],
        surplus_tokens: int,
        reuse_ratio: float,
    ) -> None:
        self._chain = chain
        self._branches = branches
        self._engine_block_tokens = engine_block_tokens  # by bit; the engine has whole blocks of so many cached
        self.levels = levels  # the shortest prefix first
        self.blocks = levels[-1][0] if levels else 0  # of the longest prefix that any replica has cached
        self.surplus_tokens = surplus_tokens  # of the longest prefix, above the estimate by the model's mean ratio
        self.reuse_ratio = reuse_ratio  # ``Reuse.ratio`` of the residency
        self.common_key_at: int | None = None  # as of ``BlockIndex.common_key_at``; None: there are no other routers
        self.tail_mask = 0  # replicas with the longest cached prefix and its tail
        self.tail_tokens = 0  # expected cached tokens after that prefix, at these replicas
        self.branch_tokens = 0  # expected cached tokens after that prefix, at other replicas that have it

    def tokens(self, bit: int, prompt_tokens: int) -> int:
        """Predicted cached tokens at the replica with this bit, at most ``prompt_tokens``, in whole engine blocks."""
        levels = self.levels
        for at in range(len(levels) - 1, -1, -1):
            blocks, mask, tokens = levels[at]
            if not mask & bit:
                continue
            if at < len(levels) - 1:
                tokens += self._branches.tokens(self._chain[blocks - 1])
            else:
                tokens += self.tail_tokens if self.tail_mask & bit else self.branch_tokens
            tokens = max(0, min(tokens, prompt_tokens))
            return tokens - tokens % self._engine_block_tokens.get(bit, 1)
        return 0


class Residency:
    """The estimated cached blocks of all replicas. Times are seconds of any one clock that never goes back."""

    def __init__(
        self,
        block_tokens: int = BLOCK_TOKENS,
        run_tokens: int = RUN_TOKENS,
        max_entries: int = MAX_ENTRIES,
        ttl_s: float = TTL_S,
    ) -> None:
        self.block_tokens = block_tokens  # of each block of a chain
        self._max_entries = max_entries
        self._ttl_s = ttl_s
        self.index = BlockIndex(max(1, run_tokens // block_tokens))
        self.replicas = ReplicaBlockTables(self.index)
        self.reuse = Reuse()
        self.tails = TailReuse()
        self.branches = Branches()
        self.unrecorded_hits = UnrecordedHits()
        self.max_share = MAX_PREFIX_SHARE  # of all prompts: up to it, those with one prefix have one common replica
        self.dispatches = 0  # prompts that were added, since the process started
        self.placed: list[Placed] | None = None  # what this router has sent; a publisher takes it. None: there is none

    def __len__(self) -> int:
        """Entries, one for each run and replica that has it."""
        return self.index.entries

    @property
    def runs(self) -> int:
        """Distinct runs."""
        return len(self.index)

    # --- replicas ---

    def add_replica(
        self, target: TargetId, capacity_tokens: int | None = None, engine_block_tokens: int | None = None
    ) -> ReplicaBlocks:
        """Add a replica, initially without blocks, or change its sizes; None if the engine has not reported them."""
        tokens = DEFAULT_TOKENS if capacity_tokens is None else capacity_tokens
        replica = self.replicas.add(target, tokens)
        replica.reported_tokens = capacity_tokens
        self.replicas.engine_block_tokens[replica.bit] = engine_block_tokens or 1
        self.max_share = MAX_PREFIX_SHARE / len(self.replicas.by_target)
        return replica

    def replica(self, target: TargetId) -> ReplicaBlocks | None:
        """The estimated blocks of a replica; None if it was not added."""
        return self.replicas.by_target.get(target)

    def forget_all_but(self, targets: Iterable[TargetId]) -> None:
        """Remove all other replicas."""
        self.replicas.remove_all_but(targets)
        self.max_share = MAX_PREFIX_SHARE / max(1, len(self.replicas.by_target))

    # --- prompts ---

    def match(self, chain: Chain, block_tokens: int | None = None) -> Match:
        """How much of a prompt each replica has cached. Its only side effect is that ``insert`` reuses the walk.

        ``block_tokens``: estimated tokens of a block whose tokens are not known; None: the residency's default.
        """
        levels = self.index.levels(chain)
        surplus = levels[-1][2] - levels[-1][0] * (block_tokens or self.block_tokens) if levels else 0
        sizes = self.replicas.engine_block_tokens
        match = Match(chain, levels, self.branches, sizes, surplus, self.reuse.ratio)
        if self.unrecorded_hits.has_other_routers:
            match.common_key_at = self.index.common_key_at(self.max_share)
        if levels and (blocks := match.blocks) < len(chain):
            match.branch_tokens = self.branches.tokens(chain[blocks - 1])
            tail = self.index.run_starting_with(tail_key(chain, blocks))
            if tail is not None:
                match.tail_mask, match.tail_tokens = tail.mask, int(self.tails.ratio * tail_tokens(tail))
        return match

    def insert(
        self,
        target: TargetId,
        chain: Chain,
        now_s: float,
        prompt_tokens: int = 0,
        block_tokens: int | None = None,
        common_hits: ShareByTokens | None = None,
        *,
        is_published: bool = True,
    ) -> SentPrompt:
        """Add a prompt that is sent to a replica; ``prompt_tokens`` is its estimated length by the model's mean ratio.

        ``block_tokens`` is as for ``match``. ``common_hits`` learns from the response; None: not the common replica.
        ``is_published``: other routers learn of it.
        """
        block_tokens = block_tokens or self.block_tokens
        placed = self.placed
        if placed is not None and is_published and len(placed) < MAX_PLACED:
            placed.append((target, block_tokens, chain))
        replica = self.replicas.by_target.get(target) or self.add_replica(target)
        self.dispatches += 1
        sent = SentPrompt(self, replica, chain, now_s, prompt_tokens, block_tokens, common_hits)
        self._evict(replica, now_s)
        if replica.caches_nothing:
            self.clear(target)
        return sent

    def restore(
        self, target: TargetId, chain: Chain, used_s: float, tail_tokens: int, runs: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Add a prompt that a snapshot has of a replica; prompts of a replica must come in the order of their use.

        ``runs``: (blocks, tokens) of the prompt's last runs; 0 tokens if no engine has reported them.
        """
        replica = self.replicas.by_target.get(target)
        if replica is None:
            return
        replica.uses_tails = replica.uses_tails or tail_tokens > 0
        at = len(chain) - sum([blocks for blocks, _ in runs])
        for blocks, tokens in runs:
            at += blocks
            block_tokens = tokens / blocks if tokens else float(self.block_tokens)
            self.index.path(chain[:at], self.on_split, block_tokens, is_learned=tokens > 0)
        self.insert(target, chain, used_s, is_published=False).restore_tail(tail_tokens)

    @property
    def ttl_s(self) -> float:
        """Age in seconds above which blocks are not expected to be cached any more."""
        return self._ttl_s

    # --- KV events, and prompts of other routers ---

    def add_stored(self, target: TargetId, chain: Chain, now_s: float, block_tokens: float | None = None) -> None:
        """Record that a replica has cached these blocks, and make them its most recently used ones.

        ``block_tokens``: of each block, if it is not in the index; None: the residency's default.
        """
        replica = self.replicas.by_target.get(target)
        if replica is None or not chain:
            return
        path, bit = self.index.path(chain, self.on_split, block_tokens or self.block_tokens), replica.bit
        for run in path:
            if not run.mask & bit:
                run.mask |= bit
                replica.tokens += run.tokens
                self.index.entries += 1
        tail = self.cached_tail(replica, chain, len(chain))
        if tail is not None:
            path.append(tail)
        replica.add_use(path, now_s)
        self._evict(replica, now_s)

    def set_seen_tokens(self, target: TargetId, tokens: int, *, was_full: bool) -> None:
        """Change a replica's capacity by the most tokens that its events have shown as cached at one time.

        They count where they are more than the engine reports, and where it reports nothing and has evicted blocks
        (``was_full``). Otherwise they are too few, because running requests hold blocks that are not stored yet.
        """
        replica = self.replicas.by_target.get(target)
        if replica is None:
            return
        reported, replica.is_full = replica.reported_tokens, was_full
        capacity = DEFAULT_TOKENS if reported is None else reported
        if tokens > capacity or (was_full and reported is None):
            capacity = tokens
        if capacity != replica.capacity_tokens:
            self.replicas.add(target, capacity)

    def truncate(self, target: TargetId, chain: Chain, blocks: int) -> None:
        """Record that a replica no longer has what follows the first ``blocks`` of a chain."""
        replica = self.replicas.by_target.get(target)
        run = self.index.run_with_block(chain, blocks) if replica is not None else None
        if replica is None or run is None or not run.mask & replica.bit:
            return
        if run.hashes[0] != chain[blocks]:
            self.index.path(
                chain[:blocks], self.on_split, self.block_tokens
            )  # splits the run, so that its first blocks stay
            run = self.index.run_with_block(chain, blocks) or run
        replica.evict_run(run)

    def evict_before(self, target: TargetId, used_s: float) -> None:
        """Evict what a replica last used before this time, except what running requests use."""
        replica = self.replicas.by_target.get(target)
        if replica is not None:
            replica.evict_before(used_s)

    def clear(self, target: TargetId) -> None:
        """Record that a replica's cache is empty."""
        replica = self.replicas.by_target.get(target)
        if replica is not None:
            replica.evict_until(inf)

    def cached_tail(self, replica: ReplicaBlocks, chain: Chain, blocks: int) -> BlockRun | None:
        """The tail after the first ``blocks`` of a chain, if the replica has it."""
        tail = self.index.run_starting_with(tail_key(chain, blocks)) if blocks else None
        return tail if tail is not None and tail.mask & replica.bit else None

    def add_tail(self, replica: ReplicaBlocks, key: int, before: BlockRun) -> BlockRun:
        """Add the tail with this key, after the last run of its prompt, to a replica."""
        tail = self.index.run_starting_with(key)
        if tail is None:
            tail = Tail(key)
            tail.before = before
            self.index.add(tail)
        if not tail.mask & replica.bit:
            tail.mask |= replica.bit
            replica.tokens += tail.tokens
            self.index.entries += 1
        return tail

    def on_split(self, head: BlockRun, tail: BlockRun) -> None:
        """Called when a run was split, as of ``BlockIndex.path``."""
        for replica in self.replicas.replicas_of_mask(tail.mask):
            replica.on_split(head, tail)

    def _evict(self, replica: ReplicaBlocks, now_s: float) -> None:
        """Evict blocks above this replica's capacity, old ones of the next replica in turn, and entries over the limit.

        The limit holds for the entries of all replicas together.
        """
        if replica.tokens > replica.capacity:
            excess = replica.evict_excess(MAX_EVICTED // len(self.replicas.by_target))
            self.reuse.count_evicted(excess, self.replicas.capacity)
        self.replicas.expire(now_s - self._ttl_s)
        while self.index.entries > self._max_entries:
            if (next_replica := self.replicas.next_in_turn()) and next_replica.runs:
                next_replica.evict()
