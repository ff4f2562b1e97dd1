"""Every loop over pools, routers, rules, rollouts, channels and sources: one that fails stops no other.

Each case breaks one step of our own code for one item alone, as a defect would, and runs the whole task twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
from django.utils import timezone

from controlplane import tasks as controlplane_tasks
from controlplane.models import EventKind, ItemFailure, PeriodicTask, Rollout, Router, RoutingPolicy
from controlplane.services import routers
from controlplane.services.events import record_event
from controlplane.services.fleet.pools import create_pool
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.policies import rollouts as controller
from controlplane.services.routers import announce
from telemetry import tasks as telemetry_tasks
from telemetry.alerts import notifications, pipeline
from telemetry.guards import measurement
from telemetry.models import Alert, AlertRule, MetricsServer, ReadPool, RollupRepair, RollupState
from telemetry.scraping import collect, metrics_servers, record
from telemetry.scraping.merge import ScrapeFailure
from telemetry.scraping.record import ReplicaScrape, record_scrapes
from telemetry.services.alerts import explanations
from telemetry.services.alerts.explanations import evaluate_alerts
from telemetry.services.lab import replays
from telemetry.services.notifications import outbox
from telemetry.services.notifications.channels import create_channel, test_send
from telemetry.storage import rollup
from tests.controlplane.push.pushing import publish
from tests.telemetry.conftest import T0
from tests.telemetry.decisions import FakeRing, store
from tests.telemetry.lab.traces import request
from tests.telemetry.readings import engine_reading
from tests.telemetry.services.notifications.scripted import ScriptedSender, connection_error

pytestmark = pytest.mark.django_db
NOW = T0 + timedelta(minutes=10)


@pytest.fixture
def pools():
    """``broken``, which comes first, and ``whole``."""
    return {name: create_pool(name, models=[name]) for name in ("broken", "whole")}


@pytest.fixture
def breaks(monkeypatch) -> Callable[..., list[str]]:
    """Have a step fail for what is called ``broken``; the names for which the step was taken."""

    def apply(module: ModuleType, step: str, name_of: Callable[..., str]) -> list[str]:
        taken: list[str] = []
        original = getattr(module, step)

        def stepped(*arguments: Any, **options: Any) -> Any:
            name = name_of(*arguments, **options)
            if name.startswith("broken"):
                raise ZeroDivisionError(name)
            taken.append(name)
            return original(*arguments, **options)

        monkeypatch.setattr(module, step, stepped)
        return taken

    return apply


def assert_isolated(
    task: PeriodicTask, taken: list[str], run: Callable[[], object], caplog: Any, *, item: str = "broken"
) -> None:
    """Both runs take the step for what is whole; the failure is stored and logged once."""
    with caplog.at_level(logging.ERROR, logger="controlplane.isolation"):
        run()
        assert any(name.startswith("whole") for name in taken)
        taken.clear()
        run()
    failure = ItemFailure.objects.get(task=task)
    assert item in failure.item
    assert (failure.error, failure.failures) == ("ZeroDivisionError", 2)
    assert len([record for record in caplog.records if record.name == "controlplane.isolation"]) == 1


def test_a_short_prompt_to_a_fresh_pool_stops_no_breakdown(pools):
    for name in pools:
        store([request(T0.timestamp(), [])], pool=name, boot=name)
        store([request(T0.timestamp() + n, [1, 2]) for n in range(1, 9)], pool=name, boot=f"{name}-2")
    replays.replay_pools(NOW)
    assert ItemFailure.objects.count() == 0
    assert sorted({row.pool.name for row in replays.BreakdownBin.objects.all()}) == ["broken", "whole"]


def test_causes_of_alerts(pools, breaks, caplog):
    for pool in pools.values():  # the broken one comes first
        rule = AlertRule.objects.get(pool=pool, kind="hit_rate_drop")
        Alert.objects.create(rule=rule, pool=pool, state="firing", started_at=T0, last_breach_at=T0, fired_at=T0)
    taken = breaks(explanations, "explain", lambda alert, *_, **__: alert.pool.name)
    moments = iter((NOW, NOW + timedelta(hours=1)))
    broken = f"alert {Alert.objects.get(pool=pools['broken']).pk}"
    assert_isolated(
        PeriodicTask.ALERT_CAUSES, taken, lambda: explanations.explain_drops(next(moments)), caplog, item=broken
    )


def test_breakdowns(pools, breaks, caplog):
    taken = breaks(replays, "replay_pool", lambda pool, *_, **__: pool.name)
    assert_isolated(PeriodicTask.BREAKDOWNS, taken, lambda: replays.replay_pools(NOW), caplog)


def test_alert_rules(pools, breaks, caplog):
    AlertRule.objects.exclude(kind="replica_down").delete()
    taken = breaks(pipeline, "_evaluate", lambda ready, *_: ready.rule.pool.name)
    assert_isolated(PeriodicTask.ALERT_RULES, taken, lambda: evaluate_alerts(NOW), caplog)
    assert set(AlertRule.objects.values_list("evaluated_at", flat=True)) == {NOW}
    assert AlertRule.objects.get(pool=pools["broken"]).verdict["reason"] == "failed"


def test_a_rule_whose_settings_cannot_be_read(pools):
    rule = AlertRule.objects.filter(pool=pools["broken"]).first()
    AlertRule.objects.filter(pk=rule.pk).update(settings={"window_s": "no number"})
    evaluate_alerts(NOW)
    assert ItemFailure.objects.get().item == f"broken: {rule.name}"
    assert AlertRule.objects.get(pk=rule.pk).verdict["reason"] == "failed"
    assert set(AlertRule.objects.values_list("evaluated_at", flat=True)) == {NOW}


def test_readings_of_rules(pools, monkeypatch, breaks):
    load = pipeline.load_histories

    def loading(some, wanted):
        if any(pool.name == "broken" for pool in some):
            raise ZeroDivisionError
        return load(some, wanted)

    monkeypatch.setattr(pipeline, "load_histories", loading)
    evaluate_alerts(NOW)
    assert {failure.item for failure in ItemFailure.objects.all()} == {"readings of broken"}
    assert {rule.verdict["reason"] for rule in AlertRule.objects.filter(pool=pools["broken"])} == {"failed"}
    assert "failed" not in {rule.verdict["reason"] for rule in AlertRule.objects.filter(pool=pools["whole"])}
    monkeypatch.setattr(pipeline, "load_histories", load)
    evaluate_alerts(NOW)
    assert ItemFailure.objects.count() == 0


def test_notifications(pools, breaks, caplog, settings):
    settings.ALERT_GROUP_WAIT_S = 0
    for pool in pools.values():
        replica = add_replica(pool, name=f"{pool.name}-1", url=f"http://{pool.name}")
        for second in range(0, 121, 5):
            record_scrapes([ReplicaScrape(replica, ScrapeFailure("gone", refused=True))], [],
                           due=NOW - timedelta(seconds=120 - second))  # fmt: skip
    rule = AlertRule.objects.filter(kind="replica_down")
    rule.update(settings={**rule[0].settings, "for_s": 0})
    taken = breaks(notifications, "_notify_group", lambda alerts, *_: alerts[0].pool.name)
    with caplog.at_level(logging.ERROR, logger="controlplane.isolation"):
        evaluate_alerts(NOW)
    assert taken == ["whole"]
    assert ItemFailure.objects.get(task=PeriodicTask.NOTIFICATIONS).item.startswith("broken")


def test_rollout_guards(pools, breaks, caplog, monkeypatch):
    for pool in pools.values():
        publish(RoutingPolicy.objects.get(pool=pool, group=None))
    monkeypatch.setattr(measurement, "_rollouts_to_analyze", Rollout.objects.order_by("pk").all)
    taken = breaks(measurement, "analyze_rollout", lambda rollout, _: rollout.revision.policy.pool.name)
    assert_isolated(PeriodicTask.ROLLOUT_GUARDS, taken, lambda: measurement.analyze_rollouts(NOW), caplog)


def test_rollouts(pools, breaks, caplog):
    router = announce(name="r", boot="b", admin_url="http://127.0.0.1:9")
    for pool in pools.values():
        publish(RoutingPolicy.objects.get(pool=pool, group=None))
    taken = breaks(controller, "_advance", lambda rollout, _: rollout.revision.policy.pool.name)
    run = lambda: announce(name="r", boot="b", admin_url=router.admin_url)  # noqa: E731 - a heartbeat
    assert_isolated(PeriodicTask.ROLLOUTS, taken, run, caplog)


def test_configuration_pushes(pools, breaks, caplog):
    for name in ("broken", "whole"):
        announce(name=name, boot="b", admin_url="http://127.0.0.1:9")
    taken = breaks(controlplane_tasks, "record_unreachable", lambda pk, **_: Router.objects.get(pk=pk).name)

    def run() -> None:
        Router.objects.update(push_after=None)
        controlplane_tasks.reconcile_routers()

    assert_isolated(PeriodicTask.CONFIG_PUSHES, taken, run, caplog)


def test_lost_routers(pools, breaks, caplog):
    for name in ("broken", "whole"):
        announce(name=name, boot="b", admin_url="http://127.0.0.1:9")

    def run() -> None:
        Router.objects.update(last_seen_at=timezone.now() - timedelta(minutes=5), lost_at=None)
        routers.mark_lost_routers()

    taken = breaks(routers, "record_event", lambda *_, router, **__: router.name)
    assert_isolated(PeriodicTask.CONFIG_PUSHES, taken, run, caplog)


@pytest.mark.parametrize("step", ["_begin", "finish", "fail"])
def test_collected_decisions(breaks, caplog, step, metrics_server):
    for name in ("broken", "whole"):
        Router.objects.create(name=name, admin_url=f"{metrics_server.url}/{name}", last_seen_at=NOW)
        if step != "fail":
            metrics_server.script(f"/{name}/admin/decisions", FakeRing())
    scripted = metrics_server.next_responder
    metrics_server.next_responder = lambda path: scripted(path.partition("?")[0])
    taken = breaks(collect, step, lambda one, *_, **__: one.name if isinstance(one, Router) else one.router.name)
    assert_isolated(PeriodicTask.DECISIONS, taken, lambda: collect.collect_decisions(NOW), caplog)


def test_metrics_servers(breaks, caplog, pools):
    for name, pool in pools.items():
        server = MetricsServer.objects.create(name=name, url="http://127.0.0.1:9")
        ReadPool.objects.create(pool=pool, server=server)
    taken = breaks(metrics_servers, "read_server", lambda server, **_: server.name)
    assert_isolated(PeriodicTask.METRICS_SERVERS, taken, metrics_servers.read_metrics_servers, caplog)


def test_stored_scrapes(pools, breaks, caplog):
    replicas = [add_replica(pools["whole"], name=name, url=f"http://{name}") for name in ("broken-1", "whole-1")]
    by_reason = {replica.name: ReplicaScrape(replica, ScrapeFailure(replica.name)) for replica in replicas}
    taken = breaks(record, "_merge", lambda _, scrape, *__: scrape.target.name)
    seconds = iter((0, 5))

    def run() -> None:
        record_scrapes(list(by_reason.values()), [], due=NOW + timedelta(seconds=next(seconds)))

    assert_isolated(PeriodicTask.SCRAPES, taken, run, caplog)
    assert record.ScrapeState.objects.get(replica__name="whole-1").at == NOW + timedelta(seconds=5)


def test_rollups(breaks, caplog, pool):
    replica = add_replica(pool, name="a", url="http://a")
    for minute in range(30):
        engine_reading(replica, T0 + timedelta(minutes=minute, seconds=30), queries=10)
    rollup.roll_up(T0 + timedelta(minutes=31), readings_retention_s=86_400)
    reached = RollupState.objects.get(pk=60).rolled_through
    for minute in (5, 6):
        RollupRepair.objects.create(resolution_s=60, at=reached - timedelta(minutes=minute))
    at = {reached - timedelta(minutes=5): "whole", reached - timedelta(minutes=6): "broken"}
    taken = breaks(rollup, "_replace_bins", lambda _, __, end: at.get(end, "other"))
    rollup.roll_up(T0 + timedelta(minutes=31), readings_retention_s=86_400)
    assert taken[0] == "whole"
    assert ItemFailure.objects.get(task=PeriodicTask.ROLLUPS).error == "ZeroDivisionError"


def test_deliveries(breaks, caplog, time_machine):
    time_machine.move_to(T0, tick=False)
    for name in ("broken", "whole"):
        test_send(create_channel(name, config={"url": "https://hooks.example/secret"}))
    taken = breaks(outbox, "record_outcome", lambda claim, *_: claim.notification.channel.name)
    moments = iter((T0, T0 + timedelta(minutes=2)))

    def run() -> None:
        now = next(moments)
        outbox.Notification.objects.update(next_at=now, leased_until=None)
        outbox.deliver_due(
            lambda: now, ScriptedSender(connection_error(), connection_error(), connection_error(), connection_error())
        )

    assert_isolated(PeriodicTask.DELIVERIES, taken, run, caplog)


def test_a_failure_to_notify_steps_of_rollouts_stops_no_delivery(pool, monkeypatch):
    create_channel("ops", config={"url": "https://hooks.example/secret"}, topics=["rollouts"])
    record_event(EventKind.ROLLOUT_HELD, "Without the detail of a rollout.", pool=pool)
    delivered: list[int] = []
    monkeypatch.setattr(outbox, "deliver_due", lambda: delivered.append(1))
    telemetry_tasks.deliver_notifications()
    assert (delivered, ItemFailure.objects.get().item) == ([1], "steps of rollouts")
