"""Notifications: grouped, suppressed, acknowledged, repeated, resolved, and each sent once."""

import threading
from dataclasses import replace
from datetime import timedelta

import pytest
import time_machine
from django.db import connection, connections

from controlplane.errors import ConflictError, InvalidError
from controlplane.models import Event
from controlplane.services.fleet.pools import create_pool, create_project, remove_pool
from controlplane.services.fleet.task_groups import create_task_group, remove_task_group
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from telemetry.alerts import notifications
from telemetry.alerts.findings import Finding, Reason, Restarts, Result
from telemetry.alerts.kinds import KINDS
from telemetry.alerts.message import alert_labels
from telemetry.alerts.notifications import notify_due
from telemetry.alerts.pipeline import resolve
from telemetry.channels.message_text import lines
from telemetry.models import Alert, AlertRule, Notification
from telemetry.services.alerts.alerts import acknowledge, create_silence, end_silence, unacknowledge
from telemetry.services.alerts.rules import create_rule, update_rule
from telemetry.services.notifications.channels import create_channel, update_channel
from tests.telemetry.conftest import T0

pytestmark = pytest.mark.django_db
HOUR = timedelta(hours=1)
INHIBITING = ("evaluator_lag", "no_data", "router_lost", "cache_store_down", "replica_down", "error_ratio")
BROKEN = Finding(Result.BREACH, Reason.BELOW, 0.1, 0.6)


def at(seconds):
    return T0 + timedelta(seconds=seconds)


@pytest.fixture
def olga(django_user_model):
    return django_user_model.objects.create_user("olga")


def firing(pool, kind="hit_rate_drop", *, since=0, subject=""):
    """An alert that fired, and whose causes were looked for."""
    rule = AlertRule.objects.filter(pool=pool, kind=kind).first() or create_rule(pool, name=kind, kind=kind)
    return Alert.objects.create(
        rule=rule, pool=pool, subject=subject, state="firing", started_at=at(since), last_breach_at=at(since),
        fired_at=at(since), explained_at=at(since), labels=alert_labels(rule, subject),
        severity=rule.severity, summary=f"{kind} {subject}.",
    )  # fmt: skip


def sent():
    """Kind and number of alerts of each message in the outbox, in its order."""
    return [(row.kind, len(row.alert_ids)) for row in Notification.objects.order_by("number")]


def transitions(alert):
    return list(alert.history.values_list("transition", flat=True))


def fresh(alert):
    return Alert.objects.select_related("rule", "pool").get(pk=alert.pk)


def test_alerts_of_a_pool_are_grouped_in_one_notification(pool, channel):
    other = create_pool("other", models=["m"])
    firing(pool, since=0)
    assert notify_due(at(9)) == 0
    firing(pool, "load_skew", since=9)
    firing(other, since=9)

    assert notify_due(at(10)) == 2
    assert sent() == [("firing", 2)]
    assert notify_due(at(19)) == 1
    assert notify_due(at(20)) == 0
    assert sent() == [("firing", 2), ("firing", 1)]
    payload = Notification.objects.order_by("number").first().payload
    assert [one["labels"]["kind"] for one in payload["data"]["alerts"]] == ["hit_rate_drop", "load_skew"]


def test_an_alert_resolved_before_its_notification_is_never_notified(pool, channel):
    alert = firing(pool)
    resolve(fresh(alert), at(5))

    assert notify_due(at(60)) == 0
    assert sent() == []


