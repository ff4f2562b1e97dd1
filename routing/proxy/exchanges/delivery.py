"""An answer's way to the client, from its first body byte on: nothing is tried again any more.

The head goes out together with the first bytes. If the rest never comes, an event stream gets one error event, and
any other answer is cut, so that nobody takes half for whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from routing.proxy.clients.framing import outgoing, plain
from routing.proxy.http.answer import AnswerHead, Framing, is_encoded
from routing.proxy.http.chunks import chunked
from routing.proxy.http.errors import RefusalError, error_event
from routing.proxy.metrics.metrics import Outcome
from routing.proxy.replicas.upstream import Sink
from routing.proxy.usage.answer_json import Said, Usage
from routing.proxy.usage.tail import Tail
from routing.proxy.usage.usage_filter import UsageFilter

if TYPE_CHECKING:
    from routing.proxy.clients.client import Client
    from routing.proxy.decisions.record import Record
    from routing.proxy.http.request import Request


class Delivery:
    """One answer being passed on."""

    __slots__ = (
        "_answer",
        "_client",
        "_filter",
        "_frame",
        "_is_aborted",
        "_keep_alive",
        "_outbox",
        "_said",
        "_tail",
        "_transport",
    )

    _tail: Tail  # of an answer that says nothing as a whole

    def __init__(
        self, client: Client, answer: AnswerHead, said: Said | None, *, is_aborted: bool, hides_usage: bool
    ) -> None:
        self._client = client
        may_filter = hides_usage and answer.is_stream and not is_encoded(answer)
        self._filter = UsageFilter() if may_filter else None
        self._answer = answer
        self._is_aborted = is_aborted  # its engine stopped, and nobody else can give it
        self._said = said  # by an answer that came in one piece and is no stream
        self._outbox, self._transport = client.outbox, client.transport

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
        if self._said is None:
            self._tail = Tail()
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
    def sink(self) -> Sink:
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
            self._outbox.write(self._transport, passed)
        elif start and passed is body:
            self._outbox.write(self._transport, data)
        else:
            self._outbox.write(self._transport, b"%x\r\n%b\r\n" % (len(passed), passed))

    def _pass_chunk(self, data: bytes, start: int) -> None:
        self._outbox.write(self._transport, data if start else b"%x\r\n%b\r\n" % (len(data), data))
        self._tail.add(data[start:-2] if start else data)

    def _pass_plain(self, data: bytes, start: int) -> None:
        body = data[start:-2] if start else data
        self._outbox.write(self._transport, body)
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
        return self._tail.usage() if self._said is None else self._said.usage

    def outcome(self) -> Outcome:
        """How the complete answer counts."""
        status = self._answer.status
        if status >= 500 or self._is_aborted or (self._answer.is_stream and self._tail.has_error()):
            return Outcome.REPLICA_ERROR
        return Outcome.CLIENT_ERROR if status >= 400 else Outcome.OK

    def end(self) -> None:
        """The answer is complete, and accounted for."""
        self._client.exchange_ended(keep_alive=self._keep_alive)

    def break_off(self, refusal: RefusalError) -> None:
        """The rest will never come, for the reason that ``refusal`` gives."""
        if self._answer.framing is Framing.LENGTH and self._filter is None:
            self._client.exchange_ended(keep_alive=False)  # the length says that something is missing
        elif self._answer.is_stream:
            event = error_event(refusal.status, refusal.message, torn=self._is_inside_event)
            self._client.write(self._frame(event, True))
            self._client.exchange_ended(keep_alive=False)
        elif self._frame is plain:
            self._client.cut()  # an orderly close would be its end
        else:
            self._client.exchange_ended(keep_alive=False)  # the last chunk is missing
