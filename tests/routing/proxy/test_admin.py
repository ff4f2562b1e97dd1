"""The admin port: who may ask, and what it shows."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging

import pytest

from routing.schema import HealthCheck, Limits, LowestCostSettings, PrefixHashSettings, dump_snapshot
from tests.fakes.replica import FakeReplica
from tests.routing.proxy.harness import config, connect, routed
from tests.routing.proxy.records import told


async def test_the_token_guards_everything_that_changes_or_shows_anything(replica: FakeReplica) -> None:
    paths = ["/admin/config", "/admin/replicas", "/admin/decisions"]
    async with routed(config([replica]), token="s3cret") as harness:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            for path in paths:
                assert (await harness.admin("GET", path, headers=headers))[0] == 401
            assert (await harness.admin("PUT", "/admin/config", headers=headers, data=b"{}"))[0] == 401
            assert (await harness.admin("POST", "/admin/explain", headers=headers, data=b"{}"))[0] == 401
        for path in paths:
            assert (await harness.admin("GET", path, headers={"Authorization": "Bearer s3cret"}))[0] == 200
        for path in ("/healthz", "/readyz", "/metrics"):
            assert (await harness.admin("GET", path))[0] == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8081", 200),
        ("localhost", 200),
        ("[::1]:8081", 200),
        ("rebound.example:8081", 403),
        ("127.0.0.1.example", 403),
        ("[::1", 403),
        ("10.0.0.1", 403),
    ],
)
async def test_without_a_token_the_port_is_for_who_asks_for_the_loopback(
    host: str, status: int, replica: FakeReplica
) -> None:
    async with routed(config([replica])) as harness:
        assert (await harness.admin("GET", "/admin/config", headers={"Host": host}))[0] == status
        assert (await harness.admin("GET", "/healthz", headers={"Host": host}))[0] == 200


@pytest.mark.parametrize(("token", "status"), [(None, 415), ("s3cret", 401)])
async def test_a_compressed_body_is_refused_as_it_is(token: str | None, status: int, replica: FakeReplica) -> None:
    """Half a kilobyte may be half a megabyte, and half a megabyte what holds everybody's requests up for seconds."""
    document = dump_snapshot(config([replica]), 2).document
    async with routed(config([replica]), token=token) as harness:
        for body in (gzip.compress(document), gzip.compress(b" " * (1 << 20)), b"no gzip"):
            headers = {"Content-Encoding": "gzip"}
            assert (await harness.admin("PUT", "/admin/config", data=body, headers=headers))[0] == status
        assert harness.router.store.revision == 1


async def test_whoever_goes_away_in_the_middle_of_a_body_is_no_defect(
    replica: FakeReplica, caplog: pytest.LogCaptureFixture
) -> None:
    head = b"PUT /admin/config HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
    async with routed(config([replica])) as harness:
        port = int(harness.server.admin_url.rpartition(":")[2])
        idle = len(asyncio.all_tasks())
        for _ in range(5):
            async with connect(port) as client:
                await client.send(head + b"x")
                await harness.until(lambda: len(asyncio.all_tasks()) > idle, "the request to be at work")
            await harness.until(lambda: len(asyncio.all_tasks()) <= idle, "its end")
        assert (await harness.admin("GET", "/healthz"))[0] == 200
    assert "defect" not in caplog.text


