"""Tell the control plane that this router exists and what it runs; the control plane pushes what it should run.

One loop, beside serving and never in its way: a control plane that is away, slow or wrong costs longer pauses, and a
line in the log for each kind of problem.
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
NEWS_PAUSE_S = 1.0  # at least, between two announcements that bring events
MAX_EVENTS = 200  # in one
FIRST_PAUSE_S = 0.5  # after a failure; doubled up to a heartbeat
WILDCARDS = frozenset({"0.0.0.0", "::"})  # noqa: S104 - what one may be bound to, and nobody can connect to
MAX_ANSWER_BYTES = 1 << 16  # a control plane says a few words
TIMEOUT = aiohttp.ClientTimeout(total=5.0, connect=2.0)


@dataclass(frozen=True, slots=True)
class Announcement:
    """Where to announce, and as what. Where a URL's host stands for all of this machine's addresses, the control plane
    is told the one that this machine reaches it from.
    """

    control_plane_url: str
    admin_url: str
    data_url: str
    version: str
    token: str | None


async def announce_forever(view: View, what: Announcement, spool: EventSpool) -> None:
    """Announce for ever, and hand over what happened; a heartbeat once the control plane has accepted."""
    url = what.control_plane_url.rstrip("/") + "/api/v1/routers/announce"
    headers = {"Authorization": f"Bearer {what.token}"} if what.token else {}
    failures = 0
    said: set[str | None] = set()  # since the control plane last began or ceased to accept; None: that it accepts
    async with aiohttp.ClientSession(timeout=TIMEOUT, headers=headers) as session:
        while True:
            waiting = len(spool)
            spool.news.clear()  # what comes from now on is news, also while this is told
            problem = await _announce(session, url, view, what, spool)
            if problem not in said:
                said = {None} if problem is None else {*said, problem} - {None}
                _log(problem, failures)
            failures = 0 if problem is None else failures + 1
            if failures:
                await asyncio.sleep(_pause_s(failures))
            else:
                await _until_news(spool, has_more=0 < len(spool) < waiting)


async def _until_news(spool: EventSpool, *, has_more: bool) -> None:
    """A heartbeat's time, or less where there are events to tell; ``has_more``: some were taken, and some are left."""
    await asyncio.sleep(min(NEWS_PAUSE_S, HEARTBEAT_S))
    if not has_more:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, _pause_s(0) - NEWS_PAUSE_S)):
                await spool.news.wait()


async def _announce(
    session: aiohttp.ClientSession, url: str, view: View, what: Announcement, spool: EventSpool
) -> str | None:
    """Say it once; why it was not accepted, or None if it was."""
    happened = spool.oldest(MAX_EVENTS)
    body = _body(view, what, happened)
    try:
        for name in ("admin_url", "data_url"):
            body[name] = await reachable(body[name], what.control_plane_url)
        async with session.post(url, json=body, allow_redirects=False) as response:
            if response.status != 200:
                return f"status {response.status}"
            answer = await _short_json(response)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:  # the last one of a host, or of the token
        return type(error).__name__
    # A control plane that does not say so is older than events, and took none.
    if isinstance(answer, dict) and answer.get("events_taken") == len(happened):
        spool.acknowledge(happened)
    return None


def _body(view: View, what: Announcement, happened: list[RouterEvent]) -> dict[str, Any]:
    """What is said."""
    applied, warming = view.store.applied, view.warming
    body = {
        "name": view.name,
        "boot": view.boot,
        "version": what.version,
        "admin_url": what.admin_url,
        "data_url": what.data_url,
        "revision": applied.snapshot.revision if applied else None,
        "sha256": applied.snapshot.sha256 if applied else None,
        "signature": view.store.signature,
        "sent_at": time.time(),  # by which the control plane knows how our clock goes
        "events": msgspec.to_builtins(happened),
    }
    return body | {"warming": warming} if warming else body


async def _short_json(response: aiohttp.ClientResponse) -> Any:
    """What it says; ValueError for what is no JSON, or too long for an answer."""
    body = b""
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            raise ValueError("too long")
    try:
        return json.loads(body)
    except RecursionError:
        raise ValueError("too deep") from None


async def reachable(url: str, control_plane_url: str) -> str:
    """A URL of ours as the control plane can use it; OSError while the control plane's name does not resolve."""
    parts = urlsplit(url)
    if parts.hostname not in WILDCARDS:
        return url
    there = urlsplit(control_plane_url)
    port = there.port or (443 if there.scheme == "https" else 80)
    found = await asyncio.get_running_loop().getaddrinfo(there.hostname, port, type=socket.SOCK_DGRAM)
    family, _, _, _, address = found[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing: it only chooses the way
        own = probe.getsockname()[0]
    host = f"[{own}]" if ":" in own else own
    return urlunsplit(parts._replace(netloc=f"{host}:{parts.port}"))


def _pause_s(failures: int) -> float:
    """A heartbeat's time, or less after a failure: 0.5 s, 1 s, 2 s ..., all with jitter so that routers spread out."""
    pause_s = HEARTBEAT_S if failures == 0 else min(HEARTBEAT_S, FIRST_PAUSE_S * 2 ** min(failures - 1, 10))
    return pause_s * random.uniform(0.8, 1.2)  # noqa: S311 - no secret


def _log(problem: str | None, failures: int) -> None:
    if problem is None:
        event(logger, "control_plane_accepts", after_failures=failures)
    else:
        event(logger, "control_plane_unreachable", level=logging.WARNING, problem=problem)
