"""Evaluation of rules on stored readings: alerts, events and the outbox, with each transition stored once."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.db import IntegrityError, connection, transaction

from controlplane.models import Event, ReplicaState
from controlplane.services.fleet.pools import create_pool
from controlplane.services.fleet.replicas import add_replica, set_replica_state
from telemetry.alerts import pipeline
from telemetry.alerts.findings import Result
from telemetry.alerts.history import requests_around
from telemetry.alerts.notifications import notify_due
from telemetry.alerts.pipeline import last_evaluation
from telemetry.models import Alert, AlertHistoryEntry, AlertRule, Notification
from telemetry.services.alerts import rules
from telemetry.services.alerts.explanations import evaluate_alerts, explain_drops
from telemetry.storage.locks import EVALUATE
from tests.telemetry.conftest import T0
from tests.telemetry.readings import engine_reading, gap, stored_together

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("no_waiting")]
SETTINGS = {"baseline_s": 600, "days": 0, "for_s": 10, "keep_firing_s": 60}


@pytest.fixture
def no_waiting(settings):
    """What fires is told at once."""
    settings.ALERT_GROUP_WAIT_S = 0


@pytest.fixture
def rule(pool):
    return rules.update_rule(AlertRule.objects.get(pool=pool, kind="hit_rate_drop"), settings=SETTINGS)


@stored_together()
def traffic(replica, start_s, end_s, ratio, *, tokens=10_000, requests=20):
    """Readings every 5 s, as a busy replica would leave."""
    for second in range(start_s + 5, end_s + 1, 5):
        engine_reading(
            replica,
            T0 + timedelta(seconds=second),
            queries=tokens,
            hits=int(tokens * ratio),
            finished=requests,
            ttft={1: requests},
        )


def evaluate(rule, second):
    """One rule alone, with causes and notifications; the stored verdict."""
    now = T0 + timedelta(seconds=second)
    (fresh,) = AlertRule.objects.select_related("pool", "group").filter(pk=rule.pk)
    findings = pipeline.evaluate([fresh], now)
    explain_drops(now)
    notify_due(now, findings)
    return SimpleNamespace(**fresh.verdict)


def states():
    return list(Alert.objects.order_by("pk").values_list("state", flat=True))


def test_a_drop_on_a_new_fleet_fires_notifies_and_resolves(r1, rule, channel, pool):
    traffic(r1, 0, 240, 0.8)
    assert evaluate(rule, 240).result == "ok"
    assert states() == []

    traffic(r1, 240, 300, 0.1)
    verdict = evaluate(rule, 300)
    assert (verdict.result, verdict.baseline, verdict.value) == ("breach", pytest.approx(0.8), pytest.approx(0.1))
    assert states() == ["pending"]
    assert not Notification.objects.exists()
    evaluate(rule, 305)
    assert states() == ["pending"]
    evaluate(rule, 310)
    assert states() == ["firing"]

    traffic(r1, 300, 420, 0.8)
    evaluate(rule, 360)
    assert states() == ["firing"]
    evaluate(rule, 420)
    assert states() == ["resolved"]
    kinds = list(Event.objects.filter(kind__startswith="alert_").order_by("pk").values_list("kind", flat=True))
    assert kinds == ["alert_firing", "alert_resolved"]
    assert list(Notification.objects.order_by("created_at").values_list("kind", "channel__name")) == [
        ("firing", "ops"),
        ("resolved", "ops"),
    ]


def test_the_payload_has_the_facts_an_operator_needs(r1, rule, channel, pool):
    traffic(r1, 0, 240, 0.8)
    traffic(r1, 240, 300, 0.2)
    evaluate(rule, 300)
    evaluate(rule, 310)

    payload = Notification.objects.get().payload
    data = payload["data"]
    assert payload["type"] == "alert.firing"
    assert data["pool"] == "chat"
    assert data["baseline_ratio"] == pytest.approx(0.8)
    assert data["value_ratio"] == pytest.approx(0.2)
    assert "60.0 points below" in data["summary"]
    assert data["detail"]["top_replicas"][0]["name"] == "r1"
    assert data["detail"]["extra_recomputed_tokens"] == pytest.approx(0.6 * 120_000, rel=0.01)  # since the onset
    assert "last_change" not in data["detail"]  # an event is named as a cause, with evidence, or not at all
    assert data["detail"]["onset"] == (T0 + timedelta(seconds=240)).isoformat(timespec="seconds")
    assert data["path"].startswith("/?pool=chat&from=2031-03-04T11")
    assert "hooks.example" not in str(payload)


def test_a_second_fall_resolves_the_alert_and_is_an_alert_of_its_own(r1, rule, channel, pool):
    traffic(r1, 0, 600, 0.8)
    traffic(r1, 600, 840, 0.6)
    traffic(r1, 840, 960, 0.2)
    for second in range(610, 961, 10):
        evaluate(rule, second)

    first, second = Alert.objects.order_by("pk")
    assert (first.state, second.state) == ("resolved", "firing")
    assert first.detail["onset"] == (T0 + timedelta(seconds=600)).isoformat()
    assert second.detail["onset"] == (T0 + timedelta(seconds=840)).isoformat()
    assert second.detail["comparable_since"] == first.detail["onset"]
    assert (second.baseline, second.value) == (pytest.approx(0.8), pytest.approx(0.2))
    assert (" since 12:10:00 UTC" in first.summary, " after a second fall at 12:14:00 UTC" in second.summary) == (
        True,
        True,
    )
    assert "fell further" in first.history.get(transition="resolved").note
    assert list(Notification.objects.order_by("created_at", "kind").values_list("kind", "payload__data__alert")) == [
        ("firing", first.pk),
        ("firing", second.pk),
        ("resolved", first.pk),
    ]


def test_a_second_drop_within_keep_firing_s_of_a_recovery_is_an_alert_of_its_own(r1, rule, channel, pool):
    """Once: a rate that goes up and down stays one alert."""
    rule = rules.update_rule(rule, settings={**SETTINGS, "keep_firing_s": 120})
    traffic(r1, 0, 600, 0.8)
    for start in (600, 800, 1000):
        traffic(r1, start, start + 100, 0.3)
        traffic(r1, start + 100, start + 200, 0.8)
    for second in range(610, 1201, 10):
        evaluate(rule, second)
        AlertHistoryEntry.objects.filter(transition="resolved").update(note="worded otherwise")

    first, second = Alert.objects.order_by("pk")
    assert (first.state, first.episode, second.state, second.episode) == ("resolved", 1, "firing", 2)
    resolved = Event.objects.get(kind="alert_resolved")
    assert resolved.summary.endswith("the hit rate recovered and fell again: a new alert has the second drop.")
    assert second.detail["onset"] == (T0 + timedelta(seconds=800)).isoformat()
    assert second.detail["comparable_since"] > first.detail["onset"]
    assert list(Notification.objects.order_by("created_at", "kind").values_list("kind", "payload__data__alert")) == [
        ("firing", first.pk),
        ("firing", second.pk),
        ("resolved", first.pk),
    ]


def test_a_pending_alert_that_does_not_fire_is_deleted(r1, rule):
    traffic(r1, 0, 240, 0.8)
    traffic(r1, 240, 300, 0.3)
    evaluate(rule, 300)
    traffic(r1, 300, 360, 0.8)
    evaluate(rule, 360)

    assert states() == []


def test_no_data_neither_fires_nor_resolves(r1, rule):
    assert evaluate(rule, 0).reason == "no_readings"
    traffic(r1, 0, 240, 0.8)
    traffic(r1, 240, 300, 0.1)
    evaluate(rule, 300)
    evaluate(rule, 310)
    assert states() == ["firing"]

    traffic(r1, 360, 420, 0.8, tokens=10, requests=0)
    assert evaluate(rule, 420).result != "ok"
    assert evaluate(rule, 3000).reason == "no_readings"
    assert states() == ["firing"]
    rule.refresh_from_db()
    assert rule.verdict["result"] == "no_data"


def test_the_level_does_not_follow_a_drop_while_its_alert_is_open(r1, rule):
    traffic(r1, 0, 240, 0.8)
    traffic(r1, 240, 720, 0.3)
    evaluate(rule, 300)
    evaluate(rule, 310)

    verdict = evaluate(rule, 720)

    assert (verdict.result, verdict.baseline) == ("breach", pytest.approx(0.8))
    assert states() == ["firing"]


def test_replicas_are_summed_before_dividing(r1, rule, pool):
    """H2: a busy replica's drop is not diluted by an idle one's good rate."""
    r2 = add_replica(pool, name="r2", url="http://127.0.0.1:9102")
    for replica, tokens in ((r1, 100_000), (r2, 100)):
        traffic(replica, 0, 240, 0.8, tokens=tokens)
    traffic(r1, 240, 300, 0.5, tokens=100_000)
    traffic(r2, 240, 300, 1.0, tokens=100)

    assert evaluate(rule, 300).value == pytest.approx(0.5, abs=0.01)


def row_versions():
    """Where PostgreSQL stores each rule's row; an update moves it."""
    with connection.cursor() as cursor:
        cursor.execute("select id, ctid::text from telemetry_alertrule")
        return set(cursor.fetchall())


