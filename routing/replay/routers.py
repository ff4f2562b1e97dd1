"""Several routers in a replay, behind a load balancer that does not know sessions.

Each router has its own load tracker, residency index and measured rates, as separate routers do. Each request arrives
at a router at random, or at one that knows least of its prompt, which is the worst case.

Sharing. With ``none``, a router knows only the requests that it placed. With ``events``, every router also adds to its
residency index what each engine has stored, whichever router placed the request: at the first token, when the prompt is
in the engine's cache, and ``event_delay_s`` later. Evictions follow from the same LRU of the engine's true capacity as
for its own requests. Loads are not shared.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from enum import StrEnum

from routing.replay.fast_engine import FastEngine, FastEngineConfig, ModelledRequest
from routing.replay.routed import KeyIndex, StrategyPlacer
from routing.schema import Settings
from routing.traffic.columns import Columns
from routing.types import PrefixHash, Reason


class Sharing(StrEnum):
    """What routers know of each other's requests."""

    NONE = "none"
    EVENTS = "events"


class Arrivals(StrEnum):
    """Which router gets a request."""

    RANDOM = "random"
    WORST = "worst"  # the one that knows the fewest blocks of the prompt; at random among equals


class SeveralRouters:
    """Places requests on several modelled routers, at least one. Random choices are seeded."""

    def __init__(
        self,
        routers: Sequence[StrategyPlacer],
        sharing: Sharing = Sharing.NONE,
        arrivals: Arrivals = Arrivals.RANDOM,
        event_delay_s: float = 0.0,
    ) -> None:
        self._routers = routers
        self._sharing = sharing
        self._arrivals = arrivals
        self._event_delay_s = event_delay_s
        self._random = random.Random("router of a request")  # noqa: S311
        self._router_of: dict[int, int] = {}  # by request in flight
        self._engine_of: dict[int, int] = {}  # by request without a first token
        self._events: deque[tuple[float, int, int, int]] = deque()  # (due, request, engine, router that knows already)

    @property
    def reasons(self) -> Counter[Reason]:
        """Decisions of all routers by reason."""
        return sum((router.reasons for router in self._routers), Counter[Reason]())

    def place(self, request: ModelledRequest, engines: Sequence[FastEngine], now_s: float) -> int:
        """The engine that the request's router chooses."""
        self._deliver_events(now_s)
        number = self._router_of[request.index] = self._choose_router(request.index)
        engine = self._engine_of[request.index] = self._routers[number].place(request, engines, now_s)
        return engine

    def on_first_token(self, request: ModelledRequest, now_s: float) -> None:
        """The router of the request receives the first byte; with ``events`` the others hear of its blocks."""
        number, engine = self._router_of[request.index], self._engine_of.pop(request.index)
        self._routers[number].on_first_token(request, now_s)
        if self._sharing is Sharing.EVENTS:
            self._events.append((now_s + self._event_delay_s, request.index, engine, number))

    def on_ended(self, request: ModelledRequest, now_s: float) -> None:
        """The response is complete."""
        self._routers[self._router_of.pop(request.index)].on_ended(request, now_s)

    def _choose_router(self, index: int) -> int:
        """The router at which a request arrives."""
        count = len(self._routers)
        if self._arrivals is Arrivals.RANDOM or count == 1:
            return self._random.randrange(count)
        known = [router.known_blocks(index) for router in self._routers]
        least = min(known)
        return self._random.choice([number for number, blocks in enumerate(known) if blocks == least])

    def _deliver_events(self, now_s: float) -> None:
        """Add the blocks of events that are due by now to the indexes of all other routers."""
        events = self._events
        while events and events[0][0] <= now_s:
            due_s, index, engine, number = events.popleft()
            for other, router in enumerate(self._routers):
                if other != number:
                    router.add_stored(index, engine, due_s)


def router_placers(
    settings: Settings,
    columns: Columns,
    config: FastEngineConfig,
    replicas: int,
    routers: int,
    sessions: Sequence[PrefixHash] | None = None,
) -> list[StrategyPlacer]:
    """``routers`` independent routers with one policy and ``replicas`` equal engines; UnsupportedInTracesError.

    ``sessions``: the key of each request's session; None: requests have none.
    """
    keys = KeyIndex(settings, columns, sessions)
    return [StrategyPlacer(settings, columns, config, replicas, number, keys) for number in range(routers)]
