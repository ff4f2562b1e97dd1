"""Waiting for events: a list that is answered when there is something in it, and a stream that goes on.

Who waits holds a seat of this process, of which there are ``SEATS``, and no database connection. A stream looks again
at who is listening before each event that it sends, and every few seconds: it ends when their token or session does.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from asgiref.sync import sync_to_async
from django.contrib.auth.models import User
from django.core.handlers.asgi import ASGIRequest
from django.db import DatabaseError
from django.db.models import QuerySet
from django.http import StreamingHttpResponse
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.utils.encoders import JSONEncoder

from controlplane.access.actor import current_actor, visible
from controlplane.access.rules import opens
from controlplane.api.exceptions import TooManyWaiting
from controlplane.api.serializers.routers import EventSerializer
from controlplane.models import ApiToken, Event, Role
from controlplane.services import events
from controlplane.services.access.tokens import active_token

SEATS = 64  # of one process
BEAT_S = 15.0  # between two signs of life
LOOK_AGAIN_S = 5.0  # at who is listening
LONGEST_STREAM_S = 3600.0  # then the client connects anew, and goes on where it was
AT_ONCE = 100  # events in one piece

Rows = Callable[[], "QuerySet[Event] | None"]  # what may be seen now; None for nothing any more
log = logging.getLogger(__name__)
_seats = threading.BoundedSemaphore(SEATS)
_pulse = events.PositionCache()


class EventStreamRenderer(JSONRenderer):
    """What a stream is asked for with; a refusal is a problem document all the same."""

    media_type = "text/event-stream"
    format = "event-stream"


def wait_for_events(place: events.Place, rows: QuerySet[Event], *, limit: int, wait_s: float) -> list[Event]:
    """What follows a place, as soon as there is anything, or [] after ``wait_s`` seconds. TooManyWaiting."""
    found = events.events_after(place, rows, limit)
    if found or wait_s <= 0:
        return found
    take_seat()
    try:
        return _waited_for(place, rows, limit, time.monotonic() + wait_s)
    finally:
        _seats.release()


def take_seat() -> None:
    """TooManyWaiting unless there is one; who takes it releases it."""
    if not _seats.acquire(blocking=False):
        raise TooManyWaiting


def event_stream(request: Request, place: events.Place, rows: Rows) -> StreamingHttpResponse:
    """Server-sent events from a place on, for as long as ``rows`` lets anything be seen."""
    follower = Follower(place, rows)
    pieces = AsyncPieces(follower) if isinstance(request._request, ASGIRequest) else Pieces(follower)  # noqa: SLF001 - the request of the server
    answer = StreamingHttpResponse(pieces, content_type="text/event-stream")
    answer["Cache-Control"] = "no-store"
    answer["X-Accel-Buffering"] = "no"  # nginx would hold it back
    return answer


def rows_for(request: Request, queryset: QuerySet[Event], route: str) -> QuerySet[Event] | None:
    """The events that whoever sent a request may see at this moment; None if they may see nothing any more."""
    token: ApiToken | None = None
    if isinstance(request.auth, ApiToken):
        token = active_token(request.auth.pk)
        user: User | None = token.user if token else None
    else:
        session = request._request.session  # noqa: SLF001 - Django's own request has it
        key = session.session_key
        alive = key is not None and session.exists(key) and request.user.pk is not None
        user = User.objects.filter(pk=request.user.pk or 0, is_active=True).first() if alive else None
    if user is None:
        return None
    who = current_actor(user, token)
    return visible(who, queryset) if opens(who, route, Role.VIEWER) else None


class Follower:
    """One client's way through the events: what to send next, step by step."""

    def __init__(self, place: events.Place, rows: Rows) -> None:
        take_seat()
        self._place, self._rows = place, rows
        self._seen: events.Place | None = None  # the newest event when we last looked
        self._begun = self._beat = self._looked = time.monotonic()
        self._seated = threading.Lock()

    def step(self) -> bytes | None:
        """What to send now, b"" for nothing yet, None at the end. Queries; run it in a thread."""
        try:
            return self._step(time.monotonic())
        except DatabaseError as error:
            log.warning("a stream of events ends: %s", type(error).__name__)
            return None
        finally:
            events.release_connection()

    def close(self) -> None:
        """Leave the seat, once."""
        if self._seated.acquire(blocking=False):
            _seats.release()

    def _step(self, now: float) -> bytes | None:
        if now - self._begun > LONGEST_STREAM_S:
            return None
        newest = _pulse.read()
        if newest != self._seen and newest > self._place:
            return self._news(newest)
        if now - self._looked > LOOK_AGAIN_S:
            self._looked = now
            if self._rows() is None:
                return None
        return self._sign_of_life(now)

    def _news(self, newest: events.Place) -> bytes | None:
        rows = self._rows()
        if rows is None:
            return None
        found = events.events_after(self._place, rows, AT_ONCE)
        if found:
            self._place = (found[-1].xact, found[-1].pk)
        if len(found) < AT_ONCE:
            self._seen = newest
        return b"".join(_written(event) for event in found)

    def _sign_of_life(self, now: float) -> bytes:
        if now - self._beat < BEAT_S:
            return b""
        self._beat = now
        return b": alive\n\n"


class Pieces:
    """A stream for a WSGI server, which gives it a thread."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self.close = follower.close

    def __iter__(self) -> Iterator[bytes]:
        yield HELLO
        while (piece := self._follower.step()) is not None:
            if piece:
                yield piece
            else:
                time.sleep(events.EVERY_S)


class AsyncPieces:
    """A stream for an ASGI server: no thread waits."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self.close = follower.close

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield HELLO
        step = sync_to_async(self._follower.step, thread_sensitive=False)
        while (piece := await step()) is not None:
            if piece:
                yield piece
            else:
                await asyncio.sleep(events.EVERY_S)


HELLO = b"retry: 2000\n\n"  # milliseconds until a client that was cut off connects anew


def _waited_for(place: events.Place, rows: QuerySet[Event], limit: int, deadline: float) -> list[Event]:
    seen: events.Place | None = None
    while (left := deadline - time.monotonic()) > 0:
        newest = _pulse.read()
        if newest != seen and newest > place and (found := events.events_after(place, rows, limit)):
            return found
        seen = newest
        events.release_connection()
        time.sleep(min(events.EVERY_S, left))
    return []


def _written(event: Event) -> bytes:
    shown: Any = EventSerializer(event).data
    return f"id: {event.pk}\nevent: {event.kind}\ndata: {json.dumps(shown, cls=JSONEncoder)}\n\n".encode()
