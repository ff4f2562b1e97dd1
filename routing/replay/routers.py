"""Several routers in a replay, behind a load balancer that does not know sessions.

Each router has its own load tracker, residency index and measured rates, as separate routers do. Each request arrives
at a router at random, or at one that knows least of its prompt, which is the worst case.

Sharing. With ``none``, a router knows only the requests that it placed. With ``events``, every router also adds to its
residency index what each engine has stored, whichever router placed the request: at the first token, when the prompt is
in the engine's cache, and ``delay_s`` later. Evictions follow from the same LRU of the engine's true capacity as for
its own requests; loads are not shared. With ``state``, routers exchange the updates of ``routing/sharing``: loads and
placed prompts. Updates are taken every ``PERIOD_S``, and every change is known everywhere ``delay_s`` after it happened
at the latest. None is lost, so whole updates are not needed.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from enum import StrEnum
from math import inf
from typing import Final

from routing.replay.fast_engine import FastEngine, FastEngineConfig, ModelledRequest
from routing.replay.routed import KeyIndex, StrategyPlacer
from routing.schema import Settings
from routing.sharing.view import PERIOD_S, Update
from routing.traffic.columns import Columns
from routing.types import PrefixHash, Reason

DELAYS_S: Final = {"none": 0.0, "events": 0.0, "state": 0.05}  # unless one is given


class Sharing(StrEnum):
    """What routers know of each other's requests."""

    NONE = "none"
    EVENTS = "events"
    STATE = "state"


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
        delay_s: float | None = None,
    ) -> None:
        self._routers = routers
        self._sharing = sharing
        self._arrivals = arrivals
        self._delay_s = DELAYS_S[sharing] if delay_s is None else delay_s
        self._random = random.Random("router of a request")  # noqa: S311
        self._router_of: dict[int, int] = {}  # by request in flight
        self._engine_of: dict[int, int] = {}  # by request without a first token
        self._events: deque[tuple[float, int, int, int]] = deque()  # (due, request, engine, router that knows already)
        self._updates = ExchangedUpdates(routers, self._delay_s) if sharing is Sharing.STATE else None

    @property
    def reasons(self) -> Counter[Reason]:
        """Decisions of all routers by reason."""
        return sum((router.reasons for router in self._routers), Counter[Reason]())

    def place(self, request: ModelledRequest, engines: Sequence[FastEngine], now_s: float) -> int:
        """The engine that the request's router chooses."""
        self._deliver(now_s)
        number = self._router_of[request.index] = self._choose_router(request.index)
        engine = self._engine_of[request.index] = self._routers[number].place(request, engines, now_s)
        self._on_change(number, now_s)
        return engine

    def on_first_token(self, request: ModelledRequest, now_s: float) -> None:
        """The router of the request receives the first byte; with ``events`` the others hear of its blocks."""
        self._deliver(now_s)
        number, engine = self._router_of[request.index], self._engine_of.pop(request.index)
        self._routers[number].on_first_token(request, now_s)
        self._on_change(number, now_s)
        if self._sharing is Sharing.EVENTS:
            self._events.append((now_s + self._delay_s, request.index, engine, number))

    def on_ended(self, request: ModelledRequest, now_s: float) -> None:
        """The response is complete."""
        self._deliver(now_s)
        number = self._router_of.pop(request.index)
        self._routers[number].on_ended(request, now_s)
        self._on_change(number, now_s)

    def _choose_router(self, index: int) -> int:
        """The router at which a request arrives."""
        count = len(self._routers)
        if self._arrivals is Arrivals.RANDOM or count == 1:
            return self._random.randrange(count)
        known = [router.known_blocks(index) for router in self._routers]
        least = min(known)
        return self._random.choice([number for number, blocks in enumerate(known) if blocks == least])

    def _on_change(self, number: int, now_s: float) -> None:
        if self._updates is not None:
            self._updates.on_change(number, now_s)

    def _deliver(self, now_s: float) -> None:
        """Deliver the events and updates that have arrived by now."""
        if self._updates is not None:
            self._updates.advance(now_s)
        events = self._events
        while events and events[0][0] <= now_s:
            due_s, index, engine, number = events.popleft()
            for other, router in enumerate(self._routers):
                if other != number:
                    router.add_stored(index, engine, due_s)


class ExchangedUpdates:
    """The updates that modelled routers send each other; each arrives everywhere at the same time."""

    def __init__(self, routers: Sequence[StrategyPlacer], delay_s: float) -> None:
        self._routers = routers
        self._period_s = min(PERIOD_S, delay_s)
        self._travel_s = delay_s - self._period_s
        self._due_s = [inf] * len(routers)  # when each router takes its next update
        self._next_due_s = inf
        self._travelling: deque[tuple[float, int, int, Update]] = deque()  # (arrival, router, sequence, update)
        self.taken = 0
        for router in routers:
            router.own_state.set_peers(len(routers) - 1)

    def on_change(self, number: int, now_s: float) -> None:
        """A router's state has changed."""
        if self._due_s[number] == inf:
            self._set_due(number, now_s + self._period_s)

    def advance(self, now_s: float) -> None:
        """Take and deliver all updates until now, in order of time."""
        travelling = self._travelling
        while True:
            arrival_s = travelling[0][0] if travelling else inf
            if min(arrival_s, self._next_due_s) > now_s:
                return
            if self._next_due_s <= arrival_s:
                self._take(self._due_s.index(self._next_due_s), self._next_due_s)
                continue
            _, number, sequence, update = travelling.popleft()
            for other, router in enumerate(self._routers):
                if other != number:
                    router.apply_update(number, sequence, update, arrival_s)

    def _take(self, number: int, now_s: float) -> None:
        router = self._routers[number]
        update = router.take_update(now_s)
        if update is not None:
            self.taken += 1
            self._travelling.append((now_s + self._travel_s, number, self.taken, update))
        # a period of 0 publishes every change at once, but not the progress of prefill between changes
        self._set_due(number, now_s + self._period_s if router.own_state.has_waiting and self._period_s else inf)

    def _set_due(self, number: int, due_s: float) -> None:
        self._due_s[number] = due_s
        self._next_due_s = min(self._due_s)


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