def test_rules_in_a_steady_state_are_not_rewritten(r1, rule):
    """Every 5 s for a minute: figures that change are stored once a minute, others never again."""
    traffic(r1, 0, 370, 0.8)
    written = []
    for second in range(300, 366, 5):
        before = row_versions()
        pipeline.evaluate_rules(T0 + timedelta(seconds=second))
        written.append(len(row_versions() - before))
        assert last_evaluation() == T0 + timedelta(seconds=second)

    count = AlertRule.objects.count()
    assert count > 12
    assert written[0] == count
    assert sum(written) <= count * 2  # of 14 evaluations
    assert sum(number == 0 for number in written) >= 11

    pipeline.evaluate_rules(T0 + timedelta(seconds=1300))  # without traffic the figures of most rules stay
    versions = row_versions()
    for second in (1370, 1440):
        pipeline.evaluate_rules(T0 + timedelta(seconds=second))
    assert len(row_versions() - versions) <= 3

    shown = rules.rules().get(pk=rule.pk)
    assert shown.last_evaluated_at == last_evaluation()
    assert shown.evaluated_at < last_evaluation()
    rules.update_rule(rule, enabled=False)
    pipeline.evaluate_rules(T0 + timedelta(seconds=1900))
    assert rules.rules().get(pk=rule.pk).last_evaluated_at == shown.evaluated_at


