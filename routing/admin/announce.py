"""Announces this router and its active configuration to the control plane, which pushes configurations in return.

One background loop: an unreachable, slow or faulty control plane causes longer pauses and one log line for each kind of
problem, and does not affect requests.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aiohttp
import msgspec

from routing.admin.api import View
from routing.admin.events import EventSpool, RouterEvent
from routing.log import event

logger = logging.getLogger(__name__)

HEARTBEAT_S = 10.0
MIN_PAUSE_S = 1.0  # between two announcements with events
MAX_EVENTS = 200  # per announcement
FIRST_PAUSE_S = 0.5  # after a failure; doubled up to a heartbeat
WILDCARDS = frozenset({"0.0.0.0", "::"})  # noqa: S104 - addresses to bind to that no client can connect to
MAX_RESPONSE_BYTES = 1 << 16
TIMEOUT = aiohttp.ClientTimeout(total=5.0, connect=2.0)


@dataclass(frozen=True, slots=True)
class Announcement:
    """Static fields of an announcement. If the host of a URL is a wildcard address, the control plane gets the address
    from which this machine connects to it.
    """

    control_plane_url: str
    admin_url: str
    data_url: str
    version: str
    token: str | None


async def announce_forever(view: View, announcement: Announcement, spool: EventSpool) -> None:
    """Announce at every heartbeat and when there are events; sooner after a failure."""
    url = announcement.control_plane_url.rstrip("/") + "/api/v1/routers/announce"
    headers = {"Authorization": f"Bearer {announcement.token}"} if announcement.token else {}
    failures = 0
    logged: set[str | None] = set()  # problems since the control plane last accepted; {None}: it accepts
    async with aiohttp.ClientSession(timeout=TIMEOUT, headers=headers) as session:
        while True:
            waiting = len(spool)
            spool.has_new_events.clear()  # before sending, so that events added meanwhile count as new
            problem = await _announce(session, url, view, announcement, spool)
            if problem not in logged:
                logged = {None} if problem is None else {*logged, problem} - {None}
                if problem is None:
                    event(logger, "control_plane_accepts", after_failures=failures)
                else:
                    event(logger, "control_plane_unreachable", level=logging.WARNING, problem=problem)
            failures = 0 if problem is None else failures + 1
            if failures:
                await asyncio.sleep(_pause_s(failures))
            else:
                await _wait_for_events(spool, has_more=0 < len(spool) < waiting)


async def _wait_for_events(spool: EventSpool, *, has_more: bool) -> None:
    """Wait for a heartbeat, or less if there are new events or more than one announcement can carry (``has_more``)."""
    await asyncio.sleep(min(MIN_PAUSE_S, HEARTBEAT_S))
    if not has_more:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, _pause_s(0) - MIN_PAUSE_S)):
                await spool.has_new_events.wait()


async def _announce(
    session: aiohttp.ClientSession, url: str, view: View, announcement: Announcement, spool: EventSpool
) -> str | None:
    """Send one announcement; why it was not accepted, or None if it was."""
    events = spool.oldest(MAX_EVENTS)
    body = _body(view, announcement, events)
    try:
        for name in ("admin_url", "data_url"):
            body[name] = await reachable_url(body[name], announcement.control_plane_url)
        async with session.post(url, json=body, allow_redirects=False) as response:
            if response.status != 200:
                return f"status {response.status}"
            content = await _read_json(response)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:  # ValueError also for a bad host or token
        return type(error).__name__
    if isinstance(content, dict) and content.get("acknowledged_events") == len(events):
        spool.acknowledge(events)
    return None


def _body(view: View, announcement: Announcement, events: list[RouterEvent]) -> dict[str, Any]:
    applied, warming = view.store.applied, view.warming
    body = {
        "name": view.name,
        "boot": view.boot,
        "version": announcement.version,
        "admin_url": announcement.admin_url,
        "data_url": announcement.data_url,
        "revision": applied.snapshot.revision if applied else None,
        "sha256": applied.snapshot.sha256 if applied else None,
        "signature": view.store.signature,
        "sent_at": time.time(),  # shows the control plane the skew of this clock
        "events": msgspec.to_builtins(events),
    }
    return body | {"warming": warming} if warming else body


async def _read_json(response: aiohttp.ClientResponse) -> Any:
    """The body; ValueError if it is not JSON or too long."""
    body = b""
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_RESPONSE_BYTES:
            raise ValueError("too long")
    try:
        return json.loads(body)
    except RecursionError:
        raise ValueError("too deep") from None


async def reachable_url(url: str, control_plane_url: str) -> str:
    """A URL of this router as the control plane can use it; OSError while the control plane's name does not resolve."""
    parts = urlsplit(url)
    if parts.hostname not in WILDCARDS:
        return url
    target = urlsplit(control_plane_url)
    port = target.port or (443 if target.scheme == "https" else 80)
    addresses = await asyncio.get_running_loop().getaddrinfo(target.hostname, port, type=socket.SOCK_DGRAM)
    family, _, _, _, address = addresses[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing, but chooses the local address
        own_address = probe.getsockname()[0]
    host = f"[{own_address}]" if ":" in own_address else own_address
    return urlunsplit(parts._replace(netloc=f"{host}:{parts.port}"))


def _pause_s(failures: int) -> float:
    """A heartbeat, or less after a failure (0.5 s, 1 s, 2 s ...), with jitter so that routers spread out."""
    pause_s = HEARTBEAT_S if failures == 0 else min(HEARTBEAT_S, FIRST_PAUSE_S * 2 ** min(failures - 1, 10))
    return pause_s * random.uniform(0.8, 1.2)  # noqa: S311 - no secret
