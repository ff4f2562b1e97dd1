"""Active health checks, and the replica state that all parts of a router share.

Theory of operation. One task per replica requests its health path, at intervals and after failed connections. Each
check uses a connection of its own, because a kept-alive one does not show whether the replica
accepts new ones. ``failures`` failed checks in a row make a replica down, ``successes`` passed ones make it up; a
replica that was never checked counts as up. When requests cannot connect, the task checks at once, though not sooner
than ``MIN_INTERVAL_S`` after its last check. If that check fails too, all those requests count as one more failure;
otherwise the cause has passed, such as a full accept queue, and is not counted. A replica that is down gets no requests
even if all are down: clients get a 503 that names the pool. Checks continue at the same interval.

An overloaded replica may be late with its health check while it still sends responses. A timeout during which the
replica sent body bytes is therefore not a failure: under overload it would take down a whole pool for being busy.

The same task reads the replica's ``/v1/models``, for the router's own list of models: rarely, once it is known, but
every few checks in a pool with LoRA adapters, because vLLM loads and unloads these at run time. If that request fails,
the previous result stays.

``Balancer`` holds the shared state: loads, residency, health, circuit breakers, retry budget.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import count

import msgspec
from msgspec import Struct

from routing.balancing.load_tracker import LoadTracker, TokenRatios
from routing.balancing.placement import Placement
from routing.balancing.replicas import HealthRegistry, SlowStarts
from routing.balancing.residency import Residency
from routing.health.circuit_breaker import CircuitBreakers
from routing.http.tasks import Background, run_until_cancelled
from routing.http.tls import describe_os_error
from routing.limits.budgets import RetryBudget
from routing.log import event
from routing.schema import HealthCheck, Limits, ReplicaState, RouterConfig
from routing.types import ReplicaId
from routing.upstream.client import fetch, send_request
from routing.upstream.pool import Address, ConnectionPool

CHECKS_PER_ADAPTER_READ = 5  # health checks for each read of the models, where adapters may change or it failed
CHECKS_PER_MODELS_READ = 150  # elsewhere
MAX_MODELS_BYTES = 1 << 20  # of a ``/v1/models`` response; a thousand adapters take a quarter of it
MIN_INTERVAL_S = 0.1  # between two checks, however many requests fail

logger = logging.getLogger(__name__)


class ReportedModel(Struct, frozen=True):
    """A model in a replica's ``/v1/models``."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Models(Struct):
    data: list[ReportedModel]


_models = msgspec.json.Decoder(_Models)


async def read_models(address: Address, timeout_s: float) -> list[ReportedModel] | None:
    """The models that a replica lists in ``/v1/models``; None if it gives no usable response."""
    try:
        async with asyncio.timeout(timeout_s):
            status, body = await fetch(address, "/v1/models", max_bytes=MAX_MODELS_BYTES)
        return _models.decode(body).data if status == 200 else None
    except (TimeoutError, OSError, ValueError, RecursionError):
        return None


@dataclass(slots=True)
class HealthStatus:
    """Check results of one replica. ``is_up`` is None until it was checked."""

    is_up: bool | None = None
    reason: str | None = None  # of the latest failed check; None after a passed one
    last_ok_at: datetime | None = None
    failures: int = 0  # in a row
    successes: int = 0  # in a row
    connect_failed: bool = False  # a request could not connect since the latest check began
    check_now: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def health(self) -> str:
        """``up``, ``down`` or ``unknown``."""
        return "unknown" if self.is_up is None else "up" if self.is_up else "down"


@dataclass(frozen=True, slots=True)
class CheckTarget:
    """A replica to check."""

    name: str
    address: Address
    check: HealthCheck
    adapters: frozenset[str] = frozenset()  # configured LoRA adapters, of which it may have loaded some


