"""Bodies of templates: values and their formats, mistakes, and what a template cannot do."""

import pytest

from telemetry.channels.base import ConfigError, DeliveryError
from telemetry.channels.template import TEMPLATE, render
from tests.fakes.fake_webhook_receiver import Reply
from tests.telemetry.channels.messages import HOSTILE, NOTICE, ROLLOUT, TEST, message, several


def send(receiver, told, **config):
    receipt = TEMPLATE.send(TEMPLATE.complete({"url": receiver.url, **config}), told)
    assert receipt.status == 200
    return receiver.received[-1]


def refused(**config):
    with pytest.raises(ConfigError) as caught:
        TEMPLATE.complete({"url": "https://example.org/x", **config})
    return caught.value


def test_the_default_body_has_title_and_text(receiver):
    got = send(receiver, message())

    assert got.headers["content-type"] == "application/json"
    assert got.payload["title"].startswith("[FIRING] Hit rate of pool chat")
    assert "\nValue: 20.1 %\n" in got.payload["text"]


def test_method_headers_and_content_type_are_those_of_the_channel(receiver):
    headers = "Authorization: Bearer s3cret-token-123\r\nX-Team: a b"
    got = send(receiver, TEST, method="PUT", headers=headers, content_type="text/plain", body="{{ title | plain }}")

    assert (got.method, got.body) == ("PUT", b"[TEST] A test.")
    assert got.headers["authorization"] == "Bearer s3cret-token-123"
    assert (got.headers["x-team"], got.headers["content-type"]) == ("a b", "text/plain")


def test_paths_walk_the_payload(receiver):
    body = "[{{ data.labels.severity | json }}, {{ data.causes.0.confidence | json }}, {{ data.causes.9 | json }}]"
    assert send(receiver, message(), body=body).payload == ["critical", 0.9, None]
    many = '{"n": {{ data.alerts.1.alert | json }}, "all": {{ data.alerts | json }}, "at": {{ url | json }}}'
    got = send(receiver, several(1, 2, state="resolved"), body=many).payload
    assert (got["n"], len(got["all"]), got["at"]) == (2, 2, "https://warmpath.example/alerts/")


@pytest.mark.parametrize("told", [message(state="acknowledged"), several(1, 2), TEST, NOTICE, ROLLOUT])
def test_each_kind_of_message_makes_a_valid_body(receiver, told):
    assert set(send(receiver, told).payload) == {"text", "title"}


@pytest.mark.parametrize("hostile", [*HOSTILE, 'a", "role": "admin', "\\", "{{ data | json }}"])
def test_untrusted_text_cannot_change_the_structure_of_a_body(receiver, hostile):
    body = '{"a": {{ data.pool | json }}, "b": "pool {{ data.pool | string }}."}'
    got = send(receiver, message(pool=hostile), body=body).payload
    assert got == {"a": hostile, "b": f"pool {hostile}."}
    plain = {"content_type": "text/html", "body": "<b>{{ data.pool | html }}</b>?q={{ data.pool | url }}"}
    text = send(receiver, message(pool=hostile), **plain).body.decode()
    assert text.count("<") == 2
    assert not {"&", " ", '"'} & set(text.partition("?q=")[2])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{\n"a": {{ title }}}', "line 2: expected {{ path | format }} with one of the formats json, string"),
        ('{\n\n"a": {{ title | json }', "line 3: expected {{ path | format }}"),
        ('{"a": {{ titel | json }}}', "line 1: 'titel' is no value; expected one of id, type"),
        ('{"a": "{{ title | plain }}"}', "line 1: expected {{ path | format }} with one of the formats json, string"),
        ('{"a": {{ title | json }},\n"b" 1}', "line 2: invalid JSON: Expecting ':' delimiter"),
        ('{"a": {{ title.__class__ | shell }}}', "line 1: expected {{ path | format }}"),
        ('{"a": "\ud800"}', "'utf-8' codec can't encode"),
        ('{"a": {{ data.value_ratio | string }}}', "line 1: invalid JSON: Expecting value; expected json in place of"),
        ('["{{ data.labels.pod | json }}"]', "line 1: invalid JSON: Expecting ',' delimiter; expected json in place"),
        ("{{{ data.pool | json }}: 1}", "line 1: expected"),
        ("{ {{ data.pool | json }}: 1}", "line 1: invalid JSON: Expecting property name"),
        ("[" * 5000, "invalid JSON: it is nested too deeply"),
    ],
)
def test_a_mistake_is_refused_with_its_line_and_what_was_expected(body, reason):
    error = refused(body=body)

    assert error.field == "body"
    assert error.reason.startswith(reason)


@pytest.mark.parametrize(
    "path", ["data.__class__", "data.keys", "title.__class__", "data.pool.format", "data.causes.append"]
)
def test_a_path_reaches_no_python_object(path):
    values = {"title": "t", "data": {"pool": "p", "causes": [1]}}
    assert render(f"{{{{ {path} | json }}}}", values) == "null"


def test_tags_of_other_languages_are_text():
    text = "{% load static %}{% include '/etc/passwd' %}${7*7}"
    assert render(text, {}) == text


@pytest.mark.parametrize(
    "headers",
    ["Authorization", "Host: evil.example", "Content-Length: 0", "A: b\nC d", "A: b\x00c", "A: é", ": x"],
)
def test_invalid_headers_are_refused(headers):
    assert refused(headers=headers).field == "headers"


def test_a_body_that_is_too_long_is_not_sent(receiver):
    with pytest.raises(DeliveryError, match="the body is longer than 1000000 characters") as caught:
        send(receiver, several(*range(20)), body=f"[{','.join(['{{data|json}}'] * 700)}]")
    assert not caught.value.retryable
    assert receiver.received == []


def test_forms_accept_values_in_percent_encoding_only(receiver):
    form = {"content_type": "application/x-www-form-urlencoded"}
    assert refused(**form, body="text={{ title | plain }}").reason.endswith("one of the formats url")
    assert send(receiver, message(pool="a&b=c"), **form, body="pool={{ data.pool | url }}").body == b"pool=a%26b%3Dc"


def test_a_response_without_the_expected_text_is_a_failure(receiver):
    receiver.replies = [Reply(200, body=b'{"ok": false}'), Reply(200, body=b'{"ok": true}')]
    with pytest.raises(DeliveryError, match='the response lacks "ok": true') as caught:
        send(receiver, TEST, expect_in_response='"ok": true')
    assert caught.value.retryable
    send(receiver, TEST, expect_in_response='"ok": true')


def test_secrets_of_headers_are_removed_from_logs_and_not_shown():
    headers = "Authorization: Bearer s3cret\nX-Api-Key: hunter22"
    url = "https://a.example/s3cret-path?sig=abc%2BDefghi%2F123456"
    config = TEMPLATE.complete({"url": url, "headers": headers})

    assert "s3cret" not in str(TEMPLATE.public(config))
    echo = "no s3cret, hunter22, Bearer s3cret, abc%2BDefghi%2F123456, abc+Defghi/123456, /s3cret-path"
    for secret in TEMPLATE.secrets(config):
        echo = echo.replace(secret, "...")
    assert set(echo) == set("no .,") | set("/-path")