def test_disabling_a_rule_resolves_its_alert_with_the_reason(r1, rule, channel):
    traffic(r1, 0, 240, 0.8)
    traffic(r1, 240, 300, 0.1)
    evaluate(rule, 300)
    evaluate(rule, 310)

    rules.update_rule(rule, enabled=False)

    assert states() == ["resolved"]
    assert Notification.objects.filter(kind="resolved").count() == 1
    assert pipeline.evaluate_rules(T0 + timedelta(seconds=320)) == {}
    rule.refresh_from_db()
    assert rule.evaluated_at == T0 + timedelta(seconds=310)


def test_removing_a_rule_notifies_the_resolution_of_its_alerts(r1, rule, channel):
    traffic(r1, 0, 240, 0.8)
    traffic(r1, 240, 300, 0.1)
    evaluate(rule, 300)
    evaluate(rule, 310)

    rules.delete_rule(rule)

    assert list(Notification.objects.order_by("number").values_list("kind", "alert")) == [
        ("firing", None),
        ("resolved", None),
    ]


def test_the_database_allows_one_open_alert_per_rule_and_pool(rule):
    for state in ("resolved", "firing"):
        Alert.objects.create(rule=rule, pool=rule.pool, state=state, started_at=T0, last_breach_at=T0)
    with pytest.raises(IntegrityError), transaction.atomic():
        Alert.objects.create(rule=rule, pool=rule.pool, started_at=T0, last_breach_at=T0)


