"""Alerts sent to Debian's Alertmanager fire and resolve there."""

import base64
from datetime import UTC, datetime, timedelta

import pytest

from telemetry.channels.alertmanager import ALERTMANAGER, EXPIRES_S, RESEND_S, labels_of, to_alerts
from telemetry.channels.base import ConfigError, Message
from tests.fakes.alertmanager import alertmanager, until
from tests.fakes.real_prometheus import program
from tests.telemetry.channels.messages import HOSTILE, TEST, message, payload, several
from tests.telemetry.conftest import T0


def push(url, told, **given):
    return ALERTMANAGER.send(ALERTMANAGER.complete({"url": url, **given}), told)


def now_told(state, **changes):
    now = datetime.now(UTC)
    ended = now.isoformat() if state == "resolved" else None
    began = (now - timedelta(minutes=5)).isoformat()
    return Message("msg_1", now, payload(7, state, fired_at=began, resolved_at=ended, **changes))


def test_alertmanager_shows_the_states_of_an_alert(tmp_path, receiver):
    with alertmanager(program("prometheus-alertmanager"), tmp_path, receiver.url) as server:
        assert push(server.url, now_told("firing")).status == 200
        (alert,) = until(server.alerts, "it knows the alert")
        push(server.url, now_told("repeated"))
        assert len(server.alerts()) == 1
        push(server.url, now_told("resolved"))
        until(lambda: server.alerts() == [], "the alert has ended")
        until(lambda: any(one.payload["status"] == "resolved" for one in receiver.received), "the end is told on")

        push(server.url, TEST)
        push(server.url, several(1, 2))
        assert {one["labels"]["alertname"] for one in server.alerts()} >= {"Hit rate drop"}

        for hostile in HOSTILE:
            labels = {"group": hostile, "weird-label": hostile}
            assert push(server.url, now_told("firing", labels=labels, summary=hostile)).status == 200

    assert alert["labels"]["severity"] == "critical"
    assert alert["labels"]["alertname"] == "Hit rate drop"
    assert alert["annotations"]["summary"].startswith("Hit rate of pool chat is 20.1 %")
    assert alert["generatorURL"] == "https://warmpath.example/alerts/7/"
    first = receiver.received[0].payload
    assert (first["status"], first["alerts"][0]["labels"]["pool"]) == ("firing", "chat")


def test_an_alert_expires_without_repetition():
    (alert,) = to_alerts([message().data], T0, "")

    assert EXPIRES_S >= 3 * RESEND_S
    assert datetime.fromisoformat(alert["endsAt"]) == T0 + timedelta(seconds=EXPIRES_S)
    assert "generatorURL" not in alert


def test_labels_are_stable_and_have_valid_names():
    labels = {"pool": "chat", "task-group": "a b", "replica": None}
    begun, ended = (labels_of(payload(7, state, labels=labels)["data"]) for state in ("firing", "resolved"))

    assert begun == ended
    assert begun == {"pool": "chat", "task_group": "a b", "alertname": "Hit rate drop", "source": "warmpath"}


def test_credentials_are_sent(receiver):
    push(receiver.origin, TEST, username="u", password="p")
    push(receiver.origin, TEST, bearer_token="s3cret")

    basic, bearer = (one.headers["authorization"] for one in receiver.received)
    assert basic == "Basic " + base64.b64encode(b"u:p").decode()
    assert bearer == "Bearer s3cret"
    assert {one.path for one in receiver.received} == {"/api/v2/alerts"}


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "url"),
        ({"url": "http://am:9093", "username": "u"}, "password"),
        ({"url": "http://am:9093", "username": "u", "password": "p", "bearer_token": "t"}, "bearer_token"),
        ({"url": "http://am:9093", "bearer_token": "a\nb"}, "bearer_token"),
    ],
)
def test_invalid_configs_are_rejected_by_field(given, field):
    with pytest.raises(ConfigError) as caught:
        ALERTMANAGER.complete(given)
    assert caught.value.field == field
