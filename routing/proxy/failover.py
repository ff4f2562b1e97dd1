"""Failover of a stream: after its replica has failed, another replica generates the rest.

Theory of operation. The relay keeps what the client gets, and shows ``check`` all reads that may be more than an event
of text: it looks for the error with which an engine ends a stream. ``begin`` is called after a failure. When it is this
stream's turn, the text so far is read and another replica is chosen, which counts the tokens of the text. Then the
request for the rest is sent, by the loads of that time, and the relay rewrites the events of the rest
(``continuation.py``). If the rest cannot be another replica's, the client gets the error that was held back.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, cast

from routing.http.loop import log_exceptions
from routing.http.response import is_encoded
from routing.proxy.continuation import DONE_EVENT, NotContinuableError, Splice, error_at, finish_event
from routing.proxy.retries import failure_error
from routing.types import NoReplicaError
from routing.upstream.connection import Failure

if TYPE_CHECKING:
    from routing.balancing.placement import Decision
    from routing.http.response import RejectedRequestError, ResponseHead
    from routing.observability.decision_log import Record
    from routing.proxy.continuation import KeptStream, SentText
    from routing.proxy.response_relay import ResponseRelay
    from routing.proxy.retries import RetryState
    from routing.proxy.services import ActiveConfiguration, Services
    from routing.response_cache.cache import CacheLookup


CONTINUED: Final = "continued"  # a result of ``stream_failures_total``, as are the texts of ``NotContinuableError``
REJECTED: Final = "rejected"  # by the other replica
OK: Final = 200


class Owner(Protocol):
    """The exchange that a stream belongs to."""

    def retries(self) -> RetryState: ...

    def on_replica_lost(self, event: bytes) -> None:
        """Called when another replica may generate the rest. ``event``: the engine's error, if it sent one."""

    def on_rest_placed(self, body: bytes, decision: Decision) -> None:
        """Called with the request for the rest, and where to send it."""

    def on_text_complete(self) -> None:
        """Called when the client has the whole stream, and the replica may go on."""

    def on_not_continued(self, error: RejectedRequestError, event: bytes) -> None:
        """Called when the stream is broken. ``event``: the engine's own error, for the client if there is one."""

    def abort_on_error(self, error: Exception) -> None: ...


