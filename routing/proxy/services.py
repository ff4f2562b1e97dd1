"""What all exchanges of a router share: balancer, health, admission queues, warm-ups, metrics, decision records."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from routing.health.checks import HealthChecks
from routing.health.stall_detection import StallDetector
from routing.health.warm_ups import WarmUps
from routing.observability.decision_log import DecisionRing, StructureSampler
from routing.observability.metrics import Metrics, Outcome
from routing.proxy.admission_queues import AdmissionQueues
from routing.proxy.large_bodies import LargeBodies

if TYPE_CHECKING:
    from routing.balancing.decision import Decision
    from routing.health.balancer import Balancer
    from routing.http.request import Request
    from routing.observability.decision_record import Record
    from routing.prompt.canonical import CanonicalPrompt
    from routing.types import NoReplicaError, ReplicaId


class Services:
    """One router's. ``boot`` tells one life of the process from the next."""

    def __init__(self, balancer: Balancer, boot: str) -> None:
        self.balancer = balancer
        self.health = balancer.health
        self.breakers = balancer.breakers
        self.retry_budget = balancer.retry_budget
        self.checks = HealthChecks(balancer.health, self._on_up, balancer.progress_at)
        self.stall_detector = StallDetector(balancer)
        self.all_warm_ups = WarmUps(balancer, self.checks, boot)
        self.warm_ups: WarmUps | None = None  # None: no pool warms up
        self.all_admission_queues = AdmissionQueues()
        self.admission_queues: AdmissionQueues | None = None  # None: no limit is configured
        self.large_bodies = LargeBodies()
        self.metrics = Metrics()
        self.decisions = DecisionRing()
        self.structure_sampler = StructureSampler()
        self.is_draining = False
        self.in_flight = 0  # requests that have not ended
        self._idle = asyncio.Event()  # set by the last request of a draining router

    def on_placed(self, decision: Decision, request: Request, prompt: CanonicalPrompt) -> None:
        """Count a request's prompt when it goes to its first replica: for its API key's rates, and for warm-ups."""
        if request.grant is not None:
            request.grant.began(decision.keys.prompt_tokens)
        if self.warm_ups is not None:
            self.warm_ups.record_request(decision, request, prompt)

    def on_ended(self, record: Record | None, outcome: Outcome, *, pool: str, group: str) -> None:
        """Account for a request, exactly once. ``record`` is None if it was never placed."""
        self.in_flight -= 1
        if self.is_draining and not self.in_flight:
            self._idle.set()
        if record is None:
            self.metrics.count_unplaced(outcome, pool, group)
        else:
            self.metrics.count_placed(record, outcome)
            self.decisions.add(record)

    async def no_requests(self) -> None:
        """Wait until no request is in flight, in a router that is draining."""
        while self.in_flight:
            self._idle.clear()
            await self._idle.wait()

    def cut_warm_up_short(self, missing: NoReplicaError) -> bool:
        """Let replicas take traffic that were still warming up, if no other can serve; False if there are none."""
        return self.warm_ups is not None and self.warm_ups.end_needed(missing)

    def join(self, replica: ReplicaId) -> None:
        """Begin the warm-up of a replica whose cache is empty, where its pool warms up; else its slow start."""
        if self.warm_ups is None or not self.warm_ups.begin(replica):
            self.balancer.begin_slow_start(replica)

    def _on_up(self, replica: ReplicaId) -> None:
        self.breakers.on_health_check_passed(replica)
        self.join(replica)

    def close(self) -> None:
        """End health checks, stall detection, warm-ups and the process that reads large bodies."""
        self.checks.close()
        self.stall_detector.close()
        self.large_bodies.close()
        self.all_warm_ups.close()
