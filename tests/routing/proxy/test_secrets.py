"""No prompt, key, cookie or other content of clients and replicas gets into a log or a metric."""

from __future__ import annotations

import hashlib
import json
import logging

import pytest
from msgspec.structs import replace

from routing.balancing.placement import Placement
from routing.log import LineFormatter
from routing.schema import (
    Access,
    ApiKey,
    HealthCheck,
    Limits,
    LowestCostSettings,
    PrefixHashSettings,
    RouterConfig,
    dump_snapshot,
)
from tests.fakes.replica import FakeReplica, Script, answering, hanging, raw, resetting
from tests.routing.proxy.harness import CHAT, SECRET, Harness, config, decision_page, post, routed

TRIPWIRE = b"tripwire"
SECRETS = (
    *(b"Authorization: Bearer tripwire-key", b"Cookie: sessionid=tripwire-cookie", b"X-Session-ID: tripwire-session"),
    *(b"X-Task-Group: tripwire-group", b"X-Api-Key: tripwire-other-key", b"X-Request-Id: tripwire request"),
)
PROMPT = b'{"model":"tiny","prompt":"tripwire-prompt","user":"tripwire-user","prompt_cache_key":"tripwire-cache"}'
PATH = b"/v1/completions?key=tripwire-query"
ECHO = b'{"error":{"message":"you said tripwire-prompt"}}'
LIMITS = Limits(
    max_body_bytes=4096,
    first_byte_timeout_s=0.1,
    response_timeout_s=0.5,
    idle_timeout_s=0.1,
    header_timeout_s=0.2,
    body_idle_timeout_s=0.2,
)
SAID: dict[str, bytes] = {
    "sound": post(PATH, PROMPT, SECRETS),
    "no JSON": post(PATH, PROMPT[:-1], SECRETS),
    "an unknown model": post(PATH, PROMPT.replace(b"tiny", b"tripwire-model"), SECRETS),
    "a model that is no string": post(PATH, PROMPT.replace(b'"tiny"', b'["tripwire"]'), SECRETS),
    "no such path": post(b"/tripwire-path", PROMPT, SECRETS),
    "a malformed header": post(PATH, PROMPT, (*SECRETS, b"tripwire name: tripwire value")),
    "a malformed request line": b"tripwire tripwire\r\n\r\n",
    "another host": post(b"http://tripwire.example/v1/completions", PROMPT, SECRETS),
    "a malformed Host": post(PATH, PROMPT, (*SECRETS, b"Host: tripwire")),
    "a broken chunk": post(PATH, b"tripwire", (*SECRETS, b"Transfer-Encoding: chunked")),
    "too much": post(PATH, PROMPT * 100, SECRETS),
    "half a head": post(PATH, PROMPT, SECRETS)[:150],
    "half a body": post(PATH, PROMPT, SECRETS)[:-5],
}
ANSWERED: dict[str, Script] = {
    "well": answering(ECHO, extra=b"Set-Cookie: tripwire=tripwire\r\n"),
    "400": answering(ECHO, status=400),
    "500": answering(ECHO, status=500),
    "503": answering(ECHO, status=503),
    "with no HTTP": raw(b"tripwire\r\n\r\n"),
    "with a malformed header": raw(b"HTTP/1.1 200 OK\r\ntripwire name: tripwire\r\n\r\n"),
    "half": raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\ntripwire", then_close=True),
    "with more than was asked for": raw(b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\ntripwiretripwire"),
    "with a reset": resetting,
    "never": hanging,
}


async def say(harness: Harness, sent: bytes) -> None:
    async with harness.connect() as client:
        await client.send(sent)
        await client.reader.read(65_536)  # a response, or the deadline


async def nothing_is_kept(harness: Harness) -> None:
    await harness.at_rest()
    assert TRIPWIRE not in str(decision_page(harness.router.services.decisions, 0, 100)).encode()
    for page in ("/metrics", "/admin/decisions", "/admin/replicas", "/admin/config"):
        status, text = await harness.admin("GET", page)
        assert (status, "tripwire" in str(text)) == (200, False)


@pytest.fixture(autouse=True)
def everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.handler.setFormatter(LineFormatter())


@pytest.mark.parametrize("sent", SAID)
async def test_nothing_that_a_client_sends_is_logged(sent, replica, caplog):
    snapshot = config([replica], settings=PrefixHashSettings(), models=("tiny",), limits=LIMITS)
    async with routed(snapshot) as harness:
        await say(harness, SAID[sent])
        await nothing_is_kept(harness)
    assert "tripwire" not in caplog.text


@pytest.mark.parametrize("answered", ANSWERED)
async def test_nothing_that_a_replica_sends_is_logged(answered, two, caplog):
    for replica in two:
        replica.script = ANSWERED[answered]
        replica.health_status = 500
    async with routed(config(two, limits=LIMITS, health=HealthCheck(interval_s=0.05, failures=2))) as harness:
        await say(harness, SAID["sound"])
        await nothing_is_kept(harness)
        await harness.until(lambda: "replica_down" in caplog.text, "the health checks to fail")
    assert "tripwire" not in caplog.text


async def test_internal_errors_of_explanations_quote_nothing(replica, caplog, monkeypatch):
    def fail(*_: object) -> None:
        raise ValueError("tripwire-prompt")

    async with routed(config([replica])) as harness:
        monkeypatch.setattr(Placement, "decide", fail)
        case = {"path": CHAT.decode(), "body": json.loads(PROMPT)}
        assert await harness.admin("POST", "/admin/explain", json=case) == (500, {"error": "internal error"})
    assert "error=ValueError" in caplog.text
    assert "tripwire" not in caplog.text


# --- keys that are ours to check, and ours to send ---

KEY = "tripwire-" + "5e" * 32
GUARDED: dict[str, tuple[bytes, int]] = {
    "let in": (post(CHAT, PROMPT, (b"Authorization: Bearer " + KEY.encode(),)), 200),
    "over a rate": (post(CHAT, PROMPT, (b"Authorization: Bearer " + KEY.encode(),)), 429),
    "with an unknown key": (post(CHAT, PROMPT, SECRETS), 401),
    "with two keys": (post(CHAT, PROMPT, (*SECRETS, b"Authorization: Bearer " + KEY.encode())), 401),
    "with a model of others": (
        post(CHAT, PROMPT.replace(b"tiny", b"tripwire-model"), (b"Authorization: Bearer " + KEY.encode(),)),
        403,
    ),
    "asking for too much": (
        post(CHAT, PROMPT.replace(b"{", b'{"n":"tripwire",', 1), (b"Authorization: Bearer " + KEY.encode(),)),
        400,
    ),
}


def with_keys(replica: FakeReplica) -> RouterConfig:
    rate = 0.001 if replica.script is ONCE else None
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    key = ApiKey(name="team", digest=digest, models=("tiny",), tenant="red", requests_per_s=rate)
    snapshot = config([replica], settings=LowestCostSettings(), models=("tiny",), limits=LIMITS)
    pool = replace(snapshot.pools[0], replicas=tuple(replace(it, api_key=KEY) for it in snapshot.pools[0].replicas))
    return replace(snapshot, pools=(pool,), access=Access(keys=(key,)))


ONCE = answering(ECHO)


@pytest.mark.parametrize("case", GUARDED)
async def test_keys_of_clients_and_replicas_are_never_shown(case, replica, caplog):
    sent, status = GUARDED[case]
    if case == "over a rate":
        replica.script = ONCE
    snapshot = with_keys(replica)
    secrets = (KEY, hashlib.sha256(KEY.encode()).hexdigest(), SECRET)
    async with routed(snapshot) as harness, harness.connect() as client:
        for _ in range(2):
            response = await client.ask(sent)
        assert response.status == status
        await nothing_is_kept(harness)
        explained = {
            "path": "/v1/completions",
            "body": json.loads(PROMPT),
            "headers": {"Authorization": f"Bearer {KEY}"},
        }
        shown = [str(await harness.admin("POST", "/admin/explain", json=explained))]
        shown += [str(await harness.admin("GET", page)) for page in ("/admin/config", "/admin/replicas", "/metrics")]
        shown += [
            repr(snapshot),
            repr(harness.router.active),
            str(decision_page(harness.router.services.decisions, 0, 9)),
            caplog.text,
        ]
        shown += [(response.head + response.body).decode()] if status != 200 else []
    for text in shown:
        assert not [secret for secret in secrets if secret in text]
    assert "tripwire" not in caplog.text


@pytest.mark.parametrize("field", ["digest", "api_key", "hash_secret"])
async def test_a_rejected_configuration_keeps_its_secrets(field, replica, caplog):
    document = json.loads(dump_snapshot(with_keys(replica), 2).document)
    del document["sha256"]
    fields = {
        "digest": document["config"]["access"]["keys"][0],
        "api_key": document["config"]["pools"][0]["replicas"][0],
        "hash_secret": document["config"],
    }
    fields[field][field] = KEY + " "  # the key instead of its digest, or one character too many
    async with routed(config([replica])) as harness:
        status, nack = await harness.admin("PUT", "/admin/config", data=json.dumps(document).encode())
        _, shown = await harness.admin("GET", "/admin/config")
    assert status == 422
    assert nack["path"].endswith(field)
    assert "tripwire" not in f"{nack} {shown} {caplog.text}"