def test_notifications_repeat_until_acknowledged_and_resume_when_unacknowledged(pool, channel, olga):
    alert = firing(pool)
    update_rule(alert.rule, repeat_s=600)
    for second in (10, 600, 610, 1210):
        notify_due(at(second))
    assert sent() == [("firing", 1), ("repeated", 1), ("repeated", 1)]

    acknowledge(fresh(alert), by=olga, note="looking")
    assert notify_due(at(9000)) == 0
    unacknowledge(fresh(alert), by=olga)
    notify_due(at(9000))
    acknowledge(fresh(alert), by=olga)
    assert [kind for kind, _ in sent()] == [
        "firing", "repeated", "repeated", "acknowledged", "repeated", "acknowledged",
    ]  # fmt: skip
    resolve(fresh(alert), at(9001))
    notify_due(at(9001))
    assert sent()[-1] == ("resolved", 1)
    assert transitions(alert) == [
        "notified", "repeated", "repeated", "acknowledged", "unacknowledged", "repeated", "acknowledged", "resolved",
        "resolution_notified",
    ]  # fmt: skip
    assert Event.objects.filter(kind="alert_acknowledged", actor=olga).count() == 2
    with pytest.raises(ConflictError):
        acknowledge(fresh(alert), by=olga)


def cause(name, confidence=0.8, /, **evidence):
    return {"kind": name, "confidence": confidence, "summary": f"It is {name}.", "evidence": evidence, "advice": ""}


def causes(alert, *found):
    Alert.objects.filter(pk=alert.pk).update(causes=list(found))


def test_a_likely_cause_that_no_message_named_is_notified_once(pool, channel):
    alert = firing(pool)
    causes(alert, cause("revision", revision=4), cause("overflow"))
    notify_due(at(10))
    causes(alert, cause("overflow"), cause("revision", revision=4))
    assert notify_due(at(20)) == 0
    causes(alert, cause("prompt_changed", 0.4))
    assert notify_due(at(30)) == 0
    causes(alert, cause("prompt_changed", kind="timestamp", new_ratio=0.5), cause("overflow"))
    assert notify_due(at(40)) == 1
    causes(alert, cause("prompt_changed", kind="timestamp", new_ratio=0.6))
    assert notify_due(at(50)) == 0
    causes(alert, cause("revision", revision=4))
    assert notify_due(at(60)) == 0

    first, second = Notification.objects.order_by("number")
    assert first.payload["data"]["replaced_cause"] is None
    assert (second.kind, second.payload["data"]["replaced_cause"]) == ("repeated", "It is revision.")
    assert ("Replaces the cause", "It is revision.") in lines(second.payload["data"])
    assert alert.history.get(transition="repeated").note == "the likely cause is now: It is prompt_changed."


def test_a_message_links_to_the_revision_that_its_most_likely_such_cause_names(pool, channel, admin_client):
    alert = firing(pool)
    policy = pool.policies.get(group=None)
    publish_revision(save_draft(policy, {"strategy": "round_robin"}).pk)
    causes(alert, cause("capacity"), cause("revision", policy=policy.name, revision=2), cause("revision", revision=1))
    notify_due(at(10))

    links = Notification.objects.get().payload["data"]["links"]
    page = admin_client.get(links["revision"]).text
    assert page.index(">r2 ") < page.index(">r1 ")
    assert f"/policies/{policy.pk}/" in links["revision"]

    removed = firing(create_pool("other", models=["m"]))
    causes(removed, cause("revision", policy=policy.name, revision=2), cause("revision", policy="gone", revision=1))
    notify_due(at(30))
    data = Notification.objects.order_by("number").last().payload["data"]
    assert (data["alert"], set(data["links"])) == (removed.pk, {"alert", "silence", "pool"})


def test_a_cause_that_is_found_after_the_message_is_notified_unless_acknowledged(pool, channel, olga):
    first, second = firing(pool), firing(create_pool("other", models=["m"]))
    notify_due(at(10))
    acknowledge(fresh(second), by=olga)
    for alert in (first, second):
        causes(alert, cause("capacity"))

    assert notify_due(at(60)) == 1
    assert Notification.objects.order_by("number").last().payload["data"]["alert"] == first.pk


def test_a_rule_without_repeat_notifies_once(pool, channel):
    alert = firing(pool)
    update_rule(alert.rule, repeat_s=0)
    for second in (10, 100_000, 200_000):
        notify_due(at(second))
    assert sent() == [("firing", 1)]
    with pytest.raises(InvalidError):
        update_rule(alert.rule, repeat_s=59)


