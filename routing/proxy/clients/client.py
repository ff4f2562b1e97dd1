"""One client connection: requests in, answers out, in order.

Theory of operation. The parser may finish several requests in one read (pipelining), so finished requests queue and
are answered one at a time. A request that breaks HTTP queues as its refusal, behind the requests before it, and
nothing after it is read. Whoever waits here has one deadline: for a head, for more of a body, for the next request,
or for the client to take what was written; while a replica works, the deadline is the upstream connection's.
A client that ends its side of the connection has gone: what is running for it is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Final, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from routing.proxy.clients.body_pace import BodyPace
from routing.proxy.clients.pieces import join_tail
from routing.proxy.clients.request import Head, Request, body_too_large, malformed, overhead, read_head, without_upgrade
from routing.proxy.errors import LocalAnswer, RefusalError
from routing.proxy.known_heads import KnownHead
from routing.proxy.log import defect
from routing.proxy.loop.deadlines import NEVER, NOWHERE
from routing.proxy.loop.outbox import reset
from routing.proxy.replicas.answer import local_bytes

if TYPE_CHECKING:
    from routing.proxy.exchanges.exchange import Exchange
    from routing.proxy.router import Router

logger = logging.getLogger(__name__)

LINGER_S: Final = 2.0  # how long a refused client may go on sending before the connection is cut
AHEAD_BYTES: Final = 256 << 10  # read of later requests, while an answer is made or waits to be taken
ANSWERS_A_TURN: Final = 64  # of the router's own, to one client, before others have their turn
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class Client(asyncio.Protocol):
    """The connection of one client."""

    def __init__(self, router: Router) -> None:
        self.deadline, self.due = NEVER, NOWHERE
        self._router = router
        self.outbox = router.outbox
        self._parser = HttpRequestParser(self)
        self._known: KnownHead[Head] | None = None  # of its latest request that was recognised
        self._queue: deque[Request | RefusalError] = deque()
        self._exchange: Exchange | None = None
        self._head: Head | None = None  # whose body is coming
        self._expected: Head | None = None  # whose body may come
        self._wants_continue = False  # and will not come before we say so
        self._in_message = False
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._parts: list[bytes] = []
        self._body_bytes = 0
        self._body_pace = BodyPace()
        self._unfinished_bytes = 0  # of those, counted with all other clients'
        self.came_bytes = 0  # read since the last complete request, framing included
        self._ahead_bytes = 0
        self._is_deaf = False  # whatever still comes is not read
        self._was_refused = self._is_closing = self._is_advancing = False
        self._reading_paused = False
        self.is_full = False  # what was written waits for the client to take it
        self._awaits_head = True  # the deadline that is running is for a head

    # --- what an exchange does ---

    def write(self, data: bytes) -> None:
        """Send bytes of an answer."""
        self.outbox.write(self.transport, data)

    def answer(self, request: Request | None, answer: LocalAnswer, *, keep_alive: bool) -> None:
        """Send an answer of the router's own."""
        http11 = request is None or request.head.http11
        bodyless, name = (request.head.method == b"HEAD", request.request_id) if request else (False, "")
        self.write(local_bytes(answer, http11=http11, keep_alive=keep_alive, bodyless=bodyless, request_id=name))

    def exchange_ended(self, *, keep_alive: bool) -> None:
        """The present answer is complete, as far as it will ever be."""
        self._exchange = None
        if not keep_alive:
            self._close()
        elif self._is_advancing or self._queue or self._in_message or self._reading_paused or self.is_full:
            self._settle()
        else:
            self._ahead_bytes = 0
            self._router.deadlines.arm(self, self._router.limits.keep_alive_timeout_s)

    def cut(self) -> None:
        """Reset the connection, so that nobody takes an incomplete answer for a complete one."""
        self._exchange = None
        self._is_closing = self._is_deaf = True
        reset(self.transport)

    # --- what a stopping router does ---

    @property
    def is_owed(self) -> bool:
        """Whether a first request or the rest of one is still to come, which a client may count on being answered."""
        is_busy = self._is_closing or self._exchange is not None or bool(self._queue)
        return not is_busy and (self._awaits_head or self._in_message)

    def drain(self, *, turns_away: bool = False) -> None:
        """Close if nothing is being answered or owed (unless that is turned away); else the next answer is the last."""
        if self._is_closing or self._exchange or self._queue or (self.is_owed and not turns_away):
            return
        if self._in_message:
            self._refuse(RefusalError(503, "this router stops", retry_after_s=1, must_close=True))
            self._settle()
        else:
            self._close()

    # --- what the event loop does ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        router = self._router
        if router.addresses.most is not None and not router.addresses.enter(self):
            self.cut()  # cheaper than a word, which would have to be read
            return
        router.clients.add(self)
        router.deadlines.arm(self, router.limits.header_timeout_s)

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        is_free = self._exchange is None and not (self._in_message or self._queue or self.is_full)
        router = self._router
        if is_free and (found := router.request_heads.find(data, self._known)) is not None:
            self._known, body = found
            if len(body) <= router.limits.max_body_bytes:
                self._take_known(self._known.head, body)
                return
        self._feed(data)
        if is_free:
            self._learn(data)
        self._settle()

    def eof_received(self) -> None:
        self._cancel()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._is_closing = self._is_deaf = True
        self._head = None
        self._count_unfinished()
        self._router.clients.discard(self)
        self._router.addresses.leave(self)
        self._router.deadlines.forget(self)
        self._queue.clear()
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

    def deadline_passed(self) -> None:
        if self._is_closing or self.is_full:
            self.transport.abort()
        elif self._in_message:
            what = "body" if self._head else "head"
            self._refuse(RefusalError(408, f"the request's {what} did not come in time", must_close=True))
            self._advance()
        else:
            self._close()

    # --- what httptools does ---

    def on_message_begin(self) -> None:
        self._in_message = True
        self._target = b""
        self._headers = []
        self._parts = []
        self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head is None:  # else it is a trailer, and those are not for anybody
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        method = parser.get_method()
        if method == b"CONNECT":
            raise RefusalError(405, "this is no forward proxy", must_close=True)
        if parser.should_upgrade():
            return  # the parser stops here; see _decline_upgrade
        limits = self._router.limits
        self._head = head = read_head(method, self._target, parser.get_http_version(), self._headers, limits=limits)
        self._wants_continue = head.expects_continue

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)
        self._body_bytes += len(data)
        if self._body_bytes > self._router.limits.max_body_bytes:
            raise body_too_large(self._router.limits)

    def on_message_complete(self) -> None:
        head, self._head = self._head, None
        if head is None:
            return
        self._in_message = False
        self.came_bytes = 0
        parts, self._parts = self._parts, []
        head.keep_alive = self._parser.should_keep_alive()
        self._queue.append(self._router.request(head, parts[0] if len(parts) == 1 else b"".join(parts)))
        if not head.keep_alive:
            self._is_deaf = True

    # --- the end of a read ---

    def _feed(self, data: bytes) -> None:
        self.came_bytes += len(data)
        kept = len(self._parts)
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except HttpParserError as error:
            if not self._is_deaf:  # what follows a last request is nobody's
                cause = error.__context__
                self._refuse(cause if isinstance(cause, RefusalError) else malformed(error))
        if len(self._parts) > kept:
            join_tail(self._parts, kept)
        if self._head is not self._expected:
            self._expect_body()
        if self._in_message or self._unfinished_bytes:
            self._count_unfinished()
        self._ahead_bytes += len(data)  # until nothing waits any more
        if self.came_bytes > self._router.limits.max_header_bytes and not self._is_deaf:
            body_bytes = None if self._head is None else self._body_bytes
            if refusal := overhead(self.came_bytes, body_bytes, self._router.limits):
                self._refuse(refusal)

    def _expect_body(self) -> None:
        """Wait for a body that did not come with its head only if its sender may send one."""
        self._expected = self._head
        if self._head is not None and (refusal := self._router.body_refusal(self._head)):
            self._refuse(refusal)

    def _count_unfinished(self) -> None:
        """Share what may be held of bodies that are still coming; one that came whole in a read needs no share."""
        router = self._router
        held = self._body_bytes if self._head is not None else 0
        router.unfinished_bytes += held - self._unfinished_bytes
        self._unfinished_bytes = held
        if held and router.unfinished_bytes > router.limits.max_unfinished_body_bytes:
            self._refuse(RefusalError(503, "too many bodies are coming at once", retry_after_s=1, must_close=True))

    def _learn(self, data: bytes) -> None:
        """Remember a head, if this read brought one request and nothing else."""
        if len(self._queue) == 1 and not self._in_message:
            request = self._queue[0]
            if isinstance(request, Request) and request.head.is_plain:
                self._router.request_heads.learn(data, request.head, len(request.body))

    def _decline_upgrade(self, rest: bytes) -> None:
        """Read the request as if it offered no upgrade: the parser takes its body for the other protocol.

        Java's HTTP client offers HTTP/2 this way with every request, body included.
        """
        start = (self._parser.get_method(), self._target, self._parser.get_http_version())
        self._parser = HttpRequestParser(self)
        self.came_bytes = 0
        self._feed(without_upgrade(*start, self._headers) + rest)

    def _refuse(self, refusal: RefusalError) -> None:
        """Answer what came before, then this, and read nothing more."""
        self._queue.append(refusal)
        self._in_message = False
        self._head = None
        self._parts = []
        self._count_unfinished()
        self._is_deaf = self._was_refused = True

    def _settle(self) -> None:
        """Go on with what is due, then wait for whatever is next."""
        if self._is_advancing:
            return
        if self._queue:
            self._advance()
        if self._is_closing:
            return
        if self._wants_continue and self._head is not None and not (self._exchange or self._queue):
            self._wants_continue = False
            if not self._body_bytes:
                self.write(CONTINUE)
        self._pace_reading()
        if not self.is_full:
            self._await_next()

    def _advance(self) -> None:
        """Answer queued requests until one has to wait for a replica, or it is the turn of others."""
        self._is_advancing = True
        for _ in range(ANSWERS_A_TURN):
            if not self._queue or self._exchange is not None or self.is_full or self._is_closing:
                break
            self._take(self._queue.popleft())
        else:
            self._router.loop.call_soon(self._settle)
        self._is_advancing = False

    def _take_known(self, head: Head, body: bytes) -> None:
        """Answer a request whose head needs no reading; nothing else is under way."""
        self.deadline = NEVER
        self._awaits_head = False
        self.came_bytes = 0
        self._is_deaf = not head.keep_alive
        self._take(self._router.request(head, body))

    def _take(self, item: Request | RefusalError) -> None:
        if isinstance(item, RefusalError):
            self._answer_refusal(None, item)
            return
        try:
            outcome = self._router.open(self, item)
        except RefusalError as refusal:
            self._answer_refusal(item, refusal)
            return
        except Exception as error:  # noqa: BLE001 - whoever waits gets an answer, whatever we did wrong
            defect(logger, error, "client")
            self._answer_refusal(item, RefusalError(500, "internal error", must_close=True))
            return
        if isinstance(outcome, LocalAnswer):
            keep_alive = item.head.keep_alive and not self._router.is_draining
            self.answer(item, outcome, keep_alive=keep_alive)
            self.exchange_ended(keep_alive=keep_alive)
        else:
            self._exchange = outcome
            outcome.start()

    def _answer_refusal(self, request: Request | None, refusal: RefusalError) -> None:
        self._router.metrics.refused(refusal.status)
        may_live = not (refusal.must_close or self._router.is_draining)
        keep_alive = may_live and request is not None and request.head.keep_alive
        self.answer(request, refusal.answer(), keep_alive=keep_alive)
        self.exchange_ended(keep_alive=keep_alive)

    def _pace_reading(self) -> None:
        """Stop reading a client that is far ahead, or whose answers have to wait; read on when it is its turn again."""
        is_ahead = bool(self._queue) if self._exchange is None else self._ahead_bytes > AHEAD_BYTES
        if is_ahead and not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()
        elif self._exchange is None and not self._queue:
            self._ahead_bytes = 0
            if self._reading_paused:
                self._reading_paused = False
                self._body_pace.start_over()
                self.transport.resume_reading()

    def _await_next(self) -> None:
        limits, deadlines = self._router.limits, self._router.deadlines
        is_answering = self._exchange is not None or bool(self._queue)
        if self._reading_paused:
            self.deadline = NEVER
        elif (head := self._head) is not None:
            deadlines.arm(self, self._body_pace.wait_s(head, self._body_bytes, deadlines.time(), limits))
        elif self._in_message or (self.came_bytes and not is_answering):  # empty lines begin a request too
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
        self._is_closing = self._is_deaf = True
        if self._was_refused and self.transport.can_write_eof() and not self.transport.is_closing():
            self._router.deadlines.arm(self, LINGER_S)
            self._router.outbox.flush()
            self.transport.write_eof()
        else:
            self._router.deadlines.arm(self, self._router.limits.write_stall_timeout_s)
            self._router.outbox.close(self.transport)

    def _cancel(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange:
            exchange.cancel()
