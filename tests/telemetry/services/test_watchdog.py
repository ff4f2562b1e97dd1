"""The watchdog of web processes, for when no worker evaluates alert rules."""

import threading
from datetime import timedelta

import pytest
from django.db import connection
from django.utils import timezone

from controlplane.services.fleet.replicas import add_replica
from telemetry.models import Alert, AlertRule, EvaluationState
from telemetry.services import self_monitoring
from telemetry.services.alerts.rules import create_rule
from telemetry.services.notifications.channels import create_channel
from telemetry.storage.locks import EVALUATE, advisory_lock
from tests.telemetry.readings import engine_reading

T0 = timezone.now() - timedelta(minutes=5)  # deliveries use the real time


@pytest.fixture
def rule(transactional_db, settings, pool):
    """A rule of kind ``evaluator_lag``, beside the default rules, which were evaluated at T0 for the last time."""
    settings.ALERT_GROUP_WAIT_S = 0
    settings.WEBHOOK_NETWORKS = settings.FLEET_NETWORKS
    engine_reading(add_replica(pool, name="r1", url="http://127.0.0.1:9101"), T0, queries=100, hits=50)
    rule = AlertRule.objects.filter(pool=pool, kind="evaluator_lag").first() or create_rule(
        pool, name="lag", kind="evaluator_lag"
    )
    EvaluationState.objects.create(pk=1, at=T0)
    return rule


def test_a_missing_worker_is_reported_once_and_other_rules_stay_late(rule, receiver):
    create_channel("ops", config={"url": receiver.url})

    for second in (40, 50, 60):  # the default rule fires on the second check, 10 s later
        assert self_monitoring.check(T0 + timedelta(seconds=second))

    (message,) = receiver.received
    assert message.payload["data"]["kind"] == "evaluator_lag"
    assert [alert.rule_id for alert in Alert.objects.all()] == [rule.pk]
    assert EvaluationState.objects.get().at == T0


@pytest.mark.parametrize("second", [0, 29])
def test_a_worker_that_evaluates_or_restarts_is_not_reported(rule, receiver, second):
    create_channel("ops", config={"url": receiver.url})
    assert not self_monitoring.check(T0 + timedelta(seconds=second))
    assert receiver.received == []


def test_the_watchdog_evaluates_nothing_while_an_evaluator_runs(rule):
    results = []

    def check_in_thread():
        results.append(self_monitoring.check(T0 + timedelta(seconds=40)))
        connection.close()

    with advisory_lock(EVALUATE):
        thread = threading.Thread(target=check_in_thread)
        thread.start()
        thread.join(timeout=20)
    assert results == [False]
    assert not Alert.objects.exists()


def test_rules_that_were_never_evaluated_are_not_late(rule):
    EvaluationState.objects.all().delete()
    assert not self_monitoring.check(T0 + timedelta(hours=1))
