"""What all connections of a router share: the configuration in force, the links to replicas, loads, health, counts."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from typing import Final

from routing.balancing.placement import Placement
from routing.balancing.rates import models_of
from routing.health.balancer import ActiveFleet, Balancer, joined_replicas
from routing.http.auth import AccessControl
from routing.http.errors import RejectedRequestError
from routing.http.headers import ANSWER_NAMES, REQUEST_NAMES, HeaderCache
from routing.http.loop import Deadlines, WriteBuffer
from routing.http.request import Request, RequestHead
from routing.http.response import LocalResponse, ResponseHead
from routing.http.tasks import Background, Periodic, run_in_slices
from routing.http.tls import Tls
from routing.limits.concurrency import SharedLimits
from routing.observability.metrics import ConfiguredSeries
from routing.proxy.active_configuration import ActiveConfiguration, checked_replicas, target_ids, usage_pools
from routing.proxy.admission import PROMPT_PATHS, RETRY_AFTER_S, Admission, models_answer
from routing.proxy.config_store import ConfigStore, Swap
from routing.proxy.connection_limit import ConnectionLimit
from routing.proxy.exchange import Exchange
from routing.proxy.last_known_good import LastKnownGood, Signatures
from routing.proxy.response_relay import Downstream
from routing.proxy.services import Services
from routing.schema import Limits, LoadedSnapshot, ReplicaConfig, RouterConfig
from routing.types import ReplicaId
from routing.upstream.address import Address
from routing.upstream.pool import ConnectionPool

HOUSEKEEPING_S: Final = 0.25
HEALTH: Final = b"/health"
MODELS: Final = b"/v1/models"
_METHODS: Final = dict.fromkeys(PROMPT_PATHS, (b"POST",)) | dict.fromkeys((HEALTH, MODELS), (b"GET", b"HEAD"))


class Router:
    """One router process, apart from its listening sockets: the active configuration, and the parts that use it."""

    def __init__(
        self,
        name: str,
        files: LastKnownGood | None = None,
        tls: Tls | None = None,
        signatures: Signatures | None = None,
    ) -> None:
        self.name = name
        self.tls = tls or Tls()
        self.boot = secrets.token_hex(8)  # tells one life of the process from the next
        self.loop = asyncio.get_running_loop()
        self.deadlines = Deadlines(self.loop)
        self.write_buffer = WriteBuffer(self.loop)
        self.request_head_cache = HeaderCache[RequestHead](REQUEST_NAMES)
        self.response_head_cache = HeaderCache[ResponseHead](ANSWER_NAMES)
        self.limits = Limits()
        self.shared_limits: SharedLimits | None = None  # with other processes; None: there are none
        self.balancer = Balancer(self.loop)
        self.services = Services(self.balancer, self.boot)
        self.store = ConfigStore(self.prepare, files, signatures)
        self.serving: ActiveConfiguration | None = None
        self.clients: set[Downstream] = set()
        self.connection_limit = ConnectionLimit()
        self.unfinished_bytes = 0  # of bodies that are still coming
        self.requests = 0  # taken, ever
        self.in_flight_elsewhere = 0  # in other processes that share the port
        self._retired: set[ConnectionPool] = set()
        self._named = 0  # requests whose clients gave them no id
        self._housekeeping = Periodic(Background.UPKEEP, HOUSEKEEPING_S, self._run_housekeeping)

    @property
    def is_draining(self) -> bool:
        """Whether the router takes no new connections, and answers what it has."""
        return self.services.is_draining

    # --- requests ---

    def request(self, head: RequestHead, body: bytes, values: list[bytes] | None = None) -> Request:
        """A request that is here whole. One whose client gave it no id gets one.

        ``values``: of its head, where that was recognised.
        """
        name = head.request_id_with(values)
        if not name:
            self._named += 1
            name = f"{self.boot}-{self._named}"
        return Request(head, body, name, values)

    def body_refusal(self, head: RequestHead) -> RejectedRequestError | None:
        """Why a body is not waited for that is still coming: whose it is nobody knows. None if it may come."""
        try:
            if self.serving is not None and self.serving.access is not None:
                self.serving.access.known(head)
        except RejectedRequestError as refusal:
            refusal.must_close = True
            return refusal
        return None

    def open(self, client: Downstream, request: Request) -> Exchange | LocalResponse:
        """Take a request: for a replica, or answered here. RejectedRequestError for what no path or limit allows."""
        head = request.head
        methods = _METHODS.get(head.path)
        if methods is None:
            raise RejectedRequestError(404, "no such path")
        if head.method not in methods:
            raise RejectedRequestError(405, "no such method here", headers=((b"Allow", b", ".join(methods)),))
        if head.path == HEALTH:
            return self._health_answer()
        serving = self.serving
        if serving is None:
            raise RejectedRequestError(503, "this router has no configuration yet", retry_after_s=RETRY_AFTER_S)
        if serving.access is not None:
            request.grant = serving.access.admit(head)
        if head.path == MODELS and (models := models_answer(serving.config, request.grant)) is not None:
            return models
        if self.services.in_flight + self.in_flight_elsewhere >= serving.limits.max_in_flight:
            raise RejectedRequestError(503, "this router is at its limit of requests", retry_after_s=RETRY_AFTER_S)
        self.services.in_flight += 1
        self.requests += 1
        return Exchange(self.services, serving, client, request)

    # --- configuration ---

    @property
    def not_ready_reason(self) -> str | None:
        """Why no traffic should come here; None when it may."""
        if self.is_draining:
            return "draining"
        return "no configuration yet" if self.serving is None else None

    async def prepare(self, snapshot: LoadedSnapshot) -> Swap:
        """Build everything a configuration needs, in a thread or in turns with requests; the swap cannot fail."""
        serving = await asyncio.to_thread(self._build, snapshot.config)

        async def swap() -> None:
            await run_in_slices(serving.placement.prepare(self.balancer.health))
            self._swap(serving)
            await run_in_slices(
                serving.placement.prepare(self.balancer.health)
            )  # anew where replicas joined, else nothing is left

        return swap

    def _build(self, config: RouterConfig) -> ActiveConfiguration:
        state = self.balancer
        placement = Placement(config, state.loads, int(self.boot, 16), state.residency, self.name, state.token_ratios)
        before = self.serving.connection_pools if self.serving else {}
        connection_pools = {
            replica.name: old
            if (old := before.get(replica.name)) and old.address == address
            else self._link(replica.name, address)
            for replica, address in self._replica_addresses(config)
        }
        access = AccessControl(config, self.shared_limits) if config.access is not None else None
        admission = Admission(config, placement.models, placement.matcher)
        return ActiveConfiguration(
            config,
            placement,
            connection_pools,
            access,
            admission,
            ConfiguredSeries(config),
            config.limits,
            targets=frozenset(target_ids(config)),
            checked=[one for pool in config.pools for one in checked_replicas(pool, connection_pools)],
            usage_pools=usage_pools(config),
        )

    def _replica_addresses(self, config: RouterConfig) -> Iterator[tuple[ReplicaConfig, Address]]:
        hides_keys, networks = config.access is not None, config.replica_networks
        for pool in config.pools:
            for replica in pool.replicas:
                tls = self.tls.upstream if replica.url.startswith("https:") else None
                yield (
                    replica,
                    Address(replica.url, api_key=replica.api_key, hides_keys=hides_keys, tls=tls, networks=networks),
                )

    def _link(self, name: str, address: Address) -> ConnectionPool:
        return ConnectionPool(
            name,
            address,
            deadlines=self.deadlines,
            write_buffer=self.write_buffer,
            header_cache=self.response_head_cache,
            loop=self.loop,
        )

    def _swap(self, serving: ActiveConfiguration) -> None:
        before, self.serving, self.limits = self.serving, serving, serving.limits
        self.balancer.fleet = ActiveFleet(serving.config, serving.placement, serving.connection_pools)
        self.connection_limit.limit(serving.limits.max_connections_per_address, self.clients)
        self.request_head_cache.forget(serving.limits.max_header_bytes)  # they were read by the limits before
        if before is not None:
            self._carry_over(before, serving)
        self._configure_balancer(serving)
        self._configure_services(serving)
        for name in joined_replicas(serving.config, before.config) if before is not None else ():
            self.services.join(name)
        self._housekeeping.start()

    def _carry_over(self, before: ActiveConfiguration, serving: ActiveConfiguration) -> None:
        """Keep what the configuration before had learned, and close its connections as they become idle."""
        serving.placement.carry_over(before.placement)
        if before.access is not None and serving.access is not None:
            serving.access.carry_over(before.access)
        for link in set(before.connection_pools.values()) - set(serving.connection_pools.values()):
            link.retire()
            self._retired.add(link)
        self._retired = {link for link in self._retired if link.is_in_use}

    def _configure_balancer(self, serving: ActiveConfiguration) -> None:
        state, pools = self.balancer, serving.config.pools
        state.loads.forget_all_but(serving.targets)
        state.residency.forget_all_but(serving.targets)
        state.token_ratios.forget_all_but((pool.name, model) for pool in pools for model in models_of(pool))
        state.breakers.configure(pools)
        state.slow_starts.forget_all_but({ReplicaId(name) for name in serving.connection_pools})
        state.retry_budget.ratio = serving.limits.retry_ratio
        state.retry_budget.floor_per_s = serving.limits.retry_floor_per_s

    def _configure_services(self, serving: ActiveConfiguration) -> None:
        services, config = self.services, serving.config
        services.metrics.prune(serving.series)  # at each scrape too, but there may be none
        services.checks.configure(serving.checked)
        services.warm_ups = services.all_warm_ups if services.all_warm_ups.configure(config) else None
        services.admission_queues = (
            services.all_admission_queues
            if services.all_admission_queues.configure(config, self.shared_limits)
            else None
        )

    def _run_housekeeping(self) -> None:
        """Refill the retry budget, advance breakers, slow starts and warm-ups, and look for stalled replicas."""
        now, state, services = self.loop.time(), self.balancer, self.services
        state.retry_budget.tick(now, self.requests)
        state.breakers.admit_due_probes()
        state.loads.advance(state.loads.clock())
        state.slow_starts.advance(now)
        if services.warm_ups is not None:
            services.warm_ups.tick(now)
        if services.admission_queues is not None:
            services.admission_queues.expire()
        if state.fleet is not None:
            services.stall_detector.check(state.fleet, now)

    # --- the end ---

    def begin_draining(self) -> None:
        """Take no more requests than what has come; ``shutdown.drain`` waits for the responses."""
        self.services.is_draining = self.services.all_warm_ups.is_draining = True

    def close(self) -> None:
        """End everything at once."""
        self.begin_draining()
        for client in list(self.clients):
            client.reset()
        self.services.close()
        self._housekeeping.stop()
        for link in {*self._retired, *(self.serving.connection_pools.values() if self.serving else ())}:
            link.close()
        self.deadlines.close()

    def _health_answer(self) -> LocalResponse:
        reason = self.not_ready_reason
        return LocalResponse(200 if reason is None else 503)
