"""The prefill leg of a request: another replica computes its prompt, before the chosen replica generates the response.

Theory of operation. The contract is that of vLLM's NixlConnector. The prefill replica gets the client's request with a
length of one token and ``do_remote_decode``. Its response names the KV blocks that it keeps (``kv_transfer_params``).
The decode replica gets the client's request with these parameters, and fetches the blocks, which is possible once.

A leg never fails a request. After a failure one other prefill replica gets the prompt, if the retry policy and the
retry budget allow it. Otherwise the decode replica gets the client's own request and prefills the prompt itself. All
attempts together may take ``LEG_RATIO`` of ``first_byte_timeout_s``, so that the decode replica has time left to
prefill. Their duration is subtracted from the decode replica's deadline. While the leg runs, the request counts among
those running at the decode replica.

An engine connects to the host that the parameters name. So clients may not set them in pools whose replicas have roles.
"""

from __future__ import annotations

import logging
from time import monotonic
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec

from routing.balancing.disaggregation import PrefillTarget, SkipCause
from routing.http.loop import log_exceptions
from routing.http.response import RejectedRequestError, ResponseHead
from routing.http.response_json import PrefillResponse
from routing.http.usage import is_aborted, prompt_and_cached
from routing.observability.decision_log import LegOutcome, PrefillRecord
from routing.prompt.parsing import Layout, layout_of, may_have_member, with_members
from routing.proxy.retries import TOO_MANY, record_error_response, retry_cause
from routing.types import BodyError, ReplicaId
from routing.upstream.connection import Failure, UpstreamCall, UpstreamConnection

if TYPE_CHECKING:
    from routing.balancing.load_tracker import Ticket
    from routing.balancing.placement import Decision, Placement
    from routing.balancing.replicas import HealthRegistry
    from routing.http.request import Request
    from routing.observability.tracing import RequestTrace
    from routing.prompt.parsing import Value
    from routing.proxy.services import ActiveConfiguration, Services


logger = logging.getLogger(__name__)

MEMBER: Final = "kv_transfer_params"
LEG_RATIO: Final = 0.5  # of ``first_byte_timeout_s``
MAX_ATTEMPTS: Final = 2  # prefill replicas
MAX_RESPONSE_BYTES: Final = 4 << 20  # a prompt of a million tokens has 62,500 blocks of 16 tokens
NO_PARAMETERS: Final = "no_parameters"  # the engine has no KV connector, or the generation did not end by its length
REJECTED: Final = "rejected"  # the decode replica could not fetch the blocks
RETRIED: Final = "retried"  # the decode replica failed, and another one got the request
NULL: Final = msgspec.Raw(b"null")
REMOTE_DECODE: Final = msgspec.Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
    b'"remote_host":null,"remote_port":null}'
)
# Members that must be absent or have one of these values, so that a request has one output, without results about its
# prompt.
_UNSET: Final[dict[str, tuple[bytes, ...]]] = {
    "best_of": (b"null", b"1"),
    "echo": (b"null", b"false"),
    "n": (b"null", b"1"),
    "prompt_logprobs": (b"null",),
    "use_beam_search": (b"null", b"false"),
}
_decode_response: Final = msgspec.json.Decoder(PrefillResponse).decode


class Owner(Protocol):
    """The exchange that a leg belongs to."""

    def on_prefill_ended(self) -> None:
        """Called when the leg is over, whether or not it succeeded."""

    def abort_on_error(self, error: Exception) -> None: ...


class PrefillPlan(NamedTuple):
    """Whether a request needs a prefill leg, and where."""

    uncached_tokens: int  # estimated, at the decode replica
    skipped: SkipCause | None
    target: PrefillTarget | None = None  # None if it is skipped
    layout: Layout | None = None  # of the request's body; None if it is skipped


def plan_prefill(request: Request, decision: Decision, placement: Placement, health: HealthRegistry) -> PrefillPlan:
    """Decide whether another replica prefills a request first. No side effects. Its pool's replicas must have roles."""
    route, endpoint = decision.route.prefill, request.head.endpoint
    if route is None or endpoint is None or not endpoint.may_transfer:
        return PrefillPlan(0, SkipCause.ENDPOINT)
    tokens = route.uncached_tokens(decision.choice, decision.candidates, decision.keys)
    if tokens < route.min_uncached_tokens:
        return PrefillPlan(tokens, SkipCause.SHORT)
    layout = _layout_for_transfer(request)
    if layout is None:
        return PrefillPlan(tokens, SkipCause.PARAMETERS)
    target = placement.choose_prefill(decision, health)
    if target is None:
        return PrefillPlan(tokens, SkipCause.NO_REPLICA)
    return PrefillPlan(tokens, None, target, layout)


