"""Placement of captured requests in a replay: by the routes of a pool's configuration.

The routes are the router's own: task groups with their policies and replicas, consistent-hash rings, load trackers and
residency indexes. Each modelled router has its own load tracker and residency index, as separate routers do. A captured
request has no text, so its keys are those that its router recorded; a policy with another tier-1 boundary than the
recorded one gets the recorded prefix too, except for the boundary ``bytes``, whose prefix is the id of the block in
which it ends.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

from routing.balancing.load_tracker import LoadTracker, Ticket
from routing.balancing.placement import record_dispatch
from routing.balancing.replicas import HealthRegistry
from routing.balancing.residency import RUN_TOKENS, Residency
from routing.balancing.routes import Route, RouteBuilder, uses_residency
from routing.balancing.strategies.strategy import MediaKey
from routing.prompt.hashing import PrefixHasher
from routing.replay.fast_engine import FastEngine, ModelledRequest
from routing.replay.routed import RUN_BLOCKS, Clock, record_response
from routing.schema import Boundary, PoolConfig
from routing.traffic.columns import Columns
from routing.types import BYTES_PER_TOKEN, NoReplicaError, PrefixHash, Reason

CONVERSATION_TOKENS = 1024  # identify a conversation without a session, after a tier-1 prefix of known length
_HEALTH = HealthRegistry()


class CapturedColumns:
    """Captured requests: their columns for engines, and what placement knows about each. Key 0: none."""

    __slots__ = ("columns", "group", "groups", "router", "session", "tier1")

    def __init__(
        self,
        columns: Columns,
        groups: list[str],
        tier1: array[int],
        session: array[int],
        group: array[int],
        router: array[int],
    ) -> None:
        self.columns = columns
        self.groups = groups
        self.tier1 = tier1
        self.session = session
        self.group = group
        self.router = router


class CapturedKeys:
    """Keys of one captured request, as strategies read them."""

    __slots__ = ("_boundary_blocks", "_captured", "_chain", "_index", "block_tokens", "prompt_tokens")

    media: MediaKey | None = None  # records have none

    def __init__(self, captured: CapturedColumns, index: int, boundary_blocks: int) -> None:
        self._captured = captured
        self._index = index
        self._boundary_blocks = boundary_blocks  # of the tier-1 prefix; 0: the recorded prefix
        self._chain: array[int] | None = None
        self.block_tokens = captured.columns.block_tokens
        self.prompt_tokens = captured.columns.prompt_tokens[index]

    @property
    def estimate(self) -> int:
        """The exact length of the prompt."""
        return self.prompt_tokens

    def add_surplus(self, tokens: int) -> None:
        """Do nothing: the length is exact."""

    @property
    def session(self) -> PrefixHash | None:
        """The recorded key of the session."""
        key = self._captured.session[self._index]
        return PrefixHash(key) if key else None

    @property
    def conversation(self) -> None:
        """None: what has named the session is not recorded."""
        return None

    @property
    def tier1(self) -> PrefixHash | None:
        """The recorded tier-1 prefix, or the block in which a boundary in bytes ends."""
        if self._boundary_blocks:
            return self._block(self._boundary_blocks)
        key = self._captured.tier1[self._index]
        return PrefixHash(key) if key else None

    @property
    def tier2(self) -> PrefixHash | None:
        """The session, else the block ``CONVERSATION_TOKENS`` after a tier-1 prefix in bytes, or after the start."""
        return self.session or self._block(self._boundary_blocks + -(-CONVERSATION_TOKENS // self.block_tokens))

    @property
    def chain(self) -> Sequence[int]:
        """Hashes of the whole blocks."""
        if self._chain is None:
            columns = self._captured.columns
            start = columns.starts[self._index]
            self._chain = columns.ids[start : start + self.prompt_tokens // self.block_tokens]
        return self._chain

    def _block(self, number: int) -> PrefixHash | None:
        """The id of block ``number``, counted from 1, or of the prompt's last one."""
        columns = self._captured.columns
        count = -(-self.prompt_tokens // self.block_tokens)
        return PrefixHash(columns.ids[columns.starts[self._index] + min(number, count) - 1]) if count else None


class ModelledRouter:
    """Routes of one router, with the loads and the residency that it alone knows."""

    __slots__ = ("_boundaries", "_clock", "_loads", "_own", "_residency", "_routes")

    def __init__(self, pool: PoolConfig, block_tokens: int, number: int, clock: Clock) -> None:
        self._clock = clock
        self._loads = LoadTracker(clock.read)
        residency = Residency(block_tokens, max(RUN_TOKENS, RUN_BLOCKS * block_tokens))
        builder = RouteBuilder(
            pool, PrefixHasher(""), self._loads, residency, seed=number, router=f"router-{number + 1}"
        )
        self._routes = {group.name: builder.route(group) for group in pool.groups}
        self._own = builder.route(None)
        self._residency = residency if uses_residency(pool) else None
        routes = [*self._routes.values(), self._own]
        self._boundaries = {route.group: _boundary_blocks(route, block_tokens) for route in routes}

    def place(self, captured: CapturedColumns, request: ModelledRequest, reasons: Counter[Reason]) -> str:
        """Choose a target for a request, as ``Placement.decide`` does, and record it as dispatched."""
        loads, now_s = self._loads, self._clock.now_s
        if loads.next_due_s <= now_s:
            loads.advance(now_s)
        route = self._routes.get(captured.groups[captured.group[request.index]], self._own)
        candidates = route.replicas.candidates(_HEALTH)
        if not candidates.loads:
            raise NoReplicaError(route.pool, route.group, "")
        keys = CapturedKeys(captured, request.index, self._boundaries[route.group])
        choice = route.strategy.choose(keys, candidates)
        reasons[choice.reason] += 1
        route.strategy.count_request(keys, choice.uncached_tokens(keys.prompt_tokens))
        request.placer_data = record_dispatch(choice, keys, loads, self._residency)
        return choice.target

    def record_response(self, request: ModelledRequest) -> None:
        """Account for a complete response."""
        record_response(request, self._residency)


class CapturedPlacer:
    """Places captured requests by a pool's configuration, on several modelled routers."""

    def __init__(self, captured: CapturedColumns, pool: PoolConfig, targets: Sequence[str], routers: int) -> None:
        self.reasons: Counter[Reason] = Counter()
        self._captured = captured
        self._clock = Clock()
        self._engine = {target: index for index, target in enumerate(targets)}
        block_tokens = captured.columns.block_tokens
        self._routers = [ModelledRouter(pool, block_tokens, number, self._clock) for number in range(routers)]

    def place(self, request: ModelledRequest, _engines: Sequence[FastEngine], now_s: float) -> int:
        """The engine that the request's router chooses."""
        self._clock.now_s = now_s
        return self._engine[self._router_of(request).place(self._captured, request, self.reasons)]

    def on_first_token(self, request: ModelledRequest, now_s: float) -> None:
        """The router receives the first byte of the response."""
        self._clock.now_s = now_s
        ticket: Ticket = request.placer_data
        ticket.record_first_byte()

    def on_ended(self, request: ModelledRequest, now_s: float) -> None:
        """The response is complete."""
        self._clock.now_s = now_s
        self._router_of(request).record_response(request)

    def _router_of(self, request: ModelledRequest) -> ModelledRouter:
        return self._routers[self._captured.router[request.index] % len(self._routers)]


def _boundary_blocks(route: Route, block_tokens: int) -> int:
    """Blocks of a route's tier-1 prefix if its boundary is a number of bytes; 0 for any other."""
    if route.tier1.boundary is not Boundary.BYTES:
        return 0
    return -(-route.tier1.boundary_bytes // (block_tokens * BYTES_PER_TOKEN))
