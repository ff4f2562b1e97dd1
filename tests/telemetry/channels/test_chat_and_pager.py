"""Slack's blocks and PagerDuty's events, over a real socket."""

import pytest

from telemetry.channels import http_post
from telemetry.channels.base import ConfigError, DeliveryError
from telemetry.channels.pagerduty import PAGERDUTY
from telemetry.channels.slack import SLACK, escape, link_to
from tests.fakes.fake_webhook_receiver import Reply
from tests.telemetry.channels.messages import NOTICE, ROLLED_BACK, ROLLOUT, TEST, message, several

KEY = "s3cretkey0123456789abcdefABCDEF0"


def send(kind, told, **given):
    return kind.send(kind.complete(given), told)


def pager(receiver, told, **given):
    sent = len(receiver.received)
    send(PAGERDUTY, told, routing_key=KEY, endpoint=receiver.origin, source="wp", **given)
    return [one.payload for one in receiver.received[sent:]]


def test_plain_text_is_unchanged():
    assert escape("a & b < c > d @e") == "a &amp; b &lt; c &gt; d @\u200be"
    assert escape("90 % of pool *chat*") == "90 % of pool *chat*"
    assert link_to("https://wiki.example/a|b>?c=d&e", "Runbook") == "<https://wiki.example/a%7Cb%3E?c=d&e|Runbook>"


def test_an_incident_follows_its_alert_under_one_key(receiver):
    told = [pager(receiver, message(state=state))[0] for state in ("firing", "repeated", "acknowledged", "resolved")]

    assert [event["event_action"] for event in told] == ["trigger", "trigger", "acknowledge", "resolve"]
    assert {event["dedup_key"] for event in told} == {"wp-alert-7"}
    assert {event["routing_key"] for event in told} == {KEY}
    assert {one.path for one in receiver.received} == {"/v2/enqueue"}
    first = told[0]
    assert first["payload"]["severity"] == "critical"
    assert first["payload"]["component"] == "chat"
    assert first["payload"]["custom_details"]["Value"] == "20.1 %"
    assert first["links"][0] == {"href": "https://warmpath.example/alerts/7/", "text": "Open alert"}
    assert "payload" not in told[-1]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("critical", "critical"),
        ("page", "critical"),
        ("error", "error"),
        ("info", "info"),
        ("odd", "warning"),
        (None, "warning"),
    ],
)
def test_severities_are_translated(receiver, ours, theirs):
    assert pager(receiver, message(labels={"severity": ours}))[0]["payload"]["severity"] == theirs


def test_several_alerts_become_several_incidents(receiver):
    keys = [event["dedup_key"] for event in pager(receiver, several(1, 2, 3, state="resolved"))]

    assert keys == ["wp-alert-1", "wp-alert-2", "wp-alert-3"]


def test_a_test_opens_and_resolves_an_incident_and_a_notice_opens_one(receiver):
    opened, closed = pager(receiver, TEST)
    (notice,) = pager(receiver, NOTICE)

    assert (opened["event_action"], closed["event_action"]) == ("trigger", "resolve")
    assert opened["dedup_key"] == closed["dedup_key"] != notice["dedup_key"]
    assert notice["event_action"] == "trigger"


def test_a_partial_or_slow_delivery_is_retried_as_a_whole(receiver, monkeypatch):
    receiver.replies = [Reply(202), Reply(429, {"Retry-After": "30"})]
    with pytest.raises(DeliveryError) as caught:
        pager(receiver, several(1, 2, 3))
    assert (caught.value.retryable, caught.value.retry_after_s, len(receiver.received)) == (True, 30.0, 2)

    monkeypatch.setattr(http_post, "MAX_MESSAGE_S", -1.0)
    with pytest.raises(DeliveryError, match="timed out before"):
        pager(receiver, several(1, 2, 3))


def test_the_response_is_recorded(receiver):
    receiver.replies = [Reply(400, body=b'{"status": "invalid event",\n "errors": ["Length"]}')]
    with pytest.raises(DeliveryError) as caught:
        pager(receiver, message())

    assert (caught.value.status, caught.value.response) == (400, '{"status": "invalid event", "errors": ["Length"]}')


@pytest.mark.parametrize(
    ("kind", "given", "field"),
    [
        (SLACK, {}, "url"),
        (SLACK, {"url": "hooks.slack.com"}, "url"),
        (PAGERDUTY, {}, "routing_key"),
        (PAGERDUTY, {"routing_key": "short"}, "routing_key"),
        (PAGERDUTY, {"routing_key": KEY, "endpoint": "https://u:p@events.pagerduty.com"}, "endpoint"),
    ],
)
def test_invalid_configs_are_rejected_by_field(kind, given, field):
    with pytest.raises(ConfigError) as caught:
        kind.complete(given)
    assert caught.value.field == field


def test_two_installations_never_share_an_incident_and_neither_shows_its_key():
    one, other = (PAGERDUTY.complete({"routing_key": KEY}) for _ in range(2))

    assert one["source"] != other["source"]
    assert one["endpoint"] == "https://events.pagerduty.com"
    assert KEY not in str(PAGERDUTY.public(one))
    assert (
        SLACK.public(SLACK.complete({"url": "https://hooks.slack.com/services/s3cret"}))["target"]
        == "https://hooks.slack.com/..."
    )


def test_a_step_of_a_rollout_is_a_change_event_that_opens_no_incident(receiver):
    (event,) = pager(receiver, ROLLOUT)
    assert receiver.received[-1].path == "/v2/change/enqueue"
    assert event.keys() == {"routing_key", "payload", "links"}
    assert event["payload"]["summary"] == ROLLED_BACK
    assert "severity" not in event["payload"]
    assert event["links"] == [{"href": "https://warmpath.example/rollouts/3/", "text": "Open rollout"}]