def silence(pool, /, *, until, **labels):
    matchers = [{"label": name, "op": "=", "value": value} for name, value in labels.items()]
    return create_silence(matchers=matchers, ends_at=at(until), comment="work", project=pool.project)


def test_a_silenced_alert_is_notified_if_it_fires_when_the_silence_ends(pool, channel):
    with time_machine.travel(T0, tick=False):
        silence(pool, until=600, pool="chat")
    alert = firing(pool)

    assert notify_due(at(599)) == 0
    assert fresh(alert).suppression["reason"] == "silence"
    assert notify_due(at(600)) == 1
    assert transitions(alert) == ["suppressed", "unsuppressed", "notified"]


def test_a_notified_alert_notifies_its_resolution_though_silenced(pool, channel):
    alert = firing(pool)
    notify_due(at(10))
    with time_machine.travel(T0, tick=False):
        held = silence(pool, until=90_000, rule="Hit rate drop")
    assert notify_due(at(50_000)) == 0
    resolve(fresh(alert), at(50_001))
    assert notify_due(at(50_001)) == 1
    assert sent() == [("firing", 1), ("resolved", 1)]
    with time_machine.travel(at(50_002), tick=False):
        assert end_silence(held).ends_at == at(50_002)


def test_a_silence_applies_to_its_own_project_only(pool, channel):
    elsewhere = create_pool("elsewhere", project=create_project("other"), models=["m"])
    with time_machine.travel(T0, tick=False):
        silence(elsewhere, until=600, kind="hit_rate_drop")
    alert_of_pool, alert_of_other_pool = firing(pool), firing(elsewhere)

    assert notify_due(at(10)) == 1
    assert (fresh(alert_of_pool).suppression, fresh(alert_of_other_pool).suppression["reason"]) == (None, "silence")


@pytest.mark.parametrize("source", INHIBITING)
def test_an_inhibiting_alert_suppresses_notifications(pool, channel, source):
    other = create_pool("other", models=["m"])
    alerts = {kind: firing(pool, kind) for kind in KINDS}
    elsewhere = firing(other)
    for kind in set(INHIBITING) - {source}:
        resolve(fresh(alerts.pop(kind)), at(1))

    notify_due(at(10))

    suppressed = {kind for kind, alert in alerts.items() if fresh(alert).suppression}
    assert suppressed == {kind for kind in alerts if source in KINDS[kind].inhibited_by}
    assert suppressed
    assert fresh(elsewhere).suppression is None
    resolve(fresh(alerts[source]), at(20))
    notify_due(at(21), {alert.pk: BROKEN for alert in alerts.values()})
    assert not any(fresh(alert).suppression for alert in alerts.values() if fresh(alert).state == "firing")


@pytest.mark.parametrize("result", [Result.OK, Result.NO_DATA])
def test_an_inhibited_alert_is_notified_only_after_a_new_breach(pool, channel, result):
    down, drop = firing(pool, "replica_down", subject="r1"), firing(pool)
    notify_due(at(10), {drop.pk: BROKEN})
    resolve(fresh(down), at(20))

    notify_due(at(21), {drop.pk: Finding(result, Reason.LITTLE_TRAFFIC)})
    notify_due(at(26))  # no finding this time
    assert (fresh(drop).notified_at, fresh(drop).suppression["by"]) == (None, down.pk)

    notify_due(at(31), {drop.pk: BROKEN})
    assert (fresh(drop).notified_at, fresh(drop).suppression) == (at(31), None)
    assert sent() == [("firing", 1), ("resolved", 1), ("firing", 1)]


def test_an_ejection_that_ended_with_an_outage_is_not_notified_after_it(pool, channel):
    down, ejected = (firing(pool, kind, subject="r1") for kind in ("replica_down", "replica_ejected"))
    long_ago, going_on = (replace(BROKEN, has_ended=is_over) for is_over in (True, False))
    notify_due(at(10), {ejected.pk: going_on})
    resolve(fresh(down), at(20))

    notify_due(at(21), {ejected.pk: long_ago})
    assert (fresh(ejected).notified_at, fresh(ejected).suppression["by"]) == (None, down.pk)

    notify_due(at(31), {ejected.pk: going_on})
    assert fresh(ejected).notified_at == at(31)


