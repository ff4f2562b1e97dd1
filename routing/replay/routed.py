"""Placement in a replay: by the router's own strategies, or by a clairvoyant choice as their reference.

The block ids of a trace take the place of prompt hashes. Load tracker and residency index are updated as in the router:
dispatch at arrival, first byte at the first token, cached tokens and end of response at the last token. A strategy gets
no information that a router would not have.

``Clairvoyant`` sees every engine's actual cache and exact work, and sends each request where its first token comes
soonest. It is greedy: it does not know future requests, so a strategy can beat it.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from math import ceil, inf

from routing.balancing.candidates import Choice
from routing.balancing.load_tracker import LoadTracker, Ticket
from routing.balancing.placement import record_dispatch
from routing.balancing.replicas import GroupReplicas, HealthRegistry
from routing.balancing.residency import RUN_TOKENS, Residency
from routing.balancing.strategies.registry import build_strategy
from routing.balancing.strategies.strategy import MediaKey
from routing.replay.block_runs import Forest, Run, RunPool, shared_path
from routing.replay.fast_engine import FastEngine, FastEngineConfig, ModelledRequest
from routing.schema import Boundary, ReplicaConfig, Settings, Tier1Settings
from routing.sharing.view import OwnState, SharedView, Update
from routing.traffic.columns import Columns
from routing.types import BYTES_PER_TOKEN, PrefixHash, Reason, TargetId

TIER2_TOKENS = 512  # after the tier-1 prefix; one block, because a trace does not record where messages end

_PIECE_BYTES = 524_288  # per step of ``_spread``


class UnsupportedInTracesError(ValueError):
    """A setting needs information that traces do not have."""


class TraceKeys:
    """Keys of one request, as strategies read them."""

    __slots__ = ("_chain", "_end", "_index", "_start", "block_tokens", "prompt_tokens", "session")

    media: MediaKey | None = None  # traces have no attachments

    def __init__(
        self, index: KeyIndex, start: int, end: int, prompt_tokens: int, session: PrefixHash | None = None
    ) -> None:
        self._index = index
        self._start = start  # index of its first id in the column
        self._end = end
        self._chain: array[int] | None = None
        self.block_tokens = index.block_tokens
        self.prompt_tokens = prompt_tokens
        self.session = session

    @property
    def estimate(self) -> int:
        """The exact length of the prompt."""
        return self.prompt_tokens

    def add_surplus(self, tokens: int) -> None:
        """Do nothing: the length is exact."""

    @property
    def conversation(self) -> PrefixHash | None:
        """The session."""
        return self.session

    @property
    def tier1(self) -> PrefixHash | None:
        """Key of the tier-1 prefix: the id of its last block, which identifies all blocks before it."""
        return PrefixHash(self._index.hashes[min(self._start + self._index.tier1_blocks, self._end) - 1])

    @property
    def tier2(self) -> PrefixHash | None:
        """Key of the conversation: the block that ends ``TIER2_TOKENS`` after the tier-1 prefix."""
        return PrefixHash(self._index.hashes[min(self._start + self._index.tier2_blocks, self._end) - 1])

    @property
    def chain(self) -> Sequence[int]:
        """Hashes of the whole blocks."""
        if self._chain is None:
            whole = self.prompt_tokens // self._index.block_tokens
            self._chain = self._index.hashes[self._start : self._start + whole]
        return self._chain


class KeyIndex:
    """Keys of all requests under one policy. ``sessions``: keys by request; a trace has none of its own."""

    def __init__(self, settings: Settings, columns: Columns, sessions: Sequence[PrefixHash] | None = None) -> None:
        self.tier1_blocks = tier1_blocks_of(settings, columns.block_tokens)  # blocks of the tier-1 prefix
        self.tier2_blocks = self.tier1_blocks + -(-TIER2_TOKENS // columns.block_tokens)  # blocks of the tier-2 prefix
        self.block_tokens = columns.block_tokens
        self._columns = columns
        self._sessions = sessions
        self._hashes: array[int] | None = None

    @property
    def hashes(self) -> array[int]:
        """Ids of all requests, mapped to 64-bit values that are spread like hashes."""
        if self._hashes is None:
            self._hashes = _spread(self._columns.ids)
        return self._hashes

    def keys_of(self, index: int) -> TraceKeys:
        """Keys of one request."""
        columns, sessions = self._columns, self._sessions
        session = None if sessions is None else sessions[index]
        return TraceKeys(self, columns.starts[index], columns.starts[index + 1], columns.prompt_tokens[index], session)


def _spread(ids: array[int]) -> array[int]:
    """XOR the upper 32 bits of each id with its byte-reversed lower 32 bits; different ids stay different.

    Ids count up from 0, so the result varies most in the first bits, which rings use, and the last, which dicts use.
    Copying single bytes of columns takes a tenth of the time of arithmetic on each id.
    """
    hashes = ids[:]
    columns = memoryview(hashes).cast("B")
    for start in range(0, len(columns), _PIECE_BYTES):
        piece = bytearray(columns[start : start + _PIECE_BYTES])
        for low in range(4):  # the bytes of an id, the least significant first
            source, target = (low, 7 - low) if sys.byteorder == "little" else (7 - low, low)
            upper, reversed_byte = piece[target::8], piece[source::8]
            piece[target::8] = reversed_byte if upper == bytes(len(upper)) else _xor(upper, reversed_byte)
        columns[start : start + _PIECE_BYTES] = piece
    return hashes


def _xor(values: bytearray, others: bytearray) -> bytes:
    combined = int.from_bytes(values, "little") ^ int.from_bytes(others, "little")
    return combined.to_bytes(len(values), "little")


def tier1_blocks_of(settings: Settings, block_tokens: int) -> int:
    """Blocks of a policy's tier-1 prefix; UnsupportedInTracesError if the boundary depends on the text."""
    if not isinstance(settings, Tier1Settings) or settings.boundary is Boundary.SYSTEM:
        return 1
    if settings.boundary in {Boundary.MESSAGES, Boundary.MARKER}:
        raise UnsupportedInTracesError(f"boundary {settings.boundary}: traces have no text; use the boundary bytes")
    return -(-settings.boundary_bytes // (block_tokens * BYTES_PER_TOKEN))


# The residency index adds and evicts blocks by runs. With blocks of 512 tokens the router's runs would have two blocks;
# longer runs make a replay a third faster and change no mean TTFT by more than 1 %.
RUN_BLOCKS = 16


class Clock:
    """The time of a replay in seconds; a separate object, to avoid a reference cycle."""

    __slots__ = ("now_s",)

    def __init__(self) -> None:
        self.now_s = 0.0

    def read(self) -> float:
        """Clock of the load tracker."""
        return self.now_s


class StrategyPlacer:
    """Places requests by one strategy, with the state that a router keeps for it.

    ``seed`` differs between routers; ``keys`` may be shared by several placers of one policy.
    """

    def __init__(
        self,
        settings: Settings,
        columns: Columns,
        config: FastEngineConfig,
        replicas: int,
        seed: int = 0,
        keys: KeyIndex | None = None,
    ) -> None:
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
        self.loads = LoadTracker(self._clock.read)
        residency = Residency(
            block_tokens=config.block_tokens, run_tokens=max(RUN_TOKENS, RUN_BLOCKS * config.block_tokens)
        )
        self._residency = residency if settings.uses_residency else None
        self._targets = [TargetId(replica.name) for replica in configs]
        self.own_state = OwnState(self.loads, residency, self._targets)  # what it publishes
        self.view = SharedView(self.loads, residency, self._targets)  # what other routers have published
        self.keys = KeyIndex(settings, columns) if keys is None else keys
        self._index_by_name = {replica.name: number for number, replica in enumerate(configs)}
        modelled = GroupReplicas(configs, self.loads, seed, residency)
        self._strategy = build_strategy(settings, modelled, seed)
        self._candidates = modelled.candidates(HealthRegistry())

    def place(self, request: ModelledRequest, _engines: Sequence[FastEngine], now_s: float) -> int:
        """Place a request by the strategy and record it as dispatched."""
        keys = self.keys.keys_of(request.index)
        choice = self.choose(keys, now_s)
        self.reasons[choice.reason] += 1
        self._strategy.count_request(keys, choice.uncached_tokens(keys.prompt_tokens))
        request.placer_data = record_dispatch(choice, keys, self.loads, self._residency)
        return self._index_by_name[choice.target]

    def choose(self, keys: TraceKeys, now_s: float) -> Choice:
        """The strategy's choice for the request with these keys now."""
        self._clock.now_s = now_s
        return self._strategy.choose(keys, self._candidates)

    def take_update(self, now_s: float) -> Update | None:
        """What this router publishes now; None if nothing has changed."""
        self._clock.now_s = now_s
        return self.own_state.take(now_s)

    def apply_update(self, router: int, sequence: int, update: Update, now_s: float) -> None:
        """Use what another router has published."""
        self._clock.now_s = now_s
        self.view.apply(router.to_bytes(), sequence, update, now_s)

    def known_blocks(self, index: int) -> int:
        """Blocks of a request's prompt that this router estimates as cached at some replica; 0 without a residency."""
        residency = self._residency
        return 0 if residency is None else residency.match(self.keys.keys_of(index).chain).blocks

    def add_stored(self, index: int, replica: int, now_s: float) -> None:
        """Add the prompt of another router's request to a replica's estimated cached blocks."""
        if self._residency is not None:
            keys = self.keys.keys_of(index)
            self._residency.insert(self._targets[replica], keys.chain, now_s, keys.prompt_tokens)

    def on_first_token(self, request: ModelledRequest, now_s: float) -> None:
        """The router receives the first byte of the response."""
        self._clock.now_s = now_s
        ticket: Ticket = request.placer_data
        ticket.record_first_byte()

    def on_ended(self, request: ModelledRequest, now_s: float) -> None:
        """The response is complete; its usage updates the residency index."""
        self._clock.now_s = now_s
        record_response(request, self._residency)


def record_response(request: ModelledRequest, residency: Residency | None) -> None:
    """Account for a complete response; its usage updates the residency of the request's router, if it has one."""
    ticket: Ticket = request.placer_data
    if residency is not None:
        ticket.record_response(request.first_token_s - request.arrived_s, request.prompt_tokens, request.cached_tokens)
    ticket.end()


class Clairvoyant:
    """Places requests with full knowledge of all engines."""

    def __init__(self) -> None:
        self._pending: list[Counter[Run]] = []  # by engine: runs that its unfinished prefills will cache
        self._engine: dict[int, int] = {}  # by request without a first token

    def place(self, request: ModelledRequest, engines: Sequence[FastEngine], now_s: float) -> int:
        """The engine with the earliest first token; among equals, the one with fewer requests."""
        if not self._pending:
            self._pending = [Counter() for _ in engines]
        best, least = 0, (inf, 0)
        for index, engine in enumerate(engines):
            uncached = request.prompt_tokens - self._hit_tokens(request, index, engine)
            order = (_first_token_s(engine, uncached, now_s), engine.running + len(engine.waiting))
            if order < least:
                best, least, request.placer_data = index, order, uncached
        self._engine[request.index] = best
        self._pending[best].update(request.path)
        return best

    def on_first_token(self, request: ModelledRequest, _now_s: float) -> None:
        """The request's runs are cached now."""
        self._pending[self._engine.pop(request.index)].subtract(request.path)

    def on_ended(self, request: ModelledRequest, _now_s: float) -> None:
        """Does nothing."""

    def _hit_tokens(self, request: ModelledRequest, index: int, engine: FastEngine) -> int:
        """Cached tokens of a request once everything queued before it is prefilled."""
        pending, pool, blocks = self._pending[index], engine.pool, 0
        for run in request.path:
            cached = run.length if pending[run] > 0 else pool.cached(run)
            blocks += cached
            if cached < run.length:
                break
        block_tokens = engine.config.block_tokens
        return min(blocks, (request.prompt_tokens - 1) // block_tokens) * block_tokens


def _first_token_s(engine: FastEngine, uncached_tokens: int, now_s: float) -> float:
    """Time of the first token of a request with this many tokens to compute."""
    config = engine.config
    waiting_tokens: int = sum(request.placer_data for request in engine.waiting)  # uncached tokens, stored by ``place``
    tokens = uncached_tokens + engine.partial_tokens_left + waiting_tokens
    steps = ceil(tokens / config.chunk_tokens)
    overhead_s = steps * (config.step_s + config.decode_s * engine.decoding)
    return engine.next_step_s(now_s) + overhead_s + tokens / config.prefill_rate


def pooled_hit_rate(forest: Forest, capacity: int | None) -> float | None:
    """Token hit rate of a single cache that serves all prompts one after another; ``capacity`` None: unlimited.

    Outputs take no blocks in it, so a fleet with as many blocks in total cannot be expected to reach it.
    """
    columns = forest.columns
    block_tokens = columns.block_tokens
    if not len(columns):
        return None
    pool = RunPool(len(columns.ids) + len(columns) if capacity is None else capacity)
    hits = 0
    for prompt, last in zip(columns.prompt_tokens, forest.last_runs, strict=True):
        recompute = last is not None and last.visits > 1 and not prompt % block_tokens
        path = shared_path(last)
        admitted = pool.admit(path, prompt // block_tokens + 1, prompt_runs=len(path), recompute=recompute)
        if admitted is not None:
            hits += admitted[0]
            pool.release(admitted[1])
    return hits * block_tokens / columns.all_prompt_tokens
