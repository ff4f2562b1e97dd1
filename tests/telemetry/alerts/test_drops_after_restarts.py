"""A drop that restarts alone explain is not notified; a drop with another cause is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import pytest

from controlplane.models import EventKind, Pool, Replica
from controlplane.services.events import record_event
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.fleet.task_groups import create_task_group
from controlplane.services.snapshots import single_snapshot
from telemetry.alerts.notifications import notify_due
from telemetry.alerts.pipeline import evaluate_rules
from telemetry.causes.evidence import Prefix, Sums
from telemetry.causes.replicas import regained_ratio
from telemetry.models import Alert, AlertRule, Decision
from telemetry.services.alerts.explanations import explain_drops
from telemetry.services.alerts.rules import create_rule, update_rule
from telemetry.storage.partitions import ensure_days
from tests.telemetry.conftest import T0
from tests.telemetry.readings import engine_reading, gap, route_reading, stored_together
from tests.telemetry.stored_decisions import a_router, decision

INTERVAL_S, TOKENS, RATE = 5, 10_000, 0.8
PREFIXES = range(8)
CACHED_AFTER = 8  # requests of a prefix until a replica has it cached
INCIDENT_S = 160
DROP = {"baseline_s": 300, "days": 0, "drop_points": 15, "min_requests": 10, "for_s": 0}


@dataclass(eq=False)
class World:
    """Four replicas and eight prefixes, two per replica; each prefix has one request per interval."""

    pool: Pool
    replicas: list[Replica]
    routed: bool = True  # routers have decision logs
    group: str = ""
    second: int = 0
    unavailable: set[str] = field(default_factory=set)
    request_counts: Counter[tuple[int, str]] = field(default_factory=Counter)
    rate: float = RATE
    keys: dict[int, int] = field(default_factory=lambda: {number: number for number in PREFIXES})
    sent: int = 0

    def __post_init__(self) -> None:
        ensure_days([T0.date()])
        self.router = a_router()
        self.warm()

    def warm(self) -> None:
        self.request_counts.update(
            {(self.keys[it], replica.name): CACHED_AFTER for it in PREFIXES for replica in [self.preferred_replica(it)]}
        )

    def preferred_replica(self, opening: int) -> Replica:
        """The first available replica in the prefix's order."""
        order = (self.replicas[(opening + step) % 4] for step in range(4))
        return next(replica for replica in order if replica.name not in self.unavailable)

    def record_event_of(self, kind: EventKind, name: str) -> None:
        replica = next(replica for replica in self.replicas if replica.name == name)
        record_event(kind, f"{name}: {kind}.", pool=self.pool, replica=replica, at=at(self.second))

    def stop(self, *names: str) -> None:
        for name in names:
            self.unavailable.add(name)
            self.record_event_of(EventKind.REPLICA_DOWN, name)

    def restart(self, *names: str) -> None:
        for name in names:
            self.unavailable.discard(name)
            self.request_counts = Counter({key: count for key, count in self.request_counts.items() if key[1] != name})
            self.record_event_of(EventKind.REPLICA_UP, name)
            self.record_event_of(EventKind.REPLICA_RESTARTED, name)

    @stored_together()
    def tick(self) -> None:
        """Simulate one interval and store the readings of all replicas."""
        self.second += INTERVAL_S
        requests, cached_tokens = Counter[str](), Counter[str]()
        rows = []
        for opening in PREFIXES if len(self.unavailable) < len(self.replicas) else ():
            replica, key = self.preferred_replica(opening), self.keys[opening]
            cached = round(TOKENS * self.rate) if self.request_counts[key, replica.name] >= CACHED_AFTER else 0
            self.request_counts[key, replica.name] += 1
            requests[replica.name] += 1
            cached_tokens[replica.name] += cached
            self.sent += 1
            rows.append((self.sent, replica.name, key, cached))
        now = at(self.second)
        for replica in self.replicas:
            if replica.name in self.unavailable:
                gap(replica, now)
                continue
            count = requests[replica.name]
            figures = {"queries": count * TOKENS, "hits": cached_tokens[replica.name], "finished": count}
            engine_reading(replica, now, **figures)
            if self.group and count:
                tokens = {
                    "requests": count,
                    "prompt_tokens": count * TOKENS,
                    "cached_tokens": cached_tokens[replica.name],
                }
                route_reading(self.router, now, group=self.group, replica=replica.name, usage_reported=count, **tokens)
        decisions = [
            decision(
                self.router, now - timedelta(seconds=1), seq, replica=name, prefix=key, group=self.group,
                prompt_tokens=TOKENS, cached_tokens=cached,
            )
            for seq, name, key, cached in rows
        ]  # fmt: skip
        Decision.objects.bulk_create(decisions if self.routed else [])

    def until(self, second: int) -> None:
        while self.second < second:
            self.tick()
            if self.second >= INCIDENT_S or (self.second >= INCIDENT_S - 60 and self.second % 10 == 0):
                moment = at(self.second + 0.5)
                f = evaluate_rules(moment)
                explain_drops(moment)
                notify_due(moment, f)


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def make(pool: Pool, **settings: object) -> World:
    names = [f"r{number}" for number in range(1, 5)]
    with single_snapshot(reason="a fleet"):
        replicas = [add_replica(pool, name=it, url=f"http://127.0.0.1:91{it[1]}1") for it in names]
    AlertRule.objects.exclude(kind__in=["hit_rate_drop", "replica_down", "replica_ejected"]).update(enabled=False)
    update_rule(AlertRule.objects.get(pool=pool, kind="hit_rate_drop"), settings={**DROP, **settings})
    return World(pool, replicas)


