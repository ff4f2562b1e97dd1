"""The webhook over a real socket: delivery, and each error of the receiver."""

import base64
import hashlib
import hmac
import json
from datetime import timedelta

import pytest

from telemetry.channels import http_post
from telemetry.channels.base import ConfigError, DeliveryError, Message
from telemetry.channels.webhook import WEBHOOK, signature
from tests.fakes.fake_metrics_server import refusing
from tests.fakes.fake_webhook_receiver import Reply
from tests.telemetry.channels.messages import ROLLED_BACK, ROLLOUT
from tests.telemetry.conftest import T0

SECRET = "whsec_" + base64.b64encode(b"k" * 32).decode()
OLD_SECRET = "whsec_" + base64.b64encode(b"o" * 24).decode()
MESSAGE = Message("msg_1", T0, {"type": "alert.test", "data": {"summary": "Prüfung <b>"}})


def send(url, message=MESSAGE, **config):
    return WEBHOOK.send(WEBHOOK.complete({"url": url, "secret": SECRET, **config}), message)


def refused(url, **config):
    with pytest.raises(DeliveryError) as caught:
        send(url, **config)
    return caught.value


def test_a_message_is_signed_as_standard_webhooks_specifies(receiver):
    assert send(receiver.url).status == 200

    (got,) = receiver.received
    assert got.id == "msg_1"
    assert got.headers["content-type"] == "application/json"
    signed = f"msg_1.{got.headers['webhook-timestamp']}.".encode() + got.body
    expected = base64.b64encode(hmac.new(b"k" * 32, signed, hashlib.sha256).digest()).decode()
    assert got.headers["webhook-signature"] == f"v1,{expected}"
    assert int(got.headers["webhook-timestamp"]) == int(T0.timestamp())
    assert got.payload == MESSAGE.payload


def test_the_specification_s_own_example_verifies():
    """Vector of the reference libraries of Standard Webhooks."""
    key = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")

    assert (
        signature([key], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
        == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    )


def test_two_signatures_during_secret_rotation(receiver):
    send(receiver.url, previous_secret=OLD_SECRET)

    assert len(receiver.received[0].headers["webhook-signature"].split(" ")) == 2


@pytest.mark.parametrize(
    ("status", "retryable"),
    [
        (301, False),
        (400, False),
        (404, False),
        (408, True),
        (410, False),
        (425, True),
        (429, True),
        (500, True),
        (503, True),
    ],
)
def test_retryable_responses(receiver, status, retryable):
    receiver.replies = [Reply(status, {"Location": "/elsewhere"})]

    error = refused(receiver.url)

    assert (error.status, error.retryable, error.gone) == (status, retryable, status == 410)
    assert len(receiver.received) == 1  # a redirect is not followed


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("120", 120.0),
        ((T0 + timedelta(seconds=90)).strftime("%a, %d %b %Y %H:%M:%S GMT"), 90.0),
        ("soon", None),
        ("999999999", 86_400.0),
    ],
)
def test_retry_after_is_parsed(receiver, value, seconds):
    receiver.replies = [Reply(429, {"Retry-After": value})]

    assert refused(receiver.url).retry_after_s == seconds


def test_a_timeout_is_retryable(receiver, monkeypatch):
    monkeypatch.setattr(http_post, "DEADLINE_S", 0.2)
    receiver.replies = [Reply(hang=True)]

    assert refused(receiver.url).retryable


def test_a_refused_connection_is_retryable():
    with refusing() as port:
        assert refused(f"http://127.0.0.1:{port}/x").retryable


def test_a_message_that_is_too_long_is_not_sent(receiver):
    long = Message("msg_2", T0, {"data": {"summary": "x" * 20_001}})
    with pytest.raises(DeliveryError, match="longer than"):
        send(receiver.url, long)
    assert receiver.received == []


def test_no_error_names_the_url_or_the_secret(receiver):
    receiver.replies = [Reply(500), Reply(302), Reply(410)]
    errors = [refused(receiver.url) for _ in range(3)]
    with refusing() as port:
        errors.append(refused(f"http://127.0.0.1:{port}/hook/s3cret-path"))
    errors.append(refused("http://169.254.169.254/hook/s3cret-path"))

    for error in errors:
        chain = f"{error} {error!r} {error.__cause__!r}"
        assert "s3cret-path" not in chain
        assert SECRET not in chain


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({}, "url"),
        ({"url": "ftp://host/x"}, "url"),
        ({"url": "https://user:pass@host/x"}, "url"),
        ({"url": "https:///x"}, "url"),
        ({"url": "https://host/a b"}, "url"),
        ({"url": "https://host/x", "secret": "short"}, "secret"),
        ({"url": "https://host/x", "secret": "whsec_" + base64.b64encode(b"k" * 23).decode()}, "secret"),
        ({"url": "https://host/x", "colour": "red"}, "colour"),
    ],
)
def test_invalid_webhook_configs_are_rejected_by_field(config, field):
    with pytest.raises(ConfigError) as caught:
        WEBHOOK.complete(config)
    assert caught.value.field == field


def test_a_missing_secret_is_generated_and_only_the_host_is_public():
    config = WEBHOOK.complete({"url": "https://hooks.example/services/s3cret-path"})

    assert config["secret"].startswith("whsec_")
    assert WEBHOOK.public(config) == {"target": "https://hooks.example/...", "secrets": ["url", "secret"]}


def test_a_long_message_leaves_out_details_and_keeps_every_alert(receiver):
    bulky = [{"alert": number, "summary": "s", "detail": {"x": "y" * 3000}} for number in range(20)]
    send(receiver.url, Message("msg_3", T0, {"type": "alert.firing", "data": {"summary": "20", "alerts": bulky}}))

    (got,) = receiver.received
    assert [alert["alert"] for alert in got.payload["data"]["alerts"]] == list(range(20))
    assert len(got.body) < 20_000


def test_links_are_urls_where_the_site_has_a_public_url(receiver, settings):
    links = {"alert": "/alerts/7/", "revision": "/policies/3/revisions/?before=6", "pool": "/?pool=chat"}
    one = {"summary": "a", "links": links}
    message = Message("msg_1", T0, {"type": "alert.firing", "data": {"summary": "two", "alerts": [one]}})
    send(receiver.url, Message("msg_2", T0, {"type": "alert.firing", "data": one}))
    send(receiver.url, message)
    settings.PUBLIC_URL = ""
    send(receiver.url, message)

    single, several, local = (json.loads(got.body)["data"] for got in receiver.received)
    urls = {name: f"https://warmpath.example{path}" for name, path in links.items()}
    assert (single["links"], several["alerts"][0]["links"], local["alerts"][0]["links"]) == (urls, urls, links)


def test_a_step_of_a_rollout_has_a_type_of_its_own_and_urls(receiver):
    send(receiver.url, ROLLOUT)
    body = receiver.received[-1].payload
    assert body["type"] == "rollout.rolled_back"
    assert body["data"]["summary"] == ROLLED_BACK
    assert body["data"]["links"] == {"rollout": "https://warmpath.example/rollouts/3/"}
