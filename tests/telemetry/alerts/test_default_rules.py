"""The rules of a new pool: quiet while its fleet is healthy, and each fires on its incident."""

from dataclasses import dataclass, field
from datetime import timedelta

import pytest

from controlplane.models import ConfigSnapshot, EventKind, Pool, Replica, Router
from controlplane.services.events import record_event
from controlplane.services.fleet.pools import create_pool
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.fleet.task_groups import create_task_group
from controlplane.services.snapshots import single_snapshot
from telemetry.alerts.kinds import KINDS
from telemetry.metrics.histograms import ROUTER_EDGES
from telemetry.models import STARTING_S, Alert, AlertRule, AlertState, RuleKind, ScrapeState
from telemetry.services import self_monitoring
from telemetry.services.alerts import rules
from telemetry.services.alerts.explanations import evaluate_alerts
from telemetry.services.alerts.rules import default_rules
from tests.telemetry.conftest import T0
from tests.telemetry.readings import cache_reading, engine_reading, gap, route_reading, router_scraped, stored_together
from tests.telemetry.stored_decisions import decided

pytestmark = pytest.mark.django_db
NOT_BY_DEFAULT = {RuleKind.HIT_RATE_FLOOR, RuleKind.PREDICTION_GAP, RuleKind.SEMANTIC_CACHE_PRECISION}
STEP_S = 15  # between two evaluations and two readings
QUIET_S = 480  # longer than any rule takes to fire
# Positions of the buckets that end at 0.2 s, 4 s and 10 s.
EARLY, SLOW, LATE = (next(at for at, edge in enumerate(ROUTER_EDGES) if edge > limit_s) for limit_s in (0.2, 4.0, 10.0))


