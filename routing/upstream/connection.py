"""One connection to a replica, carrying one exchange at a time.

Theory of operation. httptools calls back while it parses; ``on_body`` is a list's own ``append``, so a chunk costs no
Python frame. What came is judged once, after the whole read is parsed, because only then is it known whether bytes
follow a complete answer. An answer goes to the listener in at most one call a read. The connection goes back to its
pool before the listener hears of the end, unless anything about it was odd: then it is closed, and whatever else the
replica sent on it is never read.

Engines write each event of a stream as one chunk. Once a read was one, by its bytes and by the parser's word, the
parser stands between chunks; the next read that is one by its bytes is passed on as it is, and the parser, none the
wiser, still stands there.

A kept-alive connection may end while the next request is on its way. It was stale, and the request may be sent again as
if it had never been, only if the replica cannot have seen it: when its kernel acknowledged nothing of the request. A
replica that took it and broke over it is not to be asked the same again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from routing.http.headers import CachedHead, Header, HeaderCache, template_of
from routing.http.loop import NEVER, NOWHERE, Deadlines, WriteBuffer
from routing.http.response import (
    BadResponseError,
    Framing,
    ResponseHead,
    chunk_start,
    describes_body,
    parse_response_head,
)
from routing.http.sockets import taken_bytes

if TYPE_CHECKING:
    from routing.upstream.pool import ConnectionPool


SYN_BYTES: Final = 1  # of what a kernel acknowledges, before all others
MAX_HEAD_BYTES: Final = 64 << 10  # of a replica's answer, 1xx included
JOINED_BYTES: Final = 16 << 10  # a shorter body is copied behind its head, which costs less than a write of its own


class Failure(StrEnum):
    """How an answer failed to come, and the cause that a retry is counted under."""

    CONNECT = "connect"  # refused, unreachable, or too slow to accept
    RESET = "reset"  # the connection ended before the answer did
    TIMEOUT = "timeout"  # nothing came for too long
    BAD_RESPONSE = "bad_answer"  # what came is not HTTP


class Listener(Protocol):
    """Who an answer is for."""

    def on_response(self, answer: ResponseHead, data: bytes, last: bool) -> None:
        """Body bytes came (perhaps none), for the first time or again; ``last`` ends the answer."""
        ...

    def is_stream(self) -> bool:
        """Whether the first byte must come as soon as the prompt is prefilled."""
        ...

    @property
    def waiting_tokens(self) -> int:
        """Of its prompt, estimated tokens that the replica has to prefill before the first byte."""
        ...

    @property
    def tokens_ahead(self) -> float:
        """Those, and what the replica had to prefill before them."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Estimated length of its prompt."""
        ...

    def on_stalled(self) -> None:
        """The replica hangs: better to wait for another one."""
        ...

    def on_upstream_failed(self, failure: Failure, *, stale: bool) -> None:
        """No more will come. ``stale``: a kept-alive connection had ended, and the replica has not seen the request."""
        ...


BodySink = Callable[[bytes, int], None]  # body bytes, or one whole chunk and where its bytes begin

# Body bytes of the read that is being parsed, of whichever connection: parsing is not interrupted, and every read ends
# with none left. One list for all stays in the core's cache, where a list for each stream would not.
_parts: Final[list[bytes]] = []


def _joined() -> bytes:
    """The body bytes of this read, which is over."""
    data = _parts[0] if len(_parts) == 1 else b"".join(_parts)
    _parts.clear()
    return data


