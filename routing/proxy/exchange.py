"""One request on its way: placed, sent, perhaps sent elsewhere, answered, accounted for.

Theory of operation. An exchange is in one state at a time; ``response_relay.py`` lists them and which may follow which.
Up to STREAMING a failure means the next replica, as long as one is eligible and the limit allows; after it, the
delivery says or shows that the answer is incomplete. A mistake of ours on the way is logged and ends the exchange too,
so that it leaves no client waiting and no load behind.
"""

from __future__ import annotations

import logging
from time import monotonic
from typing import TYPE_CHECKING, Final

from routing.http.errors import RejectedRequestError
from routing.http.loop import log_exceptions
from routing.http.response import ResponseHead
from routing.http.usage import ends_aborted, has_token_event, parse_response, text_ends_aborted
from routing.log import defect
from routing.observability.decision_log import structure_json
from routing.observability.decision_record import Record
from routing.observability.metrics import Outcome
from routing.prompt.parsing import LARGE_BYTES
from routing.prompt.rewrite import with_usage_requested
from routing.proxy.admission import PROMPT_PATHS, admitted_request, refusal_of
from routing.proxy.response_relay import (
    AWAITING,
    CONNECTING,
    DONE,
    JUDGING,
    NEXT,
    PLACING,
    QUEUED,
    READING,
    REPLICA_ERROR,
    STREAMING,
    Downstream,
    ResponseRelay,
    State,
    record_completion,
)
from routing.proxy.retries import (
    INVALID_STATUSES,
    TOO_MANY,
    RetryState,
    names_usage_request,
    no_response_error,
    outcome_of,
    unreachable_error,
)
from routing.types import BodyError, NoReplicaError, ReplicaId, RoutingError
from routing.upstream.connection import Failure, UpstreamConnection

if TYPE_CHECKING:
    from routing.balancing.decision import Decision
    from routing.balancing.load_tracker import Ticket
    from routing.balancing.request import BodyReading, PlacementRequest
    from routing.http.request import Request
    from routing.http.response_json import ParsedResponse
    from routing.proxy.active_configuration import ActiveConfiguration
    from routing.proxy.admission_queues import AdmissionQueues, QueuePermit
    from routing.proxy.large_bodies import PendingBody
    from routing.proxy.services import Services
    from routing.upstream.pool import ConnectionPool


RESPONSES: Final = b"/v1/responses"  # whose streams begin with events that come before the first token
POST: Final = b"POST"

logger = logging.getLogger(__name__)


