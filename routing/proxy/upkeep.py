"""What happens by the clock, four times a second, whether requests come or not.

The retry budget fills up, replicas that are out are probed, shares of those that join grow, warm-ups go on, waits in
line end, plain requests count as prefilled in time, and replicas that hang or crawl are found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from routing.proxy.loop.background import Background
from routing.proxy.loop.periodic import Periodic

if TYPE_CHECKING:
    from routing.proxy.router import Router

TICK_S = 0.25


class Upkeep:
    """One router's."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._ticks = Periodic(Background.UPKEEP, TICK_S, self._tick)

    def start(self) -> None:
        """Begin, if that has not happened yet."""
        self._ticks.start()

    def close(self) -> None:
        """No more of it."""
        self._ticks.stop()

    def _tick(self) -> None:
        router = self._router
        now = router.loop.time()
        router.retry_budget.tick(now, router.requests)
        router.breakers.advance()
        router.loads.advance(router.loads.clock())
        router.slow_starts.advance(now)
        if router.warm_ups is not None:
            router.warm_ups.tick(now)
        if router.gates is not None:
            router.gates.expire()
        if router.serving is not None:
            router.watch.look(router.serving, now)