def _layout_for_transfer(request: Request) -> Layout | None:
    """The layout of a body with one prompt and one output; None for any other."""
    body = request.body
    try:
        layout = layout_of(body) if request.layout is None else request.layout
    except BodyError:
        return None
    for name, allowed in _UNSET.items():
        if name in layout.spans and _value(body, layout, name) not in allowed:
            return None
    prompt = _value(body, layout, "prompt") if "prompt" in layout.spans else b""
    is_batch = prompt.startswith(b"[") and prompt[1:].lstrip().startswith((b'"', b"["))
    return None if is_batch else layout


def _value(body: bytes, layout: Layout, name: str) -> bytes:
    """The JSON text of a member that the body has."""
    start, end = layout.spans[name]
    return body[start:end]


def check_parameters(request: Request) -> None:
    """RejectedRequestError if a client sets ``kv_transfer_params``."""
    body = request.body
    if not may_have_member(body, MEMBER):
        return
    try:
        layout = layout_of(body) if request.layout is None else request.layout
    except BodyError as error:
        raise RejectedRequestError(400, str(error), param=error.param) from None
    if MEMBER in layout.spans and _value(body, layout, MEMBER) != b"null":
        raise RejectedRequestError(400, f"{MEMBER}: set by the router, not by clients of this model", param=MEMBER)


def prefill_body(request: Request, layout: Layout) -> bytes:
    """The body for the prefill replica.

    ``min_tokens`` prevents an end-of-sequence token: the engine does not keep the blocks of a generation that ended by
    itself.
    """
    members: dict[str, Value] = {"stream": False, "min_tokens": 1, MEMBER: REMOTE_DECODE}
    if request.head.endpoint is not None:
        members |= dict.fromkeys(request.head.endpoint.body.length_fields, 1)
    if "stream_options" in layout.spans:
        members["stream_options"] = NULL
    return with_members(request.body, members, layout)[0]


