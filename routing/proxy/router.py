"""What all connections of a router share: the configuration in force, the links to replicas, loads, health, counts."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterator
from typing import Final

from routing.core.health.book import HealthBook
from routing.core.health.breaker import Breakers
from routing.core.health.slow_start import SlowStarts
from routing.core.limits.retry_budget import RetryBudget
from routing.core.limits.shared import SharedLimits
from routing.core.loads.book import LoadBook
from routing.core.prompt.canonical import CanonicalPrompt
from routing.core.residency.residency import Residency
from routing.core.token_ratio import TokenRatios, models_of
from routing.core.types import NoReplicaError, ReplicaId
from routing.placement.decision import Decision
from routing.placement.placement import Placement
from routing.proxy import stopping
from routing.proxy.clients.access import AccessControl
from routing.proxy.clients.admission import Admission
from routing.proxy.clients.client import Client
from routing.proxy.clients.connection_limit import ConnectionLimit
from routing.proxy.clients.models import models_answer
from routing.proxy.configuration.last_known_good import LastKnownGood
from routing.proxy.configuration.signatures import Signatures
from routing.proxy.configuration.store import ConfigStore, Swap
from routing.proxy.decisions.record import Record
from routing.proxy.decisions.ring import DecisionRing
from routing.proxy.decisions.shapes import ShapeSampler
from routing.proxy.exchanges.exchange import Exchange
from routing.proxy.exchanges.gates import Gates
from routing.proxy.exchanges.placing import PROMPT_PATHS, RETRY_AFTER_S
from routing.proxy.http.answer import AnswerHead
from routing.proxy.http.errors import RefusalError
from routing.proxy.http.local_answer import LocalAnswer
from routing.proxy.http.request import Head, Request
from routing.proxy.known_heads import ANSWER_NAMES, REQUEST_NAMES, KnownHeads
from routing.proxy.large_bodies.reader import LargeBodies
from routing.proxy.log import event
from routing.proxy.loop.deadlines import Deadlines
from routing.proxy.loop.outbox import Outbox
from routing.proxy.loop.turns import in_turns
from routing.proxy.metrics.configured import ConfiguredSeries
from routing.proxy.metrics.metrics import Metrics, Outcome, SeriesKey
from routing.proxy.replicas.address import Address
from routing.proxy.replicas.health import HealthChecks
from routing.proxy.replicas.link import ReplicaLink
from routing.proxy.replicas.upstream import Failure
from routing.proxy.replicas.watch import Watch
from routing.proxy.serving import Serving, checked_replicas, joined_names, target_ids, usage_pools
from routing.proxy.sockets.tls import Tls
from routing.proxy.upkeep import Upkeep
from routing.proxy.warming.warm_ups import WarmUps
from routing.schema import Limits, LoadedSnapshot, ReplicaConfig, RouterConfig

logger = logging.getLogger(__name__)

HEALTH: Final = b"/health"
MODELS: Final = b"/v1/models"
_METHODS: Final = dict.fromkeys(PROMPT_PATHS, (b"POST",)) | dict.fromkeys((HEALTH, MODELS), (b"GET", b"HEAD"))


class Router:
    """One router process, apart from its listening sockets."""

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
        self.outbox = Outbox(self.loop)
        self.request_heads = KnownHeads[Head](REQUEST_NAMES)
        self.answer_heads = KnownHeads[AnswerHead](ANSWER_NAMES)
        self.loads = LoadBook()
        self.residency = Residency()
        self.token_ratios = TokenRatios()
        self.limits = Limits()
        self.shared_limits: SharedLimits | None = None  # with other processes; None: there are none
        self.health = HealthBook()
        self.slow_starts = SlowStarts(self.health)
        self.breakers = Breakers(self.health, self.loop.time, self._returned)
        self.checks = HealthChecks(self.health, self._came_up, self.progress_at)
        self.retry_budget = RetryBudget(self.limits.retry_ratio, self.limits.retry_floor_per_s)
        self.all_gates = Gates()
        self.gates: Gates | None = None  # None: no limit is configured
        self.all_warm_ups = WarmUps(self)
        self.warm_ups: WarmUps | None = None  # None: no pool warms up
        self.watch = Watch(self)
        self._upkeep = Upkeep(self)
        self.metrics = Metrics()
        self.decisions = DecisionRing()
        self.shape_sampler = ShapeSampler()
        self.store = ConfigStore(self.prepare, files, signatures)
        self.serving: Serving | None = None
        self.large_bodies = LargeBodies()
        self.clients: set[Client] = set()
        self.connection_limit = ConnectionLimit()
        self.unfinished_bytes = 0  # of bodies that are still coming
        self.is_draining = False
        self.requests = 0  # taken, ever
        self._in_flight = 0
        self.in_flight_elsewhere = 0  # in other processes that share the port
        self._idle = asyncio.Event()  # set by the last request of a draining router
        self._retired: set[ReplicaLink] = set()
        self._named = 0  # requests whose clients gave them no id

    # --- requests ---

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return self._in_flight

    def request(self, head: Head, body: bytes, values: list[bytes] | None = None) -> Request:
        """A request that is here whole. One whose client gave it no id gets one.

        ``values``: of its head, where that was recognised.
        """
        name = head.request_id_with(values)
        if not name:
            self._named += 1
            name = f"{self.boot}-{self._named}"
        return Request(head, body, name, values)

    def body_refusal(self, head: Head) -> RefusalError | None:
        """Why a body is not waited for that is still coming: whose it is nobody knows. None if it may come."""
        try:
            if self.serving is not None and self.serving.access is not None:
                self.serving.access.known(head)
        except RefusalError as refusal:
            refusal.must_close = True
            return refusal
        return None

    def open(self, client: Client, request: Request) -> Exchange | LocalAnswer:
        """Take a request: for a replica, or answered here. RefusalError for what no path or limit allows."""
        head = request.head
        methods = _METHODS.get(head.path)
        if methods is None:
            raise RefusalError(404, "no such path")
        if head.method not in methods:
            raise RefusalError(405, "no such method here", headers=((b"Allow", b", ".join(methods)),))
        if head.path == HEALTH:
            return self._health_answer()
        serving = self.serving
        if serving is None:
            raise RefusalError(503, "this router has no configuration yet", retry_after_s=RETRY_AFTER_S)
        if serving.access is not None:
            request.grant = serving.access.admit(head)
        if head.path == MODELS and (models := models_answer(serving.config, request.grant)) is not None:
            return models
        if self._in_flight + self.in_flight_elsewhere >= serving.limits.max_in_flight:
            raise RefusalError(503, "this router is at its limit of requests", retry_after_s=RETRY_AFTER_S)
        self._in_flight += 1
        self.requests += 1
        return Exchange(self, serving, client, request)

    def placed(self, decision: Decision, request: Request, prompt: CanonicalPrompt) -> None:
        """A request goes to its first replica: tell those who count by prompts."""
        if request.grant is not None:
            request.grant.began(decision.keys.prompt_tokens)
        if self.warm_ups is not None:
            self.warm_ups.met(decision, request, prompt)

    def ended(self, record: Record | None, outcome: Outcome, *, pool: str, group: str) -> None:
        """Account for a request that went through ``open``, exactly once."""
        self._in_flight -= 1
        if self.is_draining and not self._in_flight:
            self._idle.set()
        if record is None:
            self.metrics.unplaced_ended(outcome, pool, group)
        else:
            self.metrics.placed_ended(record, outcome)
            self.decisions.add(record)

    # --- what becomes of replicas ---

    def failed(self, replica: str, reason: str, *, was_probe: bool) -> None:
        """A replica failed a request in a way that its health check does not see."""
        if self.breakers.failed(ReplicaId(replica), reason, was_probe=was_probe):
            event(logger, "replica_out", level=logging.WARNING, replica=replica, reason=reason)

    def response_failed(self, replica: str, failure: Failure, *, was_probe: bool) -> None:
        """A response, or its rest, will not come. A timeout counts only where the engine shows no progress either."""
        if failure is Failure.TIMEOUT:
            self.watch.timed_out(replica, was_probe=was_probe)
        else:
            self.failed(replica, failure, was_probe=was_probe)

    def _returned(self, replica: ReplicaId) -> None:
        event(logger, "replica_back", replica=replica)
        self.start_slowly(replica)

    def _came_up(self, replica: ReplicaId) -> None:
        self.breakers.came_up(replica)
        self._join(replica)

    def progress_at(self, replica: str) -> float:
        """When a replica's latest body byte came, in loop time; 0 if none ever did."""
        link = self.serving.links.get(replica) if self.serving else None
        return link.progress_at if link else 0.0

    def _join(self, replica: ReplicaId) -> None:
        """Its cache is empty: warm it up where the pool says so, else let it start slowly as it is."""
        if self.warm_ups is None or not self.warm_ups.begin(replica):
            self.start_slowly(replica)

    def cuts_warm_ups_short(self, missing: NoReplicaError) -> bool:
        """Whether a replica that can serve what no other can was to warm up first, and takes traffic now."""
        return self.warm_ups is not None and self.warm_ups.cut_short(missing)

    def start_slowly(self, replica: ReplicaId) -> None:
        """Let a replica take traffic, a part of its share at first."""
        self.slow_starts.begin(replica, self.breakers.settings(replica).slow_start_s, self.loop.time())

    # --- configuration ---

    @property
    def not_ready_reason(self) -> str | None:
        """Why no traffic should come here; None when it may."""
        if self.is_draining:
            return "draining"
        return "no configuration yet" if self.serving is None else None

    def knows(self, key: SeriesKey, *, tried: bool = False) -> bool:
        """Whether a series' labels are in the configuration; those without a pool always are.

        ``tried``: and its policy has a trial.
        """
        return not key[0] or (self.serving is not None and self.serving.series.holds(key, tried=tried))

    async def prepare(self, snapshot: LoadedSnapshot) -> Swap:
        """Build everything a configuration needs, in a thread or in turns with requests; the swap cannot fail."""
        serving = await asyncio.to_thread(self._build, snapshot.config)

        async def swap() -> None:
            await in_turns(serving.placement.prepare(self.health))
            self._swap(serving)
            await in_turns(serving.placement.prepare(self.health))  # anew where replicas joined, else nothing is left

        return swap

    def _build(self, config: RouterConfig) -> Serving:
        placement = Placement(config, self.loads, int(self.boot, 16), self.residency, self.name, self.token_ratios)
        before = self.serving.links if self.serving else {}
        links = {
            replica.name: old
            if (old := before.get(replica.name)) and old.address == address
            else self._link(replica.name, address)
            for replica, address in self._replica_addresses(config)
        }
        access = AccessControl(config, self.shared_limits) if config.access is not None else None
        admission = Admission(config, placement.models, placement.matcher)
        return Serving(
            config,
            placement,
            links,
            access,
            admission,
            ConfiguredSeries(config),
            config.limits,
            targets=frozenset(target_ids(config)),
            checked=[one for pool in config.pools for one in checked_replicas(pool, links)],
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

    def _link(self, name: str, address: Address) -> ReplicaLink:
        return ReplicaLink(
            name,
            address,
            deadlines=self.deadlines,
            outbox=self.outbox,
            known_heads=self.answer_heads,
            loop=self.loop,
        )

    def _swap(self, serving: Serving) -> None:
        before, self.serving, self.limits = self.serving, serving, serving.limits
        self.connection_limit.limit(serving.limits.max_connections_per_address, self.clients)
        if before is not None:
            serving.placement.carry_over(before.placement)
        self.request_heads.forget(serving.limits.max_header_bytes)  # they were read by the limits before
        if before is not None and before.access is not None and serving.access is not None:
            serving.access.carry_over(before.access)
        kept = set(serving.links.values())
        for link in set(before.links.values()) - kept if before else ():
            link.retire()
            self._retired.add(link)
        self._retired = {link for link in self._retired if link.is_in_use}
        self.metrics.prune(self.knows)  # at each scrape too, but there may be none
        self.loads.forget_all_but(serving.targets)
        self.residency.forget_all_but(serving.targets)
        self.token_ratios.forget_all_but(
            (pool.name, model) for pool in serving.config.pools for model in models_of(pool)
        )
        self.checks.check_only(serving.checked)
        self.breakers.configure(serving.config.pools)
        self.slow_starts.forget_all_but({ReplicaId(name) for name in serving.links})
        self.retry_budget.ratio = serving.limits.retry_ratio
        self.retry_budget.floor_per_s = serving.limits.retry_floor_per_s
        self.warm_ups = self.all_warm_ups if self.all_warm_ups.configure(serving.config) else None
        self.gates = self.all_gates if self.all_gates.configure(serving.config, self.shared_limits) else None
        if before:
            for name in joined_names(serving.config, before.config):
                self._join(name)
        self._upkeep.start()

    # --- the end ---

    async def drain(self, *, linger_s: float = 0.0) -> None:
        """Answer what is here or was begun, up to the configured limit: ``stopping.py``."""
        self.is_draining = True
        await stopping.drain(self, linger_s)

    async def no_requests(self) -> None:
        """Wait until no request is under way, of a router that is draining."""
        while self._in_flight:
            self._idle.clear()
            await self._idle.wait()

    def close(self) -> None:
        """End everything at once."""
        self.is_draining = True
        for client in list(self.clients):
            client.cut()
        self.checks.close()
        self._upkeep.close()
        self.watch.close()
        self.large_bodies.close()
        self.all_warm_ups.close()
        for link in {*self._retired, *(self.serving.links.values() if self.serving else ())}:
            link.close()
        self.deadlines.close()

    def _health_answer(self) -> LocalAnswer:
        reason = self.not_ready_reason
        return LocalAnswer(200 if reason is None else 503)
