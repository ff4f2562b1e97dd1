"""How an answer's body is framed for the client.

Bodies are framed anew: the bytes inside a chunk or a length are the replica's, the chunk sizes are ours. All the
chunks that came in one read leave as one.

An answer's way to the client, from its first body byte on: nothing is tried again any more.

The head goes out together with the first bytes. If the rest never comes, an event stream gets one error event, and
any other answer is cut, so that nobody takes half for whole.

What an answer that came whole says: of tokens, to rates and limits; of the replica, to its breaker.

Where an exchange stands, and where it may go from there.

READING     its body is large, and another process reads it
PLACING     a replica is being chosen; synchronous
QUEUED      its pool or task group has as many requests at replicas as it may
CONNECTING  no kept-alive connection was free
AWAITING    sent; the answer's head may be here, but is held until the first byte of its body
JUDGING     an error of the replica is here, held until it is whole, because another replica may do better
STREAMING   bytes of the answer have gone to the client: from here on nothing is tried again
DONE        the end, reached exactly once; the load is given back whatever happened
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Final, Protocol, cast

from routing.http.errors import RejectedRequestError, error_event
from routing.http.loop import WriteBuffer
from routing.http.response import (
    CHUNKED,
    CLOSE,
    LENGTH,
    Framing,
    LocalResponse,
    ResponseHead,
    chunked,
    connection_line,
    is_encoded,
)
from routing.http.response_json import ParsedResponse, Usage
from routing.http.usage import ResponseTail, UsageFilter
from routing.observability.metrics import Outcome
from routing.proxy.retries import TOO_MANY
from routing.types import ReplicaId
from routing.upstream.connection import BodySink

if TYPE_CHECKING:
    from routing.balancing.load_tracker import Ticket
    from routing.http.auth import Grant
    from routing.http.request import Request
    from routing.observability.decision_record import Record
    from routing.proxy.services import Services


Frame = Callable[[bytes, bool], bytes]


class Downstream(Protocol):
    """What exchanges, the router and its shutdown do with the connection of a client."""

    write_buffer: WriteBuffer
    transport: asyncio.Transport
    is_full: bool  # what was written waits for the client to take it

    def write(self, data: bytes) -> None:
        """Send bytes of a response."""

    def answer(self, request: Request | None, answer: LocalResponse, *, keep_alive: bool) -> None:
        """Send a response of the router's own."""

    def on_exchange_ended(self, *, keep_alive: bool) -> None:
        """The current response is complete, as far as it will ever be."""

    def reset(self) -> None:
        """Reset the connection."""

    @property
    def received_bytes(self) -> int:
        """Bytes read since the last complete request."""

    @property
    def awaits_request(self) -> bool:
        """Whether a request is incomplete that a client may expect to be answered."""

    def drain(self, *, rejects_incomplete: bool = False) -> None:
        """Close the connection when nothing is left to answer; ``rejects_incomplete``: reject an incomplete request."""


def plain(data: bytes, last: bool) -> bytes:  # noqa: ARG001 - one shape for all framings
    """Frame body bytes whose end is told by a length or by the connection."""
    return data


def outgoing(
    answer: ResponseHead, whole: int | None, *, http11: bool, keep_alive: bool, is_filtered: bool = False
) -> tuple[bytes, Frame, bool]:
    """How an answer goes out: the framing's header lines, the framing of its bytes, whether the connection lives on.

    ``whole``: bytes of the body, where all of it is here. ``is_filtered``: bytes may be taken out of what is to come.
    """
    framing, frame, lines = answer.framing, plain, b""
    if is_filtered and whole is None and framing is LENGTH:
        framing = CHUNKED
    if whole is not None and framing is LENGTH:
        lines = b"Content-Length: %d\r\n" % whole
    elif answer.length and framing is not CHUNKED:
        lines = b"Content-Length: %b\r\n" % answer.length
    if framing is CHUNKED and http11:
        lines, frame = b"Transfer-Encoding: chunked\r\n", chunked
    elif framing is CLOSE or framing is CHUNKED:
        keep_alive = False
    if not (http11 and keep_alive):
        lines += connection_line(http11=http11, keep_alive=keep_alive)
    return lines, frame, keep_alive


