"""Relays one response to its client from the first body byte on, when no retry is possible any more.

The head is sent together with the first body bytes. Bodies are framed again: the body bytes are the replica's, the
chunk sizes are the router's, and all chunks of one read leave as one chunk. If the rest of a body never
arrives, an event stream gets one error event, and any other response is cut short, so that no client takes it for
complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol, cast

from routing.http.loop import WriteBuffer
from routing.http.response import (
    CHUNKED,
    CLOSE,
    LENGTH,
    LocalResponse,
    RejectedRequestError,
    ResponseHead,
    chunked,
    connection_line,
    error_event,
    is_encoded,
)
from routing.http.response_json import ParsedResponse, Usage
from routing.http.usage import (
    USAGE,
    Fingerprint,
    ResponseTail,
    UsageFilter,
    has_details,
)
from routing.observability.decision_log import Record
from routing.observability.metrics import Outcome
from routing.proxy.continuation import DONE_EVENT, EVENT_BYTES, KeptStream, Splice, complete_events
from routing.proxy.retries import TOO_MANY
from routing.response_cache.keys import RequestDigests, Scope
from routing.types import ReplicaId
from routing.upstream.connection import BodySink

if TYPE_CHECKING:
    from routing.balancing.load_tracker import Ticket
    from routing.balancing.placement import Decision
    from routing.balancing.request import PlacementRequest
    from routing.http.auth import Grant
    from routing.http.request import Request
    from routing.proxy.services import Services


OK: Final = 200
KEEP_ALIVE: Final = b": keep-alive\n\n"
NOT_FINISHED: Final = b'"finish_reason":null'
NO_END: Final = b"\0"  # of no event
Frame = Callable[[bytes, bool], bytes]
REPLICA_ERROR: Final = Outcome.REPLICA_ERROR  # attributes of an enum are slow to look up


class Downstream(Protocol):
    """The connection of a client, as exchanges, the router and its shutdown use it."""

    write_buffer: WriteBuffer
    transport: asyncio.Transport
    is_full: bool  # written bytes wait for the client to read them
    counted_address: str  # address under which the connection limit counts it; empty: not counted

    def write(self, data: bytes) -> None: ...

    def respond(self, request: Request | None, response: LocalResponse, *, keep_alive: bool, pool: str = "") -> None:
        """Send a response of the router's own. ``pool``: of the request; empty if it is unknown."""

    def on_exchange_ended(self, *, keep_alive: bool) -> None:
        """The current response is complete, or will never be."""

    def reset(self) -> None: ...

    @property
    def received_bytes(self) -> int:
        """Bytes read since the last complete request."""
        ...

    @property
    def awaits_request(self) -> bool:
        """Whether an incomplete request is being received, to which the client may expect a response."""
        ...

    def drain(self, *, rejects_incomplete: bool = False) -> None:
        """Close the connection after its last response; ``rejects_incomplete``: reject an incomplete request."""


def unframed(data: bytes, last: bool) -> bytes:  # noqa: ARG001 - same signature as chunked
    """The framing of a body whose end is marked by a length or by the connection's end."""
    return data


def client_framing(
    head: ResponseHead, whole_bytes: int | None, *, http11: bool, keep_alive: bool, is_filtered: bool = False
) -> tuple[bytes, Frame, bool]:
    """Header lines of the framing, the framing of body bytes, and whether the connection stays open.

    ``whole_bytes``: of the body, if it is complete. ``is_filtered``: bytes may be removed from the rest.
    """
    framing, lines, frame = head.framing, b"", unframed
    if is_filtered and whole_bytes is None and framing is LENGTH:
        framing = CHUNKED
    if whole_bytes is not None and framing is LENGTH:
        lines = b"Content-Length: %d\r\n" % whole_bytes
    elif head.length and framing is not CHUNKED:
        lines = b"Content-Length: %b\r\n" % head.length
    if framing is CHUNKED and http11:
        lines, frame = b"Transfer-Encoding: chunked\r\n", chunked
    elif framing is CLOSE or framing is CHUNKED:
        keep_alive = False
    if not (http11 and keep_alive):
        lines += connection_line(http11=http11, keep_alive=keep_alive)
    return lines, frame, keep_alive


