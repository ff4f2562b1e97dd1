"""How a router stops: what is here or was begun is answered, each as its connection's last.

Theory of operation. Idle connections close first. Requests that are not whole are waited for while bytes of them come:
a connection that was just accepted has ``OWED_S`` for its first, a body may pause for as long, and after ``UPLOADS_S``
it has taken too long. Then what runs may finish, and complete answers may be taken by clients that are slow: as long as
there are bytes that a client's kernel has not acknowledged. All of it ends at ``drain_timeout_s``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from routing.http.sockets import untaken_bytes
from routing.proxy.router import Router

OWED_S = 1.0  # without a byte of requests that are not whole
UPLOADS_S = 5.0  # for such requests, however they move
LINGER_S = 2.0  # for requests on idle connections, where another process goes on in its place
LAST_WORDS_S = 0.2  # in which connections end whose answers have been taken
LOOK_S = 0.01


async def drain(router: Router, linger_s: float = 0.0) -> None:
    """Let what is here end. ``linger_s``: how long idle connections may bring another request."""
    router.begin_draining()
    try:
        async with asyncio.timeout(router.limits.drain_timeout_s):
            await _wait_until(lambda: not router.clients, linger_s)
            _close_idle(router)
            await _requests_come(router)
            await router.services.no_requests()
            _close_idle(router, rejects_incomplete=True)
            await _wait_until(lambda: not any(untaken_bytes(client.transport) for client in router.clients))
            await _wait_until(lambda: not router.clients, LAST_WORDS_S)
    except TimeoutError:
        return


def _close_idle(router: Router, *, rejects_incomplete: bool = False) -> None:
    for client in list(router.clients):
        client.drain(rejects_incomplete=rejects_incomplete)


async def _requests_come(router: Router) -> None:
    """Wait for requests that are not whole, and turn away what has not come then."""
    end = router.loop.time() + UPLOADS_S
    came, moved_at = -1, 0.0
    while owed := [client for client in router.clients if client.awaits_request]:
        now, before = router.loop.time(), came
        came = sum(client.received_bytes for client in owed)
        if came != before:
            moved_at = now
        if now > min(end, moved_at + OWED_S):
            _close_idle(router, rejects_incomplete=True)
            return
        await asyncio.sleep(LOOK_S)


async def _wait_until(holds: Callable[[], bool], most_s: float = float("inf")) -> None:
    until = asyncio.get_running_loop().time() + most_s
    while not holds() and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110 - rare, and nothing to tell anybody on the path
        await asyncio.sleep(LOOK_S)