class ResponseRelay:
    """One answer being passed on."""

    __slots__ = (
        "_answer",
        "_client",
        "_filter",
        "_frame",
        "_is_aborted",
        "_keep_alive",
        "_parsed",
        "_tail",
        "_transport",
        "_write_buffer",
    )

    _tail: ResponseTail  # of an answer that says nothing as a whole

    def __init__(
        self,
        client: Downstream,
        answer: ResponseHead,
        parsed: ParsedResponse | None,
        *,
        is_aborted: bool,
        hides_usage: bool,
    ) -> None:
        self._client = client
        may_filter = hides_usage and answer.is_stream and not is_encoded(answer)
        self._filter = UsageFilter() if may_filter else None
        self._answer = answer
        self._is_aborted = is_aborted  # its engine stopped, and nobody else can give it
        self._parsed = parsed  # by an answer that came in one piece and is no stream
        self._write_buffer, self._transport = client.write_buffer, client.transport

    def begin(self, request: Request, record: Record, data: bytes, *, last: bool, keep_alive: bool) -> None:
        """Send the head with the first bytes."""
        answer, passed = self._answer, data
        if self._filter is not None:
            passed = self._filter.feed(data) + (self._filter.rest() if last else b"")
        lines, self._frame, self._keep_alive = outgoing(
            answer,
            len(passed) if last else None,
            http11=request.head.http11,
            keep_alive=keep_alive,
            is_filtered=self._filter is not None,
        )
        if record.arm is not None:
            lines += b"X-Warmpath-Revision: %d\r\n" % record.revision
        if self._parsed is None:
            self._tail = ResponseTail()
            self._tail.add(data)
        self._client.write(
            b"%b%b%bX-Request-Id: %b\r\nX-Warmpath-Replica: %b\r\nX-Warmpath-Reason: %b\r\n\r\n%b"
            % (
                answer.status_line,
                answer.lines,
                lines,
                request.request_id.encode(),
                record.replica.encode(),
                record.reason.encode(),
                passed if self._frame is plain else self._frame(passed, last),
            )
        )

    @property
    def sink(self) -> BodySink:
        """What takes the middle of the answer: one call a read, and nothing else, is the hot path of streams."""
        if self._filter is not None:
            return self._pass_filtered
        return self._pass_chunk if self._frame is chunked else self._pass_plain

    def _pass_filtered(self, data: bytes, start: int) -> None:
        body = data[start:-2] if start else data
        self._tail.add(body)
        passed = cast("UsageFilter", self._filter).feed(body)
        if not passed:
            return
        if self._frame is not chunked:
            self._write_buffer.write(self._transport, passed)
        elif start and passed is body:
            self._write_buffer.write(self._transport, data)
        else:
            self._write_buffer.write(self._transport, b"%x\r\n%b\r\n" % (len(passed), passed))

    def _pass_chunk(self, data: bytes, start: int) -> None:
        self._write_buffer.write(self._transport, data if start else b"%x\r\n%b\r\n" % (len(data), data))
        self._tail.add(data[start:-2] if start else data)

    def _pass_plain(self, data: bytes, start: int) -> None:
        body = data[start:-2] if start else data
        self._write_buffer.write(self._transport, body)
        self._tail.add(body)

    def finish(self, data: bytes) -> None:
        """Send the last bytes, if any, and the end."""
        if data:
            self._tail.add(data)
        if self._filter is not None:
            data = self._filter.feed(data) + self._filter.rest()
        if framed := self._frame(data, True):
            self._client.write(framed)

    @property
    def _is_inside_event(self) -> bool:
        """Whether what the client has of a stream ends inside an event."""
        return not self._tail.ends_event() if self._filter is None else self._filter.is_inside_event

    def usage(self) -> Usage | None:
        """What the complete answer said about its tokens; None for an error or silence."""
        if self._answer.status >= 300:
            return None
        return self._tail.usage() if self._parsed is None else self._parsed.usage

    def outcome(self) -> Outcome:
        """How the complete answer counts."""
        status = self._answer.status
        if status >= 500 or self._is_aborted or (self._answer.is_stream and self._tail.has_error()):
            return Outcome.REPLICA_ERROR
        return Outcome.CLIENT_ERROR if status >= 400 else Outcome.OK

    def end(self) -> None:
        """The answer is complete, and accounted for."""
        self._client.on_exchange_ended(keep_alive=self._keep_alive)

    def abort(self, refusal: RejectedRequestError) -> None:
        """The rest will never come, for the reason that ``refusal`` gives."""
        if self._answer.framing is Framing.LENGTH and self._filter is None:
            self._client.on_exchange_ended(keep_alive=False)  # the length says that something is missing
        elif self._answer.is_stream:
            event = error_event(refusal.status, refusal.message, torn=self._is_inside_event)
            self._client.write(self._frame(event, True))
            self._client.on_exchange_ended(keep_alive=False)
        elif self._frame is plain:
            self._client.reset()  # an orderly close would be its end
        else:
            self._client.on_exchange_ended(keep_alive=False)  # the last chunk is missing


