"""Long polls and server-sent event streams.

A waiting client occupies one of ``MAX_WAITERS`` slots of this process and no database connection. A stream checks the
client's token or session before each chunk of events, and every few seconds. It ends when the token or session does.
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
from controlplane.access.rules import permits
from controlplane.api.exceptions import TooManyWaitersError
from controlplane.api.serializers.routers import EventSerializer
from controlplane.models import ApiToken, Event, Role
from controlplane.services import events
from controlplane.services.access.tokens import active_token

MAX_WAITERS = 64  # in one process
KEEPALIVE_INTERVAL_S = 15.0
AUTH_CHECK_INTERVAL_S = 5.0
MAX_STREAM_S = 3600.0  # then the client reconnects and resumes
MAX_BATCH = 100  # events in one chunk
RETRY = b"retry: 2000\n\n"  # milliseconds until a disconnected client reconnects

Rows = Callable[[], "QuerySet[Event] | None"]  # the events visible now; None once the client lost its access
log = logging.getLogger(__name__)
_slots = threading.BoundedSemaphore(MAX_WAITERS)
_newest_position = events.PositionCache()


class EventStreamRenderer(JSONRenderer):
    """Accepts ``text/event-stream``; errors are problem documents all the same."""

    media_type = "text/event-stream"
    format = "event-stream"


def acquire_slot() -> None:
    """TooManyWaitersError unless a slot is free; the caller releases it."""
    if not _slots.acquire(blocking=False):
        raise TooManyWaitersError


def wait_for_events(position: events.Position, rows: QuerySet[Event], *, limit: int, wait_s: float) -> list[Event]:
    """The events after a position, as soon as there are any, or [] after ``wait_s`` seconds. TooManyWaitersError."""
    new_events = events.events_after(position, rows, limit)
    if new_events or wait_s <= 0:
        return new_events
    deadline_s = time.monotonic() + wait_s
    newest_seen: events.Position | None = None
    acquire_slot()
    try:
        while (left_s := deadline_s - time.monotonic()) > 0:
            newest = _newest_position.read()
            if (
                newest != newest_seen
                and newest > position
                and (new_events := events.events_after(position, rows, limit))
            ):
                return new_events
            newest_seen = newest
            events.release_connection()
            time.sleep(min(events.POLL_INTERVAL_S, left_s))
        return []
    finally:
        _slots.release()


def event_stream(request: Request, position: events.Position, rows: Rows) -> StreamingHttpResponse:
    """Server-sent events after a position, until ``rows`` returns None."""
    subscription = Subscription(position, rows)
    is_asgi = isinstance(request._request, ASGIRequest)  # noqa: SLF001 - the server's request
    chunks = AsyncChunks(subscription) if is_asgi else Chunks(subscription)
    response = StreamingHttpResponse(chunks, content_type="text/event-stream")
    response["Cache-Control"] = "no-store"
    response["X-Accel-Buffering"] = "no"  # nginx would buffer the stream
    return response


def visible_events(request: Request, queryset: QuerySet[Event], route: str) -> QuerySet[Event] | None:
    """The events that the sender of a request may see at this moment; None once the token or session has ended."""
    token: ApiToken | None = None
    user: User | None = None
    if isinstance(request.auth, ApiToken):
        token = active_token(request.auth.pk)
        user = token.user if token else None
    else:
        session = request._request.session  # noqa: SLF001 - Django's own request has it
        if session.session_key is not None and session.exists(session.session_key):
            user = User.objects.filter(pk=request.user.pk or 0, is_active=True).first()
    if user is None:
        return None
    actor = current_actor(user, token)
    return visible(actor, queryset) if permits(actor, route, Role.VIEWER) else None


class Subscription:
    """One client's position in the events: what to send next."""

    def __init__(self, position: events.Position, rows: Rows) -> None:
        acquire_slot()
        self._position, self._rows = position, rows
        self._newest_seen: events.Position | None = None
        self._started_s = self._keepalive_s = self._checked_s = time.monotonic()
        self._release_once = threading.Lock()  # never released

    def next_chunk(self) -> bytes | None:
        """What to send now, b"" for nothing, None at the end. Queries the database; call it in a thread."""
        try:
            return self._next_chunk(time.monotonic())
        except DatabaseError as error:
            log.warning("event stream ends: %s", type(error).__name__)
            return None
        finally:
            events.release_connection()

    def close(self) -> None:
        """Release the slot, once."""
        if self._release_once.acquire(blocking=False):
            _slots.release()

    def _next_chunk(self, now_s: float) -> bytes | None:
        if now_s - self._started_s > MAX_STREAM_S:
            return None
        newest = _newest_position.read()
        has_new_events = newest != self._newest_seen and newest > self._position
        if has_new_events or now_s - self._checked_s > AUTH_CHECK_INTERVAL_S:
            self._checked_s = now_s
            rows = self._rows()
            if rows is None:
                return None
            if has_new_events:
                return self._encode_events(rows, newest)
        if now_s - self._keepalive_s < KEEPALIVE_INTERVAL_S:
            return b""
        self._keepalive_s = now_s
        return b": alive\n\n"

    def _encode_events(self, rows: QuerySet[Event], newest: events.Position) -> bytes:
        batch = events.events_after(self._position, rows, MAX_BATCH)
        if batch:
            self._position = (batch[-1].xact, batch[-1].pk)
        if len(batch) < MAX_BATCH:
            self._newest_seen = newest
        return b"".join(map(_encode_event, batch))


class Chunks:
    """A stream for a WSGI server, which gives it a thread."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        self.close = subscription.close

    def __iter__(self) -> Iterator[bytes]:
        yield RETRY
        while (chunk := self._subscription.next_chunk()) is not None:
            if chunk:
                yield chunk
            else:
                time.sleep(events.POLL_INTERVAL_S)


class AsyncChunks:
    """A stream for an ASGI server: no thread waits."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        self.close = subscription.close

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield RETRY
        next_chunk = sync_to_async(self._subscription.next_chunk, thread_sensitive=False)
        while (chunk := await next_chunk()) is not None:
            if chunk:
                yield chunk
            else:
                await asyncio.sleep(events.POLL_INTERVAL_S)


def _encode_event(event: Event) -> bytes:
    data: Any = EventSerializer(event).data
    return f"id: {event.pk}\nevent: {event.kind}\ndata: {json.dumps(data, cls=JSONEncoder)}\n\n".encode()
