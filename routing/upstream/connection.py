"""One connection to a replica, which carries one exchange at a time, and the calls that use such connections.

Theory of operation. httptools calls back while it parses; ``on_body`` is the ``append`` method of a list, so a chunk
costs no Python frame. A read is evaluated once, after all of it is parsed, because only then it is known whether bytes
follow a complete response. The listener is called at most once for each read. The connection returns to its pool before
the listener learns of the end of the response. If anything about the response was irregular, the connection is closed
instead, and nothing more is read from it.

Engines write each event of a stream as one chunk. After a read that was exactly one chunk, by its bytes and by the
parser, the parser is between two chunks. The next read that is exactly one chunk by its bytes is passed on without
parsing it, and the parser is still between two chunks.

An idle connection may end while the next request is on its way. Such a connection is stale: the request may be sent
again as if for the first time, but only if the replica cannot have seen it, because its kernel acknowledged none of the
request's bytes. A replica that received the request and then failed must not get the same request again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Final, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from routing.http.loop import NEVER, NO_BUCKET, Deadlines, WriteBuffer, log_exceptions
from routing.http.response import (
    CLOSE,
    LENGTH,
    BadResponseError,
    CachedHead,
    Header,
    HeaderCache,
    ResponseHead,
    chunk_start,
    has_framing_headers,
    parse_response_head,
    template_of,
)
from routing.http.sockets import acknowledged_bytes
from routing.http.usage import is_comment
from routing.log import defect

if TYPE_CHECKING:
    from routing.http.request import Request
    from routing.observability.tracing import RequestTrace
    from routing.schema import Limits
    from routing.upstream.pool import ConnectionPool


logger = logging.getLogger(__name__)

SYN_BYTES: Final = 1  # the SYN counts as one acknowledged byte
MAX_HEAD_BYTES: Final = 64 << 10  # of a response, interim responses included
COLON: Final = ord(":")
JOINED_BYTES: Final = 16 << 10  # a shorter body is appended to its head, which costs less than a second write


class Failure(StrEnum):
    """How a response failed; also the cause under which a retry is counted."""

    CONNECT = "connect"  # refused, unreachable, or too slow to accept
    RESET = "reset"  # the connection ended before the response
    TIMEOUT = "timeout"  # no byte arrived in time
    INVALID_RESPONSE = "invalid_response"  # not valid HTTP, or not what a prefill leg expects


BodySink = Callable[[bytes, int], None]  # gets body bytes and 0, or one whole chunk and the offset of its body bytes

# Body bytes of the read that is being parsed, on any connection: parsing is not interrupted, and the list is empty
# after each read. One list for all connections stays in the core's cache.
_parts: Final[list[bytes]] = []


def _take_body() -> bytes:
    """Take the body bytes of the read that was just parsed."""
    data = _parts[0] if len(_parts) == 1 else b"".join(_parts)
    _parts.clear()
    return data


class UpstreamConnection(asyncio.Protocol):
    """A connection to one replica."""

    def __init__(
        self,
        pool: ConnectionPool,
        deadlines: Deadlines,
        write_buffer: WriteBuffer,
        header_cache: HeaderCache[ResponseHead],
    ) -> None:
        self.deadline, self.bucket = NEVER, NO_BUCKET
        self.pool = pool
        self.sent_at = 0.0  # loop time of the latest request
        self.on_body = _parts.append
        self._deadlines = deadlines
        self._write_buffer = write_buffer
        self._header_cache = header_cache
        self._latest: CachedHead[ResponseHead] | None = None  # of the latest response whose head was cached
        self._listener: UpstreamCall | None = None
        self._sink: BodySink | None = None  # gets the response's body between its first and its last read
        self._is_between_chunks = False  # the parser is known to be between two chunks
        self._loop_time = deadlines.time
        self._parser = HttpResponseParser(self)
        self._headers: list[Header] = []
        self._reason = b""
        self._head: ResponseHead | None = None
        self._complete = False  # whether the response is complete
        self._is_unusable = False  # the connection must close after this response
        self._bodyless = False
        self._head_bytes = 0
        self._idle_s = 0.0
        self._uses_tls = pool.address.ssl_context is not None  # the number of bytes sent is unknown with TLS
        self._written = SYN_BYTES
        self._sent_before: int | None = None  # bytes sent before the current request; None: unknown
        self._uses = 0  # requests sent

    # --- called by exchanges ---

    def send(
        self, listener: UpstreamCall, request: bytes, body: bytes, *, first_byte_s: float, idle_s: float, bodyless: bool
    ) -> None:
        """Send a request head and body; ``listener`` gets the response."""
        self._listener = listener
        self._sink = None
        self._is_between_chunks = False
        self._bodyless = bodyless
        self._idle_s = idle_s
        self._head = None
        self._complete = self._is_unusable = False
        self._head_bytes = 0
        self._uses += 1
        self._sent_before = acknowledged_bytes(self.transport) if self._uses_tls else self._written
        self._written += len(request) + len(body)
        if len(body) < JOINED_BYTES:
            self._write_buffer.write(self.transport, request + body)
        else:
            self._write_buffer.write(self.transport, request)
            self._write_buffer.write(self.transport, body)
        self._deadlines.arm(self, first_byte_s)
        self.sent_at = self.deadline - first_byte_s

    def pipe_to(self, sink: BodySink) -> None:
        """Send the body between its first and its last read to ``sink``: the hot path of streams."""
        self._sink = sink
        self._deadlines.arm(self, self._idle_s)

    def pause(self) -> None:
        """Stop reading because the client does not keep up; the client's own deadline applies."""
        self.transport.pause_reading()
        self.deadline = NEVER

    def resume(self) -> None:
        self.transport.resume_reading()
        self._deadlines.arm(self, self._idle_s)

    @property
    def waiting_listener(self) -> UpstreamCall | None:
        """The listener that waits for a first byte."""
        return self._listener if self._sink is None else None

    @property
    def streaming_listener(self) -> UpstreamCall | None:
        """The listener whose response is being streamed."""
        return None if self._sink is None else self._listener

    @property
    def last_byte_at(self) -> float:
        """Loop time of the latest byte of the response being streamed; 0 if there is none or it is paused."""
        return 0.0 if self._sink is None or self.deadline == NEVER else self.deadline - self._idle_s

    def abort(self) -> None:
        """Close the connection at once; the listener is not called any more."""
        self._listener = self._sink = None
        self._deadlines.disarm(self)
        self.pool.on_closed(self)
        self.transport.abort()

    def release(self) -> None:
        """Return to the pool; there is no response to wait for."""
        self._listener = None
        self.pool.return_idle(self)

    # --- called by the event loop ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        sink = self._sink
        if sink is None:
            self._on_first_read(data)
            return
        start = chunk_start(data)
        if start and self._is_between_chunks:
            if data[start] != COLON or not is_comment(data, start):  # comments are no progress of the engine
                self.deadline = self._loop_time() + self._idle_s
            sink(data, start)
            return
        self._is_between_chunks = False
        self._parse(data)
        if self._complete or self._is_unusable:
            self._deliver(cast("ResponseHead", self._head))
        elif _parts:
            body = _parts.pop() if len(_parts) == 1 else _take_body()
            if not body.startswith(b":") or not is_comment(body):
                self.deadline = self._loop_time() + self._idle_s  # later than before, so the wheel need not know
            self._is_between_chunks = start > 0 and len(body) == len(data) - start - 2
            sink(body, 0)

    def _on_first_read(self, data: bytes) -> None:
        """Read until the listener takes the body, in one or more reads. They are no progress and move no deadline."""
        listener = self._listener
        if listener is None:
            self.abort()  # bytes without a request
            return
        is_start = self._head is None and not (self._head_bytes or self._bodyless)
        if is_start and (match := self._header_cache.find(data, self._latest)) is not None:
            self._latest, body, values = match
            self._end()
            listener.on_response(self._latest.head.with_values(values), body, True)
            return
        self._parse(data)
        if self._head is None:
            self._head_bytes += len(data)
            if self._is_unusable or self._head_bytes > MAX_HEAD_BYTES:
                self._fail(Failure.INVALID_RESPONSE)
            return
        headers, self._headers = self._headers, []
        if is_start and self._complete and not self._is_unusable:
            self._learn(data, self._head, headers)
        if _parts or self._complete or self._is_unusable:
            self._deliver(self._head)

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade, BadResponseError):
            self._is_unusable = True

    def eof_received(self) -> None:
        if self._head is not None and self._head.framing is CLOSE and not self._is_unusable:
            self._complete = self._is_unusable = True
            self._deliver(self._head)
        self._fail(Failure.RESET)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._fail(Failure.RESET)

    def on_deadline(self) -> None:
        self._fail(Failure.TIMEOUT)

    def postpone(self, stalled_s: float) -> None:
        """Move the deadline, and with it the times of the request and of its last byte, at most to the present."""
        if self._listener is None:
            self.deadline += stalled_s
            return
        waits_since = self.sent_at if self._sink is None else self.last_byte_at
        moved_s = min(stalled_s, max(0.0, self._loop_time() - waits_since))
        self.deadline += moved_s
        if self._sink is None:
            self.sent_at += moved_s

    # --- called by httptools ---

    def on_message_begin(self) -> None:
        if self._complete:
            raise BadResponseError("a second response")  # before its body could be read as the first response's

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head is None:  # else it is a trailer, whose number is not limited
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        headers = self._headers  # kept until the end of the read, for the header cache
        reason, self._reason = self._reason, b""
        status = self._parser.get_status_code()
        if self._complete:
            return
        if 100 <= status < 200:
            if status == 101 or has_framing_headers(headers):
                raise BadResponseError("an interim response with a body or an upgrade")
            self._headers = []
            return
        self._head = parse_response_head(
            status, reason, self._parser.get_http_version(), headers, bodyless=self._bodyless
        )
        if status == 204 and has_framing_headers(headers):
            self._is_unusable = True  # the replica may send the body that it announces
        if self._bodyless:
            self._complete = self._is_unusable = True  # the parser would wait for the body that the head announces

    def on_message_complete(self) -> None:
        if self._head is not None:
            self._complete = True
            self._is_unusable |= not self._parser.should_keep_alive()

    # --- the end of a read ---

    def _deliver(self, head: ResponseHead) -> None:
        listener, data = self._listener, _take_body()
        if listener is None:
            return
        if self._complete:
            self._end()
            listener.on_response(head, b"" if self._bodyless else data, True)
            return
        if data:
            if self._sink is None:
                listener.on_response(head, data, False)
            else:
                self._sink(data, 0)
        if self._is_unusable and self._listener is listener:
            self._fail(Failure.INVALID_RESPONSE)

    def _learn(self, data: bytes, head: ResponseHead, headers: list[Header]) -> None:
        """Cache the head of a response that arrived in one read."""
        if head.framing is LENGTH:
            varying = self._header_cache.learn(data, head, sum(map(len, _parts)), headers)
            if varying is not None and len(varying) > 1:  # the length is not among the head's lines
                head.template = template_of(head.lines, varying)

    def _end(self) -> None:
        """Return to the pool after a complete response, or close."""
        self.pool.last_end_at = self._loop_time()
        self._head = self._sink = None
        self._complete = False
        if self._is_unusable:
            self.abort()
        else:
            self._listener = None
            self.pool.return_idle(self)

    def _is_stale(self) -> bool:
        """Whether the connection ended before the replica saw the request."""
        sent_before = self._sent_before
        if self._uses < 2 or self._head is not None or self._head_bytes or sent_before is None:
            return False
        acknowledged = acknowledged_bytes(self.transport)
        return acknowledged is not None and acknowledged <= sent_before

    def _fail(self, failure: Failure) -> None:
        listener = self._listener
        is_stale = listener is not None and failure is Failure.RESET and self._is_stale()
        self.abort()
        if listener is not None:
            listener.on_upstream_failed(failure, is_stale=is_stale)


