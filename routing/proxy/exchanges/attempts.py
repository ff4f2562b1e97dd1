"""What has gone wrong with one request, and whether another replica is tried. Made at its first failure."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from routing.core.types import NoReplicaError, ReplicaId
from routing.proxy.exchanges.judging import cause_of

if TYPE_CHECKING:
    from routing.core.matching import PlacementRequest
    from routing.placement.decision import Decision
    from routing.proxy.decisions.record import Record
    from routing.proxy.replicas.answer import AnswerHead
    from routing.proxy.router import Router
    from routing.proxy.serving import Serving

HELD_BYTES: Final = 64 << 10  # of an error answer that is being judged
TOO_MANY: Final = HTTPStatus.TOO_MANY_REQUESTS.value


class Attempts:
    """The tries of one request that failed."""

    __slots__ = ("_retried_busy", "_retried_stale", "_tried", "held")

    def __init__(self) -> None:
        self.held = b""  # of an error answer
        self._tried: set[ReplicaId] = set()
        self._retried_stale = self._retried_busy = False

    def reconnects(self) -> bool:
        """Whether the same replica is asked on a fresh connection, after a kept-alive one had ended: once."""
        already, self._retried_stale = self._retried_stale, True
        return not already

    def hold(self, data: bytes, *, last: bool) -> bool:
        """Keep more of an error answer; True when it is to be judged by what is here."""
        self.held += data
        return last or len(self.held) > HELD_BYTES

    def cause(self, answer: AnswerHead) -> str | None:
        """Why another replica may do better than the answer that is held; of several 429s only the first says so."""
        cause = cause_of(answer, self.held)
        if answer.status == TOO_MANY:
            cause, self._retried_busy = (None if self._retried_busy else cause), True
        return cause

    def next(self, router: Router, serving: Serving, wanted: PlacementRequest, record: Record) -> Decision | None:
        """Where to go that was not tried yet; None if there is nowhere, or the limit or the budget is reached."""
        self._tried.add(ReplicaId(record.replica))
        if record.retries >= serving.limits.retries:
            return None
        try:
            decision = serving.placement.decide(wanted, router.health, self._tried)
        except NoReplicaError:
            return None
        if not router.retry_budget.spend():
            return None
        self.held = b""
        self._retried_stale = False
        return decision
