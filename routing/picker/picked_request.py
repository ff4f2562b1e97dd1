"""One request that Envoy carries: its placement, and its accounting as the response passes.

Theory of operation. ``place`` does what the router does before it sends a request: it reads the body, applies the key
and the caps, waits in an admission queue if there is one, and chooses a replica. It also chooses fallbacks, and counts
the request at the replica of the first endpoint. When the response begins, Envoy names the endpoint that it came from.
If that is another one, the replicas before it have failed, and the request counts at the replica that served it.

A sampled request has the spans of the router's requests. The span of a fallback begins with its response, because
Envoy does not say when it tried it.

Envoy retries, so the retry policy and the retry budget of the configuration do not apply. No replica prefills for
another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from itertools import pairwise
from time import monotonic
from typing import TYPE_CHECKING, Protocol, TypeVar

from routing.http.response import RejectedRequestError, ResponseHead, is_encoded
from routing.http.usage import (
    Fingerprint,
    Prelude,
    ResponseTail,
    UsageFilter,
    has_abort,
    is_aborted,
    is_comment,
    parse_response,
)
from routing.observability.decision_log import structure_json
from routing.observability.metrics import Outcome
from routing.prompt.parsing import with_usage_requested
from routing.proxy.admission import RESPONSES, admit_request, rejection_of, with_response_id
from routing.proxy.exchange import INVALID_STATUSES
from routing.proxy.prefill_leg import check_parameters
from routing.proxy.response_relay import (
    begin_record,
    count_request,
    record_completion,
    response_outcome,
)
from routing.proxy.retries import TOO_MANY, record_error_response, retry_cause
from routing.types import BodyError, NoReplicaError, ReplicaId, RoutingError

if TYPE_CHECKING:
    from routing.balancing.load_tracker import Ticket
    from routing.balancing.placement import Decision
    from routing.balancing.request import BodyReading, PlacementRequest
    from routing.http.request import Request
    from routing.http.response_json import ParsedResponse, Usage
    from routing.observability.decision_log import Record
    from routing.picker.endpoints import Endpoints
    from routing.proxy.admission_queues import QueuePermit
    from routing.proxy.services import Services
    from routing.schema import ReplicaConfig

RETRIED = "proxy"  # cause of a retry in metrics: Envoy knows why

T = TypeVar("T")


class ObservedResponse:
    """A response that Envoy carries: its first token, its usage, and whether it failed. Keeps the end of its body only.

    ``fingerprint``: the engine's, if it was asked for the usage of the stream and the client did not ask; else None.
    """

    __slots__ = ("_filter", "_parsed", "_prelude", "_tail", "has_begun", "has_token", "head")

    def __init__(self, head: ResponseHead, fingerprint: Fingerprint | None) -> None:
        self.head = head
        self.has_begun = False  # the first body bytes have arrived
        self.has_token = False  # the first token has arrived; known of streams only
        self._prelude = Prelude() if head.is_stream and not is_encoded(head) else None  # until the first token
        self._tail = ResponseTail()
        self._parsed: ParsedResponse | None = None  # a JSON response that arrived in one message
        may_filter = head.is_stream and not is_encoded(head)
        self._filter = UsageFilter(fingerprint) if fingerprint is not None and may_filter else None

    def add(self, data: bytes, *, last: bool) -> bytes:
        """Read body bytes; returns those that the client gets."""
        if last and not (self.has_begun or self.head.is_stream):
            self._parsed = parse_response(data)
        if self._prelude is not None and self._prelude.add(data):
            self.has_token, self._prelude = True, None
        self.has_begun = self.has_begun or bool(data)
        self._tail.add(data)
        if self._filter is None:
            return data
        return self._filter.feed(data) + (self._filter.flush() if last else b"")

    def held_back(self) -> bytes:
        """The incomplete event at the end of a stream that ends with trailers."""
        return b"" if self._filter is None else self._filter.flush()

    def is_progress(self, data: bytes) -> bool:
        """Whether body bytes show that the engine works: in a stream, only a token and what follows it."""
        return bool(data) and (not self.head.is_stream or (self._prelude is None and not is_comment(data)))

    @property
    def error_body(self) -> bytes:
        """The end of an error's body."""
        return self._tail.text

    def usage(self) -> Usage | None:
        """The token usage that the complete response reports; None for an error or if it is not reported."""
        if self.head.status >= 300:
            return None
        return self._tail.usage() if self._parsed is None else self._parsed.usage

    def outcome(self) -> Outcome:
        """The outcome of the complete response."""
        return response_outcome(self.head.status, is_failed=self._is_failed())

    def _is_failed(self) -> bool:
        if self._parsed is not None:
            return is_aborted(self._parsed)
        return self._tail.has_error() if self.head.is_stream else has_abort(self._tail.text)