class UpstreamCall:
    """One request to a replica, on an idle connection or a new one, and the receiver of its response.

    A subclass says what is sent (``send_on``), and what becomes of connections that fail and of the response. What the
    stall detector asks has answers here for a short request.
    """

    connections: ConnectionPool  # to the current replica

    def __init__(self) -> None:
        self.upstream: UpstreamConnection | None = None  # None: no response is expected on any
        self.is_over = False  # the result does not matter any more
        self._has_reconnected = False  # the current replica got the request again, on a new connection

    # --- called by the owner ---

    def open(self, connections: ConnectionPool) -> None:
        """Send the request to a replica."""
        self.connections = connections
        self._has_reconnected = False
        upstream = connections.take_idle()
        if upstream is None:
            self.connect()
        else:
            self.upstream = upstream  # before anything can fail, which closes it
            self.send_on(upstream)

    def connect(self) -> None:
        """Send the request on a new connection to the current replica."""
        self.connections.connect(self, self.connect_timeout_s())

    def send(
        self,
        upstream: UpstreamConnection,
        request: Request,
        body: bytes,
        rank: int | None,
        trace: RequestTrace | None,
        *,
        first_byte_s: float,
        idle_s: float,
    ) -> None:
        """Send a request with this body. ``rank``: data-parallel. ``trace``: None if it is not sampled."""
        head = self.connections.address.head(request, rank, body_bytes=len(body))
        if trace is not None:
            head = trace.head_with_context(head)
        is_head = request.head.method == b"HEAD"
        upstream.send(self, head, body, first_byte_s=first_byte_s, idle_s=idle_s, bodyless=is_head)

    def abort_upstream(self) -> None:
        """Stop the replica's work at once."""
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            upstream.abort()

    # --- what a subclass decides ---

    def connect_timeout_s(self) -> float:
        raise NotImplementedError

    def send_on(self, upstream: UpstreamConnection) -> None:
        """Call ``send``."""
        raise NotImplementedError

    def on_no_connection(self, reason: str, *, is_local: bool) -> None:
        """Called when no connection was made. ``is_local``: the router lacks a resource; the replica did not fail."""
        raise NotImplementedError

    def on_response(self, head: ResponseHead, data: bytes, last: bool) -> None:
        """Body bytes arrived (perhaps none), the first or further ones; ``last``: the response is complete.

        Called again with further bytes until ``UpstreamConnection.pipe_to`` gives them a sink. With the last ones the
        connection is back in its pool: ``upstream`` is None.
        """
        raise NotImplementedError

    def on_failed(self, failure: Failure) -> None:
        """Called when the response failed before its end."""
        raise NotImplementedError

    def on_no_progress(self) -> None:
        """Called when the replica is stalled: another replica may respond earlier."""

    def abort_on_error(self, error: Exception) -> None:
        """Called after a programming error."""
        raise NotImplementedError

    # --- called by the pool and the connection ---

    @log_exceptions
    def on_connected(self, upstream: UpstreamConnection) -> None:
        """Called with a new connection."""
        if self.is_over:
            upstream.release()
        else:
            self.upstream = upstream
            self.send_on(upstream)

    @log_exceptions
    def on_connect_failed(self, reason: str, *, is_local: bool) -> None:
        """Called when no connection was made."""
        if not self.is_over:
            self.on_no_connection(reason, is_local=is_local)

    @log_exceptions
    def on_upstream_failed(self, failure: Failure, *, is_stale: bool) -> None:
        """Called when the response failed. ``is_stale``: an idle connection had ended before the replica saw it."""
        self.upstream = None
        if is_stale and not self._has_reconnected:
            self._has_reconnected = True
            self.connect()
        else:
            self.on_failed(failure)

    # --- called by the stall detector ---

    @log_exceptions
    def on_stalled(self) -> None:
        """Called when the replica is stalled."""
        if not self.is_over:
            self.on_no_progress()

    def is_stream(self) -> bool:
        """Whether the first token arrives as soon as the prompt is prefilled."""
        return False

    @property
    def waiting_tokens(self) -> int:
        """Estimated tokens of the prompt that the replica has to prefill before the first byte."""
        return 0

    @property
    def queued_tokens(self) -> float:
        """``waiting_tokens``, and the tokens that the replica had to prefill before them."""
        return self.waiting_tokens

    @property
    def prompt_tokens(self) -> int:
        """Estimated length of the prompt, in tokens."""
        return 0


