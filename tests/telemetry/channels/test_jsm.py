"""Alerts in Jira Service Management: a receiver with its limits that processes a request after it accepted it."""

import json
import re

import pytest

from telemetry.channels import jsm
from telemetry.channels.base import DeliveryError
from telemetry.channels.jsm import JSM
from tests.fakes.fake_webhook_receiver import Reply
from tests.telemetry.channels.messages import HOSTILE, NOTICE, TEST, message, several

LIMITS = {"message": 130, "alias": 512, "description": 15_000, "entity": 512, "source": 100, "priority": 2}
ACCEPTED = Reply(202, body=b'{"result":"Request will be processed","took":0.302,"requestId":"43a29c5c-3dbf"}')
DONE = Reply(200, body=b'{"data": {"success": true, "action": "Create", "isSuccess": true, "status": "Created alert"}}')
FAILED = Reply(
    200, body=b'{"data": {"success": false, "action": "Create", "isSuccess": false, "status": "No license"}}'
)


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(jsm, "PROCESSED_AFTER_S", 0.0)


def send(receiver, told, *replies):
    sent = len(receiver.received)
    receiver.replies = list(replies) or [ACCEPTED] * len(told.alerts or [told]) + [DONE]
    given = {"api_key": "s3cret-key-0123", "endpoint": f"{receiver.origin}/jsm/ops/integration/v2", "source": "wp"}
    receipt = JSM.send(JSM.complete(given), told)
    return receipt, [checked(one) for one in receiver.received[sent:]]


def checked(received):
    """(method, path below the endpoint, body); what the API refuses is an AssertionError."""
    assert received.headers["authorization"] == "GenieKey s3cret-key-0123"
    body = json.loads(received.body or b"{}")
    if received.path.endswith("/alerts"):
        assert body["message"]
        assert body["priority"] in {"P1", "P2", "P3", "P4", "P5"}
    assert body.keys() <= LIMITS.keys()
    assert all(len(body[name]) <= LIMITS[name] for name in body)
    return received.method, received.path.removeprefix("/jsm/ops/integration/v2"), body


def test_an_alert_is_opened_acknowledged_and_closed_under_one_alias(receiver):
    receipt, (opened, result) = send(receiver, message())
    assert opened[:2] == ("POST", "/alerts")
    assert opened[2]["alias"] == "wp-alert-7"
    assert (opened[2]["priority"], opened[2]["entity"]) == ("P1", "chat")
    assert "Value: 20.1 %" in opened[2]["description"]
    assert "Open alert: https://warmpath.example/alerts/7/" in opened[2]["description"]
    assert result[:2] == ("GET", "/alerts/requests/43a29c5c-3dbf")
    assert "Created alert" in receipt.response
    assert send(receiver, message(state="repeated"))[1][0][2]["alias"] == "wp-alert-7"
    for state, action in (("acknowledged", "acknowledge"), ("resolved", "close")):
        ((_, path, _),) = send(receiver, message(state=state))[1]
        assert path == f"/alerts/wp-alert-7/{action}?identifierType=alias"


@pytest.mark.parametrize("hostile", [*HOSTILE, '<a href="https://evil.example">ack</a> @all'])
def test_untrusted_text_is_no_html(receiver, hostile):
    facts = [[hostile, hostile]]
    told = message(summary=hostile, pool=hostile, facts=facts, links={"runbook": "https://w.example/<img/src=x>"})
    _, (opened, _) = send(receiver, told)
    runbook = "\nRunbook: https://w.example/%3Cimg/src=x>"
    assert opened[2]["description"].endswith(runbook)
    text = "".join([opened[2]["message"], opened[2]["entity"], opened[2]["description"].removesuffix(runbook)])
    assert not re.search("<(?!\u200b)|@(?!\u200b)|://", text)


def test_several_alerts_are_several_requests_and_one_result(receiver):
    _, requests = send(receiver, several(1, 2, 3))
    assert [body.get("alias") for _, _, body in requests] == ["wp-alert-1", "wp-alert-2", "wp-alert-3", None]
    _, requests = send(receiver, several(1, 2, state="resolved"))
    assert [path.split("/")[2] for _, path, _ in requests] == ["wp-alert-1", "wp-alert-2"]


def test_a_test_is_closed_at_once_and_a_notice_opens_an_alert(receiver):
    _, (opened, _, closed) = send(receiver, TEST, ACCEPTED, DONE, ACCEPTED)
    assert (opened[2]["priority"], closed[1]) == ("P5", "/alerts/wp-msg_1/close?identifierType=alias")
    assert send(receiver, NOTICE)[1][0][2]["alias"] == "wp-msg_2"


def test_long_texts_are_cut(receiver):
    causes = [{"summary": "c" * 600, "advice": "a"}] * 3
    _, (opened, _) = send(receiver, message(summary="s" * 600, causes=causes))
    assert opened[2]["message"].endswith("…")
    assert opened[2]["description"].startswith("s" * 499)


def test_an_accepted_request_that_is_not_processed_is_a_failure(receiver):
    with pytest.raises(DeliveryError, match="the response is an error") as caught:
        send(receiver, message(), ACCEPTED, FAILED)
    assert caught.value.retryable
    assert "No license" in caught.value.response


@pytest.mark.parametrize("reply", [Reply(404), Reply(500), Reply(200, body=b"{}")])
def test_a_result_that_is_not_known_yet_is_no_failure(receiver, reply):
    assert send(receiver, message(), ACCEPTED, reply)[0].status in {200, 202}


@pytest.mark.parametrize(
    ("reply", "retryable"),
    [(Reply(422), False), (Reply(401), False), (Reply(429), True), (Reply(200, body=b"ok"), True)],
)
def test_a_refused_request_is_a_failure(receiver, reply, retryable):
    with pytest.raises(DeliveryError) as caught:
        send(receiver, message(), reply)
    assert caught.value.retryable is retryable


def test_two_installations_share_no_alert():
    one, other = (JSM.complete({"api_key": "k"}) for _ in range(2))
    assert one["source"] != other["source"]
    assert one["endpoint"] == "https://api.atlassian.com/jsm/ops/integration/v2"
    assert JSM.topics == ()
