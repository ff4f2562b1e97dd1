"""What one client sends, read into requests: in the order in which they came, each whole or as its refusal.

Theory of operation. The parser may finish several requests in one read (pipelining), so finished requests queue. A
request that breaks HTTP queues as its refusal, behind the requests before it, and nothing after it is read: from then
on the reader is deaf.

How long a client may still take for a body: each read has a deadline, and the whole has an average to keep.

Theory of operation. Bytes buy time: after the grace, a body of ``n`` bytes so far must be no older than ``n`` divided
by the least rate. So a body that trickles is let go although it never stops, and one that came fast may pause. It is
asked only where a body does not come whole in one read.

A body that comes in pieces, kept as few objects: one for each tiny chunk or read would be many times its bytes.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from routing.http.errors import RejectedRequestError
from routing.http.request import (
    Request,
    RequestHead,
    body_too_large,
    malformed,
    overhead,
    parse_request_head,
    without_upgrade,
)
from routing.proxy.router import Router
from routing.schema import Limits


class BodyPace:
    """The body that one connection waits for."""

    __slots__ = ("_grace_until", "_head")

    def __init__(self) -> None:
        self._head: RequestHead | None = None  # of the request whose body is timed
        self._grace_until = 0.0

    def wait_s(self, head: RequestHead, body_bytes: int, now: float, limits: Limits) -> float:
        """How many seconds from ``now`` to wait for more of a body; below 0 where it is too slow already."""
        if self._head is not head:
            self._head = head
            self._grace_until = now + limits.body_grace_s
        rate = limits.min_body_bytes_per_s
        if not rate:
            return limits.body_idle_timeout_s
        return min(limits.body_idle_timeout_s, self._grace_until + body_bytes / rate - now)

    def start_over(self) -> None:
        """Time what comes from now on: it was not read for a while, and that was not the client's doing."""
        self._head = None


PIECE_BYTES: Final = 4096  # a shorter piece is joined to the next


def join_tail(pieces: list[bytes], kept: int) -> None:
    """Join what came behind the first ``kept`` pieces into one, and to the last of these where that is short."""
    start = kept - 1 if kept and len(pieces[kept - 1]) < PIECE_BYTES else kept
    if len(pieces) > start + 1:
        pieces[start:] = [b"".join(pieces[start:])]


