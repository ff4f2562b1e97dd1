"""A fleet with a measured history, seeded, for tests of pages."""

from __future__ import annotations

import bisect
import hashlib
import math
import random
from datetime import datetime, timedelta
from functools import cache
from typing import Any

from django.contrib.auth.models import User
from django.db import connection
from django.db.models import Model, Q
from psycopg import sql

from controlplane.models import (
    ConfigSnapshot,
    DiscoveredReplica,
    DiscoveredState,
    Event,
    EventKind,
    Pool,
    Replica,
    ReplicaSource,
    Router,
    RoutingPolicy,
)
from controlplane.services.discovery.sources import create_source
from controlplane.services.events import record_event
from controlplane.services.fleet.pools import create_pool, update_project
from controlplane.services.fleet.replicas import add_replica, record_engine_facts
from controlplane.services.fleet.task_groups import create_task_group
from controlplane.services.policies.lifecycle import create_policy, publish_revision, save_draft
from controlplane.services.policies.rollout_plans import make_plan
from controlplane.services.policies.rollouts import Verdict as Judgement
from controlplane.services.policies.rollouts import advance_rollouts, apply_verdict, pause_rollout
from controlplane.services.routers import announce, record_ack
from controlplane.services.snapshots import single_snapshot
from telemetry.alerts.findings import Finding, Reason, Result
from telemetry.alerts.kinds import KINDS
from telemetry.alerts.kinds.hit_rate_drop import DropEvidence
from telemetry.alerts.message import alert_labels, describe, scope_of
from telemetry.alerts.notifications import notify_due
from telemetry.models import Alert, BucketLayout, Reading, RouterReading, ScrapeState
from telemetry.services.alerts.rules import ensure_default_rules
from telemetry.storage.partitions import ensure_days

EDGES = tuple(0.001 * 1.05**i for i in range(275))
GROUPS = {"coding": 0.82, "retrieval": 0.55, "summaries": 0.21, "": 0.38}  # hit rate of each with a warm cache
SCRAPE_S = 5


def warm_fleet(
    until: datetime, *, seconds: int = 900, replicas: int = 8, by: User | None = None, number: int = 0
) -> Pool:
    """Pool ``chat`` with task groups and a router, measured until ``until``; ``prefix_hash`` is published half
    way through. With another ``number``, one more pool with replicas and a router of its own.
    """
    suffix = f"-{number}" if number else ""
    pool = create_pool(f"chat{suffix}", models=[f"llama-3.3-70b{suffix}"], description="The shared chat fleet", by=by)
    with single_snapshot(reason="the fleet", by=by):  # one for each change takes most of the time
        numbers = range(1, replicas + 1)
        urls = [(f"gpu{suffix}-{n}", f"http://10.{n // 250}.{number}.{n % 250}:8000") for n in numbers]
        fleet = [add_replica(pool, name=name, url=url, by=by) for name, url in urls]
        for replica in fleet:
            record_engine_facts(replica, block_tokens=16, capacity_blocks=27_648)
        for name in filter(None, GROUPS):
            create_task_group(pool, name, owner="platform", by=by)
    policy = pool.policies.get(group=None)
    publish_revision(save_draft(policy, {"strategy": "prefix_hash"}, by=by).pk, by=by, reason="Agents share a prompt")
    router = announce(
        name=f"router-{number + 1}", boot="b1", version="0.1.0", admin_url=f"http://10.0.1.{number + 1}:8081"
    )
    newest = ConfigSnapshot.objects.defer("encrypted").first()
    record_ack(router.pk, number=newest.number, sha256=newest.sha256)
    advance_rollouts()
    change = until - timedelta(seconds=seconds / 2)
    events = Event.objects.filter(Q(pool=pool) | Q(pool=None))  # None: of the router
    events.update(at=until - timedelta(seconds=seconds * 2))
    events.filter(kind=EventKind.POLICY_PUBLISHED).update(at=change)
    measure(fleet, router, until, seconds=seconds, change=change)
    return pool


def measure(fleet: list[Replica], router: Router, until: datetime, *, seconds: int, change: datetime) -> None:
    """Write a reading every 5 s: hit rates rise after ``change``, and the last replica restarts once."""
    start = until - timedelta(seconds=seconds)
    ensure_days({start.date(), until.date()})
    layout, _ = BucketLayout.objects.get_or_create(
        digest=hashlib.sha256(",".join(map(repr, EDGES)).encode()).hexdigest(), defaults={"edges": list(EDGES)}
    )
    restart_s = seconds * 0.8
    replica_rows, router_rows = _readings(len(fleet), seconds, (change - start).total_seconds(), restart_s)
    _copy_in(Reading, start, layout, [{**row, "replica_id": fleet[row["replica_id"]].pk} for row in replica_rows])
    placed = {"pool": fleet[0].pool.name, "replica": fleet[0].name, "policy": fleet[0].pool.name}
    routed = [{**row, **{key: value for key, value in placed.items() if row[key]}} for row in router_rows]
    _copy_in(RouterReading, start, layout, [{**row, "router_id": router.pk} for row in routed])
    for replica in fleet:
        ScrapeState.objects.update_or_create(replica=replica, defaults={"at": until, "ok_at": until, "health": "up"})
    ScrapeState.objects.update_or_create(router=router, defaults={"at": until, "ok_at": until, "health": "up"})
    event = record_event(
        EventKind.REPLICA_RESTARTED, f"Replica {fleet[-1].name} restarted; its cache is cold.",
        pool=fleet[-1].pool, replica=fleet[-1],
    )  # fmt: skip
    event.at = start + timedelta(seconds=restart_s)
    event.save()


