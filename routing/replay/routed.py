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

from routing.balancing.candidates import Candidates
from routing.balancing.load_tracker import LoadTracker, Ticket
from routing.balancing.placement import record_dispatch
from routing.balancing.replicas import GroupReplicas, HealthRegistry
from routing.balancing.residency import RUN_TOKENS, Residency
from routing.balancing.strategies.registry import build_strategy
from routing.balancing.strategies.strategy import MediaKey, Strategy
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


class ModelledKeys:
    """Keys of one request, as strategies read them. ``hashes``: of all requests; its own begin at ``start``."""

    __slots__ = (
        "_chain", "_hashes", "_start", "block_tokens", "conversation", "estimate", "media", "prompt_tokens", "session",
        "tier1", "tier2",
    )  # fmt: skip

    def __init__(
        self,
        hashes: array[int],
        start: int,
        prompt_tokens: int,
        block_tokens: int,
        *,
        tier1: PrefixHash | None,
        tier2: PrefixHash | None,
        session: PrefixHash | None = None,
        conversation: PrefixHash | None = None,
    ) -> None:
        self._hashes = hashes
        self._start = start
        self._chain: array[int] | None = None
        self.prompt_tokens = self.estimate = prompt_tokens  # the exact length
        self.block_tokens = block_tokens
        self.tier1 = tier1
        self.tier2 = tier2
        self.session = session
        self.conversation = conversation
        self.media: MediaKey | None = None  # neither traces nor records have attachments

    def add_surplus(self, tokens: int) -> None:
        """Do nothing: the length is exact."""

    @property
    def chain(self) -> Sequence[int]:
        """Hashes of the whole blocks."""
        if self._chain is None:
            self._chain = self._hashes[self._start : self._start + self.prompt_tokens // self.block_tokens]
        return self._chain


class KeyIndex:
    """Keys of all requests of a trace under one policy. ``sessions``: by request; a trace has none of its own."""

    def __init__(self, settings: Settings, columns: Columns, sessions: Sequence[PrefixHash] | None = None) -> None:
        self.tier1_blocks = tier1_blocks_of(settings, columns.block_tokens)  # blocks of the tier-1 prefix
        self.tier2_blocks = self.tier1_blocks + -(-TIER2_TOKENS // columns.block_tokens)  # blocks of the tier-2 prefix
        self.hashes = _spread(columns.ids)
        self._columns = columns
        self._sessions = sessions

    def keys_of(self, index: int) -> ModelledKeys:
        """Keys of one request: a prefix is identified by its last block, which stands for all blocks before it."""
        columns, hashes = self._columns, self.hashes
        start, end = columns.starts[index], columns.starts[index + 1]
        session = None if self._sessions is None else self._sessions[index]
        return ModelledKeys(
            hashes,
            start,
            columns.prompt_tokens[index],
            columns.block_tokens,
            tier1=PrefixHash(hashes[min(start + self.tier1_blocks, end) - 1]),
            tier2=PrefixHash(hashes[min(start + self.tier2_blocks, end) - 1]),
            session=session,
            conversation=session,
        )


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


class ModelledRouter:
    """What one router knows: the loads and the residency of the requests that it places."""

    def __init__(self, block_tokens: int) -> None:
        self.reasons: Counter[Reason] = Counter()
        self.clock = Clock()
        self.loads = LoadTracker(self.clock.read)
        self.residency = Residency(block_tokens, max(RUN_TOKENS, RUN_BLOCKS * block_tokens))
        self.uses_residency = True

    def dispatch(
        self, request: ModelledRequest, strategy: Strategy, candidates: Candidates, keys: ModelledKeys
    ) -> TargetId:
        """Choose a target by a strategy, and record the request as dispatched."""
        choice = strategy.choose(keys, candidates)
        self.reasons[choice.reason] += 1
        strategy.count_request(keys, choice.uncached_tokens(keys.prompt_tokens))
        residency = self.residency if self.uses_residency else None
        request.placer_data = record_dispatch(choice, keys, self.loads, residency)
        return choice.target

    def on_first_token(self, request: ModelledRequest, now_s: float) -> None:
        """The router receives the first byte of the response."""
        self.clock.now_s = now_s
        ticket: Ticket = request.placer_data
        ticket.record_first_byte()

    def on_ended(self, request: ModelledRequest, now_s: float) -> None:
        """The response is complete; its usage updates the residency."""
        self.clock.now_s = now_s
        ticket: Ticket = request.placer_data
        if self.uses_residency:
            ttft_s = request.first_token_s - request.arrived_s
            ticket.record_response(ttft_s, request.prompt_tokens, request.cached_tokens)
        ticket.end()


class StrategyPlacer(ModelledRouter):
    """A router that places the requests of a trace by one strategy, with the state that a router keeps for it.

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
        super().__init__(config.block_tokens)
        configs = [
            ReplicaConfig(
                name=f"replica-{number + 1}",
                url="http://simulated",
                block_tokens=config.block_tokens,
                capacity_blocks=config.blocks,
            )
            for number in range(replicas)
        ]
        self.uses_residency = settings.uses_residency
        self._targets = [TargetId(replica.name) for replica in configs]
        self.own_state = OwnState(self.loads, self.residency, self._targets)  # what it publishes
        self.view = SharedView(self.loads, self.residency, self._targets)  # what other routers have published
        self.keys = KeyIndex(settings, columns) if keys is None else keys
        self.index_by_name = {replica.name: number for number, replica in enumerate(configs)}
        modelled = GroupReplicas(configs, self.loads, seed, self.residency)
        self.strategy = build_strategy(settings, modelled, seed)
        self.candidates = modelled.candidates(HealthRegistry())

    def place(self, request: ModelledRequest, _engines: Sequence[FastEngine], now_s: float) -> int:
        """The engine that the strategy chooses."""
        self.clock.now_s = now_s
        keys = self.keys.keys_of(request.index)
        return self.index_by_name[self.dispatch(request, self.strategy, self.candidates, keys)]

    def take_update(self, now_s: float) -> Update | None:
        """What this router publishes now; None if nothing has changed."""
        self.clock.now_s = now_s
        return self.own_state.take(now_s)

    def apply_update(self, router: int, sequence: int, update: Update, now_s: float) -> None:
        """Use what another router has published."""
        self.clock.now_s = now_s
        self.view.apply(router.to_bytes(), sequence, update, now_s)

    def known_blocks(self, index: int) -> int:
        """Blocks of a request's prompt that this router estimates as cached at some replica; 0 without a residency."""
        return self.residency.match(self.keys.keys_of(index).chain).blocks if self.uses_residency else 0

    def add_stored(self, index: int, replica: int, now_s: float) -> None:
        """Add the prompt of another router's request to a replica's estimated cached blocks."""
        if self.uses_residency:
            keys = self.keys.keys_of(index)
            self.residency.insert(self._targets[replica], keys.chain, now_s, keys.prompt_tokens)


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
