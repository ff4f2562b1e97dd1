"""What a router shows of itself: figures, replicas, decisions. The admin port and a parent of workers ask for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from routing.core.breaker import State
from routing.core.load import LoadBook
from routing.core.targets import targets_of
from routing.core.types import PrefixHash, ReplicaId, RoutingError
from routing.proxy.clients.request import Head, Request
from routing.proxy.configuration.store import Applied, ConfigStore, Source
from routing.proxy.errors import RefusalError
from routing.proxy.exchanges.placing import PROMPT_PATHS, admitted_request, refusal_of
from routing.proxy.figures import build, metrics
from routing.proxy.figures.decisions import Record, shown_hash
from routing.proxy.loop.lasting import failures
from routing.proxy.loop.turns import in_turns
from routing.proxy.router import Router, Serving
from routing.schema import ReplicaConfig
from routing.strategies.placement import Decision


class Explained(Struct):
    """A request to explain: what a client would have sent."""

    path: str
    body: msgspec.Raw
    headers: dict[str, str] = {}
    key: str | None = None  # the name of its API key


class View(Protocol):
    """What the admin port shows and does, of one router or of several workers together."""

    @property
    def name(self) -> str:
        """The router's name."""
        ...

    @property
    def boot(self) -> str:
        """Tells one life of the router from the next."""
        ...

    @property
    def store(self) -> ConfigStore:
        """The configuration in force."""
        ...

    async def take(self, document: bytes) -> Applied:
        """Put a pushed configuration into force; NackError if it is refused, NotNowError if it was not judged."""
        ...

    @property
    def not_ready_reason(self) -> str | None:
        """Why no traffic should come here; None when it may."""
        ...

    @property
    def warming(self) -> dict[str, dict[str, int]]:
        """How far each replica is that warms up, by name."""
        ...

    async def metrics(self) -> str:
        """Everything counted, as Prometheus text."""
        ...

    @property
    def health_epoch(self) -> int | None:
        """Changes with any replica's health; None where that is only known by looking."""
        ...

    async def replicas(self) -> list[dict[str, Any]]:
        """Every configured replica, its health and its load."""
        ...

    async def decisions(self, after: int, limit: int, ratio: float) -> dict[str, Any]:
        """Decisions after a sequence number, oldest first, with this part of their block hashes."""
        ...

    async def explain(self, asked: bytes) -> dict[str, Any]:
        """The decision that a request would get now; RefusalError if it gets none."""
        ...