@pytest.mark.parametrize(
    "raw",
    [
        b"GET /admin/config HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer s3cret\x00\r\n\r\n",
        b"GET /admin/config?s3cret HTTP/1.1\r\nHost : localhost\r\nCookie: s3cret\r\n\r\n",
        b"GET s3cret\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_refused_and_not_quoted(
    raw: bytes, replica: FakeReplica, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for known in logging.root.manager.loggerDict.values():  # as logging.config does with those that it finds
        monkeypatch.setattr(known, "disabled", False, raising=False)
    async with routed(config([replica])) as harness:
        async with connect(int(harness.server.admin_url.rpartition(":")[2])) as client:
            await client.send(raw)
            assert b" 400 " in (await client.read_all()).partition(b"\r\n")[0]
        assert (await harness.admin("GET", "/healthz"))[0] == 200
    assert "s3cret" not in caplog.text
    assert "ERROR" not in caplog.text


async def test_what_no_client_may_send_is_not_explained(replica: FakeReplica) -> None:
    asked = {"path": "/v1/completions", "body": {"prompt": "x" * 2000}}
    async with routed(config([replica], limits=Limits(max_body_bytes=1024))) as harness:
        assert (await harness.admin("POST", "/admin/explain", json=asked))[0] == 413
        asked["body"] = {"prompt": "x"}
        assert (await harness.admin("POST", "/admin/explain", json=asked))[0] == 200


async def test_explain_gives_the_decision_that_a_request_gets(two: list[FakeReplica]) -> None:
    async with routed(config(two, settings=PrefixHashSettings())) as harness:
        for number in range(10):
            body = {"model": "tiny", "messages": [{"role": "system", "content": f"Expert {number}. " * 99}]}
            asked = {"path": "/v1/chat/completions", "headers": {"X-Task-Group": "none"}, "body": body}
            status, explained = await harness.admin("POST", "/admin/explain", json=asked)
            answer = await harness.chat(json.dumps(body).encode())
            assert (status, explained["replica"]) == (200, answer.replica)
            record = told(harness.router.services.decisions, number, 1)["decisions"][0]
            assert (record["prefix"], record["blocks"]) == (explained["prefix"], explained["blocks"])
            assert len(record["blocks"]) == 3
        calls = sum(len(replica.calls) for replica in two)
        assert calls == 10
        odd = (b'{"path":"\xff","body":{}}', b'{"path":"/v1/completions","body":' + b"[" * 100_000)
        for bad in (b"{", b'{"path":"/x","body":{}}', b'{"path":"/v1/completions"}', *odd):
            assert (await harness.admin("POST", "/admin/explain", data=bad))[0] == 422
        bad_body = {"path": "/v1/completions", "body": []}
        assert (await harness.admin("POST", "/admin/explain", json=bad_body))[0] == 400


async def test_explain_shows_what_each_candidate_holds_and_costs(two: list[FakeReplica]) -> None:
    async with routed(config(two, settings=LowestCostSettings())) as harness:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "A shared document. " * 200}]}
        first = await harness.chat(json.dumps(body).encode())
        asked = {"path": "/v1/chat/completions", "body": body}
        status, explained = await harness.admin("POST", "/admin/explain", json=asked)
        shown = {candidate["replica"]: candidate for candidate in explained["candidates"]}

        assert (status, explained["replica"], explained["reason"]) == (200, first.replica, "hit")
        assert explained["hit_tokens"] == shown[first.replica]["hit_tokens"] > 800
        (other,) = shown.keys() - {first.replica}
        assert shown[other]["hit_tokens"] == 0
        assert shown[first.replica]["cost"] < shown[other]["cost"]


async def test_replicas_are_shown_with_health_and_load(two: list[FakeReplica]) -> None:
    two[1].health_status = 500
    async with routed(config(two, health=HealthCheck(failures=1, interval_s=0.05))) as harness:
        await harness.until(lambda: harness.router.services.checks.status("replica-0").is_up, "a first finding")
        await harness.until(
            lambda: harness.router.services.checks.status("replica-1").is_up is False, "a first finding"
        )
        await harness.chat()
        _, shown = await harness.admin("GET", "/admin/replicas")
    up, down = shown["replicas"]
    assert (up["name"], up["health"], up["reason"], up["connections"], up["running"]) == ("replica-0", "up", None, 1, 0)
    assert up["last_ok_at"] is not None
    assert (down["health"], down["reason"], down["last_ok_at"]) == ("down", "health check returned status 500", None)


async def test_decisions_are_shown_with_the_part_of_their_blocks_that_is_asked_for(replica: FakeReplica) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "A shared document. " * 2000}]}
    async with routed(config([replica])) as harness:
        await harness.chat(json.dumps(body).encode())
        shown = [(await harness.admin("GET", f"/admin/decisions{query}"))[1] for query in ("", "?blocks=0.25")]
        (whole,), (part,) = (page["decisions"] for page in shown)
        assert len(whole["blocks"]) == whole["block_count"] == part["block_count"] > 100
        assert part["blocks"] == [whole["blocks"][place] for place in part["positions"]]
        assert 0 < len(part["blocks"]) < 60
        assert (whole["hash_tokens"], whole["block_tokens"]) == (64, 16)
        for bad in ("2", "-0.1", "nan", "half", "inf"):
            assert (await harness.admin("GET", f"/admin/decisions?blocks={bad}"))[0] == 422