class UpstreamConnection(asyncio.Protocol):
    """A connection to one replica."""

    __slots__ = (
        "_answer",
        "_bodyless",
        "_complete",
        "_deadlines",
        "_head_bytes",
        "_header_cache",
        "_headers",
        "_idle_s",
        "_is_between_chunks",
        "_is_unusable",
        "_known",
        "_listener",
        "_loop_time",
        "_parser",
        "_reason",
        "_sink",
        "_speaks_tls",
        "_taken_before",
        "_transport",
        "_uses",
        "_write_buffer",
        "_written",
        "deadline",
        "due",
        "link",
        "on_body",
        "sent_at",
    )

    def __init__(
        self,
        link: ConnectionPool,
        deadlines: Deadlines,
        write_buffer: WriteBuffer,
        header_cache: HeaderCache[ResponseHead],
    ) -> None:
        self.deadline, self.due = NEVER, NOWHERE
        self.link = link
        self._deadlines = deadlines
        self._write_buffer = write_buffer
        self._header_cache = header_cache
        self._known: CachedHead[ResponseHead] | None = None  # of its latest answer that was recognised
        self._listener: Listener | None = None
        self._sink: BodySink | None = None  # where the middle of an answer goes
        self._is_between_chunks = False  # the parser surely is
        self._loop_time = deadlines.time
        self.on_body = _parts.append
        self._parser = HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._reason = b""
        self._answer: ResponseHead | None = None
        self._complete = False  # the answer is, whole
        self._is_unusable = False  # this connection carries nothing more after this answer
        self._bodyless = False
        self._head_bytes = 0
        self._idle_s = 0.0
        self._speaks_tls = link.address.ssl_context is not None  # then nobody knows what goes over the wire
        self._written = SYN_BYTES
        self._taken_before: int | None = None  # bytes before this request
        self._uses = 0
        self.sent_at = 0.0  # when the latest request was, in loop time

    def __repr__(self) -> str:
        return f"<Upstream {self.link.name} uses={self._uses} busy={self._listener is not None}>"

    # --- what an exchange does ---

    def send(
        self, listener: Listener, request: bytes, body: bytes, *, first_byte_s: float, idle_s: float, bodyless: bool
    ) -> None:
        """Send a request, head and body, and let ``listener`` hear what comes of it."""
        self._listener = listener
        self._sink = None
        self._is_between_chunks = False
        self._bodyless = bodyless
        self._idle_s = idle_s
        self._answer = None
        self._complete = self._is_unusable = False
        self._head_bytes = 0
        self._uses += 1
        self._taken_before = taken_bytes(self._transport) if self._speaks_tls else self._written
        self._written += len(request) + len(body)
        if len(body) < JOINED_BYTES:
            self._write_buffer.write(self._transport, request + body)
        else:
            self._write_buffer.write(self._transport, request)
            self._write_buffer.write(self._transport, body)
        self._deadlines.arm(self, first_byte_s)
        self.sent_at = self.deadline - first_byte_s

    def pipe_to(self, sink: BodySink) -> None:
        """Give what is neither the beginning nor the end of the answer to ``sink``: the hot path of streams."""
        self._sink = sink
        self._deadlines.arm(self, self._idle_s)

    def pause(self) -> None:
        """Read no more until resume: the client does not keep up. Its own deadline is running."""
        self._transport.pause_reading()
        self.deadline = NEVER

    def resume(self) -> None:
        """Read on."""
        self._transport.resume_reading()
        self._deadlines.arm(self, self._idle_s)

    @property
    def waiting(self) -> Listener | None:
        """Who waits for a first byte on it."""
        return self._listener if self._sink is None else None

    @property
    def streaming(self) -> Listener | None:
        """Whose answer is under way on it."""
        return None if self._sink is None else self._listener

    @property
    def last_byte_at(self) -> float:
        """When the latest byte of a stream came that is under way, in loop time; 0 where none is or it is paused."""
        return 0.0 if self._sink is None or self.deadline == NEVER else self.deadline - self._idle_s

    def abandon(self) -> None:
        """End the connection at once, whatever it carries; the listener hears nothing more."""
        self._listener = self._sink = None
        self._deadlines.forget(self)
        self.link.closed(self)
        self._transport.abort()

    def release(self) -> None:
        """Go back to the pool: nothing is under way."""
        self._listener = None
        self.link.return_idle(self)

    def is_usable(self) -> bool:
        """Whether a request may still be sent on it."""
        return not self._transport.is_closing()

    # --- what the event loop does ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        sink = self._sink
        if sink is None:
            self._beginning_received(data)
            return
        start = chunk_start(data)
        if start and self._is_between_chunks:
            self.deadline = self._loop_time() + self._idle_s
            sink(data, start)
            return
        self._is_between_chunks = False
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade, BadResponseError):
            self._is_unusable = True
        if self._complete or self._is_unusable:
            self._deliver(cast("ResponseHead", self._answer))
        elif _parts:
            self.deadline = self._loop_time() + self._idle_s  # later than it was, so the wheel need not know
            body = _parts.pop() if len(_parts) == 1 else _joined()
            self._is_between_chunks = start > 0 and len(body) == len(data) - start - 2
            sink(body, 0)

    def _beginning_received(self, data: bytes) -> None:
        listener = self._listener
        if listener is None:
            self.abandon()  # bytes that nobody asked for
            return
        is_fresh = self._answer is None and not (self._head_bytes or self._bodyless)
        if is_fresh and (found := self._header_cache.find(data, self._known)) is not None:
            self._known, body, values = found
            self._end()
            listener.on_response(self._known.head.with_values(values), body, True)
            return
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade, BadResponseError):
            self._is_unusable = True
        if self._answer is None:
            self._head_continues(len(data))
            return
        headers, self._headers = self._headers, []
        if is_fresh and self._complete and not self._is_unusable:
            self._learn(data, self._answer, headers)
        if _parts or self._complete or self._is_unusable:
            self._deliver(self._answer)

    def eof_received(self) -> None:
        if self._answer is not None and self._answer.framing is Framing.CLOSE and not self._is_unusable:
            self._complete = self._is_unusable = True
            self._deliver(self._answer)
        self._fail(Failure.RESET)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._fail(Failure.RESET)

    def on_deadline(self) -> None:
        self._fail(Failure.TIMEOUT)

    # --- what httptools does ---

    def on_message_begin(self) -> None:
        if self._complete:
            raise BadResponseError("a second answer")  # so that no byte of its body is taken for the first one's

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._answer is None:  # else it is a trailer, of which there is no end
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        headers = self._headers  # kept until the end of the read, for whoever learns the head
        reason, self._reason = self._reason, b""
        status = self._parser.get_status_code()
        if self._complete:
            return
        if 100 <= status < 200:
            if status == 101 or describes_body(headers):
                raise BadResponseError("an interim answer with more behind it than the answer")
            self._headers = []
            return
        self._answer = parse_response_head(
            status, reason, self._parser.get_http_version(), headers, bodyless=self._bodyless
        )
        if status == 204 and describes_body(headers):
            self._is_unusable = True  # whoever says so may send one
        if self._bodyless:
            self._complete = self._is_unusable = True  # the parser would wait for the body that the head describes

    def on_message_complete(self) -> None:
        if self._answer is not None:
            self._complete = True
            self._is_unusable |= not self._parser.should_keep_alive()

    # --- the end of a read ---

    def _head_continues(self, size: int) -> None:
        self._head_bytes += size
        if self._is_unusable or self._head_bytes > MAX_HEAD_BYTES:
            self._fail(Failure.BAD_RESPONSE)

    def _deliver(self, answer: ResponseHead) -> None:
        listener, data = self._listener, _joined()
        if listener is None:
            return
        if self._complete:
            self._end()
            listener.on_response(answer, b"" if self._bodyless else data, True)
            return
        if data:
            if self._sink is None:
                listener.on_response(answer, data, False)
            else:
                self._sink(data, 0)
        if self._is_unusable and self._listener is listener:
            self._fail(Failure.BAD_RESPONSE)

    def _learn(self, data: bytes, answer: ResponseHead, headers: list[Header]) -> None:
        """Remember the head of an answer that came whole in one read."""
        if answer.framing is Framing.LENGTH:
            cut = self._header_cache.learn(data, answer, sum(map(len, _parts)), headers)
            if cut is not None and len(cut) > 1:  # a length alone does not go on
                answer.template = template_of(answer.lines, cut)

    def _end(self) -> None:
        """The answer is complete: back to the pool, or gone."""
        self.link.last_end_at = self._loop_time()
        self._answer = self._sink = None
        self._complete = False
        if self._is_unusable:
            self.abandon()
        else:
            self._listener = None
            self.link.return_idle(self)

    def _is_stale(self) -> bool:
        """Whether it has ended without the replica's having seen the request."""
        before = self._taken_before
        if self._uses < 2 or self._answer is not None or self._head_bytes or before is None:
            return False
        taken = taken_bytes(self._transport)
        return taken is not None and taken <= before

    def _fail(self, failure: Failure) -> None:
        listener = self._listener
        stale = listener is not None and failure is Failure.RESET and self._is_stale()
        self.abandon()
        if listener is not None:
            listener.on_upstream_failed(failure, stale=stale)
