"""A trace's requests as a strategy sees them: the ids of their blocks stand in for the hashes of a prompt.

The router's own strategy, deciding in a replay as it decides in production.

Load book and residency are used as the router uses them: dispatch at arrival, first byte at the first token, the
answer's cached tokens and the end at the last one. What a router cannot know it is not told.

What no router can know: the measure that strategies are judged by. It exists in replays alone.

``Clairvoyant`` sees every engine's true cache and exact work, and sends each request to where its first token comes
soonest. It is greedy: it neither knows what comes next nor spares a cache for it, so a strategy may beat it.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from math import ceil, inf

from routing.balancing.health import HealthRegistry
from routing.balancing.load_tracker import LoadTracker, Ticket
from routing.balancing.placement import count_as_sent
from routing.balancing.replicas import GroupReplicas
from routing.balancing.residency import RUN_TOKENS, Residency
from routing.balancing.strategies.registry import build_strategy
from routing.balancing.strategies.strategy import FollowsTraffic
from routing.replay.block_runs import Forest, Run, RunPool, shared_path
from routing.replay.fast_engine import FastEngine, FastEngineConfig, ModelledRequest
from routing.schema import Boundary, ReplicaConfig, ResidencySettings, Settings, Tier1Settings
from routing.traffic.columns import Columns
from routing.types import BYTES_PER_TOKEN, Choice, PrefixHash, Reason

TIER2_TOKENS = 512  # behind the opening, a block of Mooncake's: a trace does not say where its first message ends

_PIECE = 65_536  # ids that are spread at once


class NotInTracesError(ValueError):
    """A setting that asks for something which a trace does not tell."""


class TraceKeys:
    """What a strategy may ask about one request."""

    __slots__ = ("_book", "_chain", "_end", "_start", "block_tokens", "prompt_tokens")

    session: PrefixHash | None = None  # a trace knows no sessions

    def __init__(self, book: KeyBook, start: int, end: int, prompt_tokens: int) -> None:
        self._book = book
        self._start = start  # of its ids
        self._end = end
        self._chain: array[int] | None = None
        self.block_tokens = book.block_tokens
        self.prompt_tokens = prompt_tokens

    @property
    def tier1(self) -> PrefixHash | None:
        """Key of the opening: of its last block, which stands for all before it."""
        return PrefixHash(self._book.hashes[min(self._start + self._book.depth, self._end) - 1])

    @property
    def tier2(self) -> PrefixHash | None:
        """Key of the conversation: of the block that ends ``TIER2_TOKENS`` behind the opening."""
        return PrefixHash(self._book.hashes[min(self._start + self._book.conversation, self._end) - 1])

    @property
    def chain(self) -> Sequence[int]:
        """Hashes of the whole blocks."""
        if self._chain is None:
            whole = self.prompt_tokens // self._book.block_tokens
            self._chain = self._book.hashes[self._start : self._start + whole]
        return self._chain


class KeyBook:
    """The keys of all requests under one policy."""

    def __init__(self, settings: Settings, columns: Columns) -> None:
        self.depth = tier1_depth(settings, columns.block_tokens)  # blocks of the opening
        self.conversation = self.depth + -(-TIER2_TOKENS // columns.block_tokens)  # blocks that name a conversation
        self.block_tokens = columns.block_tokens
        self._columns = columns
        self._hashes: array[int] | None = None

    @property
    def hashes(self) -> array[int]:
        """The ids of all requests, spread over 64 bits as hashes are."""
        if self._hashes is None:
            self._hashes = _spread(self._columns.ids)
        return self._hashes

    def of(self, index: int) -> TraceKeys:
        """The keys of one request."""
        columns = self._columns
        return TraceKeys(self, columns.starts[index], columns.starts[index + 1], columns.prompt_tokens[index])


def _spread(ids: array[int]) -> array[int]:
    """Each id with its lower 32 bits once more over its upper ones, bytes in reverse: no two ids come to the same.

    Ids are counted up from 0, so what changes most stands first and last: where a ring and where a dict look. In
    columns of half a number, because that takes 10 ns an id, and a product that wraps around 230.
    """
    hashes = ids[:]
    halves = memoryview(hashes).cast("B").cast("I")
    lower = int(sys.byteorder == "big")
    for start in range(0, len(halves), 2 * _PIECE):
        piece = halves[start : start + 2 * _PIECE]
        reverse = array("I", piece[lower::2].tobytes())
        reverse.byteswap()
        upper = piece[1 - lower :: 2].tobytes()
        piece[1 - lower :: 2] = _xor(reverse, upper) if upper.strip(b"\0") else reverse
    return hashes


def _xor(values: array[int], others: bytes) -> array[int]:
    both = int.from_bytes(values.tobytes(), "little") ^ int.from_bytes(others, "little")
    return array("I", both.to_bytes(len(others), "little"))


def tier1_depth(settings: Settings, block_tokens: int) -> int:
    """The block in which a policy's tier-1 prefix ends, counted from 1; NotInTracesError for ends in the text."""
    if not isinstance(settings, Tier1Settings) or settings.boundary is Boundary.SYSTEM:
        return 1
    if settings.boundary in {Boundary.MESSAGES, Boundary.MARKER}:
        raise NotInTracesError(f"boundary {settings.boundary}: a trace has no text; use bytes with boundary_bytes")
    return -(-settings.boundary_bytes // (block_tokens * BYTES_PER_TOKEN))


# The residency enters and evicts blocks by runs. In a trace's blocks of 512 tokens the router's runs would be of two;
# longer ones are a third faster to replay and move no mean TTFT by more than 1 %.
RUN_BLOCKS = 16


class Clock:
    """The time of a replay, seconds; apart from who sets it, so that nothing refers to itself in a circle."""

    __slots__ = ("now_s",)

    def __init__(self) -> None:
        self.now_s = 0.0

    def read(self) -> float:
        """What the load book asks."""
        return self.now_s


class Routed:
    """One strategy with everything that a router keeps for it."""

    def __init__(self, settings: Settings, columns: Columns, config: FastEngineConfig, replicas: int) -> None:
        configs = [
            ReplicaConfig(
                name=f"replica-{number + 1}",
                url="http://simulated",
                block_tokens=config.block_tokens,
                capacity_blocks=config.blocks,
            )
            for number in range(replicas)
        ]
        self.reasons: Counter[Reason] = Counter()
        self._clock = Clock()
        self.book = LoadTracker(self._clock.read)
        residency = Residency(
            block_tokens=config.block_tokens, run_tokens=max(RUN_TOKENS, RUN_BLOCKS * config.block_tokens)
        )
        self._asked = residency if isinstance(settings, ResidencySettings) else None
        self._keys = KeyBook(settings, columns)
        self._number = {it.name: number for number, it in enumerate(configs)}
        modelled = GroupReplicas(configs, self.book, residency=residency)
        self._strategy = build_strategy(settings, modelled)
        self._counting = self._strategy if isinstance(self._strategy, FollowsTraffic) else None
        self._candidates = modelled.candidates(HealthRegistry())

    def place(self, request: ModelledRequest, _engines: Sequence[FastEngine], now_s: float) -> int:
        """Ask the strategy, and count the request as sent."""
        choice, keys = self.ask(request, now_s), self._keys.of(request.index)
        self.reasons[choice.reason] += 1
        if self._counting is not None:
            self._counting.count_request(keys)
        request.note = count_as_sent(choice, keys, self.book, self._asked)
        return self._number[choice.target]

    def ask(self, request: ModelledRequest, now_s: float) -> Choice:
        """Where the strategy would send a request now."""
        self._clock.now_s = now_s
        return self._strategy.choose(self._keys.of(request.index), self._candidates)

    def first_token(self, request: ModelledRequest, now_s: float) -> None:
        """The first byte of the answer reaches the router."""
        self._clock.now_s = now_s
        ticket: Ticket = request.note
        ticket.first_byte()

    def ended(self, request: ModelledRequest, now_s: float) -> None:
        """The answer is whole. Its usage says how much was cached, to whoever learns from that."""
        self._clock.now_s = now_s
        ticket: Ticket = request.note
        if self._asked is not None:
            ticket.answered(request.first_token_s - request.arrived_s, request.prompt_tokens, request.cached_tokens)
        ticket.end()


class Clairvoyant:
    """Places requests with nothing hidden."""

    def __init__(self) -> None:
        self._promised: list[Counter[Run]] = []  # by engine: runs that requests without a first token will cache
        self._engine: dict[int, int] = {}  # by request: where it is, as long as it has no first token

    def place(self, request: ModelledRequest, engines: Sequence[FastEngine], now_s: float) -> int:
        """The engine with the earliest first token; of equals the one with fewer requests."""
        if not self._promised:
            self._promised = [Counter() for _ in engines]
        best, least = 0, (inf, 0)
        for index, engine in enumerate(engines):
            uncached = request.prompt_tokens - self._hit_tokens(request, index, engine)
            order = (_first_token_s(engine, uncached, now_s), engine.running + len(engine.waiting))
            if order < least:
                best, least, request.note = index, order, uncached
        self._engine[request.index] = best
        self._promised[best].update(request.path)
        return best

    def first_token(self, request: ModelledRequest, _now_s: float) -> None:
        """What the request promised is cached now."""
        self._promised[self._engine.pop(request.index)].subtract(request.path)

    def ended(self, request: ModelledRequest, _now_s: float) -> None:
        """Nothing that counts."""

    def _hit_tokens(self, request: ModelledRequest, index: int, engine: FastEngine) -> int:
        """Cached tokens that a request would find once all that is ahead of it has been prefilled."""
        promised, pool, blocks = self._promised[index], engine.pool, 0
        for run in request.path:
            cached = run.length if promised[run] > 0 else pool.cached(run)
            blocks += cached
            if cached < run.length:
                break
        block_tokens = engine.config.block_tokens
        return min(blocks, (request.prompt_tokens - 1) // block_tokens) * block_tokens


def _first_token_s(engine: FastEngine, uncached_tokens: int, now_s: float) -> float:
    """When an engine would give the first token of a request that leaves so many tokens to compute."""
    config = engine.config
    waiting_tokens: int = sum(request.note for request in engine.waiting)  # uncached, as ``place`` noted
    tokens = uncached_tokens + engine.left_tokens + waiting_tokens
    steps = ceil(tokens / config.chunk_tokens)
    overhead_s = steps * (config.step_s + config.decode_s * engine.decoding)
    return engine.next_step_s(now_s) + overhead_s + tokens / config.prefill_rate


def pooled_hit_rate(forest: Forest, capacity: int | None) -> float | None:
    """Token hit rate of one cache for all prompts, each served before the next; None: a cache without limit.

    Answers take no room in it, so no fleet with as many blocks can be expected to reach it.
    """
    columns = forest.columns
    block_tokens = columns.block_tokens
    if not len(columns):
        return None
    pool = RunPool(len(columns.ids) + len(columns) if capacity is None else capacity)
    hits = 0
    for prompt, last in zip(columns.prompt_tokens, forest.last, strict=True):
        again = last is not None and last.visits > 1 and not prompt % block_tokens
        admitted = pool.admit(shared_path(last), prompt // block_tokens + 1, recompute=again)
        if admitted is not None:
            hits += admitted[0]
            pool.release(admitted[1])
    return hits * block_tokens / columns.all_prompt_tokens
