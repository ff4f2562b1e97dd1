"""State machine of one proxied request: place, send, retry, relay the response, account for it.

Theory of operation. An exchange is in one state at a time; ``TRANSITIONS`` lists what may follow. Before STREAMING a
failure leads to the next replica, while one is eligible and the limit allows; from then on another replica generates
the rest of a stream (``failover.py``), or the relay shows the client that the response is incomplete. Where
replicas have roles, another replica may prefill the prompt before the request is sent (``prefill_leg.py``). A
programming error is logged and ends the exchange too, so that no client waits and no load remains.
"""

from __future__ import annotations

import asyncio
import logging
import math
from enum import IntEnum
from functools import partial
from http import HTTPStatus
from time import monotonic
from typing import TYPE_CHECKING, Final, cast

from routing.http.loop import log_exceptions
from routing.http.response import Header, LocalResponse, RejectedRequestError, ResponseHead, is_encoded
from routing.http.usage import Prelude, begins_with_error, has_abort, is_aborted, parse_response
from routing.log import defect
from routing.observability.decision_log import structure_json
from routing.observability.metrics import MISSED, SHED, Outcome
from routing.paths import DataPath
from routing.prompt.parsing import with_usage_requested, without_member
from routing.proxy.admission import RESPONSES, admit_request, rejection_of, with_response_id
from routing.proxy.continuation import KeptStream, fails_after_token
from routing.proxy.failover import StreamFailover
from routing.proxy.prefill_leg import REJECTED, RETRIED, PrefillLeg, check_parameters
from routing.proxy.response_relay import (
    REPLICA_ERROR,
    Downstream,
    ResponseRelay,
    begin_record,
    count_request,
    end_request,
    record_completion,
    stream_head,
)
from routing.proxy.retries import TOO_MANY, RetryState, failure_error, retry_cause
from routing.response_cache.cache import Progress
from routing.types import BodyError, NoReplicaError, ReplicaId, RoutingError
from routing.upstream.connection import BodySink, Failure, UpstreamCall, UpstreamConnection

if TYPE_CHECKING:
    from routing.balancing.load_tracker import Ticket
    from routing.balancing.placement import Decision
    from routing.balancing.request import BodyReading, PlacementRequest
    from routing.http.request import Request
    from routing.http.response_json import ParsedResponse
    from routing.observability.decision_log import Record
    from routing.paths import Endpoint
    from routing.proxy.admission_queues import QueuePermit
    from routing.proxy.large_bodies import PendingBody
    from routing.proxy.services import ActiveConfiguration, Services
    from routing.response_cache.cache import CachedResponse, CacheLookup


POST: Final = b"POST"
CHAT: Final = DataPath.CHAT_COMPLETIONS.endpoint
OK: Final = HTTPStatus.OK.value
SERVER_ERROR: Final = HTTPStatus.INTERNAL_SERVER_ERROR.value
MAX_SHOWN_BYTES: Final = 1000  # of an error response that a client gets as an event
INVALID_STATUSES: Final = frozenset({400, 422})  # of engines that do not know a member of the request

logger = logging.getLogger(__name__)


class State(IntEnum):
    """The state of an exchange."""

    READING = 0  # another process reads the large body
    PLACING = 1  # a replica is being chosen; synchronous
    LOOKING_UP = 2  # the response cache is asked, or another request for the same response is running
    QUEUED = 3  # the pool or task group is at its concurrency limit
    PREFILLING = 4  # another replica prefills the prompt
    CONNECTING = 5  # no idle connection was available
    AWAITING = 6  # sent; the beginning of the response may have arrived, but is held until its first token or byte
    CLASSIFYING = 7  # an error response is being buffered, because another replica may do better
    STREAMING = 8  # bytes of the response have been sent to the client: the request is not sent again from here on
    COUNTING = 9  # the replica of the stream failed; another one counts the tokens of the text so far
    DONE = 10  # reached exactly once; the load is always released


READING: Final = State.READING  # attributes of an enum are slow to look up
PLACING: Final = State.PLACING
LOOKING_UP: Final = State.LOOKING_UP
QUEUED: Final = State.QUEUED
PREFILLING: Final = State.PREFILLING
CONNECTING: Final = State.CONNECTING
AWAITING: Final = State.AWAITING
CLASSIFYING: Final = State.CLASSIFYING
STREAMING: Final = State.STREAMING
COUNTING: Final = State.COUNTING
DONE: Final = State.DONE

