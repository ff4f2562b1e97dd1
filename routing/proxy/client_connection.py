"""One client connection: requests in, responses out, in order.

Theory of operation. Received bytes are parsed into a queue (``request_reader.py``), whose requests and rejections are
answered one at a time. Only a read that brought one whole request with a cached head, while nothing is queued, is
answered without parsing. A connection has one deadline: for a head, for more of a body, for the next request, or for
the client to read what was written. While a replica works, the upstream connection has the deadline. A client that ends
its side of the connection has disconnected: its running request is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from socket import SO_LINGER, SOL_SOCKET
from typing import Final, cast

from routing.http.headers import CachedHead
from routing.http.loop import NEVER, NO_BUCKET
from routing.http.request import Request, RequestHead
from routing.http.response import LocalResponse, RejectedRequestError, encode_local_response
from routing.log import defect
from routing.proxy.exchange import Exchange
from routing.proxy.request_reader import RequestReader
from routing.proxy.router import Router

logger = logging.getLogger(__name__)

_NO_LINGER: Final = struct.pack("ii", 1, 0)
LINGER_S: Final = 2.0  # how long a rejected client may go on sending before the connection is closed
MAX_PIPELINED_BYTES: Final = 256 << 10  # received of later requests while one is being answered
READ_BYTES: Final = 128 << 10  # after a larger read other connections are read first; uvloop would read 32 times
RESPONSES_PER_ITERATION: Final = 64  # of the router's own to one client, before other connections continue
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
        self._pipelined_bytes = 0
        self._is_closing = self._is_advancing = False
        self._reading_paused = False
        self._awaits_head = True  # the running deadline is for a head

    # --- called by exchanges ---

    def write(self, data: bytes) -> None:
        self.write_buffer.write(self.transport, data)

    def respond(self, request: Request | None, response: LocalResponse, *, keep_alive: bool) -> None:
        """Send a response of the router's own; ``request`` is None if it could not be parsed."""
        http11, bodyless, request_id = True, False, ""
        if request is not None:
            http11, bodyless, request_id = request.head.http11, request.head.method == b"HEAD", request.request_id
        encoded = encode_local_response(
            response, http11=http11, keep_alive=keep_alive, bodyless=bodyless, request_id=request_id
        )
        self.write(encoded)

    def on_exchange_ended(self, *, keep_alive: bool) -> None:
        """The current response is complete, or will never be."""
        self._exchange = None
        reader = self._reader
        if not keep_alive:
            self._close()
        elif self._is_advancing or reader.queue or reader.in_message or self._reading_paused or self.is_full:
            self._continue()
        else:
            self._pipelined_bytes = 0
            self._router.deadlines.arm(self, self._router.limits.keep_alive_timeout_s)

    def reset(self) -> None:
        """Reset the connection, so that no client takes an incomplete response for a complete one."""
        self._exchange = None
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
        """Whether a request, or its rest, is still to come that a client may expect to be answered."""
        is_busy = self._is_closing or self._exchange is not None or bool(self._reader.queue)
        return not is_busy and (self._awaits_head or self._reader.in_message)

    def drain(self, *, rejects_incomplete: bool = False) -> None:
        """Close if no request is running, queued or incomplete; otherwise the next response is the last.

        ``rejects_incomplete``: an incomplete request is rejected.
        """
        reader = self._reader
        if self._is_closing or self._exchange or reader.queue or (self.awaits_request and not rejects_incomplete):
            return
        if reader.in_message:
            reader.reject(RejectedRequestError(503, "this router stops", retry_after_s=1, must_close=True))
            self._continue()
        else:
            self._close()

    # --- called by the event loop ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        router = self._router
        if router.connection_limit.max_per_address is not None and not router.connection_limit.enter(self):
            self.reset()  # costs less than a response, before which a request would have to be read
            return
        router.clients.add(self)
        router.deadlines.arm(self, router.limits.header_timeout_s)

    def data_received(self, data: bytes) -> None:
        reader, router = self._reader, self._router
        if len(data) >= READ_BYTES:
            self.transport.pause_reading()
            router.loop.call_soon(self._resume_after_large_read)
        if reader.ignores_input:
            return
        is_free = self._exchange is None and not (reader.in_message or reader.queue or self.is_full)
        if is_free and (match := router.request_head_cache.find(data, self._latest)) is not None:
            self._latest, body, values = match
            if len(body) <= router.limits.max_body_bytes:
                self._handle_cached(self._latest.head, body, values)
                return
        reader.feed(data)
        self._pipelined_bytes += len(data)  # until nothing is queued any more
        if is_free:
            reader.learn(data)
        self._continue()

    def eof_received(self) -> None:
        self._cancel()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._is_closing = True
        self._reader.close()
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
            self.transport.abort()
        elif reader.in_message:
            part = "body" if reader.head else "head"
            reader.reject(RejectedRequestError(408, f"the request's {part} did not come in time", must_close=True))
            self._advance()
        else:
            self._close()

    # --- one request after the other ---

    def _continue(self) -> None:
        """Answer queued requests, pace reading, and set the deadline for what comes next."""
        if self._is_advancing:
            return
        reader = self._reader
        if reader.queue:
            self._advance()
        if self._is_closing:
            return
        if reader.wants_continue and reader.head is not None and not (self._exchange or reader.queue):
            reader.wants_continue = False
            if not reader.body_bytes:
                self.write(CONTINUE)
        self._pace_reading()
        if not self.is_full:
            self._await_next()

    def _advance(self) -> None:
        """Answer queued requests until one has to wait for a replica, or other connections have to continue."""
        queue = self._reader.queue
        self._is_advancing = True
        for _ in range(RESPONSES_PER_ITERATION):
            if not queue or self._exchange is not None or self.is_full or self._is_closing:
                break
            self._handle(queue.popleft())
        else:
            self._router.loop.call_soon(self._continue)
        self._is_advancing = False

    def _handle_cached(self, head: RequestHead, body: bytes, values: list[bytes]) -> None:
        """Handle a request with a cached head; nothing else is queued or running."""
        self.deadline = NEVER
        self._awaits_head = False
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
        self.respond(request, rejection.response(), keep_alive=keep_alive)
        self.on_exchange_ended(keep_alive=keep_alive)

    def _pace_reading(self) -> None:
        """Stop reading a client that has sent many requests ahead or reads no responses, and resume later."""
        queue = self._reader.queue
        is_ahead = bool(queue) if self._exchange is None else self._pipelined_bytes > MAX_PIPELINED_BYTES
        if is_ahead and not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()
        elif self._exchange is None and not queue:
            self._pipelined_bytes = 0
            if self._reading_paused:
                self._reading_paused = False
                self._reader.restart_pace()
                self.transport.resume_reading()

    def _resume_after_large_read(self) -> None:
        if not (self._reading_paused or self.transport.is_closing()):
            self.transport.resume_reading()

    def _await_next(self) -> None:
        """Set the deadline for what the client has to do next."""
        limits, deadlines, reader = self._router.limits, self._router.deadlines, self._reader
        is_answering = self._exchange is not None or bool(reader.queue)
        if self._reading_paused:
            self.deadline = NEVER
        elif (head := reader.head) is not None:
            deadlines.arm(self, reader.body_wait_s(head, deadlines.time()))
        elif reader.in_message or (reader.received_bytes and not is_answering):  # empty lines begin a request too
            if self.deadline == NEVER or not self._awaits_head:
                deadlines.arm(self, limits.header_timeout_s)
            self._awaits_head = True
            return
        elif is_answering:
            self.deadline = NEVER
        else:
            deadlines.arm(self, limits.keep_alive_timeout_s)
        self._awaits_head = False

    def _close(self) -> None:
        """Close after what was written. A rejected client is still sending: let it read the rejection first.

        TLS connections cannot be half-closed; closing them waits for the client.
        """
        if self._is_closing:
            return
        self._is_closing = self._reader.ignores_input = True
        if self._reader.is_rejected and self.transport.can_write_eof() and not self.transport.is_closing():
            self._router.deadlines.arm(self, LINGER_S)
            self._router.write_buffer.flush()
            self.transport.write_eof()
        else:
            self._router.deadlines.arm(self, self._router.limits.write_stall_timeout_s)
            self._router.write_buffer.close(self.transport)

    def _cancel(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange:
            exchange.cancel()