def for_a_moment(world: World) -> None:
    """Shorter than silent_s: ``replica_down`` never fires."""
    world.stop("r1")
    world.until(INCIDENT_S + 25)
    world.restart("r1")


def at_full_replicas(world: World) -> None:
    """The others take over its prompts, evict their own, and have not computed them all when it is back."""
    world.stop("r1")
    world.rate = RATE / 2
    world.until(INCIDENT_S + 25)
    world.restart("r1")
    world.until(world.second + 20)
    world.rate = RATE


def with_a_revision(world: World) -> None:
    """The same figures, and a revision that may be their cause."""
    record_event(EventKind.POLICY_PUBLISHED, "Revision 2.", pool=world.pool, at=at(world.second))
    at_full_replicas(world)


def for_a_while(world: World) -> None:
    """``replica_down`` fires and ends while prompts still go back."""
    world.stop("r1")
    world.until(INCIDENT_S + 70)
    world.restart("r1")


def in_turn(world: World) -> None:
    for name in ("r1", "r2", "r3"):
        world.stop(name)
        world.until(world.second + 15)
        world.restart(name)
        world.until(world.second + 30)


def one_and_then_all(world: World) -> None:
    world.stop("r1")
    world.until(INCIDENT_S + 10)
    world.stop("r2", "r3", "r4")
    world.until(INCIDENT_S + 30)
    for name in ("r1", "r2", "r3", "r4"):
        world.restart(name)
        world.until(world.second + 5)


def without_decisions(world: World) -> None:
    """Routers that are not ours: only engines are read."""
    Decision.objects.all().delete()
    world.routed = False
    for_a_moment(world)


def revision_before(world: World) -> None:
    """From a minute before on everything hits half as much; the rule takes its time."""
    for_a_moment(world)


def prompts_at_once(world: World) -> None:
    """In the same moment half of the prompts begin otherwise with each request."""
    world.stop("r1")
    for step in range(8):
        world.keys.update({number: 1000 * step + number for number in PREFIXES if number % 4})
        world.until(world.second + INTERVAL_S)
        if step == 2:
            world.restart("r1")


def prompts_and_all(world: World) -> None:
    """The same while every replica restarts."""
    names = ("r1", "r2", "r3", "r4")
    world.stop(*names)
    world.until(INCIDENT_S + 10)
    world.restart(*names)
    for step in range(8):
        world.keys.update({number: 1000 * step + number for number in PREFIXES})
        world.until(world.second + INTERVAL_S)


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("what", "is_notified"),
    [
        (for_a_moment, False),
        (for_a_while, False),
        (at_full_replicas, False),
        (with_a_revision, True),
        (in_turn, False),
        (one_and_then_all, False),
        (without_decisions, False),
        (revision_before, True),
        (prompts_at_once, True),
        (prompts_and_all, True),
    ],
)
def test_a_restart_suppresses_only_the_drop_that_it_explains(
    pool: Pool, what: Callable[[World], None], is_notified: bool
) -> None:
    world = make(pool, for_s=60 if what is revision_before else 0)
    world.until(INCIDENT_S - 60)
    if what is revision_before:
        world.rate = RATE / 2
    world.until(INCIDENT_S)
    what(world)
    world.until(world.second + 45)

    alerts = Alert.objects.filter(rule__kind="hit_rate_drop")
    assert alerts.exists()  # in either case
    assert alerts.filter(notification_count__gt=0).exists() == is_notified