TRANSITIONS: Final = {
    READING: {PLACING, DONE},
    PLACING: {READING, LOOKING_UP, QUEUED, PREFILLING, CONNECTING, AWAITING, DONE},
    LOOKING_UP: {PLACING, DONE},
    QUEUED: {PLACING, DONE},
    PREFILLING: {PLACING, DONE},
    CONNECTING: {PLACING, AWAITING, DONE},
    AWAITING: {PLACING, CONNECTING, CLASSIFYING, STREAMING, DONE},
    CLASSIFYING: {PLACING, CONNECTING, STREAMING, DONE},
    STREAMING: {COUNTING, DONE},
    COUNTING: {PLACING, DONE},
    DONE: set[State](),
}


class Exchange(UpstreamCall):
    """One request and its response."""

    __deletable__ = ("_placement_request", "_decision")  # for mypyc

    _placement_request: PlacementRequest  # until the first byte, as the decision
    _decision: Decision
    _record: Record  # once placed, as the ticket
    _ticket: Ticket
    _relay: ResponseRelay  # from the first byte on, as ``_has_begun``

    def __init__(
        self, services: Services, configuration: ActiveConfiguration, client: Downstream, request: Request
    ) -> None:
        UpstreamCall.__init__(self)
        self._services = services
        self._configuration = configuration
        self._client = client
        self._request = request
        self._state = PLACING
        self._is_placed = False
        self._is_plain = True  # the client did not ask for a stream
        self._removes_usage = False  # the replica was asked for usage that the client did not ask for
        self._sends_unmodified = False  # because the replica rejected the usage request
        self._is_probe = False  # the replica is ejected
        self._has_probe_result = False  # the breaker counts no success of this probe any more
        self._pending_body: PendingBody | None = None  # a large one
        self._lookup: CacheLookup | None = None  # None: its task group has no response cache
        self._permit: QueuePermit | None = None  # None: no admission queues
        self._prefill: PrefillLeg | None = None  # until the first byte; None: no replica of the pool has a role
        self._objective_ms: int | None = None  # for TTFT
        self._pool = self._group = ""  # set where no replica was available
        self._sent_at = 0.0  # to the current replica
        self._prelude: Prelude | None = None  # of the current replica's stream, held until its first token
        self._retry_state: RetryState | None = None  # since the first failure
        self._has_begun = False  # the client has bytes of the response
        self._silence: asyncio.TimerHandle | None = None  # until a comment is sent; None: the client is to get none
        self._released: ResponseRelay | None = None  # has sent the head, before any replica responded
        self._failover: StreamFailover | None = None  # of a stream that may be continued
        tracer = services.tracer
        self._trace = None if tracer is None else tracer.start(request)  # None: not sampled

    # --- called by the client's connection ---

    def start(self) -> None:
        """Place and send the request, answer it from its task group's response cache, or reject it."""
        caches = self._services.response_caches
        if caches is not None and (lookup := caches.lookup_known(self._request, self.on_cache_result)) is not None:
            self._lookup, self._pool, self._group = lookup, lookup.pool, lookup.group
            self._respond_from_cache(lookup)
            return
        endpoint = self._request.head.endpoint
        if self._request.is_large and endpoint is not None and not endpoint.is_form:
            self._read_large_body(endpoint)
        else:
            self._admit(None)

    @log_exceptions
    def _read_large_body(self, endpoint: Endpoint) -> None:
        self._enter(READING)
        body, grant = self._request.body, self._request.grant
        try:
            self._pending_body = self._services.large_bodies.read(
                endpoint.path, body, self.on_body_read, self.on_body_rejected, owner=grant.name if grant else None
            )
        except RejectedRequestError as rejection:
            self._reject(rejection)

    @log_exceptions
    def on_body_read(self, reading: BodyReading) -> None:
        """Called when another process has read the large body."""
        self._pending_body = None
        self._enter(PLACING)
        self._admit(reading)

    @log_exceptions
    def on_body_rejected(self, error: BodyError | RejectedRequestError) -> None:
        """Called when the large body is invalid or could not be read."""
        self._pending_body = None
        self._reject(error if isinstance(error, RejectedRequestError) else rejection_of(error))

    def _admit(self, reading: BodyReading | None) -> None:
        try:
            self._placement_request = admit_request(self._request, self._configuration.admission, reading)
            self._is_plain = self._placement_request.is_plain
            if not self._request.cache_digest or self._begin_lookup():
                self._place()
        except RoutingError as error:
            self._reject(rejection_of(error))
        except RejectedRequestError as rejection:
            self._reject(rejection)
        except Exception as unexpected:  # noqa: BLE001 - as log_exceptions, without a call
            self.abort_on_error(unexpected)

    def _begin_lookup(self) -> bool:
        """Look for the response in its task group's cache; False if no replica is needed now."""
        admission, caches = self._configuration.admission, self._services.response_caches
        scope = admission.cache_scope(self._request, self._placement_request)
        if scope is None or caches is None:
            return True
        self._lookup = lookup = caches.lookup(self._request, scope, self.on_cache_result)
        if lookup is None:
            return True
        self._pool, self._group = scope.pool, scope.group
        body = without_member(self._request.body, "cache")  # some engines reject it
        if body is not self._request.body:
            self._request.body, self._request.layout = body, None
        progress = lookup.start(self._first_byte_limit_s())
        if progress is Progress.FOUND:
            self._respond_from_cache(lookup)
        elif progress is Progress.WAITING:
            self._enter(LOOKING_UP)
        return progress is Progress.MISSING

    @log_exceptions
    def on_cache_result(self) -> None:
        """Called when the cache has responded, or the request with the same response has ended."""
        lookup = self._lookup
        if self.is_over or lookup is None:
            return
        if lookup.response is not None:
            self._respond_from_cache(lookup)
        else:
            self._enter(PLACING)
            self._place()

    def _respond_from_cache(self, lookup: CacheLookup) -> None:
        response = cast("CachedResponse", lookup.response)
        keep_alive = self._request.head.keep_alive and not self._services.is_draining
        headers: tuple[Header, ...] = (
            (b"X-Warmpath-Cache", b"hit"),
            (b"X-Warmpath-Cache-Key", response.key),
            (b"Age", b"%d" % response.age_s),
        )
        if response.similarity is not None:
            headers += ((b"X-Warmpath-Cache-Similarity", b"%.4f" % response.similarity),)
        self._finish(Outcome.OK)
        local = LocalResponse(200, response.body, headers, response.content_type)
        self._client.respond(self._request, local, keep_alive=keep_alive, pool=self._pool)
        self._client.on_exchange_ended(keep_alive=keep_alive)

    def _place(self) -> None:
        """Choose a replica and send the request, or wait in an admission queue."""
        try:
            decision = self._configuration.placement.decide(self._placement_request, self._services.health)
        except NoReplicaError as error:
            self._pool, self._group = error.pool, error.group
            if self._services.end_warm_up_early(error):
                self._place()
            else:
                self._reject(rejection_of(error))
            return
        queues, latest_start = self._services.admission_queues, math.inf
        objective_ms = self._request.head.ttft_objective_ms or decision.route.ttft_objective_ms
        if objective_ms is not None and not self._is_plain:  # the first token of other responses is not seen
            self._pool, self._group = decision.pool, decision.group
            try:
                decision, latest_start = self._prefer_objective(decision, objective_ms)
            except RejectedRequestError as rejection:
                self._reject(rejection)
                return
        if self._configuration.keep_alive_s and self._silence is None:
            self._expect_silence(decision.pool)
        if queues is not None and self._permit is None:
            self._pool, self._group = decision.pool, decision.group
            request, tokens = self._request, decision.choice.uncached_tokens(decision.keys.prompt_tokens)
            self._permit = queues.permit(
                decision.pool,
                decision.group,
                request.head.priority,
                request.grant,
                tokens,
                self.on_admitted,
                self.on_queue_rejected,
                latest_start,
            )
            if not self._permit.acquire():
                self._enter(QUEUED)
                return
        self._dispatch(decision)

    def _prefer_objective(self, decision: Decision, objective_ms: int) -> tuple[Decision, float]:
        """A decision for a replica that keeps the objective for TTFT, if there is one, and when to send the request.

        RejectedRequestError if there is none, and such requests are to be rejected.
        """
        self._objective_ms, deadline = objective_ms, self._request.arrived_at + objective_ms / 1000
        within_s, queues = deadline - monotonic(), self._services.admission_queues
        decision, predicted_s = self._configuration.placement.prefer_within(decision, within_s)
        if predicted_s > within_s and queues is not None and queues.sheds(decision.pool, decision.group):
            message = f"no replica is expected to send the first token within {objective_ms} ms"
            raise RejectedRequestError(429, message, retry_after_s=math.ceil(predicted_s - within_s))
        return decision, deadline - predicted_s

    def _expect_silence(self, pool: str) -> None:
        """Send comments while the client of a stream waits for its first token, if its pool and endpoint have them."""
        every_s, endpoint = self._configuration.keep_alive_s.get(pool), self._request.head.endpoint
        if every_s and not self._is_plain and endpoint is not None and endpoint.generates and not endpoint.is_form:
            callback = partial(self.on_silence, pool, every_s)
            self._silence = asyncio.get_running_loop().call_later(every_s, callback)

    @log_exceptions
    def on_silence(self, pool: str, every_s: float) -> None:
        """Called when the client has got nothing for a while. Until the first token retries remain possible."""
        if self._released is None:
            head, cross_origin = stream_head(), self._configuration.cross_origin
            if cross_origin is not None:
                head = cross_origin.decided(head, self._request.head, pool)
            self._released = ResponseRelay(self._client, head, None, is_aborted=False, fingerprint=None)
            keep_alive = self._request.head.keep_alive and not self._services.is_draining
            self._released.release_head(self._request, keep_alive=keep_alive)
        self._released.send_comment()
        self._silence = asyncio.get_running_loop().call_later(every_s, partial(self.on_silence, pool, every_s))

    def _end_silence(self) -> None:
        if self._silence is not None:
            self._silence.cancel()

    @log_exceptions
    def on_admitted(self) -> None:
        """Called when a queued request may be sent: place it again by the current loads."""
        self._enter(PLACING)
        self._place()

    @log_exceptions
    def on_queue_rejected(self, rejection: RejectedRequestError) -> None:
        """Called when the admission queue is full, or when the request has waited for too long."""
        self._reject(rejection)

    def cancel(self) -> None:
        """Abort the replica's request at once, because the client has disconnected."""
        outcome = Outcome.CANCELLED
        if self._state is STREAMING and self._relay.has_ended:
            outcome = self._record_completion()  # the client has the last event, and did not wait for the last chunk
        self._finish(outcome)

    def pause(self) -> None:
        """Stop reading from the replica until the client has read what was written."""
        if self.upstream and self._state is STREAMING:
            self.upstream.pause()

    def resume(self) -> None:
        if self.upstream and self._state is STREAMING:
            self.upstream.resume()

    # --- to a replica ---

    def _begin_prefill(self, decision: Decision) -> bool:
        """Let another replica prefill the prompt first, if that is worth it; False if the request is not sent now."""
        leg = self._prefill
        if leg is None:
            self._pool, self._group = decision.pool, decision.group
            try:
                check_parameters(self._request)
            except RejectedRequestError as rejection:
                self._reject(rejection)
                return False
            leg = self._prefill = PrefillLeg(self._services, self._configuration, self, self._request, self._trace)
        if self._is_placed or not leg.start(decision):
            return True
        self._enter(PREFILLING)
        return False

    @log_exceptions
    def on_prefill_ended(self) -> None:
        """Called when the prefill leg is over: send the request to the chosen replica, or to another if it is down."""
        self._enter(PLACING)
        decision = cast("PrefillLeg", self._prefill).decision
        if self._configuration.placement.is_eligible(decision, self._services.health):
            self._dispatch(decision)
        else:
            self._place()

    def _record_prefill(self, leg: PrefillLeg) -> None:
        self._record.prefill = leg.record
        if leg.has_parameters:
            self._record.hit_tokens = leg.record.hit_tokens

    def _dispatch(self, decision: Decision) -> None:
        if decision.route.prefill is not None and not self._begin_prefill(decision):
            return
        self._decision, is_described = decision, False
        self._sends_unmodified = False
        if self._is_placed:
            self._record.on_retry(decision)
        else:
            services, request = self._services, self._request
            is_described = services.structure_sampler.should_sample(decision, request.arrived_at)
            self._record = begin_record(services, decision, request, self._placement_request, is_described=is_described)
            self._record.objective_ms = self._objective_ms
        is_retry, is_plain, leg = self._is_placed, self._is_plain, self._prefill
        self._ticket = self._configuration.placement.dispatch(
            decision, is_retry=is_retry, is_plain=is_plain, is_prefilled=leg is not None and leg.has_parameters
        )
        self._is_placed = True
        if leg is not None:
            self._record_prefill(leg)
        if self._trace is not None:
            self._trace.begin_attempt(decision, self._placement_request.model)
        if self._services.breakers.not_closed:
            self._is_probe = self._services.breakers.on_request_sent(ReplicaId(decision.replica.name))
        self.open(self._configuration.connection_pools[decision.target.replica.name])
        if is_described:
            self._record.structure = structure_json(decision, self._request)

    def connect(self) -> None:
        self._enter(CONNECTING)
        UpstreamCall.connect(self)

    def connect_timeout_s(self) -> float:
        return self._configuration.limits.connect_timeout_s

    def send_on(self, upstream: UpstreamConnection) -> None:
        self._enter(AWAITING)
        self._prelude = None
        request = self._request
        self._removes_usage = (
            request.omits_usage
            and self._decision.pool in self._configuration.usage_pools
            and not self._sends_unmodified
            and self.connections.accepts_usage_requests
        )
        body = with_usage_requested(request.body, request.layout) if self._removes_usage else request.body
        if request.head.endpoint is RESPONSES:
            admission, model = self._configuration.admission, self._placement_request.model
            body = with_response_id(request, admission, self._decision, model)
        first_byte_s = self._first_byte_limit_s()
        if self._prefill is not None:
            first_byte_s = max(0.001, first_byte_s - self._prefill.duration_s)
        idle_s, rank = self._configuration.limits.idle_timeout_s, self._decision.target.rank
        self.send(upstream, request, body, rank, self._trace, first_byte_s=first_byte_s, idle_s=idle_s)
        self._sent_at = monotonic()

    def _first_byte_limit_s(self) -> float:
        """The longest wait for the first byte: a plain response is generated to its end before that."""
        limits, is_generated_first = self._configuration.limits, self._is_plain and self._request.head.method == POST
        return limits.response_timeout_s if is_generated_first else limits.first_byte_timeout_s

    def on_no_connection(self, reason: str, *, is_local: bool) -> None:
        """Called when no connection was made. ``is_local``: the router lacks a resource."""
        decision = self.retries().on_connect_failed(reason, is_local=is_local, was_probe=self._is_probe)
        if not self._retry_on_other_replica(decision):
            replica = self._record.replica
            self._reject(RejectedRequestError(502, f"replica {replica!r} cannot be reached: {reason}"))

    # --- from a replica ---

    def on_response(self, head: ResponseHead, data: bytes, last: bool) -> None:
        """Called with the first and the last body bytes: relay them, or classify an error."""
        if last:
            self.upstream = None  # it has returned to its pool
        try:
            if self._state is STREAMING:
                self._end_response(data)
            elif head.status >= TOO_MANY or (self._removes_usage and head.status in INVALID_STATUSES):
                self._on_error_response(head, data, last)
            elif head.is_stream:
                self._on_first_events(head, data, last)
            elif last:
                self._on_whole_response(head, data)
            else:
                self._start_response(head, data, last=False)
        except Exception as error:  # noqa: BLE001 - as log_exceptions, without a call
            self.abort_on_error(error)

    def _on_first_events(self, head: ResponseHead, data: bytes, last: bool) -> None:
        """Relay a stream from its first token on; until then another replica may still get the request."""
        prelude = self._prelude
        if prelude is None:
            prelude = self._prelude = Prelude()
        has_token = prelude.add(data)
        if not (has_token or last or is_encoded(head)):
            return
        data = bytes(prelude.data)
        if fails_after_token(data) and (decision := self.retries().on_aborted()) is not None:
            self._record_stream_error(data)
            self._retry_on_other_replica(decision)
            return
        if begins_with_error(data):
            has_token = False
            if self._prefill is not None and self._prefill.has_parameters:
                self._send_without_parameters()
                return
        if has_token:
            now = monotonic()
            self._record.prefill_s = now - self._sent_at
            if not self._has_begun:
                self._record.ttft_s = now - self._request.arrived_at
            self._ticket.record_first_byte()
        if last:
            self._on_whole_response(head, data)
        else:
            self._start_response(head, data, last=False)

    def _on_whole_response(self, head: ResponseHead, data: bytes) -> None:
        """Relay the response, unless its engine aborted it and another replica gets the request."""
        parsed = None if head.is_stream else parse_response(data)
        aborted = has_abort(data) if parsed is None else is_aborted(parsed)
        if not (aborted and self._retry_on_other_replica(self.retries().on_aborted())):
            self._start_response(head, data, parsed, last=True, aborted=aborted)

    def on_failed(self, failure: Failure) -> None:
        """Called when the response failed before its end."""
        replica = self._record.replica
        if self._state is STREAMING:
            self._services.stall_detector.record_failed_response(replica, failure, was_probe=self._is_probe)
            error = failure_error(replica, failure)
            if self._failover is None or not self._failover.begin(failure, error):
                self.on_not_continued(error, b"")
            return
        decision = self.retries().on_response_failed(failure, was_probe=self._is_probe)
        if not self._retry_on_other_replica(decision):
            self._reject(failure_error(replica, failure))

    def _on_error_response(self, head: ResponseHead, data: bytes, last: bool) -> None:
        """Buffer an error; then retry if that may help, or relay it."""
        if self._state is AWAITING:
            self._enter(CLASSIFYING)
        retries = self.retries()
        if not retries.buffer(data, last=last):
            return
        if head.status < TOO_MANY:
            if b"stream_options" in retries.body or b"include_usage" in retries.body:
                self._send_unmodified(retries)
                return
        elif self._may_have_rejected_parameters(head, retries.body):
            self._send_without_parameters()
            return
        elif self._retry_on_other_replica(retries.on_error_response(head, was_probe=self._is_probe)):
            return
        self._start_response(head, retries.body, last=last)

    def _may_have_rejected_parameters(self, head: ResponseHead, body: bytes) -> bool:
        """Whether an error may mean that the replica could not fetch the KV blocks."""
        leg = self._prefill
        return (
            leg is not None
            and leg.has_parameters
            and head.status == SERVER_ERROR
            and retry_cause(head, body) is None  # else the engine stops
        )

    def _send_unmodified(self, retries: RetryState) -> None:
        """Send the client's own request to the same replica, which rejected the usage request."""
        retries.body = b""
        self._sends_unmodified = True
        self.abort_upstream()
        self.connect()

    def _send_without_parameters(self) -> None:
        """Send the client's own request to the same replica, which could not fetch the KV blocks.

        vLLM fails such a request, unless ``kv_load_failure_policy`` is ``recompute``. Nothing was generated, so this
        needs no retry budget.
        """
        cast("PrefillLeg", self._prefill).drop_parameters(REJECTED)
        if self._retry_state is not None:
            self._retry_state.body = b""
        self._release_replica()
        self._enter(PLACING)
        self._dispatch(self._decision)

    # --- called by the stall detector ---

    def is_stream(self) -> bool:
        """Whether the first token arrives as soon as the prompt is prefilled."""
        return not self._is_plain

    @property
    def waiting_tokens(self) -> int:
        """Estimated tokens of the prompt that the replica has to prefill before the first byte."""
        return self._ticket.waiting_tokens

    @property
    def queued_tokens(self) -> float:
        """``waiting_tokens``, and the tokens that the replica had to prefill before them."""
        return self._ticket.queued_tokens + self._ticket.waiting_tokens

    @property
    def prompt_tokens(self) -> int:
        """Estimated length of the prompt, in tokens."""
        return self._record.prompt_tokens_estimate

    def on_no_progress(self) -> None:
        """Retry on another replica if that is allowed, or keep waiting."""
        if self._state is STREAMING:
            if self._failover is not None:
                self._failover.on_stalled()
        elif self._state is AWAITING or self._state is CLASSIFYING:
            self._retry_on_other_replica(self.retries().on_stalled())

    # --- retries ---

    def retries(self) -> RetryState:
        """The failed attempts so far."""
        if self._retry_state is None:
            self._retry_state = RetryState(self._services, self._configuration, self._placement_request, self._record)
        return self._retry_state

    def _retry_on_other_replica(self, decision: Decision | None) -> bool:
        """Send the request to another replica; False if there is no decision for one."""
        if decision is None:
            return False
        if self._prefill is not None and self._state is not CONNECTING:
            self._prefill.drop_parameters(RETRIED)  # the replica may have used them
        if self._trace is not None and self._retry_state is not None:
            self._trace.end_attempt(self._retry_state.cause)
        self._release_replica()
        self._enter(PLACING)
        self._dispatch(decision)
        return True

    # --- the rest of a stream from another replica: called by its failover ---

    def on_replica_lost(self, event: bytes) -> None:
        """Called when another replica may generate the rest. ``event``: the engine's error, if it sent one."""
        self._record_stream_error(event)
        self._release_replica()
        if self._lookup is not None:
            self._lookup.stop_recording()
        self._enter(COUNTING)

    def _record_stream_error(self, data: bytes) -> None:
        """Count an error in a stream against the replica; an engine that aborts is stopping."""
        if b'"error"' in data:
            self._services.balancer.record_failure(self._record.replica, "error in a stream", was_probe=self._is_probe)

    def on_rest_placed(self, body: bytes, decision: Decision) -> None:
        """Called with the request for the rest, and where to send it."""
        self._request.body, self._request.layout = body, None
        self._retry_on_other_replica(decision)

    def on_text_complete(self) -> None:
        """Called when the client has the whole stream, and the replica may go on."""
        self.abort_upstream()
        self._complete()

    def on_not_continued(self, error: RejectedRequestError, event: bytes) -> None:
        """Called when the stream is broken. ``event``: the engine's own error, for the client if there is one."""
        self._finish(REPLICA_ERROR)
        if event:
            self._relay.finish(event)
            self._client.on_exchange_ended(keep_alive=self._relay.keep_alive)
        else:
            self._relay.abort(error, self._request.head.path)

    # --- to the client ---

    def _start_response(
        self,
        head: ResponseHead,
        data: bytes,
        parsed: ParsedResponse | None = None,
        *,
        last: bool,
        aborted: bool = False,
    ) -> None:
        """Relay the first bytes, also those of the rest from another replica, and drop what only a retry would need."""
        request, record, failover = self._request, self._record, self._failover
        if failover is not None and not failover.accepts(head):
            self._reject(RejectedRequestError(502, f"replica {record.replica!r} cannot continue the response"))
            return
        if self._released is not None and (head.status >= 300 or not head.is_stream or is_encoded(head)):
            text = data[:MAX_SHOWN_BYTES].decode(errors="replace") if head.status >= 400 else "expected a stream"
            message = f"replica {record.replica!r} responded with status {head.status}: {text}"
            self._reject(RejectedRequestError(head.status if head.status >= 400 else 502, message))
            return
        self._enter(STREAMING)
        if self._is_probe and head.status < TOO_MANY:
            self._has_probe_result = self._services.breakers.record_first_byte(ReplicaId(record.replica))
        if failover is None:
            self._send_head(head, data, parsed, last=last, aborted=aborted)
        elif last:
            self._relay.finish(data)
        else:
            failover.check(data, 0)
        self._prefill = self._prelude = None
        request.body = b""
        if last:
            self._complete()
        elif self._state is STREAMING and self.upstream is not None:
            self.upstream.pipe_to(self._sink())
            if self._client.is_full:  # because of an earlier response
                self.upstream.pause()

    def _send_head(
        self, head: ResponseHead, data: bytes, parsed: ParsedResponse | None, *, last: bool, aborted: bool
    ) -> None:
        """Send the head with the first bytes; from here on the request is not sent again."""
        self._has_begun = True
        if self._silence is not None:
            self._silence.cancel()
        request, record = self._request, self._record
        if self._sends_unmodified and head.status < 300:
            self._on_usage_rejected()
        record.status, record.is_streamed = head.status, head.is_stream
        if not (last or head.is_stream):
            self._ticket.record_first_byte()  # at the end, ``record_response`` implies it
        cross_origin, is_released = self._configuration.cross_origin, self._released is not None
        if self._released is not None:
            head = self._released.head
        elif cross_origin is not None:
            head = cross_origin.decided(head, request.head, record.pool)
        fingerprint = self.connections.fingerprint if self._removes_usage else None
        self._relay = relay = ResponseRelay(self._client, head, parsed, is_aborted=aborted, fingerprint=fingerprint)
        if self._lookup is not None:
            self._record_for_cache(self._lookup, head, data)
        if not (last or self._keep(relay, data)):
            del self._placement_request, self._decision
        if request.held_bytes:
            self._services.release_body(request)
        self._retry_state = None
        keep_alive = request.head.keep_alive and not self._services.is_draining
        relay.send_head(request, record, data, last=last, keep_alive=keep_alive, is_released=is_released)
        if self._failover is not None:
            relay.keep(self._failover.kept, self._failover.check)

    def _keep(self, relay: ResponseRelay, data: bytes) -> bool:
        """Whether the stream may be continued: then keep what another replica needs to generate the rest."""
        request, services = self._request, self._services
        endpoint, pools = request.head.endpoint, self._configuration.continued_pools
        if endpoint is None or not (endpoint.may_continue and relay.may_continue and self._record.pool in pools):
            return False
        if self._decision.route.prefill is not None:
            return False  # the request may have been changed for the transfer
        kept = KeptStream(
            services.stream_budget,
            request.body,
            is_chat=endpoint is CHAT,
            wants_usage=not request.omits_usage,
            prompt_bytes=len(self._placement_request.prompt.data),
        )
        kept.add(data)
        if kept.is_lost:
            return False
        self._failover = StreamFailover(services, self._configuration, self, kept, relay, self._record, self._lookup)
        return True

    def _record_for_cache(self, lookup: CacheLookup, head: ResponseHead, data: bytes) -> None:
        """Begin to record a response that the cache may store."""
        self._relay.cache_lines = lookup.header_lines
        if head.status == OK and not is_encoded(head):
            lookup.begin_recording()
            lookup.record(data)

    def _sink(self) -> BodySink:
        """Gets the body between its first and its last read."""
        is_recorded = self._lookup is not None and self._lookup.is_recording
        return self._relay_and_record if is_recorded and self._failover is None else self._relay.sink()

    @log_exceptions
    def _relay_and_record(self, data: bytes, start: int) -> None:
        cast("CacheLookup", self._lookup).record(data[start:-2] if start else data)
        self._relay.sink()(data, start)

    def _end_response(self, data: bytes) -> None:
        """Relay the last bytes of a response; earlier ones went straight to its sink."""
        rest = data if self._failover is None else self._failover.until_error(data)
        if rest is None:
            return
        if self._lookup is not None:
            self._lookup.record(rest)
        self._relay.finish(rest)
        self._complete()

    def _on_usage_rejected(self) -> None:
        """The replica accepted the request only without a usage request: send none for a while."""
        if self.connections.on_usage_rejected():
            logger.warning("usage_request_rejected", extra={"replica": self._record.replica})

    def _complete(self) -> None:
        self._finish(self._record_completion())
        self._client.on_exchange_ended(keep_alive=self._relay.keep_alive)

    def _record_completion(self) -> Outcome:
        """Account for the complete response; how it ended."""
        self._record.latency_s = monotonic() - self._request.arrived_at
        usage, outcome = self._relay.usage(), self._relay.outcome()
        record_completion(
            self._services, self._request.grant, self._record, self._ticket, usage, outcome, was_probe=self._is_probe
        )
        if self._permit is not None:
            self._permit.record_usage(usage)
        if self._lookup is not None and outcome is Outcome.OK:
            self._lookup.complete(is_stream=self._record.is_streamed is True)
        return outcome

    def _reject(self, rejection: RejectedRequestError) -> None:
        """Respond with an error of the router's own."""
        keep_alive = self._request.head.keep_alive and not self._services.is_draining and not rejection.must_close
        outcome = REPLICA_ERROR if self._is_placed else Outcome.ROUTER_ERROR
        if self._is_placed:
            if not self._has_begun:
                self._record.status = rejection.status
        else:
            if self._objective_ms is not None:
                result = SHED if rejection.status == TOO_MANY else MISSED
                self._services.metrics.count_objective(self._pool, self._group, result)
            if self._request.grant is not None:
                self._request.grant.give_back(rejection)
        if self._trace is not None:
            self._trace.status = rejection.status
        if self._failover is not None:
            self._failover.on_rejected()
            self.on_not_continued(rejection, b"")
            return
        self._finish(Outcome.CLIENT_ERROR if rejection.status < 500 else outcome)
        if self._released is not None:
            self._released.abort(rejection, self._request.head.path)
            return
        response = rejection.response(self._request.head.path)
        self._client.respond(self._request, response, keep_alive=keep_alive, pool=self._pool_name())
        self._client.on_exchange_ended(keep_alive=keep_alive)

    def _pool_name(self) -> str:
        """The request's pool; empty if it is unknown."""
        return self._record.pool if self._is_placed else self._pool

    # --- the end ---

    def abort_on_error(self, error: Exception) -> None:
        """Log a programming error and respond with 500, or abort a response that has begun."""
        defect(logger, error, "exchange")
        has_begun = self._has_begun or self._released is not None or self._state is DONE
        self._finish(Outcome.ROUTER_ERROR)
        if has_begun:
            self._client.reset()
        else:
            error_response = RejectedRequestError(500, "internal error").response(self._request.head.path)
            self._client.respond(self._request, error_response, keep_alive=False, pool=self._pool_name())
            self._client.on_exchange_ended(keep_alive=False)

    def _finish(self, outcome: Outcome) -> None:
        if self.is_over:
            return
        self._enter(DONE)
        self.is_over = True
        try:
            self._account(outcome)
        except Exception as error:  # noqa: BLE001 - an error in accounting must not fail a client
            defect(logger, error, "accounting")
        finally:
            if self._request.held_bytes:
                self._services.release_body(self._request)
            if self._failover is not None:
                self._failover.close()
            self._end_silence()
            if self._pending_body is not None:
                self._pending_body.cancel()
            if self._lookup is not None:
                self._lookup.end()
            if self._permit is not None:
                self._permit.release()
            if self._is_placed:
                self._release_replica()
            elif self._prefill is not None:
                self._prefill.cancel()

    def _account(self, outcome: Outcome) -> None:
        """Count the request in metrics and the decision log, exactly once. A cached response has metrics of its own."""
        record = self._record if self._is_placed else None
        if outcome is Outcome.CANCELLED and self._objective_ms is not None:
            has_waited = monotonic() - self._request.arrived_at > self._objective_ms / 1000
            if has_waited and (record is None or record.ttft_s is None):  # the client gave up after its objective
                self._services.metrics.count_objective(self._pool, self._group, MISSED)
        if self._lookup is not None and self._lookup.response is not None:
            end_request(self._services)
        else:
            count_request(self._services, record, outcome, self._pool, self._group)
        if self._trace is not None:
            pool, group = (self._pool, self._group) if record is None else (record.pool, record.group)
            self._trace.finish(outcome, record, pool, group)

    def _release_replica(self) -> None:
        """Release the connection and the load; a probe without a result lets another request probe."""
        self.abort_upstream()
        self._ticket.end()
        if self._is_probe:
            if not self._has_probe_result:
                self._services.breakers.record_cancelled(ReplicaId(self._record.replica))
            self._is_probe = self._has_probe_result = False

    def _enter(self, state: State) -> None:
        if state not in TRANSITIONS[self._state]:
            raise RuntimeError(f"an exchange cannot go from {self._state.name} to {state.name}")
        self._state = state