MAX_OWN_RESPONSE_BYTES: Final = 2 << 20


class OwnCall(UpstreamCall):
    """A request of the router's own, whose whole response ``on_end`` gets; it has a deadline of its own elsewhere.

    ``tokens``: estimated, to prefill. ``queued_tokens``: these, and what the replica has to prefill before.
    """

    def __init__(
        self,
        limits: Limits,
        request: Request,
        rank: int | None,
        on_end: Callable[[OwnCall], None],
        *,
        tokens: int = 0,
        queued_tokens: float = 0.0,
    ) -> None:
        UpstreamCall.__init__(self)
        self.status = 0  # of the complete response
        self.body = b""
        self.failure = ""  # why there is no complete response
        self._limits = limits
        self._request = request
        self._rank = rank
        self._on_end = on_end
        self._tokens = tokens
        self._queued_tokens = queued_tokens

    def abort(self) -> None:
        """Stop without a result, so that the replica stops computing."""
        self.is_over = True
        self.abort_upstream()

    def connect_timeout_s(self) -> float:
        return self._limits.connect_timeout_s

    def send_on(self, upstream: UpstreamConnection) -> None:
        limits, request = self._limits, self._request
        first_byte_s, idle_s = limits.first_byte_timeout_s, limits.idle_timeout_s
        self.send(upstream, request, request.body, self._rank, None, first_byte_s=first_byte_s, idle_s=idle_s)

    def on_no_connection(self, reason: str, *, is_local: bool) -> None:  # noqa: ARG002 - health checks find the cause
        self._end(Failure.CONNECT)

    def on_response(self, head: ResponseHead, data: bytes, last: bool) -> None:
        self._collect(head, data, last)

    @log_exceptions
    def _collect(self, head: ResponseHead, data: bytes, last: bool) -> None:
        self.body += data
        if last:
            self.upstream, self.status = None, head.status
            self._end("")
        elif len(self.body) > MAX_OWN_RESPONSE_BYTES:
            self.abort_upstream()
            self._end(Failure.INVALID_RESPONSE)

    def on_failed(self, failure: Failure) -> None:
        self._end(failure)

    def abort_on_error(self, error: Exception) -> None:
        defect(logger, error, "own call")
        self.abort_upstream()
        self._end("internal")

    def _end(self, failure: str) -> None:
        if not self.is_over:
            self.is_over, self.failure = True, failure
            self._on_end(self)

    @property
    def waiting_tokens(self) -> int:
        return self._tokens

    @property
    def queued_tokens(self) -> float:
        return self._queued_tokens

    @property
    def prompt_tokens(self) -> int:
        return self._tokens