def test_a_second_evaluator_does_nothing_while_the_first_runs(rule):
    with connection.get_new_connection(connection.get_connection_params()) as other:
        other.execute("select pg_advisory_lock(%s)", [EVALUATE])
        assert not evaluate_alerts(T0)
        other.execute("select pg_advisory_unlock(%s)", [EVALUATE])
        assert evaluate_alerts(T0)


def test_an_evaluation_costs_as_many_queries_whatever_the_number_of_pools_and_rules(
    r1, rule, django_assert_num_queries
):
    requests_around.cache_clear()
    traffic(r1, 0, 240, 0.8)
    # New pools: 3 more read their bins, and 14 the requests of the days before.
    for second, queries, pools in ((245, 64, 5), (255, 67, 0), (265, 50, 0)):
        with django_assert_num_queries(queries):
            evaluate_alerts(T0 + timedelta(seconds=second))
        for number in range(pools):
            other = create_pool(f"pool-{number}", models=[f"m{number}"])
            traffic(add_replica(other, name=f"r1-{number}", url=f"http://127.0.0.1:92{number:02}"), 200, 245, 0.8)
            rules.update_rule(AlertRule.objects.get(pool=other, kind="hit_rate_drop"), settings=SETTINGS)


def test_a_disabled_replica_stays_in_the_history_of_the_pool(rule, r1):
    traffic(r1, 0, 600, 0.8)
    traffic(r1, 600, 660, 0.1)
    set_replica_state(r1, ReplicaState.DISABLED)

    verdict = evaluate(rule, 660)

    assert verdict.result == Result.BREACH
    assert verdict.baseline == pytest.approx(0.8)


def test_a_rule_disabled_during_its_evaluation_opens_no_alert(r1, rule):
    traffic(r1, 0, 300, 0.8)
    traffic(r1, 300, 420, 0.1)
    (loaded,) = AlertRule.objects.select_related("pool", "group").filter(pk=rule.pk)
    rules.update_rule(rule, enabled=False)

    pipeline.evaluate([loaded], T0 + timedelta(seconds=420))

    assert loaded.verdict["result"] == "breach"
    assert not Alert.objects.exists()


def test_the_number_of_open_alerts_of_a_rule_is_limited(pool, monkeypatch):
    monkeypatch.setattr(pipeline, "MAX_SUBJECTS", 3)
    for number in range(1, 6):
        replica = add_replica(pool, name=f"r{number}", url=f"http://127.0.0.1:910{number}")
        for second in (200, 240, 280):
            gap(replica, T0 + timedelta(seconds=second))
    rule = AlertRule.objects.get(pool=pool, kind="replica_down")

    for second in (285, 290):
        evaluate(rule, second)
        assert states() == ["firing"] * 3


def test_the_sentence_and_the_figures_of_an_alert_are_of_the_same_evaluation(r1, rule, channel):
    """The rate goes on falling between the alert and its message."""
    traffic(r1, 0, 240, 0.8)
    traffic(r1, 240, 300, 0.3)
    evaluate(rule, 300)
    evaluate(rule, 310)
    traffic(r1, 300, 330, 0.0)
    evaluate(rule, 330)
    alert = Alert.objects.get()
    assert alert.value < 0.25
    assert f"is {alert.value * 100:.1f} %, {(alert.baseline - alert.value) * 100:.1f} points below" in alert.summary