def stream_head() -> ResponseHead:
    """The head of a stream to which no replica has responded yet."""
    head = ResponseHead(OK, b"HTTP/1.1 200 OK\r\n")
    head.lines = b"Content-Type: text/event-stream; charset=utf-8\r\n"
    head.framing, head.is_stream = CHUNKED, True
    return head


def plain_end(data: bytes) -> bytes:
    """How an event ends, from its empty finish reason on. An event that ends the same has no usage, end or error.

    ``NO_END`` for any other.
    """
    end = data[data.rfind(NOT_FINISHED) :]
    return end if end.startswith(NOT_FINISHED) and end.endswith(b"\n\n\r\n") and USAGE not in end else NO_END


class ResponseRelay:
    """The relay of one response."""

    _tail: ResponseTail  # only if the response was not parsed
    _kept: KeptStream  # only if the stream may be continued, as ``_check``
    _check: BodySink

    def __init__(
        self,
        client: Downstream,
        head: ResponseHead,
        parsed: ParsedResponse | None,
        *,
        is_aborted: bool,
        fingerprint: Fingerprint | None,  # of an engine that was asked for usage that the client did not ask for
    ) -> None:
        may_filter = head.is_stream and not is_encoded(head)
        self._filter = UsageFilter(fingerprint) if fingerprint is not None and may_filter else None
        self._client = client
        self.head = head
        self._is_aborted = is_aborted  # by an engine that is stopping
        self._parsed = parsed  # a JSON response that arrived in one read
        self._write_buffer, self._transport = client.write_buffer, client.transport
        self._may_continue = False
        self._plain_end = NO_END  # an event of text that ends so passes unchanged
        self._splice: Splice | None = None  # the rest comes from another replica
        self.cache_lines = b""  # header lines; empty: the task group has no response cache

    def release_head(self, request: Request, *, keep_alive: bool) -> None:
        """Send the head of a stream before its first token; another relay sends the events."""
        self._tail = ResponseTail()
        lines, self._frame, self.keep_alive = client_framing(
            self.head, None, http11=request.head.http11, keep_alive=keep_alive
        )
        lines += b"X-Request-Id: %b\r\n\r\n" % request.request_id.encode()
        self._client.write(self.head.status_line + self.head.lines + lines)

    def send_comment(self) -> None:
        """Show the client, and proxies before it, that the connection lives."""
        if not self._client.is_full:
            self._client.write(self._frame(KEEP_ALIVE, False))

    def send_head(
        self, request: Request, record: Record, data: bytes, *, last: bool, keep_alive: bool, is_released: bool
    ) -> None:
        """Send the head, unless it is released, with the first body bytes."""
        head, passed = self.head, data
        if self._filter is not None:
            passed = self._filter.feed(data) + (self._filter.flush() if last else b"")
        lines, self._frame, self.keep_alive = client_framing(
            head,
            len(passed) if last else None,
            http11=request.head.http11,
            keep_alive=keep_alive,
            is_filtered=self._filter is not None,
        )
        if record.arm is not None:
            lines += b"X-Warmpath-Revision: %d\r\n" % record.revision
        if record.prefill is not None and record.prefill.is_used:
            lines += b"X-Warmpath-Prefill-Replica: %b\r\n" % str(record.prefill.replica).encode()
        lines += self.cache_lines
        if self._parsed is None:
            self._tail = ResponseTail()
            self._tail.add(data)
        if is_released:
            self._client.write(self._frame(passed, last))
            return
        self._client.write(
            b"%b%b%bX-Request-Id: %b\r\nX-Warmpath-Replica: %b\r\nX-Warmpath-Reason: %b\r\n\r\n%b"
            % (
                head.status_line,
                head.lines,
                lines,
                request.request_id.encode(),
                record.replica.encode(),
                record.reason.encode(),
                passed if self._frame is unframed else self._frame(passed, last),
            )
        )

    def keep(self, kept: KeptStream, check: BodySink) -> None:
        """The stream may be continued: ``check`` gets all reads but those that are one event of text."""
        self._tail = self._kept = kept
        self._check, self._may_continue = check, True

    def sink(self) -> BodySink:
        """Gets the body between its first and its last read: one call for each read, the hot path of streams."""
        return self._pass_kept if self._may_continue else self._checked_sink()

    def _pass_kept(self, data: bytes, start: int) -> None:
        """Without further calls for what nearly all reads are: one event of text, which ends as the one before."""
        if start and data.endswith(self._plain_end):
            kept = self._kept
            left = kept.left - len(data) - EVENT_BYTES
            if left >= 0:
                kept.left = left
                kept.chunks.append(data)
                self._write_buffer.write(self._transport, data)
                return
        self._check(data, start)

    def pass_checked(self, data: bytes, start: int, *, is_recorded: bool = False) -> None:
        """Relay bytes of a stream that may be continued. ``is_recorded``: all reads have to be checked."""
        self._checked_sink()(data, start)
        is_idle = self._filter is None or self._filter.is_idle
        may_pass = start and is_idle and not is_recorded and self._splice is None and self._frame is chunked
        self._plain_end = plain_end(data) if may_pass else NO_END

    def _checked_sink(self) -> BodySink:
        if self._splice is not None:
            return self._pass_spliced
        if self._filter is not None:
            return self._pass_filtered
        return self._pass_chunk if self._frame is chunked else self._pass_unframed

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

    def _pass_spliced(self, data: bytes, start: int) -> None:
        body = data[start:-2] if start else data
        self._tail.add(body)
        if passed := cast("Splice", self._splice).feed(body):
            self._write_buffer.write(self._transport, self._frame(passed, False))

    def _pass_chunk(self, data: bytes, start: int) -> None:
        self._write_buffer.write(self._transport, data if start else b"%x\r\n%b\r\n" % (len(data), data))
        self._tail.add(data[start:-2] if start else data)

    def _pass_unframed(self, data: bytes, start: int) -> None:
        body = data[start:-2] if start else data
        self._write_buffer.write(self._transport, body)
        self._tail.add(body)

    def finish(self, data: bytes) -> None:
        """Send the last bytes, if any, and the end of the body."""
        if data:
            self._tail.add(data)
        if self._splice is not None:
            data = self._splice.feed(data) + self._splice.flush()
        elif self._filter is not None:
            data = self._filter.feed(data) + self._filter.flush()
        if framed := self._frame(data, True):
            self._client.write(framed)

    @property
    def may_continue(self) -> bool:
        """Whether the rest of the response may come from another replica."""
        head = self.head
        return head.is_stream and head.status == OK and head.framing is not LENGTH and not is_encoded(head)

    @property
    def is_inside_event(self) -> bool:
        """Whether the bytes that the client got end inside an event."""
        if self._splice is not None:
            return False
        return not self._tail.ends_event() if self._filter is None else self._filter.is_inside_event

    def splice(self, splice: Splice) -> None:
        """The rest comes from another replica: ``splice`` rewrites its events, and keeps them."""
        self._splice = splice
        self._tail = ResponseTail()
        self._plain_end = NO_END

    def end_finished(self, *, is_done: bool = False) -> None:
        """End a stream whose text is complete, after the events that are held back. ``is_done``: [DONE] was sent."""
        held = b"" if self._filter is None or self._splice is not None else complete_events(self._filter.flush())
        self._client.write(self._frame(held + (b"" if is_done else DONE_EVENT), True))

    def usage(self) -> Usage | None:
        """The token usage that the complete response reports; None for an error or if it is not reported."""
        if self.head.status >= 300:
            return None
        return self._tail.usage() if self._parsed is None else self._parsed.usage

    @property
    def has_ended(self) -> bool:
        """Whether the client got the last event of a stream, of which only the end of the body may be missing."""
        return self.head.is_stream and self._tail.has_ended()

    def outcome(self) -> Outcome:
        """The outcome of the complete response."""
        is_failed = self._is_aborted or (self.head.is_stream and self._tail.has_error())
        return response_outcome(self.head.status, is_failed=is_failed)

    def abort(self, error: RejectedRequestError, path: bytes) -> None:
        """End an incomplete response so that the client notices; a stream gets ``error`` as its last event.

        ``path``: of the request, which determines the format of the error.
        """
        if self.head.framing is LENGTH and self._filter is None:
            pass  # the client notices that the body is shorter than its Content-Length
        elif self.head.is_stream:
            event = error_event(path, error.status, error.message, is_inside_event=self.is_inside_event)
            self._client.write(self._frame(event, True))
        elif self._frame is unframed:
            self._client.reset()  # closing the connection would mark the end of the body
            return
        self._client.on_exchange_ended(keep_alive=False)  # without the last chunk, unless it is a stream


