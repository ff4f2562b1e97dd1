"""Requests over a pool's or a task group's limit wait here, and not at a replica.

Theory of operation. A request goes through its task group's gate first and then through its pool's, so a group that is
over its limit does not fill the pool's line. Where no pool has limits there are no gates, and a request asks one
attribute. Whoever has to wait is placed anew when its turn comes, for by then the loads are others. It is told in a
turn of its own of the event loop, so that one end cannot set off a chain of ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final, Protocol

from routing.http.errors import RejectedRequestError
from routing.limits.concurrency import ConcurrencyLimiter, RejectionCause, SharedLimits
from routing.observability.exposition import PREFIX, Histogram, header, labels
from routing.schema import LEAST_URGENT, ConcurrencyConfig, RouterConfig

QueueKey = tuple[str, str]  # pool, and task group or "" for the pool's own

_SAID: Final = {
    RejectionCause.FULL: "too many requests are waiting already",
    RejectionCause.DISPLACED: "more urgent requests are waiting",
    RejectionCause.TIMEOUT: "the request has waited for too long",
}


class QueuedRequest(Protocol):
    """Who wants to be sent to a replica."""

    def on_admitted(self) -> None:
        """It may be, after it had to wait."""
        ...

    def on_rejected(self, refusal: RejectedRequestError) -> None:
        """It may not be."""
        ...


class QueuePermit:
    """One request's way through its gates. Its end must be told by ``leave``."""

    __slots__ = ("_began", "_gates", "_guest", "_loop", "_passed", "priority")

    def __init__(
        self, admission_queues: list[tuple[ConcurrencyLimiter, Histogram]], guest: QueuedRequest, priority: int
    ) -> None:
        self.priority = priority
        self._gates = admission_queues
        self._guest: QueuedRequest | None = guest
        self._loop = asyncio.get_running_loop()
        self._passed = 0  # gates, in order
        self._began = self._loop.time()

    def go(self) -> bool:
        """Go on; False if it has to wait or was turned away."""
        while self._passed < len(self._gates):
            if not self._gates[self._passed][0].acquire(self):
                return False
            self._passed += 1
        return True

    def admit(self) -> None:
        """One gate more is passed."""
        self._gates[self._passed][1].observe(self._loop.time() - self._began)
        self._passed += 1
        self._loop.call_soon(self._go_on)

    def on_rejected(self, gate: ConcurrencyLimiter, why: RejectionCause) -> None:
        """No way through."""
        status = 503 if why is RejectionCause.TIMEOUT else 429
        refusal = RejectedRequestError(status, _SAID[why], retry_after_s=gate.retry_after_s)
        self._loop.call_soon(self._tell, refusal)

    def leave(self) -> None:
        """The request is over, wherever it stood."""
        guest, self._guest = self._guest, None
        if guest is None:
            return
        if self._passed < len(self._gates):
            self._gates[self._passed][0].cancel(self)
        for gate, _ in self._gates[: self._passed]:
            gate.release()

    def _go_on(self) -> None:
        self._began = self._loop.time()
        if self._guest is not None and self.go():
            self._guest.on_admitted()

    def _tell(self, refusal: RejectedRequestError) -> None:
        if self._guest is not None:
            self._guest.on_rejected(refusal)


class AdmissionQueues:
    """All gates of one router. ``share``: this process's part, where several share a port."""

    def __init__(self) -> None:
        self.share = 1.0
        self._loop = asyncio.get_running_loop()
        self._gates: dict[QueueKey, tuple[ConcurrencyLimiter, Histogram]] = {}
        self._priorities: dict[QueueKey, int] = {}

    def configure(self, config: RouterConfig, shared: SharedLimits | None = None) -> bool:
        """Go by this configuration; whether there are any gates now. Who waits at one that is gone is let in."""
        wanted = dict(configured_queues(config))
        for key in self._gates.keys() - wanted.keys():
            self._gates.pop(key)[0].remove_limit()
        for key, concurrency in wanted.items():
            if key in self._gates:
                self._gates[key][0].configure(concurrency)
            else:
                places = None if shared is None else shared.permits(queue_name(key))
                share = self.share if places is None else 1.0
                self._gates[key] = ConcurrencyLimiter(concurrency, self._loop.time, share, places), Histogram()
        self._priorities = {(pool.name, group.name): group.priority for pool in config.pools for group in pool.groups}
        return bool(wanted)

    def permit(self, guest: QueuedRequest, pool: str, group: str, priority: int | None) -> QueuePermit:
        """The way for a request. A client may ask for less urgency than its group has, and not for more."""
        keys = ((pool, group), (pool, "")) if group else ((pool, ""),)
        own = self._priorities.get((pool, group), 0)
        urgency = own if priority is None else min(max(own, priority), LEAST_URGENT)
        return QueuePermit([self._gates[key] for key in keys if key in self._gates], guest, urgency)

    def admit(self) -> None:
        """Let in who has room by now, because it was given back in another process."""
        for gate, _ in self._gates.values():
            gate.admit()

    def expire(self) -> None:
        """Turn away who has waited for too long."""
        for gate, _ in self._gates.values():
            gate.expire()

    def lines(self, *, is_fine: bool = False) -> Iterator[str]:
        """Prometheus text; histograms with all their edges where ``is_fine``."""
        if not self._gates:
            return
        named = [(labels(pool=pool, group=group), *gate) for (pool, group), gate in self._gates.items()]
        yield from header("queue_running", "gauge", "Requests that a limit has let in and that have not ended.")
        yield from (f"{PREFIX}queue_running{{{where}}} {gate.running}" for where, gate, _ in named)
        yield from header("queue_waiting", "gauge", "Requests that wait for a limit.")
        yield from (f"{PREFIX}queue_waiting{{{where}}} {gate.waiting}" for where, gate, _ in named)
        yield from header("queue_seconds", "histogram", "How long requests had waited that were let in.")
        for where, _, waits in named:
            yield from waits.lines(f"{PREFIX}queue_seconds", where, is_fine=is_fine)
        yield from header("queue_refused_total", "counter", "Requests that a limit turned away, by why.")
        for where, gate, _ in named:
            for why, count in gate.rejected.items():
                yield f'{PREFIX}queue_refused_total{{{where},cause="{why}"}} {count}'


def queue_name(key: QueueKey) -> str:
    """By which processes of a router find the room that they share."""
    return "/".join(key)


def configured_queues(config: RouterConfig) -> Iterator[tuple[QueueKey, ConcurrencyConfig]]:
    for pool in config.pools:
        if pool.concurrency is not None:
            yield (pool.name, ""), pool.concurrency
        for group in pool.groups:
            if group.concurrency is not None:
                yield (pool.name, group.name), group.concurrency
