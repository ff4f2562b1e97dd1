"""What exchanges use: the active configuration, and the services that all exchanges of a router share."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from routing.balancing.placement import Placement
from routing.health.checks import HealthChecks
from routing.health.engine_probe import OwnRequests
from routing.health.stall_detection import StallDetector
from routing.health.warm_ups import WarmUps
from routing.http.auth import AccessControl, CrossOrigin
from routing.kv_events.subscriptions import KvEventSubscriptions
from routing.observability.decision_log import DecisionRing, StructureSampler
from routing.observability.metrics import ConfiguredSeries, Metrics
from routing.observability.tracing import Tracer
from routing.proxy.admission import Admission
from routing.proxy.admission_queues import AdmissionQueues
from routing.proxy.continuation import StreamBudget
from routing.proxy.large_bodies import LargeBodies
from routing.response_cache.cache import ResponseCaches
from routing.schema import RouterConfig, StreamFailure, StreamUsage
from routing.types import ReplicaId
from routing.upstream.pool import ConnectionPool

if TYPE_CHECKING:
    from routing.health.checks import Balancer
    from routing.http.request import Request
    from routing.response_cache.keys import RequestDigests
    from routing.response_cache.store import Store
    from routing.types import NoReplicaError


class ActiveConfiguration:
    """A configuration and the objects built from it. A request uses the same one from start to end."""

    def __init__(
        self,
        config: RouterConfig,
        placement: Placement,
        connection_pools: dict[str, ConnectionPool],
        access: AccessControl | None,
    ) -> None:
        self.config = config
        self.limits = config.limits
        self.placement = placement
        self.connection_pools = connection_pools  # by replica name
        self.access = access  # None: no API key is required
        self.cross_origin = CrossOrigin(config) if any(pool.allowed_origins for pool in config.pools) else None
        self.admission = Admission(config, placement.models, placement.matcher)
        self.series = ConfiguredSeries(config)
        self.usage_pools = frozenset(pool.name for pool in config.pools if pool.stream_usage is StreamUsage.REQUEST)
        self.keep_alive_s = {pool.name: pool.keep_alive_s for pool in config.pools if pool.keep_alive_s is not None}
        self.continued_pools = frozenset(
            pool.name for pool in config.pools if pool.on_stream_failure is StreamFailure.CONTINUE
        )


class Services:
    """The shared services of one router. ``boot`` is different each time the process starts."""

    def __init__(self, balancer: Balancer, boot: str, cache_store: Store | None = None) -> None:
        self.balancer = balancer
        self.health = balancer.health
        self.breakers = balancer.breakers
        self.retry_budget = balancer.retry_budget
        self.checks = HealthChecks(balancer.health, self._on_up, balancer.progress_at)
        self.own_requests = OwnRequests()
        self.stall_detector = StallDetector(balancer, self.own_requests)
        self.all_warm_ups = WarmUps(balancer, self.checks, self.own_requests, boot)
        self.warm_ups: WarmUps | None = None  # None: no pool warms up
        self.all_admission_queues = AdmissionQueues()
        self.admission_queues: AdmissionQueues | None = None  # None: no limit is configured
        self.all_response_caches = ResponseCaches(cache_store, balancer)
        self.response_caches: ResponseCaches | None = None  # None: no task group has one
        self.request_digests: RequestDigests | None = None  # None: there is no configuration yet
        self.kv_events = KvEventSubscriptions(balancer.residency, balancer.loads.clock)
        self.large_bodies = LargeBodies()
        self.stream_budget = StreamBudget()
        self.metrics = Metrics()
        self.decisions = DecisionRing()
        self.structure_sampler = StructureSampler()
        self.tracer: Tracer | None = None  # None: nothing is traced
        self.is_draining = False
        self.held_body_bytes = 0  # of large bodies that were received and may still be needed
        self.in_flight = 0  # requests that have not ended
        self.idle = asyncio.Event()  # set at the end of the last request of a draining router

    async def wait_until_idle(self) -> None:
        """Wait until no request is in flight, in a router that is draining."""
        while self.in_flight:
            self.idle.clear()
            await self.idle.wait()

    def release_body(self, request: Request) -> None:
        """Stop counting a large body, which is dropped."""
        self.held_body_bytes -= request.held_bytes
        request.held_bytes = 0

    def end_warm_up_early(self, error: NoReplicaError) -> bool:
        """Let replicas that are warming up take traffic because no other can serve; False if there are none."""
        return self.warm_ups is not None and self.warm_ups.end_early(error)

    def start_warm_up(self, replica: ReplicaId) -> None:
        """Start the warm-up of a replica whose cache is empty, or its slow start if its pool does not warm up."""
        if self.warm_ups is None or not self.warm_ups.start(replica):
            self.balancer.begin_slow_start(replica)

    def _on_up(self, replica: ReplicaId) -> None:
        self.breakers.on_health_check_passed(replica)
        self.start_warm_up(replica)

    def close(self) -> None:
        self.checks.close()
        self.stall_detector.close()
        self.kv_events.close()
        self.large_bodies.close()
        self.all_warm_ups.close()
