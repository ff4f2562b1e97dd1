"""The admin port: authentication, explanations, replicas, decision records."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from array import array
from typing import Any

import pytest

from routing.observability.decision_log import MAX_SHOWN_BLOCKS, DecisionRing
from routing.schema import HealthCheck, Limits, LowestCostSettings, PrefixHashSettings, dump_snapshot
from tests.fakes.replica import hanging
from tests.routing.proxy.harness import config, connect, decision_page, record, routed


async def test_the_token_protects_everything_but_health_and_metrics(replica):
    paths = ["/admin/config", "/admin/replicas", "/admin/decisions"]
    async with routed(config([replica]), token="s3cret") as harness:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            for path in paths:
                assert (await harness.admin("GET", path, headers=headers))[0] == 401
            assert (await harness.admin("PUT", "/admin/config", headers=headers, data=b"{}"))[0] == 401
            assert (await harness.admin("POST", "/admin/explain", headers=headers, data=b"{}"))[0] == 401
        for path in paths:
            for scheme in ("Bearer", "bearer"):  # RFC 9110: case-insensitive
                assert (await harness.admin("GET", path, headers={"Authorization": f"{scheme} s3cret"}))[0] == 200
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
async def test_without_a_token_only_loopback_hosts_are_served(host, status, replica):
    async with routed(config([replica])) as harness:
        assert (await harness.admin("GET", "/admin/config", headers={"Host": host}))[0] == status
        assert (await harness.admin("GET", "/healthz", headers={"Host": host}))[0] == 200


@pytest.mark.parametrize(("token", "status"), [(None, 415), ("s3cret", 401)])
async def test_compressed_bodies_are_rejected(token, status, replica):
    """Half a kilobyte may decompress to a body that blocks all requests for seconds."""
    document = dump_snapshot(config([replica]), 2).document
    async with routed(config([replica]), token=token) as harness:
        for body in (gzip.compress(document), gzip.compress(b" " * (1 << 20)), b"no gzip"):
            headers = {"Content-Encoding": "gzip"}
            assert (await harness.admin("PUT", "/admin/config", data=body, headers=headers))[0] == status
        assert harness.router.store.revision == 1


async def test_a_client_that_disconnects_during_its_body_causes_no_defect(replica, caplog):
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
async def test_malformed_http_is_rejected_and_not_logged(raw, replica, caplog, monkeypatch):
    for existing in logging.root.manager.loggerDict.values():  # logging.config disables existing loggers
        monkeypatch.setattr(existing, "disabled", False, raising=False)
    async with routed(config([replica])) as harness:
        async with connect(int(harness.server.admin_url.rpartition(":")[2])) as client:
            await client.send(raw)
            assert b" 400 " in (await client.read_all()).partition(b"\r\n")[0]
        assert (await harness.admin("GET", "/healthz"))[0] == 200
    assert "s3cret" not in caplog.text
    assert "ERROR" not in caplog.text


async def test_bodies_over_the_limit_are_not_explained(replica):
    explained_request = {"path": "/v1/completions", "body": {"prompt": "x" * 2000}}
    async with routed(config([replica], limits=Limits(max_body_bytes=1024))) as harness:
        assert (await harness.admin("POST", "/admin/explain", json=explained_request))[0] == 413
        explained_request["body"] = {"prompt": "x"}
        assert (await harness.admin("POST", "/admin/explain", json=explained_request))[0] == 200


async def test_explain_returns_the_decision_that_a_request_gets(two):
    async with routed(config(two, settings=PrefixHashSettings(slack_s=60))) as harness:
        for number in range(10):
            body = {"model": "tiny", "messages": [{"role": "system", "content": f"Expert {number}. " * 99}]}
            explained_request = {"path": "/v1/chat/completions", "headers": {"X-Task-Group": "none"}, "body": body}
            status, explained = await harness.admin("POST", "/admin/explain", json=explained_request)
            response = await harness.chat(json.dumps(body).encode())
            assert (status, explained["replica"]) == (200, response.replica)
            record = decision_page(harness.router.services.decisions, number, 1)["decisions"][0]
            assert (record["prefix"], record["blocks"]) == (explained["prefix"], explained["blocks"])
            assert len(record["blocks"]) == 3
        calls = sum(len(replica.calls) for replica in two)
        assert calls == 10
        odd = (b'{"path":"\xff","body":{}}', b'{"path":"/v1/completions","body":' + b"[" * 100_000)
        for bad in (b"{", b'{"path":"/x","body":{}}', b'{"path":"/v1/completions"}', *odd):
            assert (await harness.admin("POST", "/admin/explain", data=bad))[0] == 422
        bad_body = {"path": "/v1/completions", "body": []}
        assert (await harness.admin("POST", "/admin/explain", json=bad_body))[0] == 400


async def test_explain_names_the_home_at_which_the_request_would_wait_too_long(two):
    two[0].script = two[1].script = hanging

    def about(subject: str) -> dict[str, Any]:
        return {"model": "tiny", "messages": [{"role": "system", "content": subject * 99}]}

    async with routed(config(two, settings=PrefixHashSettings())) as harness:
        waiting = asyncio.create_task(harness.chat(json.dumps(about("An expert in everything. " * 9)).encode()))
        await harness.until(lambda: bool(two[0].calls or two[1].calls), "the request at its replica")
        busy, other = two if two[0].calls else reversed(two)
        found = set()
        for number in range(20):
            explained_request = {"path": "/v1/chat/completions", "body": about(f"Expert {number}. ")}
            _, explained = await harness.admin("POST", "/admin/explain", json=explained_request)
            found.add((explained["replica"], explained["reason"], *explained["rejected"]))
        waiting.cancel()

    assert found == {(other.name, "affinity"), (other.name, "spill", busy.name)}


async def test_explain_shows_the_hit_and_cost_of_each_candidate(two):
    async with routed(config(two, settings=LowestCostSettings())) as harness:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "A shared document. " * 200}]}
        first = await harness.chat(json.dumps(body).encode())
        explained_request = {"path": "/v1/chat/completions", "body": body}
        status, explained = await harness.admin("POST", "/admin/explain", json=explained_request)
        shown = {candidate["replica"]: candidate for candidate in explained["candidates"]}

        assert (status, explained["replica"], explained["reason"]) == (200, first.replica, "hit")
        assert explained["hit_tokens"] == shown[first.replica]["hit_tokens"] > 800
        (other_replica,) = shown.keys() - {first.replica}
        assert shown[other_replica]["hit_tokens"] == 0
        assert shown[first.replica]["cost"] < shown[other_replica]["cost"]


async def test_replicas_show_health_and_load(two):
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


async def test_decisions_can_be_fetched_with_a_sample_of_their_blocks(replica):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "A shared document. " * 2000}]}
    async with routed(config([replica])) as harness:
        await harness.chat(json.dumps(body).encode())
        shown = [(await harness.admin("GET", f"/admin/decisions{query}"))[1] for query in ("", "?blocks=0.25")]
        (whole,), (part,) = (page["decisions"] for page in shown)
        assert len(whole["blocks"]) == whole["block_count"] == part["block_count"] > 100
        assert part["blocks"] == [whole["blocks"][index] for index in part["positions"]]
        assert 0 < len(part["blocks"]) < 60
        assert (whole["hash_tokens"], whole["block_tokens"]) == (64, 16)
        for bad in ("2", "-0.1", "nan", "half", "inf"):
            assert (await harness.admin("GET", f"/admin/decisions?blocks={bad}"))[0] == 422


def many(count: int) -> array[int]:
    """Evenly distributed hashes."""
    return array("Q", [(number * 0x9E37_79B9_7F4A_7C15) % (1 << 64) for number in range(count)])


def pages_of(ring: DecisionRing, limit: int = 1000) -> list[list[str]]:
    """Request ids on each page, until there are no more."""
    pages, after = [], 0
    while (page := decision_page(ring, after, limit))["decisions"]:
        pages.append([decision["request_id"] for decision in page["decisions"]])
        after = page["next"]
    return pages


def test_a_page_is_limited_by_its_number_of_block_hashes():
    ring = DecisionRing()
    for number in range(5):
        ring.add(record(f"r{number}", many(MAX_SHOWN_BLOCKS // 2)))
    assert pages_of(ring) == [["r0", "r1"], ["r2", "r3"], ["r4"]]
    assert pages_of(ring, limit=1) == [["r0"], ["r1"], ["r2"], ["r3"], ["r4"]]


def test_a_record_longer_than_a_page_has_its_own_page():
    ring = DecisionRing()
    for name, blocks in (("short", 1), ("long", MAX_SHOWN_BLOCKS + 1), ("last", 1)):
        ring.add(record(name, many(blocks)))
    assert pages_of(ring) == [["short"], ["long"], ["last"]]


def test_a_block_sample_is_the_lower_part_of_the_hash_range():
    ring, hashes = DecisionRing(), many(1000)
    ring.add(record("r", hashes))
    whole = decision_page(ring, 0, 1)["decisions"][0]
    assert (len(whole["blocks"]), whole["block_count"], "positions" in whole) == (1000, 1000, False)

    shown = {ratio: decision_page(ring, 0, 1, ratio)["decisions"][0] for ratio in (0.0, 0.125, 0.5)}
    for ratio, decision in shown.items():
        assert decision["block_count"] == 1000
        assert [int(block, 16) for block in decision["blocks"]] == [hashes[index] for index in decision["positions"]]
        assert len(decision["blocks"]) == pytest.approx(1000 * ratio, abs=2)
    assert set(shown[0.125]["blocks"]) < set(shown[0.5]["blocks"])  # a smaller part is a subset of a larger one


def test_a_smaller_block_sample_gives_more_records_a_page_up_to_a_limit():
    ring = DecisionRing()
    for number in range(600):
        ring.add(record(f"r{number}", many(256)))
    whole, part, none = (decision_page(ring, 0, 1000, ratio)["decisions"] for ratio in (1.0, 0.05, 0.0))
    assert len(whole) == MAX_SHOWN_BLOCKS // 256
    assert len(whole) < len(part) < len(none) < 600


async def test_decisions_are_paged_by_sequence_number(replica):
    async with routed(config([replica])) as harness:
        for number in range(5):
            await harness.chat(headers=[b"X-Request-Id: r%d" % number])
        _, first = await harness.admin("GET", "/admin/decisions", params={"limit": "2"})
        _, rest = await harness.admin("GET", "/admin/decisions", params={"after": str(first["next"])})
        _, none = await harness.admin("GET", "/admin/decisions", params={"after": str(rest["next"])})
        assert (await harness.admin("GET", "/admin/decisions", params={"after": "x"}))[0] == 422
    assert [decision["request_id"] for decision in first["decisions"]] == ["r0", "r1"]
    assert [decision["seq"] for decision in rest["decisions"]] == [3, 4, 5]
    assert (none["decisions"], none["next"], none["dropped"]) == ([], 5, 0)
    assert first["boot"] == harness.router.boot
    assert set(first["decisions"][0]) == {
        "seq", "at", "request_id", "pool", "group", "matched_by", "policy", "revision", "arm", "strategy", "replica",
        "rank",
        "reason",
        "prompt_tokens_estimate", "prefix", "blocks", "block_count", "block_tokens", "hash_tokens",
        "candidates", "hit_tokens", "prefill", "retries", "status", "outcome", "streamed", "ttft_s", "prefill_s",
        "latency_s", "continued_after", "objective_ms", "objective_kept",
        "prompt_tokens", "cached_tokens", "generated_tokens", "session", "prompt_structure",
        "request_digest", "digest_ratio",
    }  # fmt: skip
    load = {"replica", "running", "waiting_tokens"}
    assert set(first["decisions"][0]["candidates"][0]) == load | {"hit_tokens", "cost"}  # its prompt is described
    assert set(first["decisions"][1]["candidates"][0]) == load


def test_the_ring_is_bounded_in_records_and_bytes():
    ring = DecisionRing(max_records=100, max_bytes=50_000)
    for _ in range(500):
        ring.add(record("short", array("Q")))
    assert ring.bytes <= 50_000
    assert len(ring) == 50_000 // 1000
    seen = decision_page(ring, 0, 10)
    assert (seen["dropped"], seen["decisions"][0]["seq"], seen["next"]) == (
        500 - len(ring),
        500 - len(ring) + 1,
        500 - len(ring) + 10,
    )
    for _ in range(20):
        ring.add(record("long", array("Q", range(2048))))
    assert ring.bytes <= 50_000
    assert len(ring) == 2
