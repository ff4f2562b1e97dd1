"""What all connections of a router share: the active configuration, its activation, and the limit of connections."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from ipaddress import IPv6Address, ip_address
from math import inf
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from routing.balancing.load_tracker import models_of
from routing.balancing.placement import Placement
from routing.balancing.replicas import target_ids
from routing.health.checks import ActiveFleet, Balancer, CheckTarget, joined_replicas
from routing.http.auth import AccessControl
from routing.http.loop import Deadlines, Turns, WriteBuffer
from routing.http.request import Request, RequestHead
from routing.http.response import (
    VARYING_REQUEST_HEADERS,
    VARYING_RESPONSE_HEADERS,
    HeaderCache,
    LocalResponse,
    RejectedRequestError,
    ResponseHead,
)
from routing.http.tasks import Background, Periodic, run_in_slices
from routing.http.tls import Tls
from routing.limits.concurrency import SharedLimits
from routing.log import event
from routing.process import file_limit, max_clients
from routing.proxy.admission import RETRY_AFTER_S, model_response, models_response
from routing.proxy.config_store import ConfigStore, LastKnownGood, Signatures, Swap
from routing.proxy.exchange import Exchange
from routing.proxy.resources import HEALTH, MODELS, POST_ONLY, methods_of, model_named_by
from routing.proxy.response_relay import Downstream
from routing.proxy.services import ActiveConfiguration, Services
from routing.response_cache.evidence import uses_semantic_caches
from routing.response_cache.keys import RequestDigests
from routing.schema import Limits, LoadedSnapshot, PoolConfig, ReplicaConfig, ReplicaState, RouterConfig
from routing.types import ReplicaId
from routing.upstream.pool import Address, ConnectionPool

if TYPE_CHECKING:
    from routing.response_cache.store import Store
    from routing.sharing.exchange import Exchange as StateExchange

logger = logging.getLogger(__name__)

HOUSEKEEPING_S: Final = 0.25
REFUSED_LOG_S: Final = 60.0
POST: Final = b"POST"
OPTIONS: Final = b"OPTIONS"
HEAD: Final = b"HEAD"  # vLLM has none for models
IPV6_NETWORK_BITS: Final = 64  # a client can choose its addresses within a /64


class CloseReason(StrEnum):
    """Why a client connection ended; values are labels of a metric."""

    CLIENT = "client"  # the client ended it, or it was lost
    COMPLETE = "complete"  # the client wanted no further response, or it speaks HTTP/1.0
    REJECTED = "rejected"  # after a rejection that ends the connection
    TIMEOUT = "timeout"  # a request did not arrive in time: 408
    IDLE = "idle"  # no request started within ``keep_alive_timeout_s``
    UNREAD = "unread"  # the client did not read what was written
    INCOMPLETE = "incomplete"  # reset, because the rest of a response is missing
    DRAINING = "draining"  # the router shuts down
    LIMIT = "limit"  # the limit of connections of its address
    FILES = "files"  # the limit of open files of the process


class ConnectionLimit:
    """Counts the connections of each client address; nothing is counted without a limit."""

    def __init__(self) -> None:
        self.max_per_address: int | None = None  # None: no limit
        self._counts: Counter[str] = Counter()

    def configure(self, max_per_address: int | None, clients: Iterable[Downstream]) -> None:
        """Apply a limit to new connections; the existing ones stay, and count."""
        if max_per_address == self.max_per_address:
            return
        self.max_per_address = max_per_address
        self._counts.clear()
        for client in clients:
            self._count(client, "" if max_per_address is None else address_of(client.transport))

    def enter(self, client: Downstream) -> bool:
        """Count a new connection; False if its address has reached the limit."""
        address = address_of(client.transport)
        if self.max_per_address is not None and address and self._counts[address] >= self.max_per_address:
            return False
        self._count(client, address)
        return True

    def leave(self, client: Downstream) -> None:
        """Stop counting a connection, if it was counted."""
        address, client.counted_address = client.counted_address, ""
        if address:
            self._counts[address] -= 1
            if not self._counts[address]:
                del self._counts[address]

    def __len__(self) -> int:
        """Number of addresses with counted connections."""
        return len(self._counts)

    def _count(self, client: Downstream, address: str) -> None:
        client.counted_address = address
        if address:
            self._counts[address] += 1


def address_of(transport: asyncio.Transport) -> str:
    """The peer's IPv4 address or IPv6 network; empty if it has none."""
    peer = transport.get_extra_info("peername")
    if not isinstance(peer, tuple) or not peer:
        return ""
    address = ip_address(str(peer[0]).partition("%")[0])
    if not isinstance(address, IPv6Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return f"{int(address) >> (128 - IPV6_NETWORK_BITS):x}/{IPV6_NETWORK_BITS}"


class Router:
    """One router process without its listening sockets."""

    def __init__(
        self,
        name: str,
        files: LastKnownGood | None = None,
        tls: Tls | None = None,
        signatures: Signatures | None = None,
        cache_store: Store | None = None,
        state_exchange: StateExchange | None = None,
    ) -> None:
        self.name = name
        self.tls = tls or Tls()
        self.boot = secrets.token_hex(8)  # different each time the process starts
        self.loop = asyncio.get_running_loop()
        self.deadlines = Deadlines(self.loop)
        self.write_buffer = WriteBuffer(self.loop)
        self.turns = Turns(self.loop, self.write_buffer)
        self.request_head_cache = HeaderCache[RequestHead](VARYING_REQUEST_HEADERS)
        self.response_head_cache = HeaderCache[ResponseHead](VARYING_RESPONSE_HEADERS)
        self.limits = Limits()
        self.shared_limits: SharedLimits | None = None  # with other workers; None: there are none
        self.balancer = Balancer(self.loop)
        self.state_exchange = state_exchange  # with other routers; None: this one decides by what it knows itself
        if state_exchange is not None:
            state_exchange.bind(self.boot, self.balancer.loads, self.balancer.residency)
        self.services = Services(self.balancer, self.boot, cache_store)
        self.store = ConfigStore(self.prepare, files, signatures)
        self.active: ActiveConfiguration | None = None
        self.clients: set[Downstream] = set()
        self.connection_limit = ConnectionLimit()
        self.max_clients = max_clients()  # by the limit of open files; None: no limit
        self._refused_logged_at = -inf
        self.closed: Counter[CloseReason] = Counter()  # client connections, since the process started
        self.unfinished_body_bytes = 0  # of bodies that are still being received
        self.requests = 0  # accepted since the process started
        self._retired: set[ConnectionPool] = set()
        self._generated_ids = 0
        self._housekeeping = Periodic(Background.HOUSEKEEPING, HOUSEKEEPING_S, self._run_housekeeping, reads_first=True)

    @property
    def is_draining(self) -> bool:
        """Whether the router accepts no new connections and finishes the requests that it has."""
        return self.services.is_draining

    def on_refused(self) -> None:
        """Log, once a minute, that clients are refused because files are few."""
        now = self.loop.time()
        if now - self._refused_logged_at >= REFUSED_LOG_S:
            self._refused_logged_at = now
            refused = self.closed[CloseReason.FILES] + 1
            facts = {"limit": self.max_clients, "refused": refused, "open_files": file_limit()}
            event(logger, "clients_refused", level=logging.WARNING, **facts)

    # --- requests ---

    def request(self, head: RequestHead, body: bytes, values: list[bytes] | None = None) -> Request:
        """Make a request, with an id of the router's own if its client sent none.

        ``values``: of the varying headers, if the head was cached.
        """
        request_id = head.request_id_with(values)
        if not request_id:
            self._generated_ids += 1
            request_id = f"{self.boot}-{self._generated_ids}"
        return Request(head, body, request_id, values)

    def reject_before_body(self, head: RequestHead) -> RejectedRequestError | None:
        """Reject a request without a valid API key before its body is received; None if the body may come."""
        try:
            if self.active is not None and self.active.access is not None:
                self.active.access.authenticate(head)
        except RejectedRequestError as rejection:
            rejection.must_close = True
            return rejection
        return None

    def open(self, client: Downstream, request: Request) -> Exchange | LocalResponse:
        """Start an exchange, or respond without a replica; RejectedRequestError by path, method, key or limit."""
        if request.is_large:
            self._hold_body(request)
        if request.head.method == OPTIONS and (preflight := self._preflight(request.head)) is not None:
            return preflight
        accepted = self.accept(request)
        if isinstance(accepted, LocalResponse):
            return accepted
        self.services.held_body_bytes += request.held_bytes
        return Exchange(self.services, accepted, client, request)

    def _preflight(self, head: RequestHead) -> LocalResponse | None:
        """The response to a browser that asks, without a key, what a page may send; None if it may not send it."""
        methods = methods_of(head)
        if methods is None or self.active is None or self.active.cross_origin is None:
            return None
        return self.active.cross_origin.preflight(head, methods)

    def _hold_body(self, request: Request) -> None:
        """Count a large body until it is dropped; RejectedRequestError if all of them together are too large."""
        size, services = len(request.body), self.services
        if self.unfinished_body_bytes + services.held_body_bytes + size > self.limits.max_unfinished_body_bytes:
            raise RejectedRequestError(503, "too many large bodies at once", retry_after_s=RETRY_AFTER_S)
        request.held_bytes = size

    def accept(self, request: Request) -> ActiveConfiguration | LocalResponse:
        """Count a request as in flight, or respond without a replica; RejectedRequestError as ``open``."""
        head = request.head
        methods = POST_ONLY if head.endpoint is not None else methods_of(head)
        if methods is None:
            raise RejectedRequestError(404, "no such path")
        if head.method not in methods:
            raise RejectedRequestError(405, "no such method here", headers=((b"Allow", b", ".join(methods)),))
        if head.path == HEALTH:
            return LocalResponse(200 if self.not_ready_reason is None else 503)
        active = self.active
        if active is None:
            raise RejectedRequestError(503, "this router has no configuration yet", retry_after_s=RETRY_AFTER_S)
        if active.access is not None:
            request.grant = active.access.authenticate(head)
        in_flight, limit, shared = self.services.in_flight, active.limits.max_in_flight, self.shared_limits
        if in_flight >= limit or not (shared is None or shared.admits(in_flight, limit)):
            raise RejectedRequestError(503, "this router is at its limit of requests", retry_after_s=RETRY_AFTER_S)
        if request.grant is not None:
            request.grant.admit()
        if head.method != POST and (local := self._models_response(active.config, request)) is not None:
            return local
        self.services.in_flight += 1
        self.requests += 1
        return active

    def _models_response(self, config: RouterConfig, request: Request) -> LocalResponse | None:
        """The list of models, or one of them; None for other requests, or where a replica has to respond."""
        path, grant, reported = request.head.path, request.grant, self.services.checks.models
        name = None if path == MODELS else model_named_by(path)
        if path == MODELS:
            local = models_response(config, grant, reported)
        elif name is not None:
            local = model_response(config, grant, reported, name)
        else:
            return None
        return LocalResponse(200) if local is None and request.head.method == HEAD else local

    # --- configuration ---

    @property
    def not_ready_reason(self) -> str | None:
        """Why the router should get no traffic; None if it is ready."""
        if self.is_draining:
            return "draining"
        return "no configuration yet" if self.active is None else None

    async def prepare(self, snapshot: LoadedSnapshot) -> Swap:
        """Build everything that a configuration needs, in a thread or in slices between requests.

        The returned swap cannot fail.
        """
        new = await asyncio.to_thread(self._build, snapshot.config)

        async def swap() -> None:
            await run_in_slices(new.placement.prepare(self.balancer.health))
            self._activate(new)
            await run_in_slices(new.placement.prepare(self.balancer.health))  # again, if replicas joined

        return swap

    def _build(self, config: RouterConfig) -> ActiveConfiguration:
        uses_semantic_caches(config)  # ConfigError
        state = self.balancer
        placement = Placement(config, state.loads, int(self.boot, 16), state.residency, self.name, state.token_ratios)
        current = self.active.connection_pools if self.active else {}
        connection_pools: dict[str, ConnectionPool] = {}
        for replica in (replica for pool in config.pools for replica in pool.replicas):
            address = self._address(config, replica)
            pool = current.get(replica.name)
            if pool is None or pool.address != address:
                pool = ConnectionPool(
                    replica.name,
                    address,
                    deadlines=self.deadlines,
                    write_buffer=self.write_buffer,
                    header_cache=self.response_head_cache,
                    loop=self.loop,
                )
            connection_pools[replica.name] = pool
        access = AccessControl(config, self.shared_limits) if config.access is not None else None
        return ActiveConfiguration(config, placement, connection_pools, access)

    def _address(self, config: RouterConfig, replica: ReplicaConfig) -> Address:
        return Address(
            replica.url,
            api_key=replica.api_key,
            hides_keys=config.access is not None,
            tls=self.tls.upstream_context if urlsplit(replica.url).scheme == "https" else None,
            networks=config.replica_networks,
        )

    def _activate(self, new: ActiveConfiguration) -> None:
        """Swap the configuration between two requests."""
        previous, self.active, self.limits = self.active, new, new.limits
        self.balancer.fleet = ActiveFleet(new.config, new.placement, new.connection_pools)
        self.connection_limit.configure(new.limits.max_connections_per_address, self.clients)
        self.request_head_cache.reset(new.limits.max_header_bytes)  # heads were checked by the previous limits
        if previous is not None:
            new.placement.carry_over(previous.placement)
            if previous.access is not None and new.access is not None:
                new.access.carry_over(previous.access)
            for pool in set(previous.connection_pools.values()) - set(new.connection_pools.values()):
                pool.retire()
                self._retired.add(pool)
            self._retired = {pool for pool in self._retired if pool.is_in_use}
        self._configure_balancer(new)
        self._configure_services(new)
        for name in joined_replicas(new.config, previous.config) if previous is not None else ():
            self.services.start_warm_up(name)
        self._housekeeping.start()

    def _configure_balancer(self, new: ActiveConfiguration) -> None:
        state, pools, targets = self.balancer, new.config.pools, frozenset(target_ids(new.config))
        if self.state_exchange is not None:
            self.state_exchange.configure(new.config.hash_secret, targets)
        state.loads.forget_all_but(targets)
        state.residency.forget_all_but(targets)
        state.token_ratios.forget_all_but((pool.name, model) for pool in pools for model in models_of(pool))
        state.breakers.configure(pools)
        state.slow_starts.forget_all_but({ReplicaId(name) for name in new.connection_pools})
        state.retry_budget.ratio = new.limits.retry_ratio
        state.retry_budget.floor_per_s = new.limits.retry_floor_per_s

    def _configure_services(self, new: ActiveConfiguration) -> None:
        services, queues, warm_ups = self.services, self.services.all_admission_queues, self.services.all_warm_ups
        services.metrics.prune(new.series)  # also at each scrape, but there may be none
        services.checks.configure(_check_targets(new))
        services.kv_events.configure(new.config)
        services.warm_ups = warm_ups if warm_ups.configure(new.config) else None
        services.admission_queues = queues if queues.configure(new.config, self.shared_limits) else None
        digests = services.request_digests
        if digests is None or digests.hash_secret != new.config.hash_secret:
            services.request_digests = RequestDigests(new.config.hash_secret)
        has_caches = any(group.response_cache for pool in new.config.pools for group in pool.groups)
        if has_caches or services.response_caches is not None:
            caches = services.all_response_caches
            services.response_caches = caches if caches.configure(new.config) else None

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
        """Accept no new requests; ``shutdown.drain`` waits for the responses."""
        self.services.is_draining = self.services.all_warm_ups.is_draining = True

    def close(self) -> None:
        """Close all connections and stop everything at once."""
        self.begin_draining()
        for client in list(self.clients):
            client.reset()
        self.services.close()
        if self.state_exchange is not None:
            self.state_exchange.close()
        self._housekeeping.stop()
        for pool in {*self._retired, *(self.active.connection_pools.values() if self.active else ())}:
            pool.close()
        self.deadlines.close()


def _check_targets(active: ActiveConfiguration) -> list[CheckTarget]:
    return [
        CheckTarget(
            replica.name, active.connection_pools[replica.name].address, pool.health, _unlisted_adapters(pool, replica)
        )
        for pool in active.config.pools
        for replica in pool.replicas
        if replica.state is not ReplicaState.DISABLED
    ]


def _unlisted_adapters(pool: PoolConfig, replica: ReplicaConfig) -> frozenset[str]:
    """The adapters of a pool, if the configuration does not list which of them the replica serves."""
    return frozenset(adapter.name for adapter in pool.adapters) if replica.adapters is None else frozenset()