class RequestReader:
    """One client's."""

    __slots__ = (
        "_body_pace",
        "_expected",
        "_headers",
        "_parser",
        "_parts",
        "_router",
        "_target",
        "_unfinished_bytes",
        "body_bytes",
        "head",
        "ignores_input",
        "in_message",
        "queue",
        "received_bytes",
        "wants_continue",
        "was_refused",
    )

    def __init__(self, router: Router) -> None:
        self.queue: deque[Request | RejectedRequestError] = deque()  # read, and not answered yet
        self.head: RequestHead | None = None  # whose body is coming
        self.wants_continue = False  # and will not come before we say so
        self.in_message = False
        self.body_bytes = 0
        self.received_bytes = 0  # since the last complete request, framing included
        self.ignores_input = False  # whatever still comes is not read
        self.was_refused = False
        self._router = router
        self._parser = HttpRequestParser(self)
        self._expected: RequestHead | None = None  # whose body may come
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._parts: list[bytes] = []
        self._body_pace = BodyPace()
        self._unfinished_bytes = 0  # of bodies, counted with all other clients'

    # --- what its connection does ---

    def feed(self, data: bytes) -> None:
        """Read what came."""
        self.received_bytes += len(data)
        kept = len(self._parts)
        try:
            self._parse(data)
        except HttpParserError as error:
            if not self.ignores_input:  # what follows a last request is nobody's
                cause = error.__context__
                self.refuse(cause if isinstance(cause, RejectedRequestError) else malformed(error))
        if len(self._parts) > kept:
            join_tail(self._parts, kept)
        if self.head is not self._expected:
            self._expect_body()
        if self.in_message or self._unfinished_bytes:
            self._count_unfinished()
        if self.received_bytes > self._router.limits.max_header_bytes and not self.ignores_input:
            body_bytes = None if self.head is None else self.body_bytes
            if refusal := overhead(self.received_bytes, body_bytes, self._router.limits):
                self.refuse(refusal)

    def learn(self, data: bytes) -> None:
        """Remember a head, if this read brought one request and nothing else."""
        if len(self.queue) == 1 and not self.in_message:
            request = self.queue[0]
            if isinstance(request, Request) and request.head.is_plain:
                heads, head = self._router.request_head_cache, request.head
                if (cut := heads.learn(data, head, len(request.body), self._headers)) is not None:
                    head.stand_for(cut, self._headers)

    def refuse(self, refusal: RejectedRequestError) -> None:
        """Let what came before be answered, then this, and read nothing more."""
        self.queue.append(refusal)
        self.in_message = False
        self.head = None
        self._parts = []
        self._count_unfinished()
        self.ignores_input = self.was_refused = True

    def wait_s(self, head: RequestHead, now: float) -> float:
        """How many seconds from ``now`` to wait for more of a body; below 0 where it is too slow already."""
        return self._body_pace.wait_s(head, self.body_bytes, now, self._router.limits)

    def start_over(self) -> None:
        """Time a body by what comes from now on: it was not read for a while, and that was not the client's doing."""
        self._body_pace.start_over()

    def close(self) -> None:
        """Let go of everything: the connection has ended."""
        self.ignores_input = True
        self.head = None
        self._count_unfinished()
        self.queue.clear()

    # --- what httptools does ---

    def _parse(self, data: bytes) -> None:
        """Read what came; HttpParserError. A request that offers an upgrade is read as if it offered none.

        The parser stops behind the head of each, and takes its body for the other protocol. Java's HTTP client offers
        HTTP/2 this way with every request, body included.
        """
        rest: bytes | memoryview = data
        while True:
            try:
                self._parser.feed_data(rest)
            except HttpParserUpgrade as upgrade:
                rest = memoryview(rest)[upgrade.args[0] :]  # which copies nothing: many may come in one read
            else:
                return
            start = (self._parser.get_method(), self._target, self._parser.get_http_version())
            head = without_upgrade(*start, self._headers)
            self._parser = HttpRequestParser(self)
            self.received_bytes = len(head) + len(rest)
            self._parser.feed_data(head)

    def on_message_begin(self) -> None:
        self.in_message = True
        self._target = b""
        self._headers = []
        self._parts = []
        self.body_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.head is None:  # else it is a trailer, and those are not for anybody
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        method = parser.get_method()
        if method == b"CONNECT":
            raise RejectedRequestError(405, "this is no forward proxy", must_close=True)
        if parser.should_upgrade():
            return  # the parser stops here; see _parse
        limits = self._router.limits
        self.head = head = parse_request_head(
            method, self._target, parser.get_http_version(), self._headers, limits=limits
        )
        self.wants_continue = head.expects_continue

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)
        self.body_bytes += len(data)
        if self.body_bytes > self._router.limits.max_body_bytes:
            raise body_too_large(self._router.limits)

    def on_message_complete(self) -> None:
        head, self.head = self.head, None
        if head is None:
            return
        self.in_message = False
        self.received_bytes = 0
        parts, self._parts = self._parts, []
        head.keep_alive = self._parser.should_keep_alive()
        self.queue.append(self._router.request(head, parts[0] if len(parts) == 1 else b"".join(parts)))
        if not head.keep_alive:
            self.ignores_input = True

    # --- the end of a read ---

    def _expect_body(self) -> None:
        """Wait for a body that did not come with its head only if its sender may send one."""
        self._expected = self.head
        if self.head is not None and (refusal := self._router.body_refusal(self.head)):
            self.refuse(refusal)

    def _count_unfinished(self) -> None:
        """Share what may be held of bodies that are still coming; one that came whole in a read needs no share."""
        router = self._router
        held = self.body_bytes if self.head is not None else 0
        router.unfinished_bytes += held - self._unfinished_bytes
        self._unfinished_bytes = held
        if held and router.unfinished_bytes > router.limits.max_unfinished_body_bytes:
            self.refuse(
                RejectedRequestError(503, "too many bodies are coming at once", retry_after_s=1, must_close=True)
            )