REPLICA_ERROR: Final = Outcome.REPLICA_ERROR


def record_completion(
    services: Services, grant: Grant | None, record: Record, ticket: Ticket, relay: ResponseRelay, *, was_probe: bool
) -> Outcome:
    """Tell everybody who asked; how the request counts. ``was_probe``: it tried a replica that was out."""
    usage = relay.usage()
    record.add_usage(usage)
    if grant is not None:
        grant.used(record.prompt_tokens_estimate, usage)
    if record.status is not None and record.status < 400:
        ttft_s = None if record.retries else record.ttft_s
        generated_tokens = None if usage is None else usage.generated
        ticket.record_response(ttft_s, record.prompt_tokens, record.cached_tokens, generated_tokens)
    outcome = relay.outcome()
    if services.breakers.not_closed or outcome is REPLICA_ERROR:
        _report_to_breaker(services, record, outcome, was_probe=was_probe)
    return outcome


def _report_to_breaker(services: Services, record: Record, outcome: Outcome, *, was_probe: bool) -> None:
    """Tell the replica's breaker; of errors by status it has heard."""
    if record.status is None or record.status >= TOO_MANY:
        return
    if outcome is REPLICA_ERROR:
        services.balancer.record_failure(record.replica, "error in an answer of 200", was_probe=was_probe)
    else:
        services.breakers.record_success(ReplicaId(record.replica), was_probe=was_probe)


class State(IntEnum):
    """Where an exchange stands."""

    READING = 0
    PLACING = 1
    QUEUED = 2
    CONNECTING = 3
    AWAITING = 4
    JUDGING = 5
    STREAMING = 6
    DONE = 7


READING: Final = State.READING  # an enum's attributes are slow to look up
PLACING: Final = State.PLACING
QUEUED: Final = State.QUEUED
CONNECTING: Final = State.CONNECTING
AWAITING: Final = State.AWAITING
JUDGING: Final = State.JUDGING
STREAMING: Final = State.STREAMING
DONE: Final = State.DONE

NEXT: Final = {
    READING: {PLACING, DONE},
    PLACING: {READING, QUEUED, CONNECTING, AWAITING, DONE},
    QUEUED: {PLACING, DONE},
    CONNECTING: {PLACING, AWAITING, DONE},
    AWAITING: {PLACING, CONNECTING, JUDGING, STREAMING, DONE},
    JUDGING: {PLACING, CONNECTING, STREAMING, DONE},
    STREAMING: {DONE},
    DONE: set[State](),
}