class Exchange:
    """One request and its answer."""

    __slots__ = (
        "_client",
        "_decision",
        "_group",
        "_is_placed",
        "_is_plain",
        "_is_probe",
        "_is_probe_over",
        "_permit",
        "_placement_request",
        "_pool",
        "_reading",
        "_record",
        "_relay",
        "_removes_usage",
        "_request",
        "_retry_state",
        "_sends_unmodified",
        "_services",
        "_serving",
        "_state",
        "_ticket",
        "_upstream",
    )
    __deletable__ = ("_placement_request", "_decision")  # for mypyc

    _placement_request: PlacementRequest  # until the first byte, as the decision
    _decision: Decision
    _record: Record  # once placed, as the ticket
    _ticket: Ticket
    _relay: ResponseRelay  # from the first byte on

    def __init__(self, services: Services, serving: ActiveConfiguration, client: Downstream, request: Request) -> None:
        self._services = services
        self._serving = serving
        self._client = client
        self._request = request
        self._state = PLACING
        self._is_placed = False
        self._is_plain = True  # the client asked for no events
        self._removes_usage = False  # the replica was asked for usage that the client did not ask for
        self._sends_unmodified = False  # the replica refused the request with it
        self._is_probe = False  # of a replica that was out
        self._is_probe_over = False  # what comes of the request now is no success more
        self._reading: PendingBody | None = None  # of a large body
        self._permit: QueuePermit | None = None  # through the gates, where there are any
        self._pool = self._group = ""  # where no replica was found
        self._upstream: UpstreamConnection | None = None
        self._retry_state: RetryState | None = None  # once one has failed

    # --- what the client's connection does ---

    def start(self) -> None:
        """Place the request and send it; whatever is wrong with it is answered at once."""
        if len(self._request.body) > LARGE_BYTES:
            self._parse_in_other_process(self._request)
        else:
            self._admit(None)

    @log_exceptions
    def _parse_in_other_process(self, request: Request) -> None:
        """Have the body read by another process."""
        path = PROMPT_PATHS.get(request.head.path)
        if path is None:
            self._admit(None)
            return
        self._enter(READING)
        try:
            self._reading = self._services.large_bodies.read(self, path, request.body)
        except RejectedRequestError as refusal:
            self._reject(refusal)

    @log_exceptions
    def on_body_parsed(self, reading: BodyReading) -> None:
        """The large body is read: place the request."""
        self._reading = None
        self._enter(PLACING)
        self._admit(reading)

    @log_exceptions
    def on_body_rejected(self, why: BodyError | RejectedRequestError) -> None:
        """The large body cannot be placed."""
        self._reading = None
        self._reject(why if isinstance(why, RejectedRequestError) else refusal_of(why))

    def _admit(self, reading: BodyReading | None) -> None:
        request = self._request
        try:
            self._placement_request = admitted_request(request, self._serving.admission, reading)
            self._is_plain = self._placement_request.is_plain
            decision = self._serving.placement.decide(self._placement_request, self._services.health)
            if self._services.admission_queues is None or self._try_admit(self._services.admission_queues, decision):
                self._dispatch(decision)
        except NoReplicaError as missing:
            self._pool, self._group = missing.pool, missing.group
            self._on_no_replica(missing)
        except RoutingError as error:
            self._reject(refusal_of(error))
        except RejectedRequestError as refusal:
            self._reject(refusal)
        except Exception as mistake:  # noqa: BLE001 - as in never_raises, but without its frame
            self.abort_on_error(mistake)

    def _try_admit(self, admission_queues: AdmissionQueues, decision: Decision) -> bool:
        """Whether the request need not wait in line."""
        self._pool, self._group = decision.pool, decision.group
        self._permit = admission_queues.permit(self, decision.pool, decision.group, self._request.head.priority)
        if self._permit.go():
            return True
        self._enter(QUEUED)
        return False

    @log_exceptions
    def on_admitted(self) -> None:
        """Its turn has come: choose by what the loads are now."""
        self._enter(PLACING)
        self._place()

    def _place(self) -> None:
        try:
            decision = self._serving.placement.decide(self._placement_request, self._services.health)
        except NoReplicaError as missing:
            self._on_no_replica(missing)
            return
        if (
            self._permit is not None
            or self._services.admission_queues is None
            or self._try_admit(self._services.admission_queues, decision)
        ):
            self._dispatch(decision)

    @log_exceptions
    def _on_no_replica(self, missing: NoReplicaError) -> None:
        """Place it at a replica that was to warm up first, if there is one; the request is as it was admitted."""
        if self._services.cut_warm_up_short(missing):
            self._place()
        else:
            self._reject(refusal_of(missing))

    @log_exceptions
    def on_rejected(self, refusal: RejectedRequestError) -> None:
        """The line is too long."""
        self._reject(refusal)

    def cancel(self) -> None:
        """The client has gone: stop the replica's work at once."""
        self._finish(Outcome.CANCELLED)

    def pause(self) -> None:
        """Take nothing more from the replica until the client has taken what there is."""
        if self._upstream and self._state is STREAMING:
            self._upstream.pause()

    def resume(self) -> None:
        """Go on."""
        if self._upstream and self._state is STREAMING:
            self._upstream.resume()

    # --- to a replica ---

    def _dispatch(self, decision: Decision) -> None:
        self._decision, is_described = decision, False
        self._sends_unmodified = False
        if self._is_placed:
            self._record.on_retry(decision)
        else:
            request, prompt = self._request, self._placement_request.prompt
            is_described = self._services.structure_sampler.should_sample(decision, request.arrived_at)
            self._record = Record.from_decision(decision, request.request_id, with_costs=is_described)
            self._services.on_placed(decision, request, prompt)
        is_retry, is_plain = self._is_placed, self._is_plain
        self._ticket = self._serving.placement.dispatch(decision, is_retry=is_retry, is_plain=is_plain)
        self._is_placed = True
        if self._services.breakers.not_closed:
            self._is_probe = self._services.breakers.on_request_sent(ReplicaId(decision.replica.name))
        upstream = self._serving.connection_pools[decision.target.replica.name].take_idle()
        if upstream is None:
            self._connect()
        else:
            self._send(upstream)
        if is_described:
            self._record.structure = structure_json(decision, self._request)

    def _connect(self) -> None:
        self._enter(CONNECTING)
        link = self._serving.connection_pools[self._decision.replica.name]
        link.connect(self, self._serving.limits.connect_timeout_s)

    @log_exceptions
    def on_connected(self, upstream: UpstreamConnection) -> None:
        """Send the request on a connection of the chosen replica."""
        if self._state is DONE:
            upstream.release()
        else:
            self._send(upstream)

    def _send(self, upstream: UpstreamConnection) -> None:
        self._enter(AWAITING)
        self._upstream = upstream
        request, limits = self._request, self._serving.limits
        body = self._body_for(upstream.link)
        is_whole = self._is_plain and request.head.method == POST  # generated to its end before the first byte comes
        upstream.send(
            self,
            upstream.link.address.head(request, self._decision.target.rank, body_bytes=len(body)),
            body,
            first_byte_s=limits.response_timeout_s if is_whole else limits.first_byte_timeout_s,
            idle_s=limits.idle_timeout_s,
            bodyless=request.head.method == b"HEAD",
        )

    def _body_for(self, link: ConnectionPool) -> bytes:
        """The body as the replica gets it: with an ask for usage where the client has none and the pool wants it."""
        request = self._request
        self._removes_usage = (
            request.omits_usage
            and self._decision.pool in self._serving.usage_pools
            and not self._sends_unmodified
            and link.takes_usage_requests
        )
        return with_usage_requested(request.body, request.layout) if self._removes_usage else request.body

    @log_exceptions
    def on_connect_failed(self, reason: str, *, ours: bool) -> None:
        """The chosen replica cannot be reached. ``ours``: for a shortage of the router's own."""
        if self._state is DONE:
            return
        if not self._retry_on_other_replica(
            self._failed().after_connect_failure(reason, ours=ours, was_probe=self._is_probe)
        ):
            self._reject(unreachable_error(self._record.replica, reason))

    # --- from a replica ---

    def on_response(self, answer: ResponseHead, data: bytes, last: bool) -> None:
        """Bytes of the answer: pass them on, or judge an error."""
        if last:
            self._upstream = None  # it has gone back to its pool
        try:
            if self._state is STREAMING:
                if self._awaits_token() and has_token_event(data):
                    self._on_first_token()
                self._relay.finish(data)  # the middle went straight to its sink
                self._complete()
            elif answer.status >= TOO_MANY:
                self._on_error_response(answer, data, last)
            elif self._removes_usage and answer.status in INVALID_STATUSES:
                self._check_usage_refusal(answer, data, last)
            elif last:
                self._on_whole_response(answer, data)
            else:
                self._start_response(answer, data, last=False)
        except Exception as error:  # noqa: BLE001 - as in never_raises, but without its frame
            self.abort_on_error(error)

    def _on_whole_response(self, answer: ResponseHead, data: bytes) -> None:
        """Pass it on; of one that its engine gave up to stop, another replica is asked first."""
        parsed = None if answer.is_stream else parse_response(data)
        is_aborted = text_ends_aborted(data) if parsed is None else ends_aborted(parsed)
        if not (is_aborted and self._retry_on_other_replica(self._failed().after_abort())):
            self._start_response(answer, data, parsed, last=True, is_aborted=is_aborted)

    @log_exceptions
    def on_upstream_failed(self, failure: Failure, *, stale: bool) -> None:
        """The answer ends here, though it is not complete."""
        self._upstream = None
        if self._state is STREAMING:
            self._services.stall_detector.record_failed_response(
                self._record.replica, failure, was_probe=self._is_probe
            )
            self._finish(REPLICA_ERROR)
            self._relay.abort(no_response_error(self._record.replica, failure))
        elif stale and self._failed().may_reconnect():
            self._connect()
        elif not self._retry_on_other_replica(self._failed().after_broken_response(failure, was_probe=self._is_probe)):
            self._reject(no_response_error(self._record.replica, failure))

    def _on_error_response(self, answer: ResponseHead, data: bytes, last: bool) -> None:
        """Hold an error until it is whole, then try elsewhere if that may help; else the client gets it."""
        if self._state is AWAITING:
            self._enter(JUDGING)
        attempts = self._failed()
        if attempts.hold(data, last=last) and not self._retry_on_other_replica(
            attempts.answered(answer, was_probe=self._is_probe)
        ):
            self._start_response(answer, attempts.held, last=last)

    def _check_usage_refusal(self, answer: ResponseHead, data: bytes, last: bool) -> None:
        """Send the client's own request to the same replica if the error may be about the router's ask for usage."""
        if self._state is AWAITING:
            self._enter(JUDGING)
        attempts = self._failed()
        if not attempts.hold(data, last=last):
            return
        if names_usage_request(attempts.held):
            attempts.held = b""
            self._sends_unmodified = True
            if self._upstream is not None:
                self._upstream.abandon()
                self._upstream = None
            self._connect()
        else:
            self._start_response(answer, attempts.held, last=last)

    # --- from whoever watches the replica ---

    def is_stream(self) -> bool:
        """Whether the client asked for events, so that the first byte must come with the first token."""
        return not self._is_plain

    @property
    def waiting_tokens(self) -> int:
        """Of its prompt, estimated tokens that the replica has to prefill before the first byte."""
        return self._ticket.waiting_tokens

    @property
    def tokens_ahead(self) -> float:
        """Those, and what the replica had to prefill before them."""
        return self._ticket.queued_tokens + self._ticket.waiting_tokens

    @property
    def prompt_tokens(self) -> int:
        """Estimated length of its prompt."""
        return self._record.prompt_tokens_estimate

    @log_exceptions
    def on_stalled(self) -> None:
        """The replica hangs: go elsewhere, if that is allowed, else wait on."""
        if self._state is AWAITING or self._state is JUDGING:
            self._retry_on_other_replica(self._failed().stalled())

    # --- when a try has failed ---

    def _failed(self) -> RetryState:
        """What has failed so far, from now on at least something."""
        if self._retry_state is None:
            self._retry_state = RetryState(self._services, self._serving, self._placement_request, self._record)
        return self._retry_state

    def _retry_on_other_replica(self, elsewhere: Decision | None) -> bool:
        """Leave the replica for another one; False if there is none."""
        if elsewhere is None:
            return False
        self._release_replica()
        self._enter(PLACING)
        self._dispatch(elsewhere)
        return True

    # --- to the client ---

    def _start_response(
        self,
        answer: ResponseHead,
        data: bytes,
        parsed: ParsedResponse | None = None,
        *,
        last: bool,
        is_aborted: bool = False,
    ) -> None:
        """The first byte is here: pass it on, and let go of what only a retry would need."""
        self._enter(STREAMING)
        request = self._request
        if self._sends_unmodified and answer.status < 300:
            self._usage_refused()
        self._record.on_first_byte(answer.status, is_streamed=answer.is_stream)
        is_first_token = answer.is_stream and (request.head.path != RESPONSES or has_token_event(data))
        if is_first_token:
            self._on_first_token()
        elif not (last or answer.is_stream):
            self._ticket.first_byte()  # its end implies it
        if self._is_probe and answer.status < TOO_MANY:
            self._is_probe_over = self._services.breakers.record_first_byte(ReplicaId(self._record.replica))
        self._relay = relay = ResponseRelay(
            self._client, answer, parsed, is_aborted=is_aborted, hides_usage=self._removes_usage
        )
        del self._placement_request, self._decision
        request.body = b""
        self._retry_state = None
        keep_alive = request.head.keep_alive and not self._services.is_draining
        relay.begin(request, self._record, data, last=last, keep_alive=keep_alive)
        if last:
            self._complete()
        elif self._upstream is not None:
            self._upstream.pipe_to(self._pass_before_token if self._awaits_token() else relay.sink)
            if self._client.is_full:  # since before this answer: with one that went out ahead of it
                self._upstream.pause()

    def _usage_refused(self) -> None:
        """The replica took the request only as the client had sent it: do not ask it for usage for a while."""
        replica = self._record.replica
        if self._serving.connection_pools[replica].usage_refused():
            logger.warning("usage_request_refused", extra={"replica": replica})

    def _awaits_token(self) -> bool:
        """Whether the response is a stream of which no token has come: only events that tell of the request."""
        return self._record.is_streamed is True and self._record.ttft_s is None

    def _on_first_token(self) -> None:
        """The prompt is prefilled."""
        self._record.ttft_s = monotonic() - self._request.arrived_at
        self._ticket.first_byte()

    @log_exceptions
    def _pass_before_token(self, data: bytes, start: int) -> None:
        """Pass events on until one has a token; from then on they go straight to the delivery."""
        self._relay.sink(data, start)
        if has_token_event(data) and self._state is STREAMING and self._upstream is not None:
            self._on_first_token()
            self._upstream.pipe_to(self._relay.sink)
            if self._client.is_full:
                self._upstream.pause()

    def _complete(self) -> None:
        self._record.latency_s = monotonic() - self._request.arrived_at
        outcome = record_completion(
            self._services, self._request.grant, self._record, self._ticket, self._relay, was_probe=self._is_probe
        )
        self._finish(outcome)
        self._relay.end()

    def _reject(self, refusal: RejectedRequestError) -> None:
        """No answer of a replica will come: give the router's own."""
        keep_alive = self._request.head.keep_alive and not self._services.is_draining and not refusal.must_close
        if self._is_placed:
            self._record.status = refusal.status
        self._finish(outcome_of(refusal.status, placed=self._is_placed))
        self._client.answer(self._request, refusal.answer(), keep_alive=keep_alive)
        self._client.on_exchange_ended(keep_alive=keep_alive)

    # --- the end ---

    def abort_on_error(self, error: Exception) -> None:
        """A mistake of ours: say so, or cut an answer that has begun."""
        defect(logger, error, "exchange")
        has_begun = self._state >= STREAMING
        self._finish(Outcome.ROUTER_ERROR)
        if has_begun:
            self._client.reset()
        else:
            self._client.answer(self._request, RejectedRequestError(500, "internal error").answer(), keep_alive=False)
            self._client.on_exchange_ended(keep_alive=False)

    def _finish(self, outcome: Outcome) -> None:
        if self._state is DONE:
            return
        self._enter(DONE)
        try:
            self._services.on_ended(
                self._record if self._is_placed else None, outcome, pool=self._pool, group=self._group
            )
        except Exception as error:  # noqa: BLE001 - a count that fails is no reason to fail a client
            defect(logger, error, "accounting")
        finally:
            if self._reading is not None:
                self._reading.cancel()
            if self._permit is not None:
                self._permit.leave()
            if self._is_placed:
                self._release_replica()

    def _release_replica(self) -> None:
        """Nothing of it is left at the replica that was chosen; a probe that has shown nothing may be another's."""
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.abandon()
        self._ticket.end()
        if self._is_probe:
            if not self._is_probe_over:
                self._services.breakers.record_cancelled(ReplicaId(self._record.replica))
            self._is_probe = self._is_probe_over = False

    def _enter(self, state: State) -> None:
        if state not in NEXT[self._state]:
            raise RuntimeError(f"an exchange cannot go from {self._state.name} to {state.name}")
        self._state = state
