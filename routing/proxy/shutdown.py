"""Graceful shutdown of a router: running requests complete, and each connection closes after its last response.

Theory of operation. Idle connections close first. Then the router waits for incomplete requests while their bytes
arrive: a new connection has ``FIRST_BYTE_S`` for its first byte, a body may pause for as long, and after ``UPLOADS_S``
they are rejected. Then running requests may finish, and slow clients may receive complete responses while there are
bytes that a client's kernel has not acknowledged. All of it ends after ``drain_timeout_s``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from routing.http.sockets import unacknowledged_bytes
from routing.proxy.router import Router

FIRST_BYTE_S = 1.0  # without a byte of any incomplete request
UPLOADS_S = 5.0  # for incomplete requests altogether
LINGER_S = 2.0  # for requests on idle connections, if another process takes over the port
CLOSE_S = 0.2  # for connections to close whose responses have been received
POLL_S = 0.01


async def drain(router: Router, linger_s: float = 0.0) -> None:
    """Finish the requests that have begun. ``linger_s``: how long idle connections may send another request."""
    router.begin_draining()
    try:
        async with asyncio.timeout(router.limits.drain_timeout_s):
            await _wait_until(lambda: not router.clients, linger_s)
            _close_idle(router)
            await _receive_requests(router)
            await router.services.wait_until_idle()
            _close_idle(router, rejects_incomplete=True)
            await _wait_until(lambda: not any(unacknowledged_bytes(client.transport) for client in router.clients))
            await _wait_until(lambda: not router.clients, CLOSE_S)
    except TimeoutError:
        return


def _close_idle(router: Router, *, rejects_incomplete: bool = False) -> None:
    for client in list(router.clients):
        client.drain(rejects_incomplete=rejects_incomplete)


async def _receive_requests(router: Router) -> None:
    """Wait for incomplete requests, and reject those that take too long."""
    end = router.loop.time() + UPLOADS_S
    received, received_at = -1, 0.0
    while incomplete := [client for client in router.clients if client.awaits_request]:
        now, previously_received = router.loop.time(), received
        received = sum(client.received_bytes for client in incomplete)
        if received != previously_received:
            received_at = now
        if now > min(end, received_at + FIRST_BYTE_S):
            _close_idle(router, rejects_incomplete=True)
            return
        await asyncio.sleep(POLL_S)


async def _wait_until(is_met: Callable[[], bool], max_s: float = float("inf")) -> None:
    until = asyncio.get_running_loop().time() + max_s
    while not is_met() and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110 - rare; events would cost requests
        await asyncio.sleep(POLL_S)