@dataclass
class Fleet:
    """Three busy replicas behind a router, a second of simulated time after the other."""

    replicas: list[Replica]
    router: Router
    second: int = 0
    down: set[str] = field(default_factory=set)
    failed_ratio: float = 0.0
    late_ratio: float = 0.0
    kv_usage_ratio: float = 0.6
    in_time: int = EARLY  # bucket of the first tokens that are not late
    share: tuple[float, ...] = (1.0, 1.1, 0.9)
    waiting: tuple[float, ...] = (0.0, 1.0, 0.0)
    cache_hit_ratio: float | None = None  # None: no response cache
    store_up: float | None = None

    @property
    def now(self):
        return T0 + timedelta(seconds=self.second)

    @stored_together()
    def read(self) -> None:
        """What scrapes of the last seconds store."""
        requests = 60
        for replica, share, waiting in zip(self.replicas, self.share, self.waiting, strict=True):
            if replica.name in self.down:
                gap(replica, self.now)
                continue
            finished = int(requests * share)
            gauges = {"running": 4.0, "waiting": waiting, "kv_usage_ratio": self.kv_usage_ratio}
            counters = {"queries": 1000 * finished, "hits": 800 * finished, "finished": finished, "preemptions": 0}
            engine_reading(replica, self.now, interval_s=STEP_S, gauges=gauges, **counters)
        failed, late = int(180 * self.failed_ratio), int(180 * self.late_ratio)
        reported = {"prompt_tokens": 180_000, "cached_tokens": 144_000, "usage_reported": 180}
        counters = {"requests": 180, "ok_requests": 180 - failed, "replica_error_requests": failed, **reported}
        router_scraped(self.router, self.now, store_up=self.store_up)
        if self.cache_hit_ratio is not None:
            hits = int(100 * self.cache_hit_ratio)
            cache_reading(self.router, self.now, group="support", cache_hits=hits, cache_misses=100 - hits)
        route_reading(self.router, self.now, group="support", replica="gpu-0", **counters)
        route_reading(
            self.router, self.now, group="support", replica="gpu-0", ttft={self.in_time: 180 - late, LATE: late}
        )

    def run(self, seconds: int) -> set[str]:
        """Let time pass; the kinds of the alerts that fired meanwhile."""
        fired: set[str] = set()
        for _ in range(seconds // STEP_S):
            self.second += STEP_S
            self.read()
            evaluate_alerts(self.now)
            fired |= set(Alert.objects.filter(state=AlertState.FIRING).values_list("rule__kind", flat=True))
        return fired


@pytest.fixture
def fleet(pool):
    with single_snapshot(reason="a fleet"):
        for number in range(3):
            add_replica(pool, name=f"gpu-{number}", url=f"http://127.0.0.1:91{number:02}")
    newest = ConfigSnapshot.objects.order_by("-number").first()
    router = Router.objects.create(
        name="router-1",
        admin_url="http://127.0.0.1:9000",
        last_seen_at=T0,
        running_number=newest.number,
        running_sha256=newest.sha256,
    )
    return Fleet(list(pool.replicas.order_by("name")), router)


def test_a_new_pool_has_valid_default_rules(pool):
    made = list(AlertRule.objects.filter(pool=pool, enabled=True))
    assert {rule.name for rule in made} == {one.name for one in default_rules(5.0)}
    assert {rule.kind for rule in made} == set(RuleKind) - NOT_BY_DEFAULT, "a default rule, or a row of NOT_BY_DEFAULT"
    for rule in made:
        KINDS[rule.kind].read(rule.settings)


@pytest.mark.parametrize("interval_s", [1.0, 5.0, 300.0])
def test_the_default_evaluator_lag_follows_the_scrape_interval(interval_s):
    (lag,) = [one for one in default_rules(interval_s) if one.kind == RuleKind.EVALUATOR_LAG]
    assert KINDS[lag.kind].read(dict(lag.settings)).behind_s == max(30.0, 3 * interval_s)


def test_a_removed_or_disabled_default_rule_stays_so(pool):
    rules.delete_rule(AlertRule.objects.get(pool=pool, kind="kv_pressure"))
    rules.update_rule(AlertRule.objects.get(pool=pool, kind="load_skew"), enabled=False)
    pool.save()
    create_pool("other", models=["other"])
    assert not AlertRule.objects.filter(pool=pool, kind="kv_pressure").exists()
    assert not AlertRule.objects.get(pool=pool, kind="load_skew").enabled


def test_a_healthy_fleet_raises_no_alert(fleet):
    assert fleet.run(QUIET_S) == set()
    assert not Alert.objects.exclude(state=AlertState.PENDING).exists()


def test_a_healthy_fleet_with_long_prompts_and_affinity_raises_no_alert(fleet):
    """Prefill of a long prompt takes seconds, and affinity skews a pool in which nothing waits."""
    fleet.in_time, fleet.share, fleet.waiting = SLOW, (2.2, 0.4, 0.4), (0.0, 0.0, 0.0)
    assert fleet.run(QUIET_S) == set()


def _fails(fleet):
    fleet.failed_ratio = 0.2


def _streams_lose_replicas(fleet):
    """Of 100 streams, six were continued after gpu-1, and one broke at gpu-2."""
    after_gpu_1 = [{"replica": "gpu-2", "tokens": 3}, {"replica": "gpu-1", "tokens": 9}]
    broken = {"replica": "gpu-2", "outcome": "replica_error"}
    refused = broken | {"ttft_s": None}  # before its first token: the request may be to blame
    ends = [{"continued_after": after_gpu_1}] * 6 + [broken, *[refused] * 50, *[{}] * 93]
    for seq, end in enumerate(ends):
        whole = {"pool": "chat", "replica": "gpu-0", "outcome": "ok", "streamed": True, "ttft_s": 0.1, **end}
        decided(fleet.router, fleet.now, seq, **whole)


def _is_ejected(fleet, kind=EventKind.REPLICA_EJECTED):
    record_event(
        kind,
        "What router-1 says of replica gpu-1.",
        pool=fleet.replicas[1].pool,
        replica=fleet.replicas[1],
        router=fleet.router,
        detail={"reason": "5 failures in a row"},
        at=fleet.now,
    )


def _is_readmitted(fleet):
    _is_ejected(fleet, EventKind.REPLICA_READMITTED)


def _is_skewed(fleet):
    fleet.share, fleet.waiting = (2.4, 0.3, 0.3), (6.0, 0.0, 0.0)


def _is_full(fleet):
    fleet.kv_usage_ratio = 0.99


def _is_slow(fleet):
    fleet.late_ratio = 0.5


def _has_an_old_configuration(fleet):
    newest = ConfigSnapshot.objects.order_by("-number").first()
    Router.objects.update(running_number=newest.number - 1, first_seen_at=fleet.now)


def _does_not_hear_the_other_router(fleet):
    newest = ConfigSnapshot.objects.order_by("-number").first()
    running = {"running_number": newest.number, "running_sha256": newest.sha256, "last_seen_at": fleet.now}
    other = Router.objects.create(name="router-2", admin_url="http://127.0.0.1:9", boot="b", **running)
    for router, age in ((fleet.router, {"age_s": 0.1}), (other, {})):
        shared = {"peers": 0, **age}
        ScrapeState.objects.update_or_create(router=router, defaults={"at": fleet.now, "shared_state": shared})


def _loses_a_replica(fleet):
    ScrapeState.objects.create(replica=fleet.replicas[2], at=fleet.now, ok_at=fleet.now, health="up")
    fleet.down = {"gpu-2"}


def _loses_all_replicas(fleet):
    fleet.down = {replica.name for replica in fleet.replicas}


@pytest.mark.parametrize(
    ("incident", "kinds", "within_s"),
    [
        (_fails, {"error_ratio"}, 150),
        (_streams_lose_replicas, {"stream_failures"}, 120),
        (_is_ejected, {"replica_ejected"}, 60),
        (_is_skewed, {"load_skew"}, 240),
        (_is_full, {"kv_pressure"}, 390),
        (_is_slow, {"ttft_objective"}, 240),
        (_has_an_old_configuration, {"rollout_stuck"}, 180),
        (_does_not_hear_the_other_router, {"routers_apart"}, 120),
        (_loses_a_replica, {"replica_down"}, 90),
        (_loses_all_replicas, {"replica_down", "no_data"}, 180),
    ],
)
def test_each_default_rule_fires_on_its_incident_and_no_other_does(fleet, incident, kinds, within_s):
    assert fleet.run(60) == set()
    incident(fleet)
    assert fleet.run(within_s) == kinds


def test_an_alert_on_streams_names_the_replica_that_failed_most(fleet):
    _streams_lose_replicas(fleet)
    fleet.run(120)
    (alert,) = Alert.objects.all()
    assert alert.summary == (
        "7.0 % of the streams of pool chat lost their replica (7 of 100 in 10 min), most of them replica gpu-1."
    )


@pytest.fixture
def cached(fleet):
    """The fleet with a task group whose response cache answers four of five requests, and a store."""
    create_task_group(Pool.objects.get(name="chat"), "support", response_cache={})
    newest = ConfigSnapshot.objects.order_by("-number").first()
    Router.objects.update(running_number=newest.number, running_sha256=newest.sha256)
    fleet.cache_hit_ratio, fleet.store_up = 0.8, 1.0
    rule = AlertRule.objects.get(kind="cache_share_drop")
    rules.update_rule(rule, settings={"window_s": 60.0, "baseline_s": 300.0})  # a shorter simulation
    return fleet


def test_a_store_of_response_caches_that_is_down_explains_fewer_hits(cached):
    assert cached.run(360) == set()
    cached.store_up, cached.cache_hit_ratio = 0.0, 0.0
    assert cached.run(150) == {"cache_store_down", "cache_share_drop"}
    down, fewer = (Alert.objects.get(rule__kind=kind) for kind in ("cache_store_down", "cache_share_drop"))
    assert down.summary.startswith("1 of 1 routers could not use the store of response caches for")
    assert (fewer.state, fewer.suppression["by"]) == (AlertState.FIRING, down.pk)
    cached.store_up, cached.cache_hit_ratio = 1.0, 0.8
    cached.run(420)
    down.refresh_from_db()
    assert down.state == AlertState.RESOLVED


def test_a_killed_replica_is_notified_once_and_not_again_as_ejected(fleet):
    assert fleet.run(60) == set()
    fleet.down = {"gpu-1"}
    _is_ejected(fleet)
    assert fleet.run(120) == {"replica_down", "replica_ejected"}
    fleet.down = set()
    _is_readmitted(fleet)
    fleet.run(480)
    assert not Alert.objects.filter(state=AlertState.FIRING).exists()
    assert {alert.rule.kind for alert in Alert.objects.filter(notification_count__gt=0)} == {"replica_down"}


def test_a_web_process_sends_the_alert_of_a_late_evaluator(fleet):
    assert fleet.run(60) == set()
    late = fleet.now + timedelta(seconds=45)
    assert self_monitoring.check(late)
    assert self_monitoring.check(late + timedelta(seconds=15))
    (alert,) = Alert.objects.filter(state=AlertState.FIRING)
    assert alert.rule.kind == "evaluator_lag"


def test_one_stuck_router_is_notified_by_one_of_a_projects_pools(fleet):
    other = create_pool("other", models=["other"])
    add_replica(other, name="spare", url="http://127.0.0.1:9200")
    fleet.run(60)
    _has_an_old_configuration(fleet)
    fleet.run(180)
    stuck = Alert.objects.filter(rule__kind="rollout_stuck", state=AlertState.FIRING).order_by("pk")
    first, second = stuck
    assert first.suppression is None
    assert (second.suppression["reason"], second.suppression["by"]) == ("inhibited", first.pk)


def test_a_replica_that_was_never_read_is_down_only_after_15_minutes(fleet):
    new = fleet.replicas[2]
    fleet.down = {new.name}
    Replica.objects.filter(pk=new.pk).update(created_at=T0 + timedelta(seconds=120 - STARTING_S))
    assert fleet.run(105) == set()
    assert fleet.run(60) == {"replica_down"}


@pytest.mark.parametrize("loading", [{"gpu-2"}, {"gpu-0", "gpu-1", "gpu-2"}])
def test_a_replica_that_loaded_for_minutes_raises_no_alert_when_it_becomes_ready(fleet, loading):
    """Windows end before the newest reading, so the first success is known and not yet in them."""
    Replica.objects.update(created_at=T0)
    fleet.down = loading
    assert fleet.run(150) == set()
    fleet.down = set()
    fleet.second += STEP_S
    fleet.read()
    for replica in fleet.replicas:  # gpu-0 is scraped last
        at = fleet.now - timedelta(seconds=5 * (replica.name == "gpu-0"))
        ScrapeState.objects.update_or_create(replica=replica, defaults={"at": at, "ok_at": at})
    evaluate_alerts(fleet.now)
    assert not Alert.objects.exists()
    assert fleet.run(120) == set()


def _scraped(fleet, name, reason, *, serving_at=(), was_read=True):
    """The last scrapes: of a replica that failed, and of the router."""
    ok_at = fleet.now - timedelta(minutes=2) if was_read else None
    replica = next(one for one in fleet.replicas if one.name == name)
    failed = {"at": fleet.now, "failures": 9, "reason": reason, "health": "down", "ok_at": ok_at}
    ScrapeState.objects.update_or_create(replica=replica, defaults=failed)
    serving = {"chat": list(serving_at)}
    read = {"at": fleet.now, "ok_at": fleet.now, "health": "up", "serving_replicas": serving}
    ScrapeState.objects.update_or_create(router=fleet.router, defaults=read)


def _run_unreadable(fleet, seconds, names, **state):
    fired = set()
    fleet.down = set(names)
    for _ in range(seconds // STEP_S):
        for name in names:
            _scraped(fleet, name, "its /metrics responds with status 500", **state)
        fired |= fleet.run(STEP_S)
    return fired


def test_a_replica_that_serves_without_readable_metrics_is_not_called_down(fleet):
    assert fleet.run(60) == set()
    assert _run_unreadable(fleet, 90, ["gpu-0"], serving_at=["gpu-0", "gpu-1"]) == {"metrics_unreadable"}
    alert = Alert.objects.get(rule__kind="metrics_unreadable")
    assert alert.severity == "warning"
    assert alert.summary == (
        "Metrics of replica gpu-0 (pool chat) cannot be read (its /metrics responds with status 500); 1 router reports "
        "it up, 360 requests in the last 30 s."
    )
    assert _run_unreadable(fleet, 90, ["gpu-0"], serving_at=["gpu-1"]) == {"metrics_unreadable", "replica_down"}
    assert Alert.objects.get(rule__kind="replica_down").summary.endswith("(its /metrics responds with status 500).")


def test_the_last_router_is_a_critical_alert_and_its_warning_is_inhibited(fleet):
    fleet.run(60)
    Router.objects.update(last_seen_at=fleet.now, lost_at=fleet.now + timedelta(seconds=31))
    fleet.second += 31
    assert fleet.run(15) == {"router_lost"}
    warning, critical = Alert.objects.filter(rule__kind="router_lost").order_by("severity").reverse()
    assert (critical.severity, critical.suppression) == ("critical", None)
    assert critical.summary == (
        "No router is left: no heartbeat of router-1 for 46 s. Clients of all pools get no responses through it."
    )
    assert (warning.severity, warning.suppression["by"]) == ("warning", critical.pk)
    assert warning.summary == "Router router-1 is lost: no heartbeat for 46 s; 0 of 1 routers left."
    fleet.run(60)
    assert [Alert.objects.get(pk=alert.pk).notification_count for alert in (warning, critical)] == [0, 1]
    Router.objects.update(last_seen_at=fleet.now, lost_at=None)
    fleet.run(15)
    assert not Alert.objects.filter(state=AlertState.FIRING).exists()


def _router(fleet, name, *, first_seen_s, seen_s=0, lost=False):
    row = Router.objects.create(
        name=name,
        admin_url="http://127.0.0.1:9001",
        last_seen_at=fleet.now - timedelta(seconds=seen_s),
        running_number=fleet.router.running_number,
        running_sha256=fleet.router.running_sha256,
        lost_at=fleet.now if lost else None,
    )
    Router.objects.filter(pk=row.pk).update(first_seen_at=fleet.now - timedelta(seconds=first_seen_s))


@pytest.mark.parametrize(("new_router_s", "kinds"), [(None, {"router_lost"}), (60, set()), (86_000, {"router_lost"})])
def test_one_of_several_routers_is_a_warning_unless_another_replaced_it(fleet, new_router_s, kinds):
    """As a rolling update replaces them: the new one joins just before the old one stops."""
    Router.objects.update(first_seen_at=T0 - timedelta(days=2))
    fleet.run(60)
    _router(fleet, "router-2", first_seen_s=90_000, seen_s=31, lost=True)
    if new_router_s is not None:
        _router(fleet, "router-3", first_seen_s=new_router_s)
    assert fleet.run(30) == kinds
    summaries = list(Alert.objects.values_list("severity", "summary"))
    left = "1 of 2" if new_router_s is None else "2 of 3"
    text = f"Router router-2 is lost: no heartbeat for 61 s; {left} routers left."
    assert summaries == ([("warning", text)] if kinds else [])


def test_a_lost_router_counts_as_removed_after_an_hour(fleet):
    _router(fleet, "router-2", first_seen_s=90_000, seen_s=31, lost=True)
    Router.objects.filter(name="router-1").update(first_seen_at=T0 - timedelta(days=2))
    assert fleet.run(15) == {"router_lost"}
    fleet.second += 3660
    fleet.run(15)
    assert not Alert.objects.filter(rule__kind="router_lost", state=AlertState.FIRING).exists()
