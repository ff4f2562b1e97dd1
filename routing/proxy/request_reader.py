"""Reads the bytes of one client into requests, in order; each becomes a whole request or its rejection.

Theory of operation. The parser may finish several requests in one read (pipelining), so requests are queued. A request
that violates HTTP is queued as its rejection, behind the requests before it, and all further bytes are ignored.

A body has a deadline for each read, and an average rate to keep: after the grace period, a body of which ``n`` bytes
have arrived must be no older than ``n`` divided by the minimum rate. So a body that trickles is rejected although it
never stops, and one that arrived fast may pause. This concerns only bodies that do not arrive in one read.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from routing.http.headers import Header
from routing.http.request import (
    Request,
    RequestHead,
    body_too_large,
    head_too_large,
    parse_request_head,
    without_upgrade,
)
from routing.http.response import RejectedRequestError
from routing.proxy.router import Router

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

    __slots__ = (
        "_checked",
        "_grace_until",
        "_headers",
        "_paced",
        "_parser",
        "_pieces",
        "_router",
        "_target",
        "_unfinished_bytes",
        "body_bytes",
        "head",
        "ignores_input",
        "in_message",
        "is_rejected",
        "queue",
        "received_bytes",
        "wants_continue",
    )

    def __init__(self, router: Router) -> None:
        self.queue: deque[Request | RejectedRequestError] = deque()  # not answered yet
        self.head: RequestHead | None = None  # of the request whose body is being received
        self.wants_continue = False  # the client waits for 100 Continue
        self.in_message = False
        self.body_bytes = 0
        self.received_bytes = 0  # since the last complete request, framing included
        self.ignores_input = False
        self.is_rejected = False  # the last item of the queue is a rejection
        self._router = router
        self._parser = HttpRequestParser(self)
        self._checked: RequestHead | None = None  # its body may be received
        self._paced: RequestHead | None = None  # the rate of its body is measured
        self._grace_until = 0.0  # loop time
        self._target = b""
        self._headers: list[Header] = []
        self._pieces: list[bytes] = []
        self._unfinished_bytes = 0  # of the body, as counted in the router's total

    # --- called by the connection ---

    def feed(self, data: bytes) -> None:
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
        if self.head is not self._checked:
            self._check_body_may_come()
        if self.in_message or self._unfinished_bytes:
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
        self.queue.append(rejection)
        self.in_message = False
        self.head = None
        self._pieces = []
        self._count_unfinished()
        self.ignores_input = self.is_rejected = True

    def body_wait_s(self, head: RequestHead, now: float) -> float:
        """Seconds from ``now`` to wait for more of the body of ``head``; below 0 if it is too slow already."""
        limits = self._router.limits
        if self._paced is not head:
            self._paced = head
            self._grace_until = now + limits.body_grace_s
        rate = limits.min_body_bytes_per_s
        if not rate:
            return limits.body_idle_timeout_s
        return min(limits.body_idle_timeout_s, self._grace_until + self.body_bytes / rate - now)

    def restart_pace(self) -> None:
        """Measure the rate of a body from now on, because the router did not read it for a while."""
        self._paced = None

    def close(self) -> None:
        """The connection has ended."""
        self.ignores_input = True
        self.head = None
        self._count_unfinished()
        self.queue.clear()

    # --- called by httptools ---

    def _parse(self, data: bytes) -> None:
        """Parse a read; HttpParserError. A request that offers an upgrade is parsed as if it offered none.

        The parser stops after such a head and takes the body for the other protocol. Java's HTTP client offers HTTP/2
        with every request, body included.
        """
        rest: bytes | memoryview = data
        while True:
            try:
                self._parser.feed_data(rest)
            except HttpParserUpgrade as upgrade:
                rest = memoryview(rest)[upgrade.args[0] :]  # without a copy: one read may bring many
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
        self._pieces = []
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
            raise RejectedRequestError(405, "this is no forward proxy", must_close=True)
        if parser.should_upgrade():
            return  # the parser stops here; see _parse
        self.head = head = parse_request_head(
            method, self._target, parser.get_http_version(), self._headers, limits=self._router.limits
        )
        self.wants_continue = head.expects_continue

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)
        self.body_bytes += len(data)
        if self.body_bytes > self._router.limits.max_body_bytes:
            raise body_too_large(self._router.limits)

    def on_message_complete(self) -> None:
        head, self.head = self.head, None
        if head is None:
            return
        self.in_message = False
        self.received_bytes = 0
        pieces, self._pieces = self._pieces, []
        head.keep_alive = self._parser.should_keep_alive()
        self.queue.append(self._router.request(head, pieces[0] if len(pieces) == 1 else b"".join(pieces)))
        if not head.keep_alive:
            self.ignores_input = True

    # --- the end of a read ---

    def _check_body_may_come(self) -> None:
        """Reject a body that did not arrive with its head if its sender has no valid key."""
        self._checked = self.head
        if self.head is not None and (rejection := self._router.reject_before_body(self.head)):
            self.reject(rejection)

    def _count_unfinished(self) -> None:
        """Limit the bytes of all bodies that are being received; a body that arrived in one read does not count."""
        router = self._router
        unfinished = self.body_bytes if self.head is not None else 0
        router.unfinished_body_bytes += unfinished - self._unfinished_bytes
        self._unfinished_bytes = unfinished
        if unfinished and router.unfinished_body_bytes > router.limits.max_unfinished_body_bytes:
            message = "too many bodies are being received at once"
            self.reject(RejectedRequestError(503, message, retry_after_s=1, must_close=True))