Row = dict[str, Any]  # of a table of readings: ``at`` in seconds after the start, a replica as its index in the fleet


@cache
def _readings(replicas: int, seconds: int, change_s: float, restart_s: float) -> tuple[list[Row], list[Row]]:
    """Readings of replicas and router; generated once and written by COPY."""
    rng = random.Random(7)
    readings: list[Row] = []
    routed: list[Row] = []
    for at_s in range(SCRAPE_S, seconds + 1, SCRAPE_S):
        warmth = 0.0 if at_s < change_s else 1 - math.exp(-(at_s - change_s) / 90)
        for index in range(replicas):
            is_down = index == replicas - 1 and restart_s <= at_s < restart_s + 30
            readings.append(_reading(rng, index, at_s, warmth * (0.9 + 0.02 * index), is_down=is_down))
        routed.append({"at": at_s, "pool": "", "group": "", "replica": "", "policy": "", "revision": 0,
                       "state": "ok", "interval_s": SCRAPE_S})  # fmt: skip
        for group, warm_rate in GROUPS.items():
            routed += _routed(rng, at_s, group, 0.3 * warm_rate + 0.7 * warm_rate * warmth)
    return readings, routed


def _copy_in(model: type[Model], start: datetime, layout: BucketLayout, rows: list[Row]) -> None:
    names = sorted(set().union(*rows))
    columns = sql.SQL(", ").join(map(sql.Identifier, [*names, "ttft_layout_id"]))
    statement = sql.SQL("copy {} ({}) from stdin").format(sql.Identifier(model._meta.db_table), columns)
    with connection.cursor() as cursor, cursor.copy(statement) as copy:
        for row in rows:
            timed = {**row, "at": start + timedelta(seconds=row["at"])}
            copy.write_row([*map(timed.get, names), layout.pk if "ttft_at" in row else None])


def _reading(rng: random.Random, index: int, at_s: int, warmth: float, *, is_down: bool) -> Row:
    key = {"at": at_s, "replica_id": index}
    if is_down:
        return {**key, "model": "", "engine": "", "state": "stale"}
    queries = rng.randint(18_000, 26_000)
    rate = min(0.16 + 0.5 * warmth + rng.uniform(-0.04, 0.04), 0.97)
    positions, counts = _histogram(rng, 24, 0.9 - 0.6 * warmth)
    return {
        **key, "model": "llama-3.3-70b", "engine": "0", "state": "ok", "interval_s": SCRAPE_S,
        "queries": queries, "hits": int(queries * rate), "device_tokens": int(queries * rate), "prompt_tokens": queries,
        "generation_tokens": rng.randint(3000, 4000), "preemptions": 0, "finished": rng.randint(20, 28),
        "running": rng.randint(9, 22) - 6 * warmth, "waiting": max(0, rng.randint(-2, 5) - 4 * warmth),
        "kv_usage_ratio": min(0.98, rng.uniform(0.38, 0.62) - 0.12 * warmth),
        "ttft_at": positions, "ttft_counts": counts,
    }  # fmt: skip


def _routed(rng: random.Random, at_s: int, group: str, rate: float) -> list[Row]:
    requests, prompt = rng.randint(30, 60), rng.randint(30_000, 60_000)
    positions, counts = _histogram(rng, requests, 1.1 - rate)
    key = {"at": at_s, "pool": "chat", "group": group, "replica": "gpu-1", "state": "ok", "interval_s": SCRAPE_S}
    counted = {
        **key, "policy": "chat", "revision": 1, "requests": requests, "ok_requests": requests,
        "client_error_requests": 0, "replica_error_requests": 0, "router_error_requests": 0, "cancelled_requests": 0,
        "usage_reported": requests, "prompt_tokens": prompt, "cached_tokens": int(prompt * rate),
    }  # fmt: skip
    timed = {**key, "policy": "", "revision": 0, "ttft_at": positions, "ttft_counts": counts}
    return [counted, timed]


def _histogram(rng: random.Random, count: int, median_s: float) -> tuple[list[int], list[int]]:
    values = [median_s * rng.lognormvariate(0, 0.6) for _ in range(count)]
    buckets: dict[int, int] = {}
    for value in values:
        position = bisect.bisect_left(EDGES, value)
        buckets[position] = buckets.get(position, 0) + 1
    return sorted(buckets), [buckets[position] for position in sorted(buckets)]