class RouterView:
    """One router, seen from outside."""

    def __init__(self, router: Router, version: str) -> None:
        self._router = router
        self._version = version

    @property
    def name(self) -> str:
        """The router's name."""
        return self._router.name

    @property
    def boot(self) -> str:
        """Tells one life of the router from the next."""
        return self._router.boot

    @property
    def store(self) -> ConfigStore:
        """The configuration in force."""
        return self._router.store

    async def take(self, document: bytes) -> Applied:
        """Put a pushed configuration into force; NackError if it is refused."""
        return await self.store.apply(document, Source.PUSH)

    @property
    def not_ready_reason(self) -> str | None:
        """Why no traffic should come here; None when it may."""
        return self._router.not_ready_reason

    @property
    def warming(self) -> dict[str, dict[str, int]]:
        """How far each replica is that warms up, by name."""
        return warming_of(self.replica_rows())

    async def metrics(self) -> str:
        """Everything counted, as Prometheus text."""
        return "\n".join(await in_turns(chain(about_lines(self, self._version), self.figures()))) + "\n"

    @property
    def health_epoch(self) -> int | None:
        """Changes with any replica's health."""
        return self._router.health.epoch

    async def replicas(self) -> list[dict[str, Any]]:
        """Every configured replica, its health and its load."""
        return await in_turns(self.replica_rows())

    async def decisions(self, after: int, limit: int, ratio: float) -> dict[str, Any]:
        """Decisions after a sequence number, oldest first, with this part of their block hashes."""
        page = self._router.decisions.page(after, limit, ratio)
        return page.as_json(await in_turns(page.shown()))

    async def explain(self, asked: bytes) -> dict[str, Any]:
        """The decision that a request would get now; RefusalError if it gets none."""
        try:
            return self._explain(msgspec.json.decode(asked, type=Explained))
        except RoutingError as error:
            raise refusal_of(error) from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RefusalError(422, str(error)) from None

    def _explain(self, request: Explained) -> dict[str, Any]:
        serving = self._router.serving
        if serving is None:
            raise RefusalError(503, "no configuration yet")
        path = request.path.encode()
        if path not in PROMPT_PATHS:
            raise RefusalError(422, "path: not one that carries a prompt")
        asked = _as_request(request, serving)
        wanted = admitted_request(asked, serving.admission)
        decision = serving.placement.decide(wanted, self._router.health)
        record = Record.of(decision, asked.request_id, wanted.prompt.tokens)
        return record.as_json() | {
            "model": decision.served.model,
            "adapter": decision.served.adapter or None,
            "trial": serving.placement.verdict(decision, wanted),
            "tier1": _tier1(decision, serving.placement.tier1_hashes(decision, wanted)),
            "group_replicas": _group_replicas(decision),
            "refused": decision.choice.refused,
            "bound": decision.choice.bound,
            "candidates": [candidate.as_json() for candidate in decision.explained()],
        }

    # --- rows and lines ---

    def figures(self) -> Iterator[str]:
        """What was counted, and what is now; without what tells this router from others. Take it ``in_turns``."""
        router = self._router
        router.metrics.prune(router.knows)
        yield from router.metrics.lines()
        yield from self._failure_lines()
        yield from router.all_gates.lines()
        yield from router.all_warm_ups.lines()
        yield from self._replica_lines()
        yield from metrics.header(
            "tasks", "gauge", "Asyncio tasks of the process: a few, and one for each health check."
        )
        yield f"{metrics.PREFIX}tasks {len(asyncio.all_tasks())}"
        yield from process_lines()

    def replica_rows(self) -> Iterator[dict[str, Any]]:
        """The replicas of all pools. Take it ``in_turns``."""
        router, serving = self._router, self._router.serving
        for pool in serving.config.pools if serving else ():
            for replica in pool.replicas:
                name = ReplicaId(replica.name)
                finding, ranks = router.checks.finding(name), _loads(router.loads, replica)
                breaker = router.breakers.troubled.get(name)
                yield {
                    "pool": pool.name,
                    "name": replica.name,
                    "url": replica.url,
                    "state": replica.state,
                    "health": finding.health,
                    "breaker": router.breakers.state(name),
                    "reason": finding.reason or (breaker.reason if breaker else None),
                    "share": router.health.share(name),
                    "warming": router.all_warm_ups.progress(name),
                    "running": sum(running for running, _ in ranks),
                    "waiting_tokens": sum(tokens for _, tokens in ranks),
                    "ranks": [{"running": running, "waiting_tokens": tokens} for running, tokens in ranks],
                    "connections": serving.links[replica.name].connections if serving else 0,
                    "last_ok_at": finding.last_ok_at.isoformat() if finding.last_ok_at else None,
                }

    def _failure_lines(self) -> Iterator[str]:
        router = self._router
        yield from metrics.header("ejections_total", "counter", "Replicas taken out by their breakers, by why.")
        for (pool, replica, cause), count in list(router.breakers.opened.items()):
            what = metrics.labels(pool=pool, replica=replica, cause=cause)
            yield f"{metrics.PREFIX}ejections_total{{{what}}} {count}"
        yield from metrics.header("retries_refused_total", "counter", "Further tries for which the budget had no room.")
        yield f"{metrics.PREFIX}retries_refused_total {router.retry_budget.refused}"
        yield from metrics.header("connections_refused_total", "counter", "Connections over an address's limit.")
        yield f"{metrics.PREFIX}connections_refused_total {router.addresses.refused}"

    def _replica_lines(self) -> Iterator[str]:
        rows = list(self.replica_rows())
        gauges: tuple[tuple[str, str, Callable[[dict[str, Any]], object]], ...] = (
            ("replica_up", "Whether a replica answers its health check.", lambda row: int(row["health"] == "up")),
            (
                "replica_out",
                "Whether a replica's breaker keeps requests away.",
                lambda row: int(row["breaker"] != State.CLOSED),
            ),
            ("replica_share_ratio", "Part of its weight that a replica has.", lambda row: row["share"]),
            ("in_flight", "Requests sent to a replica and not ended.", lambda row: row["running"]),
            ("waiting_tokens", "Estimated prompt tokens without a first byte yet.", lambda row: row["waiting_tokens"]),
        )
        for name, text, value in gauges:
            yield from metrics.header(name, "gauge", text)
            for row in rows:
                if name == "replica_up" and row["health"] == "unknown":
                    continue
                where = metrics.labels(pool=row["pool"], replica=row["name"])
                yield f"{metrics.PREFIX}{name}{{{where}}} {value(row)}"