@pytest.mark.django_db
def test_a_restart_suppresses_the_drop_of_a_task_group_too(pool: Pool) -> None:
    world = make(pool)
    world.group = create_task_group(pool, name="agents").name
    create_rule(pool, name="agents", kind="hit_rate_drop", group="agents", settings=DROP)
    world.until(INCIDENT_S)

    for_a_moment(world)
    world.until(world.second + 45)

    (alert,) = Alert.objects.filter(rule__name="agents")
    assert (alert.notification_count, alert.suppression["reason"]) == (0, "restart")
    assert alert.suppression["text"].startswith("r1 restarted or was down")


def firing(pool: Pool, number: int, **columns: Any) -> Alert:
    """A firing drop of the pool that was not notified."""
    rule = AlertRule.objects.get(pool=pool, kind="hit_rate_drop")
    times = {"started_at": T0, "last_breach_at": T0, "fired_at": T0}
    return Alert.objects.create(rule=rule, pool=pool, subject=str(number), state="firing", **times, **columns)


@pytest.mark.django_db
def test_drops_that_restarts_explain_do_not_keep_a_new_one_from_being_explained(pool: Pool) -> None:
    for number in range(6):
        firing(pool, number, explained_at=T0, suppression={"reason": "restart"})
    new = firing(pool, 6)

    assert explain_drops(at(5)) == 5
    new.refresh_from_db()
    assert new.explained_at == at(5)


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("columns", "second", "explained"),
    [
        ({}, 5, 1),  # its causes decide on its first notification
        ({"suppression": {"reason": "restart"}}, 5, 1),
        ({"suppression": {"reason": "restart"}}, 700, 0),
        ({"suppression": {"reason": "silence"}}, 5, 0),
        ({"notification_count": 1}, 5, 0),
    ],
)
def test_a_drop_is_explained_again_until_it_is_notified(
    pool: Pool, columns: dict[str, Any], second: int, explained: int
) -> None:
    alert = firing(pool, 0, explained_at=at(max(second - 30, 0)), causes=[{"kind": "capacity"}], **columns)

    assert explain_drops(at(second)) == explained
    alert.refresh_from_db()
    assert (alert.explained_at == at(second)) is bool(explained)


@pytest.mark.django_db
def test_a_drop_is_notified_after_its_causes_were_looked_for(pool: Pool) -> None:
    alert = firing(pool, 0)

    assert notify_due(at(30)) == 0
    Alert.objects.filter(pk=alert.pk).update(explained_at=at(30))
    assert notify_due(at(31)) == 1


def opening(key: int, replica: str, rate: float, tokens: float = 1000.0) -> Prefix:
    return Prefix("", key, replica, Sums(1.0, tokens, rate * tokens))


BEFORE_DROP = [opening(1, "r1", 0.8), opening(2, "r2", 0.8), opening(3, "r3", 0.8), opening(4, "r3", 0.4)]


@pytest.mark.parametrize(
    ("now", "ratio"),
    [
        pytest.param(BEFORE_DROP, 0.0, id="nothing was lost"),
        pytest.param([opening(1, "r2", 0.0), *BEFORE_DROP[1:]], 0.2, id="all that its prompts hit"),
        pytest.param([opening(1, "r2", 0.6), *BEFORE_DROP[1:]], 0.05, id="no more than they lost"),
        pytest.param(
            [*BEFORE_DROP[:2], opening(3, "r3", 0.0), BEFORE_DROP[3]], 0.0, id="nothing of other replicas' prompts"
        ),
        pytest.param([opening(9, "r2", 0.0), *BEFORE_DROP[1:]], 0.0, id="nothing of prompts that nobody sent before"),
        pytest.param(
            [opening(1, "r2", 0.0), opening(2, "r2", 0.4), opening(3, "r3", 0.4), opening(4, "r3", 0.2)],
            0.1,
            id="half, where everybody else's hit half",
        ),
        pytest.param([], None, id="unknown without requests"),
    ],
)
def test_a_replica_explains_what_its_prefixes_lost(now: list[Prefix], ratio: float | None) -> None:
    explained = regained_ratio(BEFORE_DROP, now, {"r1"})
    assert explained == (None if ratio is None else pytest.approx(ratio))


def test_replicas_that_took_over_much_may_have_evicted_what_they_had() -> None:
    now = [opening(1, "r2", 0.0), opening(2, "r2", 0.2), opening(9, "r2", 0.0)]
    control = regained_ratio(BEFORE_DROP, now, {"r1"})
    crowded = regained_ratio(BEFORE_DROP, now, {"r1"}, may_crowd=True)
    assert control is not None
    assert crowded is not None
    assert crowded > control
    assert regained_ratio(BEFORE_DROP, [opening(9, "r2", 0.0)], {"r1"}, may_crowd=True) == 0.0
