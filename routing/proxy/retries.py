"""Retries: which failures of a replica count against it, and whether another replica gets the request.

Theory of operation. Each kind of failure is a method of ``RetryState``. It reports the failure to the health checks,
the circuit breaker or the stall detector, and returns the decision for another replica. It returns None if another
replica would not do better, if the retry policy does not name the failure, if no replica is left, or if the limit or
the retry budget is exhausted; then the client gets the error. ``was_probe``: the request probed an ejected replica.
"""

from __future__ import annotations

import logging
import re
from datetime import UTC
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from time import time
from typing import TYPE_CHECKING, Final

from routing.engines import BUSY, error_cause
from routing.http.response import RejectedRequestError, ResponseHead
from routing.log import event
from routing.proxy.continuation import NotContinuableError
from routing.types import NoReplicaError, ReplicaId
from routing.upstream.connection import Failure

if TYPE_CHECKING:
    from routing.balancing.placement import Decision
    from routing.balancing.request import PlacementRequest
    from routing.observability.decision_log import Record
    from routing.proxy.services import ActiveConfiguration, Services


logger = logging.getLogger(__name__)

MAX_BUFFERED_BYTES: Final = 64 << 10  # of an error response that is being classified
LIMITING_STATUSES: Final = frozenset({429, 503})
RETRIED_STATUSES: Final = frozenset({502, 503, 504})
TOO_MANY: Final = HTTPStatus.TOO_MANY_REQUESTS.value
GATEWAY_TIMEOUT: Final = HTTPStatus.GATEWAY_TIMEOUT.value

MAX_RETRY_AFTER_S: Final = 60.0  # how long a replica may ask for no requests

_retry_after: Final = re.compile(rb"^retry-after(-ms)?: *([^\r\n]*)", re.IGNORECASE | re.MULTILINE).findall
_number: Final = re.compile(rb"\d{1,9}(?:\.\d{1,9})?").fullmatch


def retry_after_s(head: ResponseHead) -> float | None:
    """How long a replica asks for no requests: seconds, at most ``MAX_RETRY_AFTER_S``; None without a valid value."""
    seconds: float | None = None
    for unit, value in _retry_after(head.lines):
        if _number(value.strip()):
            number = float(value)
            if unit:
                return min(number / 1000, MAX_RETRY_AFTER_S)  # the more exact of two
            seconds = number
        elif not unit:
            seconds = _seconds_until(value.decode("latin-1"))
    return None if seconds is None else min(seconds, MAX_RETRY_AFTER_S)