def drop_alert(pool: Pool, at: datetime) -> Alert:
    """A firing alert of the pool's default rule, with notifications to every channel."""
    rule = ensure_default_rules(pool)
    kind = KINDS[rule.kind]
    settings = kind.read(rule.settings)
    evidence = DropEvidence(requests=900, tokens=1_200_000)
    finding = Finding(Result.BREACH, Reason.BELOW, 0.31, 0.49, 0.64, evidence=evidence)
    rule.verdict, rule.evaluated_at = finding.as_json(), at
    rule.save()
    detail = describe(rule, kind, settings, finding, at)
    alert = Alert.objects.create(
        rule=rule, pool=pool, state="firing", started_at=at, last_breach_at=at, fired_at=at, value=0.31, limit=0.49,
        baseline=0.64, value_ratio=0.31, baseline_ratio=0.64,
        summary=kind.summarize(scope_of(rule, ""), settings, finding), detail=detail, labels=alert_labels(rule, ""),
    )  # fmt: skip
    notify_due(at + timedelta(seconds=60))
    return alert


def sources_at_work(pool: Pool, now: datetime) -> None:
    """A source with proposed, missing and dismissed replicas, and one that fails."""
    cluster = create_source(
        pool, name="cluster", kind="kubernetes", settings={"service": "vllm", "api_url": "https://10.0.0.1"}
    )
    row = {
        "found": 7,
        "new": 2,
        "vanished": 1,
        "last_poll_at": now,
        "succeeded_at": now,
        "rejected": ["vllm-x: link-local."],
    }
    ReplicaSource.objects.filter(pk=cluster.pk).update(**row, next_poll_at=now + timedelta(hours=1))
    for number, condition in ((21, "ready"), (22, "ready"), (23, "not_ready")):
        _discovered(
            cluster, f"vllm-7d9c5b8f6d-{number}", number, condition=condition, labels={"node": f"gpu-node-{number}"}
        )
    _discovered(cluster, "vllm-7d9c5b8f6d-24", 24, state=DiscoveredState.DISMISSED)
    missed = _discovered(cluster, "gpu-8", 8, state=DiscoveredState.ADOPTED, replica=pool.replicas.get(name="gpu-8"))
    DiscoveredReplica.objects.filter(pk=missed.pk).update(missing_since=now - timedelta(seconds=40))
    failing = create_source(pool, name="names", kind="dns", settings={"host": "vllm.example"}, adoption="adopt")
    error = "No name server responded within 10 s."
    ReplicaSource.objects.filter(pk=failing.pk).update(
        last_poll_at=now, error=error, next_poll_at=now + timedelta(hours=1)
    )


def _discovered(source: ReplicaSource, key: str, number: int, **fields: object) -> DiscoveredReplica:
    url = f"http://10.0.0.{number}:8000"
    return DiscoveredReplica.objects.create(source=source, key=key, name=key, url=url, **fields)


def rollouts_of_every_kind(policy: RoutingPolicy, by: User) -> dict[str, int]:
    """Rollouts that were rolled back, paused, or await approval; ids by name. One draft remains."""
    with_draft = policy.draft()
    rollouts = {"rolled_back": _run_canary(policy, {"strategy": "random"}, by=by, verdict="failed")}
    for name in ("holding", "paused"):
        own = create_policy(policy.pool, policy.pool.groups.order_by("name")[len(rollouts)])
        publish_revision(save_draft(own, {"strategy": "least_load"}, by=by).pk, by=by)
        rollouts[name] = _run_canary(own, {"strategy": "prefix_hash"}, by=by, verdict="inconclusive")
    pause_rollout(rollouts["paused"], by=by, reason="A demo at noon")
    update_project(policy.pool.project, needs_approval=True)
    own = create_policy(policy.pool, policy.pool.groups.order_by("name")[0])
    draft = save_draft(own, {"strategy": "tiered"}, by=by, reason="Two tiers suit it")
    rollouts["awaiting"] = publish_revision(draft.pk, by=by).pk
    if with_draft is not None:
        save_draft(policy, with_draft.settings, by=by)
    return rollouts


def _run_canary(policy: RoutingPolicy, settings: dict[str, str], *, by: User, verdict: str) -> int:
    """A canary on every router, analysed after its time."""
    draft = save_draft(policy, settings, by=by, reason="Agents share a prompt")
    rollout = publish_revision(draft.pk, by=by, plan=make_plan(policy, "by_share", observe_s=0))
    newest = ConfigSnapshot.objects.defer("encrypted").first()
    for router in Router.objects.all():
        record_ack(router.pk, number=newest.number, sha256=newest.sha256)
    advance_rollouts()
    hit_rate = {"name": "hit_rate", "unit": "ratio", "baseline": 0.634, "canary": 0.411, "limit": 0.584}
    detail = "Hit rate 41.1 %, baseline 63.4 %: 22.3 points less than expected (certain above 4.1)."
    ttft = {"name": "ttft_p95_s", "unit": "seconds", "baseline": 0.31, "canary": None, "limit": 0.39}
    readings = [
        {**hit_rate, "verdict": verdict, "detail": detail},
        {**ttft, "verdict": "passed", "detail": "as long as before"},
    ]
    apply_verdict(rollout.pk, stage=0, verdict=Judgement(verdict), readings=readings)
    return rollout.pk