class StreamFailover:
    """What another replica needs to generate the rest of one stream, and the search for such a replica."""

    _error: RejectedRequestError  # for the client, if the rest cannot be another replica's

    def __init__(
        self,
        services: Services,
        configuration: ActiveConfiguration,
        owner: Owner,
        kept: KeptStream,
        relay: ResponseRelay,
        record: Record,
        lookup: CacheLookup | None,
    ) -> None:
        self._services = services
        self._configuration = configuration
        self._owner = owner
        self.kept = kept
        self._relay = relay
        self._record = record
        self._lookup = lookup  # None: the response is not stored
        self._splice: Splice | None = None  # the body is the rest from another replica
        self._event = b""  # with which the engine ended the stream
        self._failed_after = ("", 0)  # the replica that failed last, and the tokens of the text then

    def close(self) -> None:
        """Drop everything, because the stream has ended."""
        self.kept.close()

    def abort_on_error(self, error: Exception) -> None:
        self._owner.abort_on_error(error)

    # --- the body ---

    @log_exceptions
    def check(self, data: bytes, start: int) -> None:
        """Relay bytes of the body, up to an error."""
        body = data[start:-2] if start else data
        rest = self.until_error(body)
        if rest is None:
            return
        if rest is not body:
            data, start = rest, 0
        is_recorded = self._lookup is not None and self._lookup.is_recording
        if is_recorded:
            cast("CacheLookup", self._lookup).record(rest)
        self._relay.pass_checked(data, start, is_recorded=is_recorded)
        if self._splice is not None and self._splice.is_stopped and not self.kept.wants_usage:
            self._relay.end_finished()
            self._owner.on_text_complete()

    def until_error(self, data: bytes) -> bytes | None:
        """What is left to pass of ``data``; None if it ends with an error, and another replica may continue the stream.

        All before the error has then been passed.
        """
        at = error_at(data)
        if at < 0:
            return data
        if at:
            self._relay.pass_checked(data[:at], 0)
        event = data[at:]
        is_begun = self.begin("aborted", failure_error(self._record.replica, Failure.RESET), event)
        return None if is_begun else event

    # --- after a failure ---

    def begin(self, cause: str, error: RejectedRequestError, event: bytes = b"") -> bool:
        """Let another replica generate the rest; False if it cannot be the rest of the same text.

        ``error``: for the client, if that turns out later. ``event``: the engine's own.
        """
        try:
            self.kept.check(is_inside_event=self._relay.is_inside_event)
        except NotContinuableError as obstacle:
            self._count(self._record.replica, str(obstacle))
            return False
        self._error, self._event = error, event
        self._owner.on_replica_lost(event)
        self.kept.at_turn(partial(self.on_turn, cause))
        return True

    @log_exceptions
    def on_turn(self, cause: str) -> None:
        """Called when the stream may be read."""
        try:
            sent, decision = self._read(cause)
        except NotContinuableError as obstacle:
            self._end_broken(str(obstacle))
            return
        if decision is None:
            self._count(self._record.replica, CONTINUED)
            self._relay.end_finished(is_done=sent.is_done)
            self._owner.on_text_complete()
        else:
            self._count_tokens(sent, decision)

    def on_stalled(self) -> None:
        """Called when the replica is stalled: the stream goes on waiting for it if it cannot be continued now."""
        try:
            self.kept.check(is_inside_event=self._relay.is_inside_event)
            sent, decision = self._read("stalled")
        except NotContinuableError:
            return
        if decision is None:
            return
        self._error, self._event = failure_error(self._record.replica, Failure.TIMEOUT), b""
        self._owner.on_replica_lost(b"")
        self._count_tokens(sent, decision)

    def _read(self, cause: str) -> tuple[SentText, Decision | None]:
        """What the client has, and the replica for the rest; None if there is no rest."""
        sent = self.kept.read()
        return sent, None if sent.is_finished else self._owner.retries().on_stream_failed(cause)

    def _count_tokens(self, sent: SentText, decision: Decision) -> None:
        address = self._configuration.connection_pools[decision.target.replica.name].address
        self.kept.count(address, sent, partial(self.on_counted, sent))

    @log_exceptions
    def on_counted(self, sent: SentText, tokens: int) -> None:
        """Called when the tokens of the text so far are known: send the request for the rest by the current loads."""
        kept, replica = self.kept, self._record.replica
        try:
            body = kept.rest(sent, tokens)
            decision = self._owner.retries().decide()
        except NotContinuableError as obstacle:
            self._end_broken(str(obstacle))
            return
        except NoReplicaError:
            self._end_broken("no_replica")
            return
        self._splice = Splice(kept, sent, tokens)
        self._relay.splice(self._splice)
        if body is None:
            self._count(replica, CONTINUED)
            self._relay.finish(finish_event(sent, is_chat=kept.is_chat) + DONE_EVENT)
            self._owner.on_text_complete()
        else:
            self._failed_after = (replica, tokens)
            self._owner.on_rest_placed(body, decision)

    def accepts(self, head: ResponseHead) -> bool:
        """Whether the response to the request for the rest is a stream that can be relayed."""
        if head.status != OK or not head.is_stream or is_encoded(head):
            return False
        self._count(self._failed_after[0], CONTINUED)
        self._record.continued_after += (self._failed_after,)
        return True

    def on_rejected(self) -> None:
        """Called when no replica could generate the rest."""
        self._count(self._failed_after[0], REJECTED)
        self._record.replica = self._failed_after[0]  # the one that broke the stream

    def _count(self, replica: str, result: str) -> None:
        self._services.metrics.count_stream_failure(self._record.pool, replica, result)

    def _end_broken(self, reason: str) -> None:
        self._count(self._record.replica, reason)
        self._owner.on_not_continued(self._error, self._event)