def _seconds_until(date: str) -> float | None:
    """Seconds until an HTTP date, at least 0; None if it is no date."""
    try:
        at = parsedate_to_datetime(date)
    except ValueError:
        return None
    return max(0.0, (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() - time())


def retry_cause(head: ResponseHead, body: bytes) -> str | None:
    """Why another replica may do better after an error response of 429 or more; None if it would not."""
    status = head.status
    if status == TOO_MANY:
        return "status_429" if _retry_after(head.lines) else None
    return error_cause(status, body) or (f"status_{status}" if status in RETRIED_STATUSES else None)


def record_error_response(
    services: Services, replica: str, head: ResponseHead, cause: str | None, *, was_probe: bool
) -> None:
    """Count an error response of 429 or more against the replica, if it is its fault, and obey its ``Retry-After``."""
    status = head.status
    if (
        status in LIMITING_STATUSES
        and (seconds := retry_after_s(head))
        and services.breakers.record_retry_after(ReplicaId(replica), seconds)
    ):
        event(logger, "replica_limited", replica=replica, status=status, retry_after_s=round(seconds, 1))
    if status == GATEWAY_TIMEOUT:
        services.stall_detector.record_failed_response(replica, Failure.TIMEOUT, was_probe=was_probe)
    elif status >= 500 and status != HTTPStatus.NOT_IMPLEMENTED and cause != BUSY:
        services.balancer.record_failure(replica, cause or f"status_{status}", was_probe=was_probe)


def failure_error(replica: str, failure: Failure) -> RejectedRequestError:
    """The error for the client if a response failed."""
    if failure is Failure.TIMEOUT:
        return RejectedRequestError(504, f"replica {replica!r} did not respond in time")
    if failure is Failure.INVALID_RESPONSE:
        return RejectedRequestError(502, f"replica {replica!r} sent a response that is not valid HTTP")
    return RejectedRequestError(502, f"replica {replica!r} closed the connection before its response was complete")


class RetryState:
    """The failed attempts of one request. ``record`` names the replica that has the request now."""

    def __init__(
        self, services: Services, configuration: ActiveConfiguration, request: PlacementRequest, record: Record
    ) -> None:
        self.body = b""  # of an error response
        self.cause = ""  # of the latest failure
        self._services = services
        self._configuration = configuration
        self._request = request
        self._record = record
        self._failed: set[ReplicaId] = set()
        self._retried_429 = False

    def on_connect_failed(self, reason: str, *, is_local: bool, was_probe: bool) -> Decision | None:
        """Called when no connection was made. ``is_local``: the router lacks a resource; the replica did not fail."""
        if not is_local:
            self._services.checks.on_connect_failed(self._record.replica)
            self._services.breakers.record_connect_failure(ReplicaId(self._record.replica), reason, was_probe=was_probe)
        return self._next(Failure.CONNECT)

    def on_response_failed(self, failure: Failure, *, was_probe: bool) -> Decision | None:
        """Called when the connection failed before the first byte of the response's body."""
        self._services.checks.request_check(self._record.replica)
        self._services.stall_detector.record_failed_response(self._record.replica, failure, was_probe=was_probe)
        return None if failure is Failure.INVALID_RESPONSE else self._next(failure)

    def on_aborted(self) -> Decision | None:
        """Called when the engine aborted the generation because it is stopping."""
        self._services.checks.request_check(self._record.replica)
        return self._next("aborted")

    def on_stalled(self) -> Decision | None:
        return self._next("stalled")

    def on_stream_failed(self, cause: str) -> Decision:
        """Called when a stream failed that another replica could continue; NotContinuableError if none may."""
        services = self._services
        services.checks.request_check(self._record.replica)
        self._failed.add(ReplicaId(self._record.replica))
        self.cause = cause
        if not services.retry_budget.spend():
            raise NotContinuableError("retry_budget")
        try:
            return self.decide()
        except NoReplicaError:
            services.retry_budget.give_back()
            raise NotContinuableError("no_replica") from None

    def buffer(self, data: bytes, *, last: bool) -> bool:
        """Buffer an error response; True when it can be classified."""
        self.body += data
        return last or len(self.body) > MAX_BUFFERED_BYTES

    def on_error_response(self, head: ResponseHead, *, was_probe: bool) -> Decision | None:
        """Called when an error response of 429 or more is buffered."""
        status, cause = head.status, retry_cause(head, self.body)
        record_error_response(self._services, self._record.replica, head, cause, was_probe=was_probe)
        if status == TOO_MANY:  # only the first one is retried
            cause, self._retried_429 = (None if self._retried_429 else cause), True
        return None if cause is None else self._next(cause)

    def _next(self, cause: str) -> Decision | None:
        """The decision for a replica that has not failed; None if there is none, or no retry is allowed."""
        services, record, limits = self._services, self._record, self._configuration.limits
        self._failed.add(ReplicaId(record.replica))
        self.cause = cause
        if cause not in limits.retry_on or record.retries >= limits.retries:
            return None
        if not services.retry_budget.spend():  # before a decision, which costs more
            return None
        try:
            decision = self.decide()
        except NoReplicaError:
            services.retry_budget.give_back()
            return None
        services.metrics.count_retry(record, cause)
        self.body = b""
        return decision

    def decide(self) -> Decision:
        """A replica that has not failed, or one whose warm-up ends early for it; NoReplicaError."""
        decide, health = self._configuration.placement.decide, self._services.health
        try:
            return decide(self._request, health, self._failed)
        except NoReplicaError as error:
            if not self._services.end_warm_up_early(error):
                raise
        return decide(self._request, health, self._failed)