# --- accounting, also for responses that another proxy relays ---


def begin_record(
    services: Services, decision: Decision, request: Request, placement: PlacementRequest, *, is_described: bool
) -> Record:
    """The record of a request that is sent to a replica for the first time; its key is charged for the prompt.

    ``is_described``: with the cost of each candidate, because the prompt structure is recorded too.
    """
    record = Record.from_decision(decision, request.request_id, with_costs=is_described)
    digests, prompt = services.request_digests, placement.prompt.data
    if digests is not None:
        record.digest_ratio = 2.0**-digests.sampler.level
        if digests.sampler.should_digest(prompt, request.arrived_at):  # computed once the request is sent
            asyncio.get_running_loop().call_soon(_add_digest, digests, record, decision, request, prompt)
    if request.grant is not None:
        request.grant.charge_prompt(decision.keys.prompt_tokens)
    if services.warm_ups is not None:
        services.warm_ups.record_request(decision, request, placement.prompt)
    return record


def _add_digest(digests: RequestDigests, record: Record, decision: Decision, request: Request, prompt: bytes) -> None:
    scope = Scope.of(request, decision.pool, decision.group, decision.served.name or "")
    record.request_digest = digests.digest_of(request, prompt, scope)


def response_outcome(status: int, *, is_failed: bool) -> Outcome:
    """The outcome of a complete response. ``is_failed``: its body says that it was aborted, or ends with an error."""
    if status >= 500 or is_failed:
        return REPLICA_ERROR
    return Outcome.CLIENT_ERROR if status >= 400 else Outcome.OK