class Wait(Protocol):
    """Waits for a future, unless Envoy ends the stream before; then it raises."""

    async def __call__(self, future: asyncio.Future[T]) -> T: ...


class PickedRequest:
    """One request, from the end of its body on. It counts as in flight until ``complete``, ``reject`` or ``cancel``."""

    decision: Decision  # once placed, as are the ticket and the record; deleted when the response begins
    fallbacks: list[Decision]
    _placement: PlacementRequest
    _record: Record
    _ticket: Ticket
    response: ObservedResponse  # set when the response begins

    def __init__(
        self, services: Services, endpoints: Endpoints, request: Request, *, excluded: Collection[ReplicaId]
    ) -> None:
        self._services = services
        self._endpoints = endpoints
        self._active = endpoints.active
        self._request = request
        self._excluded = excluded
        self._is_placed = self._is_over = False
        self._is_described = False  # its prompt structure is recorded
        self._is_probe = self._has_probe_result = False  # as in an exchange of the router
        self._hides_usage = False
        self._permit: QueuePermit | None = None
        self._sent_at = 0.0
        self._pool = self._group = ""  # where no replica was chosen
        tracer = services.tracer
        self.trace = None if tracer is None else tracer.start(request)  # None: the request is not sampled
        self.has_response = False

    # --- placement ---

    async def place(self, wait: Wait, fallbacks: int) -> None:
        """Choose a replica and up to ``fallbacks`` others; RejectedRequestError if the request gets none."""
        try:
            reading = await self._read_large_body(wait)
            self._placement = admit_request(self._request, self._active.admission, reading)
            decision = self._decide()
            if not await self._acquire_permit(decision, wait):
                decision = self._decide()  # loads have changed
        except RoutingError as error:
            raise rejection_of(error) from None
        self.fallbacks = self._endpoints.fallbacks(decision, fallbacks) if fallbacks else []
        self._dispatch(decision)

    async def _read_large_body(self, wait: Wait) -> BodyReading | None:
        """Let another process read a large body; None for others."""
        endpoint, body = self._request.head.endpoint, self._request.body
        if endpoint is None or endpoint.is_form or not self._request.is_large:
            return None
        future: asyncio.Future[BodyReading] = asyncio.get_running_loop().create_future()

        def on_rejected(error: BodyError | RejectedRequestError) -> None:
            future.set_exception(error)

        grant = self._request.grant
        pending = self._services.large_bodies.read(
            endpoint.path, body, future.set_result, on_rejected, owner=grant.name if grant else None
        )
        try:
            return await wait(future)
        finally:
            pending.cancel()  # it keeps the body no longer

    def _decide(self) -> Decision:
        try:
            decision = self._active.placement.decide(self._placement, self._services.health, self._excluded)
        except NoReplicaError as error:
            self._pool, self._group = error.pool, error.group
            if self._services.end_warm_up_early(error):
                return self._decide()
            raise
        self._pool, self._group = decision.pool, decision.group
        if decision.route.prefill is not None:
            check_parameters(self._request)
        return decision

    async def _acquire_permit(self, decision: Decision, wait: Wait) -> bool:
        """Acquire the permits of the admission queues; False if the request had to wait for them."""
        queues = self._services.admission_queues
        if queues is None:
            return True
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_admitted() -> None:
            future.set_result(None)

        request, tokens = self._request, decision.choice.uncached_tokens(decision.keys.prompt_tokens)
        self._permit = queues.permit(
            decision.pool,
            decision.group,
            request.head.priority,
            request.grant,
            tokens,
            on_admitted,
            future.set_exception,
        )
        if self._permit.acquire():
            return True
        await wait(future)
        return False

    def _dispatch(self, decision: Decision) -> None:
        services, request = self._services, self._request
        self._is_described = services.structure_sampler.should_sample(decision, request.arrived_at)
        self._record = begin_record(services, decision, request, self._placement, is_described=self._is_described)
        if self.trace is not None:
            self.trace.begin_attempt(decision, self._placement.model)
        self._count_at(decision, is_retry=False)

    def _count_at(self, decision: Decision, *, is_retry: bool) -> None:
        """Count the request at the replica of a decision."""
        self.decision = decision
        is_plain, breakers = self._placement.is_plain, self._services.breakers
        self._ticket = self._active.placement.dispatch(decision, is_retry=is_retry, is_plain=is_plain)
        self._is_placed, self._sent_at = True, monotonic()
        if breakers.not_closed:
            self._is_probe = breakers.on_request_sent(ReplicaId(decision.replica.name))

    def body_to_send(self, *, may_filter: bool) -> bytes:
        """The body for the replica, which is asked for usage if that can be removed from the response."""
        request, pool = self._request, self._active.connection_pools[self.decision.replica.name]
        self._hides_usage = (
            may_filter
            and request.omits_usage
            and self.decision.pool in self._active.usage_pools
            and pool.accepts_usage_requests
        )
        if request.head.endpoint is RESPONSES:
            admission, model = self._active.admission, self._placement.model
            return with_response_id(request, admission, self.decision, model)
        return with_usage_requested(request.body, request.layout) if self._hides_usage else request.body

    def on_sent(self) -> None:
        """Called when Envoy has the decision: record the prompt structure, and drop the body."""
        if self._is_described:
            self._record.structure = structure_json(self.decision, self._request)
        self._request.body = b""

    # --- the response ---

    def on_response(self, head: ResponseHead, served: str | None) -> None:
        """Called with the head of the response. ``served``: the endpoint that sent it; None: the first one."""
        self.has_response = True
        if served is not None:
            self._attribute_to(served)
        record = self._record
        pool = self._active.connection_pools.get(record.replica)
        fingerprint = pool.fingerprint if pool is not None else Fingerprint()
        self.response = ObservedResponse(head, fingerprint if self._hides_usage else None)
        if self.trace is not None:
            self.trace.status = head.status
        if not self._is_placed:
            return
        record.status, record.is_streamed = head.status, head.is_stream
        if self._is_probe and head.status < TOO_MANY:
            self._has_probe_result = self._services.breakers.record_first_byte(ReplicaId(record.replica))

    def headers(self) -> list[tuple[str, bytes]]:
        """The header fields of the picker in the response; none if no replica of the pool served it."""
        if not self._is_placed:
            return []
        record = self._record
        headers = [
            ("x-request-id", self._request.request_id.encode()),
            ("x-warmpath-replica", record.replica.encode()),
            ("x-warmpath-reason", record.reason.encode()),
        ]
        return headers if record.arm is None else [*headers, ("x-warmpath-revision", b"%d" % record.revision)]

    def on_body(self, data: bytes, *, last: bool) -> bytes:
        """Called with bytes of the response's body; returns those that the client gets."""
        response, had_begun, had_token = self.response, self.response.has_begun, self.response.has_token
        passed = response.add(data, last=last)
        if not self._is_placed:
            return passed
        if response.is_progress(data):
            self._active.connection_pools[self._record.replica].record_progress()
        if response.has_token and not had_token:
            now, record = monotonic(), self._record
            record.ttft_s = now - self._request.arrived_at
            record.prefill_s = None if record.retries else now - self._sent_at  # Envoy does not say when it retried
            self._ticket.record_first_byte()
        if response.has_begun and not had_begun:
            if not (last or response.head.is_stream):
                self._ticket.record_first_byte()  # at the end, ``record_response`` implies it
            del self._placement, self.decision
            self.fallbacks = []
        return passed

    def _attribute_to(self, served: str) -> None:
        """Count the request at the replica that served it, and failures at those that Envoy tried before."""
        replica = self._endpoints.replica_at(served)
        if replica is self.decision.replica:
            return
        tried = [self.decision, *self.fallbacks]
        at = next((index for index, decision in enumerate(tried) if decision.replica is replica), len(tried))
        decision = tried[at] if at < len(tried) else self._decision_for(replica)
        self._ticket.end()
        if decision is None:
            self._is_placed = False
            return
        for failed, following in pairwise([*tried[:at], decision]):
            self._record_failure(failed, following)
        self._is_probe = False
        self._count_at(decision, is_retry=True)

    def _decision_for(self, replica: ReplicaConfig | None) -> Decision | None:
        """The decision for a replica that Envoy chose by itself; None if it is none of the candidates."""
        placement, candidates = self._active.placement, self.decision.candidates
        targets = () if replica is None else placement.targets_by_replica[replica.name]
        eligible = [target for target in targets if target in candidates]
        return placement.decide_fallback(self.decision, eligible) if eligible else None

    def _record_failure(self, failed: Decision, following: Decision) -> None:
        """Record that Envoy got no response from a replica, and tried another one."""
        services, name = self._services, failed.replica.name
        was_probe = self._is_probe and failed is self.decision
        services.checks.request_check(name)
        services.balancer.record_failure(name, "retried by the proxy", was_probe=was_probe)
        services.metrics.count_retry(self._record, RETRIED)
        self._record.on_retry(following)
        if self.trace is not None:
            self.trace.end_attempt(RETRIED)
            self.trace.begin_attempt(following, self._placement.model)

    # --- the end ---

    def complete(self) -> None:
        """The response is complete. Nothing happens if the request is over."""
        if self._is_over:
            return
        record, response, services = self._record, self.response, self._services
        record.latency_s = monotonic() - self._request.arrived_at
        head, usage, outcome = response.head, response.usage(), response.outcome()
        if not self._is_placed:
            self._finish(outcome)
            return
        if head.status >= TOO_MANY:
            cause = retry_cause(head, response.error_body)
            record_error_response(services, record.replica, head, cause, was_probe=self._is_probe)
        elif self._hides_usage and head.status in INVALID_STATUSES and b"stream_options" in response.error_body:
            self._active.connection_pools[record.replica].on_usage_rejected()
        grant, was_probe = self._request.grant, self._is_probe
        record_completion(services, grant, record, self._ticket, usage, outcome, was_probe=was_probe)
        if self._permit is not None:
            self._permit.record_usage(usage)
        self._finish(outcome)

    def reject(self, rejection: RejectedRequestError) -> None:
        """The client gets an error of the picker's own."""
        if self.trace is not None:
            self.trace.status = rejection.status
        if not self._is_placed and self._request.grant is not None:
            self._request.grant.give_back(rejection)
        self._finish(Outcome.CLIENT_ERROR if rejection.status < 500 else Outcome.ROUTER_ERROR)

    def cancel(self) -> None:
        """Envoy has ended the stream before the end of the response. Nothing happens if the request is over."""
        self._finish(Outcome.CANCELLED)

    def _finish(self, outcome: Outcome) -> None:
        if self._is_over:
            return
        self._is_over = True
        record = self._record if self._is_placed else None
        count_request(self._services, record, outcome, self._pool, self._group)
        if self.trace is not None:
            self.trace.finish(outcome, record, self._pool, self._group)
        if self._permit is not None:
            self._permit.release()
        if self._is_placed:
            self._release_replica()

    def _release_replica(self) -> None:
        """Release the load; a probe without a result lets another request probe."""
        self._ticket.end()
        if self._is_probe and not self._has_probe_result:
            self._services.breakers.record_cancelled(ReplicaId(self._record.replica))
        self._is_probe = self._has_probe_result = False
