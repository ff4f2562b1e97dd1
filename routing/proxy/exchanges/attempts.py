"""What fails with one request, and what comes of it: what counts against whom, and which replica is tried next, if any.

Theory of operation. Each kind of failure of the replica that has the request is a method. It tells health checks and
breaker what they have to know, and gives the decision for another replica: None where none may do better
(``judging.py``), the retry policy names no such failure, none is left, or the limit or the budget is reached, and the
client has to be told. ``was_probe``: the request tried a replica that was out.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from routing.core.types import NoReplicaError, ReplicaId
from routing.proxy.exchanges.judging import cause_of, is_its_fault
from routing.proxy.replicas.upstream import Failure

if TYPE_CHECKING:
    from routing.core.request import PlacementRequest
    from routing.placement.decision import Decision
    from routing.proxy.decisions.record import Record
    from routing.proxy.http.answer import AnswerHead
    from routing.proxy.router import Router
    from routing.proxy.serving import Serving

HELD_BYTES: Final = 64 << 10  # of an error answer that is being judged
TOO_MANY: Final = HTTPStatus.TOO_MANY_REQUESTS.value
GATEWAY_TIMEOUT: Final = HTTPStatus.GATEWAY_TIMEOUT.value


class Attempts:
    """The tries of one request that failed, from the first on. ``record`` names the replica that has it."""

    __slots__ = ("_record", "_request", "_retried_busy", "_retried_stale", "_router", "_serving", "_tried", "held")

    def __init__(self, router: Router, serving: Serving, request: PlacementRequest, record: Record) -> None:
        self.held = b""  # of an error answer
        self._router = router
        self._serving = serving
        self._request = request
        self._record = record
        self._tried: set[ReplicaId] = set()
        self._retried_stale = self._retried_busy = False

    def reconnects(self) -> bool:
        """Whether the same replica is asked on a fresh connection, which has not seen the request: once."""
        already, self._retried_stale = self._retried_stale, True
        return not already

    def not_reached(self, reason: str, *, ours: bool, was_probe: bool) -> Decision | None:
        """It cannot be connected to. ``ours``: for a shortage of the router's own, which says nothing about it."""
        if not ours:
            self._router.checks.connect_failed(self._record.replica)
            self._router.breakers.refused(ReplicaId(self._record.replica), reason, was_probe=was_probe)
        return self._next(Failure.CONNECT)

    def broken_off(self, failure: Failure, *, was_probe: bool) -> Decision | None:
        """Its answer will not come, or not its rest."""
        self._router.checks.suspect(self._record.replica)
        self._router.response_failed(self._record.replica, failure, was_probe=was_probe)
        return None if failure is Failure.BAD_ANSWER else self._next(failure)

    def aborted(self) -> Decision | None:
        """Its engine stops, and ended a whole answer before its time."""
        self._router.checks.suspect(self._record.replica)
        return self._next("aborted")

    def stalled(self) -> Decision | None:
        """Its engine hangs."""
        return self._next("stalled")

    def hold(self, data: bytes, *, last: bool) -> bool:
        """Keep more of an error answer; True when it is to be judged by what is here."""
        self.held += data
        return last or len(self.held) > HELD_BYTES

    def answered(self, answer: AnswerHead, *, was_probe: bool) -> Decision | None:
        """It answered with the error that is held."""
        cause = cause_of(answer, self.held)
        if answer.status == GATEWAY_TIMEOUT:
            self._router.response_failed(self._record.replica, Failure.TIMEOUT, was_probe=was_probe)
        elif is_its_fault(answer.status, cause):
            self._router.failed(self._record.replica, cause or f"status_{answer.status}", was_probe=was_probe)
        if answer.status == TOO_MANY:  # of several, only the first is a reason to go elsewhere
            cause, self._retried_busy = (None if self._retried_busy else cause), True
        return None if cause is None else self._next(cause)

    def _next(self, cause: str) -> Decision | None:
        """Where to go that was not tried yet; None if there is nowhere, or the limit or the budget is reached."""
        router, record = self._router, self._record
        self._tried.add(ReplicaId(record.replica))
        limits = self._serving.limits
        if cause not in limits.retry_on or record.retries >= limits.retries:
            return None
        try:
            decision = self._untried()
        except NoReplicaError:
            return None
        if not router.retry_budget.spend():
            return None
        router.metrics.retried(record, cause)
        self.held = b""
        self._retried_stale = False
        return decision

    def _untried(self) -> Decision:
        """A replica that was not tried; where there is none, one that was to warm up first. NoReplicaError."""
        decide, health = self._serving.placement.decide, self._router.health
        try:
            return decide(self._request, health, self._tried)
        except NoReplicaError as missing:
            if not self._router.cuts_warm_ups_short(missing):
                raise
        return decide(self._request, health, self._tried)