def record_completion(
    services: Services,
    grant: Grant | None,
    record: Record,
    ticket: Ticket,
    usage: Usage | None,
    outcome: Outcome,
    *,
    was_probe: bool,
) -> None:
    """Account for a complete response: usage, rates, load and circuit breaker. ``was_probe``: of an ejected replica."""
    if not record.prompt_tokens_estimate:
        usage = None  # a stored response reports its usage again
    if usage is not None:
        load = ticket.load
        if not load.reports_details and has_details(usage):
            load.reports_details = True
        record.add_usage(usage, omits_zero=load.reports_details)
    if grant is not None:
        grant.charge_usage(record.prompt_tokens_estimate, usage)
    if record.status is not None and record.status < 400:
        _learn(record, ticket)
    if services.breakers.not_closed or outcome is REPLICA_ERROR:
        if record.status is None or record.status >= TOO_MANY:
            pass  # the failure was recorded when the error response was classified
        elif outcome is REPLICA_ERROR:
            services.balancer.record_failure(record.replica, "error in a response with status 200", was_probe=was_probe)
        else:
            services.breakers.record_success(ReplicaId(record.replica), was_probe=was_probe)


def _learn(record: Record, ticket: Ticket) -> None:
    if record.prefill is not None and record.prefill.is_used:
        # Transferred tokens are not cached ones: those were found, or not, by the replica that prefilled.
        record.cached_tokens = record.prefill.cached_tokens
        ticket.record_prefilled_response(record.prompt_tokens, record.generated_tokens)
    elif record.continued_after:
        ticket.record_response()  # nothing is learnt: the prompt included the text so far
    else:
        ticket.record_response(record.prefill_s, record.prompt_tokens, record.cached_tokens, record.generated_tokens)


def end_request(services: Services) -> None:
    """A request is no longer in flight."""
    services.in_flight -= 1
    if services.is_draining and not services.in_flight:
        services.idle.set()


def count_request(services: Services, record: Record | None, outcome: Outcome, pool: str, group: str) -> None:
    """Count a request that has ended. ``record``: None if it was sent to no replica; then by ``pool`` and ``group``."""
    end_request(services)
    if record is None:
        services.metrics.count_unplaced(outcome, pool, group)
    else:
        record.outcome = outcome
        services.metrics.count_placed(record, outcome)
        services.decisions.add(record)
