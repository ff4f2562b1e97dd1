"""The outbox: which channels get a message, and one row per message however often it is enqueued."""

from datetime import timedelta

import pytest

from controlplane.errors import InvalidError
from telemetry.channels.enqueue import MAX_ALERTS, combine, enqueue
from telemetry.models import Alert, AlertRule, Notification, NotificationKind
from telemetry.services.notifications.channels import create_channel, update_channel
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
        enqueue(told, "repeated", T0, sequences=dict.fromkeys(told, sequence))
    enqueue(told, "resolved", T0)

    rows = list(Notification.objects.order_by("number").values_list("kind", "sequence"))
    assert rows == [("repeated", 0), ("repeated", 1), ("repeated", 2), ("resolved", 0)]


def test_messages_are_numbered_independently_of_clocks(pool, channel):
    """Two workers whose clocks are two hours apart."""
    told = make(pool)
    enqueue(told, "firing", T0 + timedelta(hours=1))
    enqueue(told, "resolved", T0 - timedelta(hours=1))

    assert list(Notification.objects.order_by("number").values_list("kind", flat=True)) == ["firing", "resolved"]


def test_alerts_are_combined_up_to_a_limit(pool, channel):
    told = make(pool, MAX_ALERTS + 1)
    enqueue(told, "firing", T0)

    first, second = Notification.objects.order_by("number")
    assert first.alert_ids == list(told)[:MAX_ALERTS]
    assert [one["alert"] for one in first.payload["data"]["alerts"]] == first.alert_ids
    assert first.payload["data"]["summary"].startswith(f"{MAX_ALERTS} alerts firing in pool chat: Alert ")
    assert (second.alert_ids, second.payload["data"]["alert"]) == ([list(told)[-1]], list(told)[-1])


def test_a_combined_message_has_the_common_labels():
    both = combine([payload(1, pool="chat", replica="r1"), payload(2, pool="chat", replica="r2")], T0)

    assert both["data"]["labels"] == {"pool": "chat"}


def test_a_resolution_goes_to_every_notified_channel(pool, channel):
    """A pager that comes back would ring for what is long over."""
    ((alert, _),) = make(pool).items()
    told = {state: {alert: payload(alert, state, severity="warning")} for state in ("firing", "resolved")}
    narrowed = create_channel("narrowed", config={"url": "https://hooks.example/y"})
    enqueue(told["firing"], NotificationKind.FIRING, T0)
    update_channel(narrowed, matchers=[{"label": "severity", "op": "=", "value": "critical"}])
    update_channel(channel, enabled=False)
    create_channel("later", config={"url": "https://hooks.example/z"}, matchers=[{"label": "pool", "value": "other"}])

    enqueue(told["resolved"], NotificationKind.RESOLVED, T0)

    rows = Notification.objects.order_by("channel__name", "number").values_list("channel__name", "kind")
    assert list(rows) == [
        ("narrowed", "firing"), ("narrowed", "resolved"), ("ops", "firing"), ("ops", "resolved"),
    ]  # fmt: skip


def test_a_disabled_channel_gets_no_messages(pool, channel):
    update_channel(channel, enabled=False)
    enqueue(make(pool), "firing", T0)

    assert not Notification.objects.exists()


def test_a_single_repetition_differs_from_a_combined_one(pool, channel):
    told = make(pool, 2)
    first, second = told
    enqueue(told, "repeated", T0, sequences={first: 1, second: 3})
    enqueue({first: told[first]}, "repeated", T0, sequences={first: 2})
    enqueue({first: told[first]}, "repeated", T0, sequences={first: 3})

    assert Notification.objects.count() == 3


@pytest.mark.parametrize(
    ("matchers", "goes"),
    [
        ([], True),
        (["severity=critical"], True),
        (["severity=warning, critical", "pool=chat"], True),
        (["severity=critical", "pool!=chat"], False),
        (["pool=ch*"], True),
        (["pool!=ch*"], False),
        (["replica!=r1"], True),  # an alert without the label has "" there
        (["replica=r1"], False),
    ],
)
def test_a_channel_gets_the_alerts_that_match(pool, channel, matchers, goes):
    update_channel(channel, matchers=matchers)
    alert, told = next(iter(make(pool).items()))
    told["data"]["labels"] = {"severity": "critical", "pool": "chat"}
    enqueue({alert: told}, "firing", T0)

    assert Notification.objects.exists() is goes


def test_a_channel_gets_only_matching_alerts_of_a_group(pool, channel):
    update_channel(channel, matchers=["severity=critical"])
    told = make(pool, 3)
    for number, one in enumerate(told.values()):
        one["data"]["labels"] = {"severity": "warning" if number == 1 else "critical"}
    enqueue(told, "firing", T0)

    first, _, third = told
    assert Notification.objects.get().alert_ids == [first, third]


def test_an_invalid_matcher_is_rejected_and_named(channel):
    with pytest.raises(InvalidError) as caught:
        update_channel(channel, matchers=["pool=chat", "severty=critical"])
    assert [fault.path for fault in caught.value.faults] == ["$.matchers[1]"]
