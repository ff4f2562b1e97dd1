"""One client connection: reads requests, and sends responses in order.

Theory of operation. Received bytes are parsed into a queue (``RequestReader``), whose requests and rejections are
processed one at a time. Only a read that brought one whole request with a cached head, while nothing is queued, is
processed without parsing. A connection has one deadline: for a head, for more of a body, for the next request, or for
the client to read what was written. While a replica works, the upstream connection has the deadline. A client that ends
its side of the connection has disconnected: its running request is cancelled.

Theory of operation of reading. The parser may finish several requests in one read (pipelining), so requests are queued.
A request that violates HTTP is queued as its rejection, behind the requests before it, and all further bytes are
ignored.

A body has a deadline for each read, and an average rate to keep: after the grace period, a body of which ``n`` bytes
have arrived must be no older than ``n`` divided by the minimum rate. So a body that trickles is rejected although it
never stops, and one that arrived fast may pause. This concerns only bodies that do not arrive in one read.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import deque
from socket import SO_LINGER, SOL_SOCKET
from typing import Final, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from routing.http.loop import NEVER, NO_BUCKET
from routing.http.request import (
    EncodedBody,
    EncodedRequest,
    Request,
    RequestHead,
    body_too_large,
    head_too_large,
    parse_request_head,
    without_upgrade,
)
from routing.http.response import CachedHead, Header, LocalResponse, RejectedRequestError, encode_local_response
from routing.log import defect
from routing.process import REFUSED_AT_ONCE
from routing.proxy.exchange import Exchange
from routing.proxy.router import CloseReason, Router

PIECE_PARSED_BYTES: Final = 2048  # of a read, before other connections may continue
LONG_BODY_BYTES: Final = 512 << 10
PIECE_BYTES: Final = 4096  # a shorter piece of a body is joined to the next one


def join_tail(pieces: list[bytes], count: int) -> None:
    """Join the pieces after the first ``count``, and the last of those if it is short.

    A body is kept in few pieces: an object for each tiny chunk or read would take many times its bytes.
    """
    start = count - 1 if count and len(pieces[count - 1]) < PIECE_BYTES else count
    if len(pieces) > start + 1:
        pieces[start:] = [b"".join(pieces[start:])]


class RequestReader:
    """The parser of one connection and the requests that it has read."""

    def __init__(self, router: Router) -> None:
        self.queue: deque[Request | EncodedRequest | RejectedRequestError] = deque()  # without a response yet
        self.head: RequestHead | None = None  # of the request whose body is being received
        self.wants_continue = False  # the client waits for 100 Continue
        self.in_message = False
        self.body_bytes = 0
        self.received_bytes = 0  # since the last complete request, framing included
        self.ignores_input = False
        self.is_rejected = False  # the last item of the queue is a rejection
        self._router = router
        self._parser = HttpRequestParser(self)
        self._allowed_head: RequestHead | None = None  # the head whose body may be received
        self._paced_head: RequestHead | None = None  # the head whose body's rate is measured
        self._grace_until = 0.0  # loop time
        self._target = b""
        self._headers: list[Header] = []
        self._pieces: list[bytes] = []
        self._long: bytearray | None = None  # a body that has become long; pieces would fragment the heap
        self._encoded: EncodedBody | None = None  # the body, if it is to be decoded
        self._unfinished_bytes = 0  # of the body and of queued ones, as counted in the router's total

    # --- called by the connection ---

    def piece_bytes(self) -> int:
        """How much to parse at once: the rest of a body costs little, while 1 KiB may be a hundred chunks or lines."""
        head = self.head
        if head is None or not head.has_length:
            return PIECE_PARSED_BYTES
        return max(PIECE_PARSED_BYTES, head.content_length - self.body_bytes)

    def feed(self, data: bytes | memoryview) -> None:
        """Parse received bytes into requests; reject the one that is invalid or exceeds a limit."""
        self.received_bytes += len(data)
        count = len(self._pieces)
        try:
            self._parse(data)
        except HttpParserError as error:
            if not self.ignores_input:  # bytes after the last request do not matter
                cause, message = error.__context__, f"the request is not valid HTTP: {error}"
                invalid = RejectedRequestError(400, message, must_close=True)
                self.reject(cause if isinstance(cause, RejectedRequestError) else invalid)
        if len(self._pieces) > count:
            join_tail(self._pieces, count)
        if self.head is not self._allowed_head:
            self._check_body_allowed()
        if self._encoded is not None:
            self.decode()
        elif self.in_message or self._unfinished_bytes:
            self._count_unfinished()
        limits = self._router.limits
        if self.received_bytes > limits.max_header_bytes and not self.ignores_input:
            if self.head is None:
                self.reject(head_too_large(limits))
            elif self.received_bytes > 2 * limits.max_header_bytes + 8 * self.body_bytes:
                self.reject(RejectedRequestError(400, "the chunks are mostly framing", must_close=True))

    def learn(self, data: bytes) -> None:
        """Cache the head, if this read brought one request and nothing else."""
        if len(self.queue) == 1 and not self.in_message:
            request = self.queue[0]
            if isinstance(request, Request) and request.head.is_cacheable:
                head = request.head
                varying = self._router.request_head_cache.learn(data, head, len(request.body), self._headers)
                if varying is not None:
                    head.share(varying, self._headers)

    def reject(self, rejection: RejectedRequestError) -> None:
        """Queue a rejection behind earlier requests, and read nothing more."""
        rejection.path, rejection.origin = self._target, self._origin()
        self.queue.append(rejection)
        self.in_message = False
        self.head = None
        self._pieces, self._long, self._encoded = [], None, None
        self._is_too_much()
        self.ignores_input = self.is_rejected = True

    def _origin(self) -> str | None:
        """The origin of the page that sent the request; None if it names none, or more than one."""
        origins = [value for name, value in self._headers if name.lower() == b"origin"]
        return origins[0].decode("latin-1") if len(origins) == 1 else None

    def body_wait_s(self, head: RequestHead, now: float) -> float:
        """Seconds from ``now`` to wait for more of the body of ``head``; below 0 if it is too slow already."""
        limits = self._router.limits
        if self._paced_head is not head:
            self._paced_head = head
            self._grace_until = now + limits.body_grace_s
        rate = limits.min_body_bytes_per_s
        if not rate:
            return limits.body_idle_timeout_s
        return min(limits.body_idle_timeout_s, self._grace_until + self.body_bytes / rate - now)

    def postpone(self, stalled_s: float) -> None:
        """Extend the grace period, because the router could not read for a while."""
        self._grace_until += stalled_s

    def restart_pace(self) -> None:
        """Measure the rate of a body from now on, because the router did not read it for a while."""
        self._paced_head = None

    def close(self) -> None:
        """The connection has ended."""
        self.ignores_input = True
        self.head = self._long = self._encoded = None
        self.queue.clear()
        self._count_unfinished()

    @property
    def is_decoding(self) -> bool:
        """Whether a part of the body that is being received waits to be decoded."""
        return self._encoded is not None and self._encoded.has_more

    def decode(self) -> None:
        """Decode the body that is being received, as far as other connections do not have to wait."""
        encoded = self._encoded
        try:
            while encoded is not None and encoded.step():
                if self._router.turns.is_over():
                    break
        except RejectedRequestError as rejection:
            self.reject(rejection)
        else:
            self._count_unfinished()

    def next_item(self) -> Request | RejectedRequestError | None:
        """Take the first of the queue; None if its body is not decoded yet."""
        item = self.queue[0]
        if not isinstance(item, EncodedRequest):
            self.queue.popleft()
            return item
        try:
            if (rejection := self._router.reject_before_body(item.head)) is not None:
                raise rejection
            while item.body.step():
                if self._router.turns.is_over():
                    if self._is_too_much():
                        raise too_many_bodies()
                    return None
            next_item: Request | RejectedRequestError = self._router.request(item.head, item.body.end())
        except RejectedRequestError as error:
            error.path = item.head.path
            error.origin = item.head.header(b"origin")
            next_item = error
            self.ignores_input = self.is_rejected = True
        self.queue.popleft()
        self._is_too_much()
        return next_item

    # --- called by httptools ---

    def _parse(self, data: bytes | memoryview) -> None:
        """Parse a read; HttpParserError. A request that offers an upgrade is parsed as if it offered none.

        The parser stops after such a head and takes the body for the other protocol. Java's HTTP client offers HTTP/2
        with every request, body included.
        """
        remaining = data
        while True:
            try:
                self._parser.feed_data(remaining)
            except HttpParserUpgrade as upgrade:
                remaining = memoryview(remaining)[upgrade.args[0] :]  # without a copy: one read may bring many
            else:
                return
            request_line = (self._parser.get_method(), self._target, self._parser.get_http_version())
            head = without_upgrade(*request_line, self._headers)
            self._parser = HttpRequestParser(self)
            self.received_bytes = len(head) + len(remaining)
            self._parser.feed_data(head)

    def on_message_begin(self) -> None:
        self.in_message = True
        self._target = b""
        self._headers = []
        self._pieces, self._long, self._encoded = [], None, None
        self.body_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.head is None:  # else it is a trailer, which is dropped
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        method = parser.get_method()
        if method == b"CONNECT":
            raise RejectedRequestError(405, "this is not a forward proxy", must_close=True)
        if parser.should_upgrade():
            return  # the parser stops here; see _parse
        self.head = head = parse_request_head(
            method, self._target, parser.get_http_version(), self._headers, limits=self._router.limits
        )
        self.wants_continue = head.expects_continue
        if head.coding:
            self._encoded = EncodedBody(head.coding, self._router.limits)

    def on_body(self, data: bytes) -> None:
        self.body_bytes += len(data)
        if self._encoded is not None:
            self._encoded.add(data)
        elif self._long is not None:
            self._long += data
        elif self.body_bytes > LONG_BODY_BYTES:
            self._long = bytearray(b"".join(self._pieces) + data)
            self._pieces.clear()
        else:
            self._pieces.append(data)
        if self.body_bytes > self._router.limits.max_body_bytes:
            raise body_too_large(self._router.limits)

    def on_message_complete(self) -> None:
        head, self.head = self.head, None
        if head is None:
            return
        self.in_message = False
        self.received_bytes = 0
        encoded, self._encoded = self._encoded, None
        pieces, self._pieces = self._pieces, []
        head.keep_alive = self._parser.should_keep_alive()
        if self._long is not None:
            body, self._long = bytes(self._long), None
        else:
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        request = self._router.request(head, body) if encoded is None else EncodedRequest(head, encoded)
        self.queue.append(request)
        if not head.keep_alive:
            self.ignores_input = True

    # --- the end of a read ---

    def _check_body_allowed(self) -> None:
        """Reject a body that did not arrive with its head if its sender has no valid key."""
        self._allowed_head = self.head
        if self.head is not None and (rejection := self._router.reject_before_body(self.head)):
            self.reject(rejection)

    def _count_unfinished(self) -> None:
        if self._is_too_much():
            self.reject(too_many_bodies())

    def _is_too_much(self) -> bool:
        """Count the bytes of bodies that are being received or decoded; whether those of all clients are too many.

        A body that arrived in one read does not count.
        """
        router = self._router
        unfinished = 0
        if self._encoded is not None:
            unfinished = self._encoded.held_bytes
        elif self.head is not None:
            unfinished = self.body_bytes
        for item in self.queue:
            if isinstance(item, EncodedRequest):
                unfinished += item.body.held_bytes
        router.unfinished_body_bytes += unfinished - self._unfinished_bytes
        self._unfinished_bytes = unfinished
        all_bytes = router.unfinished_body_bytes + router.services.held_body_bytes
        return unfinished > 0 and all_bytes > router.limits.max_unfinished_body_bytes


def too_many_bodies() -> RejectedRequestError:
    message = "too many bodies are being received at once"
    return RejectedRequestError(503, message, retry_after_s=1, must_close=True)


logger = logging.getLogger(__name__)

_NO_LINGER: Final = struct.pack("ii", 1, 0)
LINGER_S: Final = 2.0  # how long a rejected client may go on sending before the connection is closed
MAX_PIPELINED_BYTES: Final = 256 << 10  # received of later requests while a response is pending
MAX_QUEUED: Final = 32  # parsed requests of one client; each takes ten times its bytes
MAX_UNPARSED_BYTES: Final = 64 << 10  # received while other clients have their turn, before reading pauses
READ_BYTES: Final = 128 << 10  # after a larger read other connections are read first; uvloop would read 32 times
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class ClientConnection(asyncio.Protocol):
    """The connection of one client."""

    def __init__(self, router: Router) -> None:
        self.deadline, self.bucket = NEVER, NO_BUCKET
        self.write_buffer = router.write_buffer
        self.is_full = False  # written bytes wait for the client to read them
        self.counted_address = ""
        self._router = router
        self._reader = RequestReader(router)
        self._latest: CachedHead[RequestHead] | None = None  # of the latest request whose head was cached
        self._exchange: Exchange | None = None
        self.is_deferred = False  # waits for its turn
        self._unparsed = b""  # received and not parsed yet
        self._pipelined_bytes = 0
        self._is_closing = self._is_advancing = False
        self._reading_paused = False
        self._is_new = True  # nothing was received yet
        self._awaits_head = False  # the running deadline is for a head
        self._close_reason = CloseReason.CLIENT

    # --- called by exchanges ---

    def write(self, data: bytes) -> None:
        self.write_buffer.write(self.transport, data)

    def respond(
        self,
        request: Request | None,
        response: LocalResponse,
        *,
        keep_alive: bool,
        pool: str = "",
        origin: str | None = None,
    ) -> None:
        """Send a response of the router's own; ``request`` is None if it could not be parsed.

        ``pool``: of the request; empty if it is unknown. ``origin``: of a request that could not be parsed.
        """
        http11, bodyless, request_id = True, False, ""
        if request is not None:
            http11, bodyless, request_id = request.head.http11, request.head.method == b"HEAD", request.request_id
        active = self._router.active
        if active is not None and active.cross_origin is not None:
            if request is not None:
                origin = request.head.header(b"origin")
            response = response._replace(headers=response.headers + active.cross_origin.headers(origin, pool))
        encoded = encode_local_response(
            response, http11=http11, keep_alive=keep_alive, bodyless=bodyless, request_id=request_id
        )
        self.write(encoded)

    def on_exchange_ended(self, *, keep_alive: bool) -> None:
        """The current response is complete, or will never be."""
        self._exchange = None
        reader = self._reader
        if not keep_alive:
            self._close(CloseReason.DRAINING if self._router.is_draining else CloseReason.COMPLETE)
        elif self._is_advancing or self._is_behind or reader.in_message or self._reading_paused or self.is_full:
            self._continue()
        else:
            self._pipelined_bytes = 0
            self._router.deadlines.arm(self, self._router.limits.keep_alive_timeout_s)

    def reset(self) -> None:
        """Reset the connection, so that no client takes an incomplete response for a complete one."""
        self._reset(CloseReason.INCOMPLETE if self._exchange is not None else CloseReason.DRAINING)

    def _reset(self, reason: CloseReason) -> None:
        self._exchange, self._close_reason = None, reason
        self._is_closing = self._reader.ignores_input = True
        socket = self.transport.get_extra_info("socket")
        if socket is not None:
            socket.setsockopt(SOL_SOCKET, SO_LINGER, _NO_LINGER)
        self.transport.abort()

    # --- called by a router that shuts down ---

    @property
    def received_bytes(self) -> int:
        """Bytes read since the last complete request, framing included."""
        return self._reader.received_bytes

    @property
    def awaits_request(self) -> bool:
        """Whether a request is missing or incomplete, and its client may expect a response."""
        is_busy = self._is_closing or self._exchange is not None or self._is_behind
        return not is_busy and (self._is_new or self._awaits_head or self._reader.in_message)

    def drain(self, *, rejects_incomplete: bool = False) -> None:
        """Close if no request is running, queued or incomplete; otherwise the next response is the last.

        ``rejects_incomplete``: an incomplete request is rejected.
        """
        reader = self._reader
        if self._is_closing or self._exchange or self._is_behind:
            return
        if self.awaits_request and not rejects_incomplete:
            return
        if reader.in_message:
            reader.reject(RejectedRequestError(503, "this router is shutting down", retry_after_s=1, must_close=True))
            self._continue()
        else:
            self._close(CloseReason.DRAINING)

    # --- called by the event loop ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        router = self._router
        if router.connection_limit.max_per_address is not None and not router.connection_limit.enter(self):
            self._reset(CloseReason.LIMIT)  # costs less than a response, before which a request would have to be read
            return
        router.clients.add(self)
        if router.max_clients is not None and len(router.clients) > router.max_clients:
            router.on_refused()
            self._refuse(CloseReason.FILES)
            return
        limits = router.limits  # a connection without a byte costs as much as an idle one, and waits as long
        router.deadlines.arm(self, max(limits.keep_alive_timeout_s, limits.header_timeout_s))

    def _refuse(self, reason: CloseReason) -> None:
        """Respond 503 before a request is read, because the process has too few descriptors for it."""
        router, self._close_reason = self._router, reason
        rejection = RejectedRequestError(503, "this router has too many connections", retry_after_s=1, must_close=True)
        router.services.metrics.count_rejected(rejection.status)
        self.respond(None, rejection.response(b""), keep_alive=False)
        if len(router.clients) <= (router.max_clients or 0) + REFUSED_AT_ONCE:
            self._reader.is_rejected = True  # let the client read it
        self._close(reason)

    def data_received(self, data: bytes) -> None:
        router = self._router
        if len(data) >= READ_BYTES:
            self.transport.pause_reading()
            router.loop.call_soon(self._resume_after_large_read)
        if self._reader.ignores_input:
            return
        if not self._unparsed and len(self._reader.queue) < MAX_QUEUED and not router.turns.is_over():
            self._read(data)
            return
        self._unparsed += data
        router.turns.defer(self, len(self._unparsed))
        if len(self._unparsed) > MAX_UNPARSED_BYTES and not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()

    def _read(self, data: bytes) -> None:
        """Handle received bytes, behind which nothing else waits to be parsed."""
        reader, router = self._reader, self._router
        is_free = self._exchange is None and not (reader.in_message or reader.queue or self.is_full)
        if is_free and (match := router.request_head_cache.find(data, self._latest)) is not None:
            self._latest, body, values = match
            if len(body) <= router.limits.max_body_bytes:
                self._handle_cached(self._latest.head, body, values)
                return
        self._is_new = False
        self._pipelined_bytes += len(data)  # until nothing is queued any more
        if len(data) <= PIECE_PARSED_BYTES:
            reader.feed(data)
        else:
            self._unparsed = data
            self._parse()
        if is_free and not self._unparsed:
            reader.learn(data)
        self._continue()

    def _parse(self) -> None:
        """Parse what was received, until enough is queued or other connections have to continue."""
        reader, unparsed, at = self._reader, memoryview(self._unparsed), 0
        while at < len(unparsed) and not reader.ignores_input:
            size = reader.piece_bytes()
            reader.feed(unparsed[at : at + size])
            at += size
            if len(reader.queue) >= MAX_QUEUED or self._router.turns.is_over():
                break
        self._unparsed = b"" if reader.ignores_input else bytes(unparsed[at:])

    def on_turn(self) -> None:
        """Go on with what had to wait for other connections."""
        reader = self._reader
        if self._is_closing or reader.ignores_input:
            self._unparsed = b""
        if reader.is_decoding:
            reader.decode()
        if self._unparsed and not (self._exchange or reader.queue or reader.in_message or self.is_full):
            data, self._unparsed = self._unparsed, b""
            self._read(data)
            if self._reading_paused and not self._is_closing:
                self._continue()
            return
        if self._unparsed and not (self._exchange or reader.queue or self.is_full):
            self._parse()  # a piece at least, even if others have used up the turn
        self._continue()

    def eof_received(self) -> None:
        self._cancel()
        self._close(CloseReason.CLIENT)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._is_closing = True
        self._router.closed[self._close_reason] += 1
        self._reader.close()
        self._unparsed = b""
        self._router.clients.discard(self)
        self._router.connection_limit.leave(self)
        self._router.deadlines.disarm(self)
        self._cancel()

    def pause_writing(self) -> None:
        self.is_full = True
        self._router.deadlines.arm(self, self._router.limits.write_stall_timeout_s)
        if self._exchange:
            self._exchange.pause()

    def resume_writing(self) -> None:
        self.is_full = False
        if self._exchange:
            self._exchange.resume()
        if not self._is_closing:
            self._continue()

    def on_deadline(self) -> None:
        reader = self._reader
        if self._is_closing or self.is_full:
            if not self._is_closing:
                self._close_reason = CloseReason.UNREAD
            self.transport.abort()
        elif self._unparsed:
            self._router.deadlines.arm(self, self._router.limits.header_timeout_s)
        elif reader.in_message:
            part = "body" if reader.head else "head"
            reader.reject(RejectedRequestError(408, f"the request's {part} did not arrive in time", must_close=True))
            self._advance()
        else:
            self._close(CloseReason.IDLE)

    def postpone(self, stalled_s: float) -> None:
        self.deadline += stalled_s
        self._reader.postpone(stalled_s)

    # --- one request after the other ---

    def _continue(self) -> None:
        """Handle what was received, pace reading, and set the deadline for the client's next request or bytes."""
        if self._is_advancing:
            return
        reader, turns = self._reader, self._router.turns
        if reader.queue:
            self._advance()
        while self._unparsed and not (self._is_closing or self._exchange or reader.queue or self.is_full):
            if turns.is_over():
                break
            self._parse()
            self._advance()
        if self._is_closing:
            return
        if reader.is_decoding or (self._is_behind and not (self._exchange or self.is_full)):
            turns.defer(self, len(self._unparsed) + MAX_UNPARSED_BYTES)
        if reader.wants_continue and reader.head is not None and not (self._exchange or reader.queue):
            reader.wants_continue = False
            if not reader.body_bytes:
                self.write(CONTINUE)
        self._pace_reading()
        if not self.is_full:
            self._await_next()

    def _advance(self) -> None:
        """Handle queued requests until one has to wait for a replica, or other connections have to continue."""
        queue, turns = self._reader.queue, self._router.turns
        self._is_advancing = True
        while queue and not (self._exchange is not None or self.is_full or self._is_closing):
            item = self._reader.next_item()
            if item is None:
                break
            self._handle(item)
            if turns.is_over():
                break
        self._is_advancing = False

    def _handle_cached(self, head: RequestHead, body: bytes, values: list[bytes]) -> None:
        """Handle a request with a cached head; nothing else is queued or running."""
        self.deadline = NEVER
        self._is_new = self._awaits_head = False
        self._reader.received_bytes = 0
        self._reader.ignores_input = not head.keep_alive
        self._handle(self._router.request(head, body, values))

    def _handle(self, item: Request | RejectedRequestError) -> None:
        if isinstance(item, RejectedRequestError):
            self._reject(None, item)
            return
        try:
            opened = self._router.open(self, item)
        except RejectedRequestError as rejection:
            self._reject(item, rejection)
            return
        except Exception as error:  # noqa: BLE001 - the client gets a response in any case
            defect(logger, error, "client")
            self._reject(item, RejectedRequestError(500, "internal error", must_close=True))
            return
        if isinstance(opened, LocalResponse):
            keep_alive = item.head.keep_alive and not self._router.is_draining
            self.respond(item, opened, keep_alive=keep_alive)
            self.on_exchange_ended(keep_alive=keep_alive)
        else:
            self._exchange = opened
            opened.start()

    def _reject(self, request: Request | None, rejection: RejectedRequestError) -> None:
        self._router.services.metrics.count_rejected(rejection.status)
        may_stay_open = not (rejection.must_close or self._router.is_draining)
        keep_alive = may_stay_open and request is not None and request.head.keep_alive
        path = b"" if request is None else request.head.path
        if not keep_alive:
            self._close_reason = CloseReason.TIMEOUT if rejection.status == 408 else CloseReason.REJECTED
        self.respond(request, rejection.response(path), keep_alive=keep_alive, origin=rejection.origin)
        self.on_exchange_ended(keep_alive=keep_alive)

    @property
    def _is_behind(self) -> bool:
        """Whether received requests wait here."""
        return bool(self._reader.queue or self._unparsed)

    def _pace_reading(self) -> None:
        """Stop reading a client that has sent many requests ahead or reads no responses, and resume later."""
        reader, is_running = self._reader, self._exchange is not None
        if not (self._is_behind or (is_running and reader.in_message)):
            self._pipelined_bytes = 0
        has_much = len(self._unparsed) > MAX_UNPARSED_BYTES or self._pipelined_bytes > MAX_PIPELINED_BYTES
        is_ahead = has_much if is_running else self._is_behind
        if is_ahead is self._reading_paused:
            return
        self._reading_paused = is_ahead
        if is_ahead:
            self.transport.pause_reading()
        else:  # also while a replica works, so that a client that disconnects is noticed
            reader.restart_pace()
            self.transport.resume_reading()

    def _resume_after_large_read(self) -> None:
        if not (self._reading_paused or self.transport.is_closing()):
            self.transport.resume_reading()

    def _await_next(self) -> None:
        """Set the deadline for what the client has to do next."""
        limits, deadlines, reader = self._router.limits, self._router.deadlines, self._reader
        has_pending_response = self._exchange is not None or bool(reader.queue)
        if self._reading_paused or self._unparsed:
            reader.restart_pace()
            self.deadline = NEVER
        elif (head := reader.head) is not None:
            deadlines.arm(self, reader.body_wait_s(head, deadlines.time()))
        elif reader.in_message or (
            reader.received_bytes and not has_pending_response
        ):  # empty lines begin a request too
            if self.deadline == NEVER or not self._awaits_head:
                deadlines.arm(self, limits.header_timeout_s)
            self._awaits_head = True
            return
        elif has_pending_response:
            self.deadline = NEVER
        else:
            deadlines.arm(self, limits.keep_alive_timeout_s)
        self._awaits_head = False

    def _close(self, reason: CloseReason) -> None:
        """Close after what was written. A rejected client is still sending: let it read the rejection first.

        TLS connections cannot be half-closed; closing them waits for the client.
        """
        if self._is_closing:
            return
        self._is_closing = self._reader.ignores_input = True
        if self._close_reason is CloseReason.CLIENT:
            self._close_reason = reason
        if self._reader.is_rejected and self.transport.can_write_eof() and not self.transport.is_closing():
            self._router.deadlines.arm(self, LINGER_S)
            self._router.write_buffer.flush()
            self.transport.write_eof()
            self._reading_paused = False
            self.transport.resume_reading()
        else:
            self._router.deadlines.arm(self, self._router.limits.write_stall_timeout_s)
            self._router.write_buffer.close(self.transport)

    def _cancel(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange:
            exchange.cancel()
