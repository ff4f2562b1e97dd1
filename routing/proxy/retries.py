"""What a failure of a replica means: whether another one may do better, and what the client is told if none does.

What fails with one request, and what comes of it: what counts against whom, and which replica is tried next, if any.

Theory of operation. Each kind of failure of the replica that has the request is a method. It tells health checks and
breaker what they have to know, and gives the decision for another replica: None where none may do better
(``retries.py``), the retry policy names no such failure, none is left, or the limit or the budget is
reached, and the client has to be told. ``was_probe``: the request tried a replica that was out.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from routing.http.errors import RejectedRequestError
from routing.http.response import ResponseHead
from routing.observability.metrics import Outcome
from routing.types import NoReplicaError, ReplicaId
from routing.upstream.connection import Failure

if TYPE_CHECKING:
    from routing.balancing.decision import Decision
    from routing.balancing.request import PlacementRequest
    from routing.observability.decision_record import Record
    from routing.proxy.active_configuration import ActiveConfiguration
    from routing.proxy.services import Services


RETRIED_STATUSES: Final = frozenset({502, 503, 504})
SHUTTING_DOWN: Final = b"cannot schedule new futures after shutdown"  # vLLM's 500 while it drains
QUEUE_FULL: Final = b"currently busy and cannot accept new requests"  # vLLM's 503 at its own limit of waiting requests
BUSY: Final = "busy"
INVALID_STATUSES: Final = frozenset({400, 422})  # of engines that do not take a request's fields

_retry_after: Final = re.compile(rb"^retry-after:", re.IGNORECASE | re.MULTILINE).search


def retry_cause(answer: ResponseHead, body: bytes) -> str | None:
    """Why another replica may do better than this answer of 429 or more; None if it would not."""
    status = answer.status
    if status == 429:
        return "status_429" if _retry_after(answer.lines) else None
    if status == 500 and SHUTTING_DOWN in body:
        return "draining"
    if status == 503 and QUEUE_FULL in body:
        return BUSY
    return f"status_{status}" if status in RETRIED_STATUSES else None


def names_usage_request(body: bytes) -> bool:
    """Whether an error may be about the ask for usage that the router put into the request."""
    return b"stream_options" in body or b"include_usage" in body


def is_replica_fault(status: int, cause: str | None) -> bool:
    """Whether an error of 429 or more counts against the replica; ``cause`` as above."""
    return status >= 500 and status != 501 and cause != BUSY


def unreachable_error(replica: str, reason: str) -> RejectedRequestError:
    """What the client is told when no replica can be connected to; of several, the last one."""
    return RejectedRequestError(502, f"replica {replica!r} cannot be reached: {reason}")


def outcome_of(status: int, *, placed: bool) -> Outcome:
    """How a request counts that the router answered by itself."""
    if status < 500:
        return Outcome.CLIENT_ERROR
    return Outcome.REPLICA_ERROR if placed else Outcome.ROUTER_ERROR


def no_response_error(replica: str, failure: Failure) -> RejectedRequestError:
    """What the client is told when a replica's answer will never come, or not its rest."""
    if failure is Failure.TIMEOUT:
        return RejectedRequestError(504, f"replica {replica!r} did not answer in time")
    if failure is Failure.BAD_RESPONSE:
        return RejectedRequestError(502, f"replica {replica!r} answered with something that is not HTTP")
    return RejectedRequestError(502, f"replica {replica!r} closed the connection before its answer was complete")


MAX_HELD_BYTES: Final = 64 << 10  # of an error answer that is being judged
TOO_MANY: Final = HTTPStatus.TOO_MANY_REQUESTS.value
GATEWAY_TIMEOUT: Final = HTTPStatus.GATEWAY_TIMEOUT.value


class RetryState:
    """The tries of one request that failed, from the first on. ``record`` names the replica that has it."""

    __slots__ = ("_record", "_request", "_retried_busy", "_retried_stale", "_services", "_serving", "_tried", "held")

    def __init__(
        self, services: Services, serving: ActiveConfiguration, request: PlacementRequest, record: Record
    ) -> None:
        self.held = b""  # of an error answer
        self._services = services
        self._serving = serving
        self._request = request
        self._record = record
        self._tried: set[ReplicaId] = set()
        self._retried_stale = self._retried_busy = False

    def may_reconnect(self) -> bool:
        """Whether the same replica is asked on a fresh connection, which has not seen the request: once."""
        already, self._retried_stale = self._retried_stale, True
        return not already

    def after_connect_failure(self, reason: str, *, ours: bool, was_probe: bool) -> Decision | None:
        """It cannot be connected to. ``ours``: for a shortage of the router's own, which says nothing about it."""
        if not ours:
            self._services.checks.on_connect_failed(self._record.replica)
            self._services.breakers.record_connect_failure(ReplicaId(self._record.replica), reason, was_probe=was_probe)
        return self._next(Failure.CONNECT)

    def after_broken_response(self, failure: Failure, *, was_probe: bool) -> Decision | None:
        """Its answer will not come, or not its rest."""
        self._services.checks.request_check(self._record.replica)
        self._services.stall_detector.record_failed_response(self._record.replica, failure, was_probe=was_probe)
        return None if failure is Failure.BAD_RESPONSE else self._next(failure)

    def after_abort(self) -> Decision | None:
        """Its engine stops, and ended a whole answer before its time."""
        self._services.checks.request_check(self._record.replica)
        return self._next("aborted")

    def stalled(self) -> Decision | None:
        """Its engine hangs."""
        return self._next("stalled")

    def hold(self, data: bytes, *, last: bool) -> bool:
        """Keep more of an error answer; True when it is to be judged by what is here."""
        self.held += data
        return last or len(self.held) > MAX_HELD_BYTES

    def answered(self, answer: ResponseHead, *, was_probe: bool) -> Decision | None:
        """It answered with the error that is held."""
        cause = retry_cause(answer, self.held)
        if answer.status == GATEWAY_TIMEOUT:
            self._services.stall_detector.record_failed_response(
                self._record.replica, Failure.TIMEOUT, was_probe=was_probe
            )
        elif is_replica_fault(answer.status, cause):
            self._services.balancer.record_failure(
                self._record.replica, cause or f"status_{answer.status}", was_probe=was_probe
            )
        if answer.status == TOO_MANY:  # of several, only the first is a reason to go elsewhere
            cause, self._retried_busy = (None if self._retried_busy else cause), True
        return None if cause is None else self._next(cause)

    def _next(self, cause: str) -> Decision | None:
        """Where to go that was not tried yet; None if there is nowhere, or the limit or the budget is reached."""
        services, record = self._services, self._record
        self._tried.add(ReplicaId(record.replica))
        limits = self._serving.limits
        if cause not in limits.retry_on or record.retries >= limits.retries:
            return None
        try:
            decision = self._untried()
        except NoReplicaError:
            return None
        if not services.retry_budget.spend():
            return None
        services.metrics.count_retry(record, cause)
        self.held = b""
        self._retried_stale = False
        return decision

    def _untried(self) -> Decision:
        """A replica that was not tried; where there is none, one that was to warm up first. NoReplicaError."""
        decide, health = self._serving.placement.decide, self._services.health
        try:
            return decide(self._request, health, self._tried)
        except NoReplicaError as missing:
            if not self._services.cut_warm_up_short(missing):
                raise
        return decide(self._request, health, self._tried)