class HealthChecks:
    """Check results of one router, and the tasks that produce them. Placement reads the results from ``registry``.

    ``on_recovered`` is called for each replica that was down and is up again. ``progress_at`` returns the loop time of
    the latest body byte from a replica.
    """

    def __init__(
        self,
        registry: HealthRegistry,
        on_recovered: Callable[[ReplicaId], None],
        progress_at: Callable[[str], float],
    ) -> None:
        self.models: dict[str, list[ReportedModel]] = {}  # by replica name, of those that reported theirs
        self._registry = registry
        self._on_recovered = on_recovered
        self._progress_at = progress_at
        self._statuses: dict[str, HealthStatus] = {}  # by replica name, as the targets and the tasks
        self._targets: dict[str, CheckTarget] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def configure(self, targets: list[CheckTarget]) -> None:
        """Check these replicas from now on, and no others. A replica with another address starts again."""
        by_name = {target.name: target for target in targets}
        for name in self._targets.keys() - by_name.keys():
            self._tasks.pop(name).cancel()
            self._forget(name)
        for name, target in by_name.items():
            before = self._targets.get(name)
            if before == target:
                continue
            if before is not None:
                self._tasks[name].cancel()
                if before.address != target.address:
                    self._forget(name)
            self._targets[name] = target
            self._statuses.setdefault(name, HealthStatus())
            checking = run_until_cancelled(Background.HEALTH, partial(self._check_forever, target))
            self._tasks[name] = asyncio.get_running_loop().create_task(checking)

    def status(self, name: str) -> HealthStatus:
        """The check results of a replica; an empty status if it is not checked."""
        return self._statuses.get(name) or HealthStatus()

    def on_connect_failed(self, name: str) -> None:
        """Check at once, because a request could not connect, and count the request if the check fails too."""
        self.status(name).connect_failed = True
        self.request_check(name)

    def request_check(self, name: str) -> None:
        """Check at once, because a request got no response, which may have many causes."""
        self.status(name).check_now.set()

    def close(self) -> None:
        """Cancel all tasks."""
        for task in self._tasks.values():
            task.cancel()

    def _forget(self, name: str) -> None:
        self._statuses.pop(name, None)
        self._targets.pop(name, None)
        self.models.pop(name, None)
        self._registry.mark(ReplicaId(name), up=True)
        self._registry.set_adapters(ReplicaId(name), None)

    async def _check_forever(self, target: CheckTarget) -> None:
        status, time = self._statuses[target.name], asyncio.get_running_loop().time
        for number in count():
            status.check_now.clear()
            connect_failed, status.connect_failed = status.connect_failed, False
            started_at = time()
            reason = await check_once(target)
            if reason is None:
                may_change = target.adapters or target.name not in self.models
                checks_per_read = CHECKS_PER_ADAPTER_READ if may_change else CHECKS_PER_MODELS_READ
                is_due = number % checks_per_read == 0 or not status.is_up
                if is_due and target.adapters:  # placement needs them before its first request
                    await self._read_models(target)
                self._record_success(target)
                if is_due and not target.adapters:
                    await self._read_models(target)
            elif reason != _timeout_reason(target.check) or self._progress_at(target.name) < started_at:
                self._record_failure(target, reason, failures=2 if connect_failed else 1)
            interval_s = target.check.interval_s * random.uniform(0.9, 1.1)  # noqa: S311 - no secret
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await status.check_now.wait()
            await asyncio.sleep(started_at + min(MIN_INTERVAL_S, interval_s) - time())

    async def _read_models(self, target: CheckTarget) -> None:
        models = await read_models(target.address, target.check.timeout_s)
        if models is None:
            return
        self.models[target.name] = models
        if target.adapters:
            self._registry.set_adapters(ReplicaId(target.name), target.adapters & {model.id for model in models})

    def _record_success(self, target: CheckTarget) -> None:
        status = self._statuses[target.name]
        status.last_ok_at = datetime.now(UTC)
        status.failures, status.successes, status.reason = 0, status.successes + 1, None
        if status.is_up is None or status.successes >= target.check.successes:
            status.is_up = True
            if self._registry.mark(ReplicaId(target.name), up=True):
                event(logger, "replica_up", replica=target.name)
                self._on_recovered(ReplicaId(target.name))

    def _record_failure(self, target: CheckTarget, reason: str, *, failures: int) -> None:
        status = self._statuses[target.name]
        status.failures, status.successes, status.reason = status.failures + failures, 0, reason
        if status.failures >= target.check.failures:
            status.is_up = False
            if self._registry.mark(ReplicaId(target.name), up=False):
                event(logger, "replica_down", level=logging.WARNING, replica=target.name, reason=reason)


