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

from routing.balancing.replicas import HealthRegistry
from routing.balancing.routes import Route, RouteBuilder, uses_residency
from routing.prompt.hashing import PrefixHasher
from routing.replay.fast_engine import FastEngine, ModelledRequest
from routing.replay.routed import ModelledKeys, ModelledRouter
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

    def keys_of(self, index: int, boundary_blocks: int) -> ModelledKeys:
        """Keys of one request. ``boundary_blocks``: of the tier-1 prefix; 0: the recorded prefix."""
        block_tokens = self.columns.block_tokens
        session, tier1 = _known(self.session[index]), _known(self.tier1[index])
        if boundary_blocks:
            tier1 = self._block(index, boundary_blocks)
        return ModelledKeys(
            self.columns.ids,
            self.columns.starts[index],
            self.columns.prompt_tokens[index],
            block_tokens,
            tier1=tier1,
            tier2=session or self._block(index, boundary_blocks + -(-CONVERSATION_TOKENS // block_tokens)),
            session=session,  # what has named it is not recorded: it is no conversation
        )

    def _block(self, index: int, number: int) -> PrefixHash | None:
        """The id of block ``number`` of a prompt, counted from 1, or of its last one."""
        columns = self.columns
        count = -(-columns.prompt_tokens[index] // columns.block_tokens)
        return PrefixHash(columns.ids[columns.starts[index] + min(number, count) - 1]) if count else None


def _known(key: int) -> PrefixHash | None:
    return PrefixHash(key) if key else None


class CapturedRouter(ModelledRouter):
    """A router that places captured requests by the routes of a pool's configuration."""

    def __init__(self, captured: CapturedColumns, pool: PoolConfig, targets: Sequence[str], number: int) -> None:
        block_tokens = captured.columns.block_tokens
        super().__init__(block_tokens)
        builder = RouteBuilder(
            pool, PrefixHasher(""), self.loads, self.residency, seed=number, router=f"router-{number + 1}"
        )
        self.uses_residency = uses_residency(pool)
        self._captured = captured
        self._routes = {group.name: builder.route(group) for group in pool.groups}
        self._own = builder.route(None)
        self._engine = {target: index for index, target in enumerate(targets)}
        routes = [*self._routes.values(), self._own]
        self._boundaries = {route.group: _boundary_blocks(route, block_tokens) for route in routes}

    def place(self, request: ModelledRequest, _engines: Sequence[FastEngine], now_s: float) -> int:
        """The engine that the route of the request's task group chooses, as ``Placement.decide`` does."""
        self.clock.now_s = now_s
        captured = self._captured
        route = self._routes.get(captured.groups[captured.group[request.index]], self._own)
        candidates = route.replicas.candidates(_HEALTH)
        if not candidates.loads:
            raise NoReplicaError(route.pool, route.group, "")
        keys = captured.keys_of(request.index, self._boundaries[route.group])
        return self._engine[self.dispatch(request, route.strategy, candidates, keys)]


class CapturedPlacer:
    """Places captured requests, each at the modelled router of the one that it was sent to."""

    def __init__(self, captured: CapturedColumns, pool: PoolConfig, targets: Sequence[str], routers: int) -> None:
        self._router_of = captured.router
        self._routers = [CapturedRouter(captured, pool, targets, number) for number in range(routers)]

    @property
    def reasons(self) -> Counter[Reason]:
        """Decisions of all routers by reason."""
        return sum((router.reasons for router in self._routers), Counter[Reason]())

    def _router(self, request: ModelledRequest) -> CapturedRouter:
        return self._routers[self._router_of[request.index] % len(self._routers)]

    def place(self, request: ModelledRequest, engines: Sequence[FastEngine], now_s: float) -> int:
        """The engine that the request's router chooses."""
        return self._router(request).place(request, engines, now_s)

    def on_first_token(self, request: ModelledRequest, now_s: float) -> None:
        """The router receives the first byte of the response."""
        self._router(request).on_first_token(request, now_s)

    def on_ended(self, request: ModelledRequest, now_s: float) -> None:
        """The response is complete."""
        self._router(request).on_ended(request, now_s)


def _boundary_blocks(route: Route, block_tokens: int) -> int:
    """Blocks of a route's tier-1 prefix if its boundary is a number of bytes; 0 for any other."""
    if route.tier1.boundary is not Boundary.BYTES:
        return 0
    return -(-route.tier1.boundary_bytes // (block_tokens * BYTES_PER_TOKEN))