@pytest.mark.parametrize(
    ("drop_since", "seconds", "is_suppressed"),
    [
        pytest.param(-50, 10, True, id="it began when the replica went"),
        pytest.param(-70, 10, False, id="it was there before the replica went"),
        pytest.param(10, 590, True, id="it goes on for a while"),
        pytest.param(10, 600, False, id="it goes on for good"),
        pytest.param(86_000, 86_010, False, id="it began long after"),
    ],
)
def test_a_down_replica_inhibits_later_drops_of_its_pool_for_a_while(pool, channel, drop_since, seconds, is_suppressed):
    down, drop = firing(pool, "replica_down", subject="r1"), firing(pool, since=drop_since)
    Alert.objects.filter(pk=down.pk).update(limit=30.0)

    notify_due(at(seconds), {drop.pk: BROKEN})

    assert bool(fresh(drop).suppression) is is_suppressed


@pytest.mark.parametrize(("part", "is_suppressed"), [("coding", True), ("chat", False)])
def test_a_drop_of_a_pool_inhibits_that_of_a_task_group_which_is_part_of_it(pool, channel, part, is_suppressed):
    create_task_group(pool, "coding")
    rule = create_rule(pool, name="coding", group="coding")
    of_pool = firing(pool)
    Alert.objects.filter(pk=of_pool.pk).update(detail={"groups": [{"name": part}]})
    of_group = Alert.objects.create(
        rule=rule, pool=pool, state="firing", started_at=at(0), last_breach_at=at(0), fired_at=at(0),
        labels=alert_labels(rule, ""), severity=rule.severity, summary="coding.",
    )  # fmt: skip
    notify_due(at(10))

    assert ((fresh(of_group).suppression or {}).get("by") == of_pool.pk) is is_suppressed
    assert fresh(of_pool).suppression is None


def test_a_down_replica_inhibits_its_own_prediction_gap_only(pool, channel):
    firing(pool, "replica_down", subject="r1")
    gaps = [firing(pool, "prediction_gap", subject=name) for name in ("r1", "r2")]
    notify_due(at(10))
    assert [bool(fresh(gap).suppression) for gap in gaps] == [True, False]


@pytest.mark.parametrize(
    ("cause", "is_suppressed"), [("replica_restarted", True), ("replica_lost", True), ("revision", False)]
)
def test_a_restarted_replica_s_drop_is_suppressed_during_warm_up(pool, channel, cause, is_suppressed):
    """H18"""
    alert = firing(pool)
    evidence = {"explained_tokens": 1, "regained_ratio": 0.6}
    Alert.objects.update(causes=[{"kind": cause, "confidence": 0.9, "summary": "It.", "evidence": evidence}])
    notify_due(at(10), {alert.pk: replace(BROKEN, restarts=Restarts(("r1",), at(300)))})
    if not is_suppressed:
        assert sent() == [("firing", 1)]
        return
    assert fresh(alert).suppression["reason"] == "restart"
    notify_due(at(15))  # no finding this time
    assert fresh(alert).suppression["reason"] == "restart"
    notify_due(at(20), {alert.pk: BROKEN})  # it is no longer its alone
    assert sent() == [("firing", 1)]


@pytest.mark.parametrize("what", ["group", "pool"])
def test_removing_a_pool_or_group_notifies_the_resolution_of_its_alerts(pool, channel, what):
    """A pager would ring for ever."""
    group = create_task_group(pool, name="agents")
    rule = create_rule(pool, name="agents", kind="hit_rate_drop", group="agents")
    alert = firing(pool)
    Alert.objects.filter(pk=alert.pk).update(rule=rule)
    notify_due(at(10))

    remove_task_group(group)
    if what == "pool":
        firing(pool)
        notify_due(at(20))
        remove_pool(pool)

    connection.check_constraints()
    assert sent()[:2] == [("firing", 1), ("resolved", 1)]
    assert sent()[2:] == ([("firing", 1), ("resolved", 1)] if what == "pool" else [])
    assert "because its rule was removed" in Event.objects.filter(kind="alert_resolved").first().summary


