"""Who is told of what: one row for each message, whoever asks for it however often."""

from datetime import timedelta

import pytest

from telemetry.channels.enqueue import enqueue
from telemetry.channels.grouping import MOST_TOGETHER, together
from telemetry.models import Alert, AlertRule, Notification
from telemetry.services.channels import create_channel, update_channel
from tests.telemetry.conftest import T0

pytestmark = pytest.mark.django_db


@pytest.fixture
def channel(db):
    return create_channel("ops", config={"url": "https://hooks.example/x"})


def payload(number, state="firing", **labels):
    data = {"alert": number, "pool": "chat", "state": state, "summary": f"Alert {number}.", "labels": labels}
    return {"type": f"alert.{state}", "timestamp": "t", "data": data}


def make(pool, count=1):
    rule = AlertRule.objects.filter(pool=pool).first()
    made = [
        Alert.objects.create(rule=rule, pool=pool, state="resolved", started_at=T0, last_breach_at=T0)
        for _ in range(count)
    ]
    return {alert.pk: payload(alert.pk) for alert in made}


def test_the_same_alert_kind_and_sequence_is_one_message_and_a_repetition_another(pool, channel):
    told = make(pool)
    for sequence in (0, 0, 1, 1, 2):
        enqueue(told, "repeated", T0, sequence=sequence)
    enqueue(told, "resolved", T0)

    rows = list(Notification.objects.order_by("number").values_list("kind", "sequence"))
    assert rows == [("repeated", 0), ("repeated", 1), ("repeated", 2), ("resolved", 0)]


def test_numbers_say_what_came_first_where_clocks_do_not(pool, channel):
    """R17: two workers whose clocks are two hours apart."""
    told = make(pool)
    enqueue(told, "firing", T0 + timedelta(hours=1))
    enqueue(told, "resolved", T0 - timedelta(hours=1))

    assert list(Notification.objects.order_by("number").values_list("kind", flat=True)) == ["firing", "resolved"]


def test_alerts_told_together_are_one_message_up_to_a_bound(pool, channel):
    told = make(pool, MOST_TOGETHER + 1)
    enqueue(told, "firing", T0)

    first, second = Notification.objects.order_by("number")
    assert first.alert_ids == list(told)[:MOST_TOGETHER]
    assert [one["alert"] for one in first.payload["data"]["alerts"]] == first.alert_ids
    assert first.payload["data"]["summary"].startswith(f"{MOST_TOGETHER} alerts fire in pool chat: Alert ")
    assert (second.alert_ids, second.payload["data"]["alert"]) == ([list(told)[-1]], list(told)[-1])


def test_what_is_told_together_says_what_it_has_in_common():
    both = together([payload(1, pool="chat", replica="r1"), payload(2, pool="chat", replica="r2")], T0)

    assert both["data"]["labels"] == {"pool": "chat"}


def test_a_channel_that_is_off_is_told_nothing(pool, channel):
    update_channel(channel, enabled=False)
    enqueue(make(pool), "firing", T0)

    assert not Notification.objects.exists()
