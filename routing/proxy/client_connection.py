"""One client connection: requests in, answers out, in order.

Theory of operation. What came is read into a queue (``request_reader.py``), whose requests and refusals are answered
one at a time. Only where one read brought one whole request whose head is known, and nothing waits before it, is it
answered unread. Whoever waits here has one deadline: for a head, for more of a body, for the next request, or for the
client to take what was written; while a replica works, the deadline is the upstream connection's. A client that ends
its side of the connection has gone: what is running for it is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from socket import SO_LINGER, SOL_SOCKET
from typing import Final, cast

from routing.http.errors import RejectedRequestError
from routing.http.headers import CachedHead
from routing.http.loop import NEVER, NOWHERE
from routing.http.request import Request, RequestHead
from routing.http.response import LocalResponse, encode_local_response
from routing.log import defect
from routing.proxy.exchange import Exchange
from routing.proxy.request_reader import RequestReader
from routing.proxy.router import Router

logger = logging.getLogger(__name__)

_RESET: Final = struct.pack("ii", 1, 0)  # an answer that lingers for no time
LINGER_S: Final = 2.0  # how long a refused client may go on sending before the connection is cut
AHEAD_BYTES: Final = 256 << 10  # read of later requests, while an answer is made or waits to be taken
READ_BYTES: Final = 128 << 10  # in one read, after which other connections are read first; uvloop would read 32 times
ANSWERS_A_TURN: Final = 64  # of the router's own, to one client, before others have their turn
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class ClientConnection(asyncio.Protocol):
    """The connection of one client."""

    def __init__(self, router: Router) -> None:
        self.deadline, self.due = NEVER, NOWHERE
        self._router = router
        self.write_buffer = router.write_buffer
        self._reader = RequestReader(router)
        self._known: CachedHead[RequestHead] | None = None  # of its latest request that was recognised
        self._exchange: Exchange | None = None
        self._ahead_bytes = 0
        self._is_closing = self._is_advancing = False
        self._reading_paused = False
        self.is_full = False  # what was written waits for the client to take it
        self._awaits_head = True  # the deadline that is running is for a head

    # --- what an exchange does ---

    def write(self, data: bytes) -> None:
        """Send bytes of an answer."""
        self.write_buffer.write(self.transport, data)

    def answer(self, request: Request | None, answer: LocalResponse, *, keep_alive: bool) -> None:
        """Send an answer of the router's own."""
        http11 = request is None or request.head.http11
        bodyless, name = (request.head.method == b"HEAD", request.request_id) if request else (False, "")
        self.write(
            encode_local_response(answer, http11=http11, keep_alive=keep_alive, bodyless=bodyless, request_id=name)
        )

    def on_exchange_ended(self, *, keep_alive: bool) -> None:
        """The present answer is complete, as far as it will ever be."""
        self._exchange = None
        reader = self._reader
        if not keep_alive:
            self._close()
        elif self._is_advancing or reader.queue or reader.in_message or self._reading_paused or self.is_full:
            self._settle()
        else:
            self._ahead_bytes = 0
            self._router.deadlines.arm(self, self._router.limits.keep_alive_timeout_s)

    def reset(self) -> None:
        """Reset the connection, so that nobody takes an incomplete answer for a complete one."""
        self._exchange = None
        self._is_closing = self._reader.ignores_input = True
        _reset(self.transport)

    # --- what a stopping router does ---

    @property
    def received_bytes(self) -> int:
        """Read since the last complete request, framing included."""
        return self._reader.received_bytes

    @property
    def awaits_request(self) -> bool:
        """Whether a first request or the rest of one is still to come, which a client may count on being answered."""
        is_busy = self._is_closing or self._exchange is not None or bool(self._reader.queue)
        return not is_busy and (self._awaits_head or self._reader.in_message)

    def drain(self, *, rejects_incomplete: bool = False) -> None:
        """Close if nothing is being answered or owed (unless that is turned away); else the next answer is the last."""
        reader = self._reader
        if self._is_closing or self._exchange or reader.queue or (self.awaits_request and not rejects_incomplete):
            return
        if reader.in_message:
            reader.refuse(RejectedRequestError(503, "this router stops", retry_after_s=1, must_close=True))
            self._settle()
        else:
            self._close()

    # --- what the event loop does ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        router = self._router
        if router.connection_limit.most is not None and not router.connection_limit.enter(self):
            self.reset()  # cheaper than a word, which would have to be read
            return
        router.clients.add(self)
        router.deadlines.arm(self, router.limits.header_timeout_s)

    def data_received(self, data: bytes) -> None:
        reader, router = self._reader, self._router
        if len(data) >= READ_BYTES:
            self.transport.pause_reading()
            router.loop.call_soon(self._resume_reading)
        if reader.ignores_input:
            return
        is_free = self._exchange is None and not (reader.in_message or reader.queue or self.is_full)
        if is_free and (found := router.request_head_cache.find(data, self._known)) is not None:
            self._known, body, values = found
            if len(body) <= router.limits.max_body_bytes:
                self._handle_cached(self._known.head, body, values)
                return
        reader.feed(data)
        self._ahead_bytes += len(data)  # until nothing waits any more
        if is_free:
            reader.learn(data)
        self._settle()

    def eof_received(self) -> None:
        self._cancel()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._is_closing = True
        self._reader.close()
        self._router.clients.discard(self)
        self._router.connection_limit.leave(self)
        self._router.deadlines.forget(self)
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
            self._settle()

    def on_deadline(self) -> None:
        reader = self._reader
        if self._is_closing or self.is_full:
            self.transport.abort()
        elif reader.in_message:
            what = "body" if reader.head else "head"
            reader.refuse(RejectedRequestError(408, f"the request's {what} did not come in time", must_close=True))
            self._advance()
        else:
            self._close()

    # --- one after the other ---

    def _settle(self) -> None:
        """Go on with what is due, then wait for whatever is next."""
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
        """Answer queued requests until one has to wait for a replica, or it is the turn of others."""
        queue = self._reader.queue
        self._is_advancing = True
        for _ in range(ANSWERS_A_TURN):
            if not queue or self._exchange is not None or self.is_full or self._is_closing:
                break
            self._take(queue.popleft())
        else:
            self._router.loop.call_soon(self._settle)
        self._is_advancing = False

    def _handle_cached(self, head: RequestHead, body: bytes, values: list[bytes]) -> None:
        """Answer a request whose head needs no reading; nothing else is under way."""
        self.deadline = NEVER
        self._awaits_head = False
        self._reader.received_bytes = 0
        self._reader.ignores_input = not head.keep_alive
        self._take(self._router.request(head, body, values))

    def _take(self, item: Request | RejectedRequestError) -> None:
        if isinstance(item, RejectedRequestError):
            self._answer_refusal(None, item)
            return
        try:
            outcome = self._router.open(self, item)
        except RejectedRequestError as refusal:
            self._answer_refusal(item, refusal)
            return
        except Exception as error:  # noqa: BLE001 - whoever waits gets an answer, whatever we did wrong
            defect(logger, error, "client")
            self._answer_refusal(item, RejectedRequestError(500, "internal error", must_close=True))
            return
        if isinstance(outcome, LocalResponse):
            keep_alive = item.head.keep_alive and not self._router.is_draining
            self.answer(item, outcome, keep_alive=keep_alive)
            self.on_exchange_ended(keep_alive=keep_alive)
        else:
            self._exchange = outcome
            outcome.start()

    def _answer_refusal(self, request: Request | None, refusal: RejectedRequestError) -> None:
        self._router.services.metrics.count_rejected(refusal.status)
        may_live = not (refusal.must_close or self._router.is_draining)
        keep_alive = may_live and request is not None and request.head.keep_alive
        self.answer(request, refusal.answer(), keep_alive=keep_alive)
        self.on_exchange_ended(keep_alive=keep_alive)

    def _pace_reading(self) -> None:
        """Stop reading a client that is far ahead, or whose answers have to wait; read on when it is its turn again."""
        queue = self._reader.queue
        is_ahead = bool(queue) if self._exchange is None else self._ahead_bytes > AHEAD_BYTES
        if is_ahead and not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()
        elif self._exchange is None and not queue:
            self._ahead_bytes = 0
            if self._reading_paused:
                self._reading_paused = False
                self._reader.start_over()
                self.transport.resume_reading()

    def _resume_reading(self) -> None:
        """Read on, after a large read."""
        if not (self._reading_paused or self.transport.is_closing()):
            self.transport.resume_reading()

    def _await_next(self) -> None:
        limits, deadlines, reader = self._router.limits, self._router.deadlines, self._reader
        is_answering = self._exchange is not None or bool(reader.queue)
        if self._reading_paused:
            self.deadline = NEVER
        elif (head := reader.head) is not None:
            deadlines.arm(self, reader.wait_s(head, deadlines.time()))
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
        """End the connection after what was written. A refused client is still sending: let it read why first.

        With TLS there is no half of an end, and closing waits for the client's own.
        """
        if self._is_closing:
            return
        self._is_closing = self._reader.ignores_input = True
        if self._reader.was_refused and self.transport.can_write_eof() and not self.transport.is_closing():
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


def _reset(transport: asyncio.Transport) -> None:
    """End a connection by a reset, which nobody takes for an orderly end; what waits for it is not written."""
    socket = transport.get_extra_info("socket")
    if socket is not None:
        socket.setsockopt(SOL_SOCKET, SO_LINGER, _RESET)
    transport.abort()