def test_an_interrupted_notification_sends_nothing_and_the_next_run_sends_all(pool, channel, monkeypatch):
    """The claim and the messages are one transaction."""
    alert = firing(pool)

    def killed(*_, **__):
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(notifications, "enqueue", killed)
        with pytest.raises(SystemExit):
            notify_due(at(10))
    assert (fresh(alert).notified_at, sent()) == (None, [])
    assert notify_due(at(15)) == 1
    assert sent() == [("firing", 1)]


@pytest.mark.django_db(transaction=True)
def test_concurrent_evaluators_notify_each_transition_once():
    """Without the lock that normally keeps the others out."""
    pool = create_pool("race")
    create_channel("ops", config={"url": "https://hooks.example/x"})
    alerts = [firing(pool), firing(pool, "load_skew")]
    for second, end in ((10, False), (20_000, False), (30_000, True)):
        if end:
            for alert in alerts:
                resolve(fresh(alert), at(second))
        start = threading.Barrier(6)

        def run(start=start, second=second):
            try:
                start.wait(timeout=10)
                notify_due(at(second))
            finally:
                connections.close_all()

        threads = [threading.Thread(target=run) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)

    per_kind = {}
    for kind, count in sent():
        per_kind[kind] = per_kind.get(kind, 0) + count
    assert per_kind == {"firing": 2, "repeated": 2, "resolved": 2}
    assert transitions(alerts[0]).count("notified") == 1


def kinds_of(channel):
    rows = Notification.objects.filter(channel=channel).order_by("number")
    return [(row.kind, len(row.alert_ids)) for row in rows]


def test_a_channel_that_is_added_while_alerts_fire_gets_these_once_and_their_end(pool, channel):
    first, second = firing(pool), firing(pool, "load_skew")
    notify_due(at(10))
    later = create_channel("later", config={"url": "https://hooks.example/y"})
    narrow = create_channel("narrow", config={"url": "https://hooks.example/z"}, matchers=["kind=load_skew"])
    for second_at in (15, 20, 25):
        notify_due(at(second_at))
    assert (kinds_of(later), kinds_of(narrow), kinds_of(channel)) == ([("firing", 2)], [("firing", 1)], [("firing", 2)])

    resolve(fresh(first), at(30))
    notify_due(at(30))
    assert kinds_of(later)[1:] == [("resolved", 1)]
    assert kinds_of(narrow) == [("firing", 1)]
    update_channel(narrow, matchers=[])
    resolve(fresh(second), at(35))
    notify_due(at(35))
    assert kinds_of(narrow)[1:] == [("resolved", 1)]


def test_a_channel_that_heard_nothing_of_an_alert_hears_nothing_of_its_end(pool, channel):
    alert = firing(pool)
    notify_due(at(10))
    resolve(fresh(alert), at(12))
    later = create_channel("later", config={"url": "https://hooks.example/y"})
    notify_due(at(15))
    assert (kinds_of(later), kinds_of(channel)) == ([], [("firing", 1), ("resolved", 1)])


def test_a_channel_that_is_enabled_or_matches_more_gets_what_fires(pool, channel):
    update_channel(channel, enabled=False)
    other = create_channel("other", config={"url": "https://hooks.example/y"}, matchers=["pool=none"])
    firing(pool)
    notify_due(at(10))
    assert sent() == []
    update_channel(channel, enabled=True)
    update_channel(other, matchers=["pool=chat"])
    notify_due(at(15))
    notify_due(at(20))
    assert (kinds_of(channel), kinds_of(other)) == ([("firing", 1)], [("firing", 1)])