class PrefillLeg(UpstreamCall):
    """The prefill leg of one request, or the decision that it needs none."""

    decision: Decision  # set by ``start``, as is ``record``
    record: PrefillRecord
    _target: PrefillTarget  # once sent
    _layout: Layout

    def __init__(
        self,
        services: Services,
        configuration: ActiveConfiguration,
        owner: Owner,
        request: Request,
        trace: RequestTrace | None,
    ) -> None:
        UpstreamCall.__init__(self)
        self._services = services
        self._configuration = configuration
        self._owner = owner
        self._request = request
        self._trace = trace  # None: the request is not sampled
        self._attempts = 0
        self._started_at = self._sent_at = 0.0  # seconds of a monotonic clock
        self._body = b""  # for the prefill replica
        self._buffer = b""  # of its response
        self._failed: set[ReplicaId] = set()
        self._is_probe = False  # whether the prompt is the probe of an ejected replica
        self._original: tuple[bytes, Layout | None] | None = None  # the client's body, while it has parameters
        self._reserved: Ticket | None = None  # at the decode replica
        self._ticket: Ticket | None = None  # at the prefill replica
        self.duration_s = 0.0  # of all attempts; 0 until the leg is over
        self.has_parameters = False  # whether the body has ``kv_transfer_params`` that no decode replica has used

    # --- called by the exchange ---

    def start(self, decision: Decision) -> bool:
        """Send the prompt to a prefill replica; False if the request needs no leg, or if its leg is over."""
        if self.is_over:
            return False
        placement, services = self._configuration.placement, self._services
        plan = plan_prefill(self._request, decision, placement, services.health)
        self.decision = decision
        self.record = PrefillRecord(plan.uncached_tokens)
        if plan.target is None or plan.layout is None:
            self.is_over = True
            self.record.cause = plan.skipped
            services.metrics.count_prefill(decision.pool, "", LegOutcome.SKIPPED, plan.skipped or "")
            return False
        self._started_at = monotonic()
        self._layout = plan.layout
        self._body = prefill_body(self._request, plan.layout)
        self._reserved = placement.reserve(decision)
        self._send_to(plan.target)
        return True

    def cancel(self) -> None:
        """Stop the prefill replica's work at once, because the request has ended."""
        if self._ticket is not None:
            self._count(LegOutcome.CANCELLED, "")
        self._release()
        self._end()

    def drop_parameters(self, cause: str) -> None:
        """Restore the client's body if it has parameters. ``cause``: why they are no longer used, as counted."""
        if self._original is None:
            return
        self._request.body, self._request.layout = self._original
        self._original = None
        self.has_parameters = False
        self.record.outcome, self.record.cause = LegOutcome.FAILED, cause
        self._count(LegOutcome.FAILED, cause)

    # --- to a replica ---

    def _send_to(self, target: PrefillTarget) -> None:
        self._target = target
        self._attempts += 1
        self._ticket = self._configuration.placement.dispatch_prefill(self.decision, target)
        if self._services.breakers.not_closed:
            self._is_probe = self._services.breakers.on_request_sent(target.replica)
        if self._trace is not None:
            self._trace.begin_prefill(target.replica)
        self.open(self._configuration.connection_pools[target.replica])

    def connect_timeout_s(self) -> float:
        return min(self._configuration.limits.connect_timeout_s, self._left_s())

    def _left_s(self) -> float:
        """Seconds until the leg must be over, at least a millisecond."""
        return max(0.001, self._started_at + LEG_RATIO * self._configuration.limits.first_byte_timeout_s - monotonic())

    def send_on(self, upstream: UpstreamConnection) -> None:
        self._buffer = b""
        self._sent_at = monotonic()
        left_s, rank = self._left_s(), self._target.target.rank
        self.send(upstream, self._request, self._body, rank, self._trace, first_byte_s=left_s, idle_s=left_s)

    def on_no_connection(self, reason: str, *, is_local: bool) -> None:
        """Called when no connection was made. ``is_local``: the router lacks a resource."""
        if not is_local:
            replica, services = self._target.replica, self._services
            services.checks.on_connect_failed(replica)
            services.breakers.record_connect_failure(replica, reason, was_probe=self._is_probe)
        self._fail(Failure.CONNECT)

    # --- from a replica ---

    def on_response(self, head: ResponseHead, data: bytes, last: bool) -> None:
        self._collect(head, data, last)

    @log_exceptions
    def _collect(self, head: ResponseHead, data: bytes, last: bool) -> None:
        """Collect body bytes until the response is complete."""
        self._buffer += data
        if last:
            self.upstream = None  # it has returned to its pool
        elif len(self._buffer) <= MAX_RESPONSE_BYTES:
            return
        if not last:
            self._fail(Failure.INVALID_RESPONSE)
        elif head.status == 200:
            self._on_whole_response()
        else:
            self._on_error_response(head)

    def _on_error_response(self, head: ResponseHead) -> None:
        """Classify an error as for any request. If the request is invalid, the decode replica rejects it later."""
        cause = retry_cause(head, self._buffer)
        if head.status >= TOO_MANY:
            record_error_response(self._services, self._target.replica, head, cause, was_probe=self._is_probe)
        self._fail(cause or f"status_{head.status}", may_retry=cause is not None)

    def _on_whole_response(self) -> None:
        try:
            response: PrefillResponse = _decode_response(self._buffer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._fail(Failure.INVALID_RESPONSE)
            return
        if is_aborted(response):
            self._services.checks.request_check(self._target.replica)
            self._fail("aborted")
            return
        self._record_success(response)
        parameters = response.kv_transfer_params
        if parameters is None:
            self._on_no_parameters()
        else:
            self._add_parameters(msgspec.json.encode(parameters))

    def _on_no_parameters(self) -> None:
        """Log once for each replica that its engine does not keep KV blocks for transfer, so a leg only costs time."""
        replica = self._target.replica
        if not self.connections.lacks_kv_transfer:
            self.connections.lacks_kv_transfer = True
            logger.warning("prefill_without_kv_transfer", extra={"replica": replica})
        self._fail(NO_PARAMETERS)

    def _record_success(self, response: PrefillResponse) -> None:
        """Record usage and TTFT. The response has one token, so its duration is the TTFT."""
        usage, replica, breakers = response.usage, self._target.replica, self._services.breakers
        prompt_tokens, cached_tokens = (None, None) if usage is None else prompt_and_cached(usage)
        self.record.cached_tokens = cached_tokens
        if self._ticket is not None:
            self._ticket.record_response(monotonic() - self._sent_at, prompt_tokens, cached_tokens)
        if breakers.not_closed:
            has_result = self._is_probe and breakers.record_first_byte(replica)
            breakers.record_success(replica, was_probe=self._is_probe and not has_result)
            self._is_probe = False

    def _add_parameters(self, parameters: bytes) -> None:
        request = self._request
        self._original = (request.body, request.layout)
        body, layout = with_members(request.body, {MEMBER: msgspec.Raw(parameters)}, self._layout)
        request.body = body
        if request.layout is not None:
            request.layout = layout
        self.has_parameters = True
        self.record.outcome, self.record.cause, self.record.replica = LegOutcome.USED, None, self._target.replica
        self.record.hit_tokens = self._target.choice.hit_tokens
        self._count(LegOutcome.USED, "")
        if self._trace is not None:
            self._trace.end_attempt(status=200)
        self._release()
        self._end_and_continue()

    def on_failed(self, failure: Failure) -> None:
        """Called when the response failed before its end."""
        replica, services = self._target.replica, self._services
        services.checks.request_check(replica)
        services.stall_detector.record_failed_response(replica, failure, was_probe=self._is_probe)
        self._fail(failure)

    # --- called by the stall detector ---

    def is_stream(self) -> bool:
        """Whether the first byte arrives with the first token, which is the only one."""
        return True

    @property
    def waiting_tokens(self) -> int:
        """Estimated tokens of the prompt that the replica has to prefill before the first byte."""
        return 0 if self._ticket is None else self._ticket.waiting_tokens

    @property
    def queued_tokens(self) -> float:
        """``waiting_tokens``, and the tokens that the replica had to prefill before them."""
        return 0 if self._ticket is None else self._ticket.queued_tokens + self._ticket.waiting_tokens

    @property
    def prompt_tokens(self) -> int:
        """Estimated length of the prompt, in tokens."""
        return self.decision.keys.prompt_tokens

    def on_no_progress(self) -> None:
        self._fail("stalled")

    # --- the end ---

    def _fail(self, cause: str, *, may_retry: bool = True) -> None:
        """Send the prompt to another prefill replica if that is allowed, or leave it to the decode replica."""
        self.record.outcome, self.record.cause, self.record.replica = LegOutcome.FAILED, cause, self._target.replica
        self._count(LegOutcome.FAILED, cause)
        if self._trace is not None:
            self._trace.end_attempt(cause)
        self._release()
        self._failed.add(self._target.replica)
        target = self._retry_target(cause) if may_retry else None
        if target is None:
            self._end_and_continue()
        else:
            self._send_to(target)

    def _retry_target(self, cause: str) -> PrefillTarget | None:
        limits, services = self._configuration.limits, self._services
        is_allowed = self._attempts < MAX_ATTEMPTS and limits.retries > 0 and cause in limits.retry_on
        if not is_allowed or self._left_s() <= 0.001:
            return None
        target = self._configuration.placement.choose_prefill(self.decision, services.health, self._failed)
        return target if target is not None and services.retry_budget.spend() else None

    def _count(self, outcome: LegOutcome, cause: str) -> None:
        self._services.metrics.count_prefill(self.decision.pool, self._target.replica, outcome, cause)

    def _release(self) -> None:
        """Release the connection and the load; a probe without a result lets another request probe."""
        self.abort_upstream()
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            ticket.end()
        if self._is_probe:
            self._services.breakers.record_cancelled(self._target.replica)
            self._is_probe = False

    def _end(self) -> None:
        self.is_over = True
        self._body = self._buffer = b""
        self.duration_s = monotonic() - self._started_at if self._started_at else 0.0
        reserved, self._reserved = self._reserved, None
        if reserved is not None:
            reserved.end()

    def _end_and_continue(self) -> None:
        self._end()
        self.record.duration_s = self.duration_s
        self._owner.on_prefill_ended()

    def abort_on_error(self, error: Exception) -> None:
        """Called after a programming error."""
        self._owner.abort_on_error(error)