def _loads(book: LoadBook, replica: ReplicaConfig) -> list[tuple[int, int]]:
    """Requests and waiting tokens that this process has at each rank of a replica."""
    loads = [book.load(target.id) for target in targets_of(replica)]
    return [(load.running - load.elsewhere_running, load.waiting_tokens - load.elsewhere_tokens) for load in loads]


def _as_request(asked: Explained, serving: Serving) -> Request:
    """The request that a client would have sent; RefusalError for a key that nobody has."""
    headers = {name.lower(): value for name, value in asked.headers.items()}
    head = Head(b"POST", asked.path.encode(), http11=True)
    head.session_id = headers.get("x-session-id") or None
    head.task_group = headers.get("x-task-group") or None
    request = Request(head, bytes(asked.body), headers.get("x-request-id", ""))
    if asked.key is not None:
        request.grant = serving.access.named(asked.key) if serving.access else None
        if request.grant is None:
            raise RefusalError(422, f"key: no API key is named {asked.key[:64]!r}")
    return request


def _group_replicas(decision: Decision) -> dict[str, Any] | None:
    """The set that follows the group's traffic, and its part of that; None where the configuration says the set."""
    route = decision.route
    if not route.is_shared or route.shares is None:
        return None
    return {"share_ratio": route.shares.share(route.group), "replicas": route.shares.replicas(route.group)}


def _tier1(decision: Decision, by_group: dict[str, PrefixHash | None]) -> dict[str, Any]:
    """Where the opening ended and its hash, and which hash each task group would have to claim to get this request."""
    return {
        "rule": decision.route.tier1,
        "bytes": decision.keys.tier1_bytes,
        "hash": shown_hash(decision.keys.tier1),
        "hash_by_group": {group: shown_hash(found) for group, found in by_group.items()},
    }


def warming_of(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Out of the replicas' rows, how far each is that warms up."""
    return {row["name"]: row["warming"] for row in rows if row["warming"] is not None}


def process_lines() -> Iterator[str]:
    """What is of the process, whoever lives in it."""
    yield from metrics.header("loop_failures_total", "counter", "Mistakes of the router's own, in loops that went on.")
    for loop, count in failures().items():
        yield f"{metrics.PREFIX}loop_failures_total{{{metrics.labels(loop=loop)}}} {count}"
    yield from metrics.process_lines()


def about_lines(view: View, version: str) -> Iterator[str]:
    """Which router this is, and what it runs."""
    yield from metrics.header("info", "gauge", "This router.")
    yield f"{metrics.PREFIX}info{{{metrics.labels(router=view.name, boot=view.boot, **build.facts(version))}}} 1"
    applied = view.store.applied
    if applied is not None:
        yield from metrics.header("config_revision", "gauge", "The configuration in force.")
        yield f"{metrics.PREFIX}config_revision {applied.snapshot.revision}"
        yield from metrics.header("config_applied_timestamp_seconds", "gauge", "Unix time since when it is.")
        yield f"{metrics.PREFIX}config_applied_timestamp_seconds {applied.at.timestamp()}"