async def check_once(target: CheckTarget) -> str | None:
    """Send one health check: the reason why it failed, or None if it passed."""
    try:
        async with (
            asyncio.timeout(target.check.timeout_s),
            send_request(target.address, target.check.path) as response,
        ):
            version, code, *_ = (await response.readuntil(b"\r\n")).split(maxsplit=2)  # ValueError if too short
        status = int(code)
    except TimeoutError:
        return _timeout_reason(target.check)
    except OSError as error:
        return describe_os_error(error)
    except UnicodeError:  # the resolver rejects the host name
        return "its host name cannot be resolved"
    except (EOFError, asyncio.LimitOverrunError, ValueError):
        return "its response is not HTTP"
    if not version.startswith(b"HTTP/1."):
        return "its response is not HTTP"
    return None if 200 <= status < 300 else f"health check returned status {status}"


def _timeout_reason(check: HealthCheck) -> str:
    return f"no response within {check.timeout_s:g} s"


class ActiveFleet:
    """The replicas of the active configuration: where requests are placed, and the connections to each replica."""

    def __init__(self, config: RouterConfig, placement: Placement, connection_pools: dict[str, ConnectionPool]) -> None:
        self.config = config
        self.placement = placement
        self.connection_pools = connection_pools  # by replica name


class Balancer:
    """State that all parts of a router share. Each configuration replaces ``fleet``; None before the first."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        limits = Limits()
        self.loop = loop
        self.fleet: ActiveFleet | None = None
        self.loads = LoadTracker()
        self.residency = Residency()
        self.token_ratios = TokenRatios()
        self.health = HealthRegistry()
        self.slow_starts = SlowStarts(self.health)
        self.breakers = CircuitBreakers(self.health, loop.time, self._on_readmitted)
        self.retry_budget = RetryBudget(limits.retry_ratio, limits.retry_floor_per_s)

    def record_failure(self, replica: str, reason: str, *, was_probe: bool) -> None:
        """Count a failed request against a replica's circuit breaker. Health checks do not see such failures."""
        if self.breakers.record_failure(ReplicaId(replica), reason, was_probe=was_probe):
            event(logger, "replica_ejected", level=logging.WARNING, replica=replica, reason=reason)

    def begin_slow_start(self, replica: ReplicaId) -> None:
        """Let a replica take traffic, at first only a part of its share. It may run with other options than before."""
        for target in self.fleet.placement.targets_by_replica.get(replica, ()) if self.fleet is not None else ():
            self.loads.load(target).reports_details = False
        self.slow_starts.begin(replica, self.breakers.settings(replica).slow_start_s, self.loop.time())

    def progress_at(self, replica: str) -> float:
        """Loop time of the latest body byte from a replica; 0 if there was none."""
        connections = self.fleet.connection_pools.get(replica) if self.fleet is not None else None
        return connections.progress_at if connections is not None else 0.0

    def _on_readmitted(self, replica: ReplicaId) -> None:
        event(logger, "replica_readmitted", replica=replica)
        self.begin_slow_start(replica)


def active_replicas(config: RouterConfig) -> dict[ReplicaId, str]:
    """The URLs of the replicas that may get requests, by name."""
    replicas = (replica for pool in config.pools for replica in pool.replicas)
    return {ReplicaId(replica.name): replica.url for replica in replicas if replica.state is ReplicaState.ACTIVE}


def joined_replicas(config: RouterConfig, before: RouterConfig) -> list[ReplicaId]:
    """Replicas that could get no requests before, or that have another URL now and thus another cache."""
    previous = active_replicas(before)
    return [name for name, url in active_replicas(config).items() if previous.get(name) != url]
