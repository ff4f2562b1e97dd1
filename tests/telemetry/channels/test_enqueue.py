"""The outbox: which channels get a message, and one row per message however often it is enqueued."""

from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.errors import InvalidError
from controlplane.models import Event
from controlplane.services.policies.rollouts import promote_rollout
from telemetry.channels.enqueue import MAX_ALERTS, combine, enqueue
from telemetry.models import Alert, AlertRule, Notification, NotificationKind
from telemetry.services.notifications.channels import ROLLOUT_AGE, create_channel, notify_rollouts, update_channel
from tests.controlplane.rollouts import FAILED, ack, publish_stages, start_routers, verdict
from tests.telemetry.conftest import T0

pytestmark = pytest.mark.django_db


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
        (["severity=critical", "pool!=chat"], False),
        (["replica!=r1"], True),  # an alert without the label has "" there
    ],
)
def test_a_channel_gets_the_alerts_that_match(pool, channel, matchers, goes):
    update_channel(channel, matchers=matchers)
    alert, told = next(iter(make(pool).items()))
    told["data"]["labels"] = {"severity": "critical", "pool": "chat"}
    enqueue({alert: told}, "firing", T0)

    assert Notification.objects.exists() is goes


def test_an_invalid_matcher_is_rejected_and_named(channel):
    with pytest.raises(InvalidError) as caught:
        update_channel(channel, matchers=["pool=chat", "severty=critical"])
    assert [fault.path for fault in caught.value.faults] == ["$.matchers[1]"]


# --- rollouts ----------------------------------------------------------------------------------------


@pytest.fixture
def subscribed(pool):
    """A channel that asks for rollouts, beside one that does not."""
    create_channel("alerts only", config={"url": "https://hooks.example/y"})
    return create_channel("ops", config={"url": "https://hooks.example/x"}, topics=["rollouts"])


def steps():
    rows = Notification.objects.filter(kind=NotificationKind.ROLLOUT).order_by("number")
    return [(row.channel.name, row.payload["type"].removeprefix("rollout.")) for row in rows]


def rolled_back(pool):
    policy = pool.policies.get(group=None)
    start_routers("router-1")
    ack()
    rollout = publish_stages(policy, guard={})
    ack()
    verdict(rollout, "failed", FAILED)
    return rollout


def test_a_channel_that_asks_for_rollouts_gets_each_step_once_with_the_reason(
    pool, subscribed, django_capture_on_commit_callbacks
):
    rollout = rolled_back(pool)
    notify_rollouts(timezone.now())
    with django_capture_on_commit_callbacks() as callbacks:
        notify_rollouts(timezone.now())
    assert callbacks == []  # no delivery is started again
    assert steps() == [("ops", "started"), ("ops", "rolled_back")]
    data = Notification.objects.order_by("-number").first().payload["data"]
    assert data["summary"].endswith("was rolled back automatically: A hit rate of 41.0 % compared with 60.0 %.")
    assert (data["policy"], data["revision"], data["rollout"]) == ("chat", rollout.revision.number, rollout.pk)
    assert data["links"] == {"rollout": f"/rollouts/{rollout.pk}/"}


def test_a_promotion_and_the_end_are_told_too(pool, subscribed, admin_user):
    policy = pool.policies.get(group=None)
    start_routers("router-1")
    ack()
    rollout = publish_stages(policy)
    ack()
    promote_rollout(rollout.pk, by=admin_user)
    promote_rollout(rollout.pk, by=admin_user)
    ack()
    notify_rollouts(timezone.now())
    assert [step for _, step in steps()] == ["started", "promoted", "promoted", "completed"]


def test_steps_of_more_than_an_hour_ago_are_not_told_any_more(pool, subscribed):
    rolled_back(pool)
    notify_rollouts(timezone.now() + ROLLOUT_AGE)
    assert steps() == []


@pytest.mark.parametrize(
    ("matchers", "count"), [(["pool=chat", "severity=critical"], 2), (["pool!=chat"], 0), (["pool=lab-*"], 0)]
)
def test_of_a_channel_s_matchers_those_on_the_pool_select_rollouts(pool, subscribed, matchers, count):
    update_channel(subscribed, matchers=matchers)
    rolled_back(pool)
    notify_rollouts(timezone.now())
    assert len(steps()) == count
    Notification.objects.all().delete()
    Event.objects.update(pool=None)  # as the removal of a pool does
    notify_rollouts(timezone.now())
    assert steps() == []
