"""What one client sends, read into requests: in the order in which they came, each whole or as its refusal.

Theory of operation. The parser may finish several requests in one read (pipelining), so finished requests queue. A
request that breaks HTTP queues as its refusal, behind the requests before it, and nothing after it is read: from then
on the reader is deaf.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from routing.proxy.clients.body_pace import BodyPace
from routing.proxy.clients.pieces import join_tail
from routing.proxy.http.errors import RefusalError
from routing.proxy.http.request import Head, Request, body_too_large, malformed, overhead, read_head, without_upgrade

if TYPE_CHECKING:
    from routing.proxy.router import Router


class Reader:
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
        "came_bytes",
        "head",
        "in_message",
        "is_deaf",
        "queue",
        "wants_continue",
        "was_refused",
    )

    def __init__(self, router: Router) -> None:
        self.queue: deque[Request | RefusalError] = deque()  # read, and not answered yet
        self.head: Head | None = None  # whose body is coming
        self.wants_continue = False  # and will not come before we say so
        self.in_message = False
        self.body_bytes = 0
        self.came_bytes = 0  # since the last complete request, framing included
        self.is_deaf = False  # whatever still comes is not read
        self.was_refused = False
        self._router = router
        self._parser = HttpRequestParser(self)
        self._expected: Head | None = None  # whose body may come
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._parts: list[bytes] = []
        self._body_pace = BodyPace()
        self._unfinished_bytes = 0  # of bodies, counted with all other clients'

    # --- what its connection does ---

    def feed(self, data: bytes) -> None:
        """Read what came."""
        self.came_bytes += len(data)
        kept = len(self._parts)
        try:
            self._parse(data)
        except HttpParserError as error:
            if not self.is_deaf:  # what follows a last request is nobody's
                cause = error.__context__
                self.refuse(cause if isinstance(cause, RefusalError) else malformed(error))
        if len(self._parts) > kept:
            join_tail(self._parts, kept)
        if self.head is not self._expected:
            self._expect_body()
        if self.in_message or self._unfinished_bytes:
            self._count_unfinished()
        if self.came_bytes > self._router.limits.max_header_bytes and not self.is_deaf:
            body_bytes = None if self.head is None else self.body_bytes
            if refusal := overhead(self.came_bytes, body_bytes, self._router.limits):
                self.refuse(refusal)

    def learn(self, data: bytes) -> None:
        """Remember a head, if this read brought one request and nothing else."""
        if len(self.queue) == 1 and not self.in_message:
            request = self.queue[0]
            if isinstance(request, Request) and request.head.is_plain:
                heads, head = self._router.request_heads, request.head
                if (cut := heads.learn(data, head, len(request.body), self._headers)) is not None:
                    head.stand_for(cut, self._headers)

    def refuse(self, refusal: RefusalError) -> None:
        """Let what came before be answered, then this, and read nothing more."""
        self.queue.append(refusal)
        self.in_message = False
        self.head = None
        self._parts = []
        self._count_unfinished()
        self.is_deaf = self.was_refused = True

    def wait_s(self, head: Head, now: float) -> float:
        """How many seconds from ``now`` to wait for more of a body; below 0 where it is too slow already."""
        return self._body_pace.wait_s(head, self.body_bytes, now, self._router.limits)

    def start_over(self) -> None:
        """Time a body by what comes from now on: it was not read for a while, and that was not the client's doing."""
        self._body_pace.start_over()

    def close(self) -> None:
        """Let go of everything: the connection has ended."""
        self.is_deaf = True
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
            self.came_bytes = len(head) + len(rest)
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
            raise RefusalError(405, "this is no forward proxy", must_close=True)
        if parser.should_upgrade():
            return  # the parser stops here; see _parse
        limits = self._router.limits
        self.head = head = read_head(method, self._target, parser.get_http_version(), self._headers, limits=limits)
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
        self.came_bytes = 0
        parts, self._parts = self._parts, []
        head.keep_alive = self._parser.should_keep_alive()
        self.queue.append(self._router.request(head, parts[0] if len(parts) == 1 else b"".join(parts)))
        if not head.keep_alive:
            self.is_deaf = True

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
            self.refuse(RefusalError(503, "too many bodies are coming at once", retry_after_s=1, must_close=True))
