"""Configurations are activated whole or not at all, and survive restarts."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from routing import __version__
from routing.proxy.config_store import CURRENT, ConfigStore, LastKnownGood, NackError, Swap
from routing.schema import (
    Limits,
    LoadedSnapshot,
    PrefixHashSettings,
    RoundRobinSettings,
    dump_snapshot,
)
from tests.fakes.replica import LAST_CHUNK, STREAM_HEAD, Call, FakeReplica, chunk, fake_replicas, sse
from tests.routing.proxy.harness import CHAT, Harness, config, get, post, ready, routed


async def running_revision(harness: Harness) -> int | None:
    _, shown = await harness.admin("GET", "/admin/config")
    return shown["revision"]


async def test_without_a_configuration_requests_get_503() -> None:
    async with routed(None) as harness:
        response = await harness.chat()
        assert (response.status, response.headers["retry-after"]) == (503, "1")
        async with harness.connect() as client:
            await client.send(get(b"/health"))
            assert (await client.read_response()).status == 503
        assert await harness.admin("GET", "/readyz") == (
            503,
            {"status": "not_ready", "reason": "no configuration yet"},
        )


async def test_a_pushed_configuration_is_acknowledged_and_active(two: list[FakeReplica]) -> None:
    async with routed(None) as harness:
        status, ack = await harness.push(config(two[:1]), 4)
        assert (status, ack["status"], ack["revision"]) == (200, "ack", 4)
        assert (await harness.chat()).replica == "replica-0"
        assert await harness.admin("GET", "/readyz") == (200, {"status": "ready", "revision": 4})
        _, shown = await harness.admin("GET", "/admin/config")
        assert (shown["sha256"], shown["source"], shown["applied_at"]) == (ack["sha256"], "push", ack["applied_at"])
        assert shown["config"]["hash_secret"] == "***"

        assert (await harness.push(config(two[1:]), 5))[0] == 200
        assert (await harness.chat()).replica == "replica-1"


async def test_a_pool_without_replicas_is_accepted(two: list[FakeReplica]) -> None:
    async with routed(config([])) as harness:
        assert (await harness.chat()).status == 503
        assert (await harness.push(config(two), revision=2))[0] == 200
        assert (await harness.chat()).status == 200
        assert (await harness.push(config([]), revision=3))[0] == 200
        assert (await harness.chat()).status == 503


async def test_an_older_revision_never_replaces_a_newer_one(two: list[FakeReplica]) -> None:
    async with routed(config(two[:1]), revision=5) as harness:
        for snapshot, revision in ((config(two[1:]), 4), (config(two[1:]), 5)):
            status, nack = await harness.push(snapshot, revision)
            assert (status, nack["status"], nack["running_revision"]) == (409, "nack", 5)
            assert nack["path"] == "$.revision"
        status, again = await harness.push(config(two[:1]), 5)
        assert (status, again["status"]) == (200, "ack")
        assert (await harness.chat()).replica == "replica-0"


def altered(document: bytes, **fields: Any) -> bytes:
    return json.dumps({**json.loads(document), **fields}).encode()


async def test_an_invalid_configuration_is_rejected_with_path_and_reason(two: list[FakeReplica]) -> None:
    good = dump_snapshot(config(two), 9).document
    body = json.loads(good)["config"]
    twice = {**body, "pools": body["pools"] * 2}
    unknown = {**body, "colour": "blue"}
    invalid = {
        b"": "$",
        b"{": "$",
        b"[]": "$",
        good[:-20]: "$",
        altered(good, schema=99): "$.schema",
        altered(good, sha256="0" * 64): "$.sha256",
        altered(good, revision=0): "$.revision",
        altered(good, config=twice, sha256=None): "$.sha256",
        json.dumps({"revision": 9, "config": twice}).encode(): "$.pools",
        json.dumps({"revision": 9, "config": unknown}).encode(): "$",
        b"[" * 100_000: "$",
    }
    async with routed(config(two[:1]), revision=3) as harness:
        for document, path in invalid.items():
            status, nack = await harness.admin("PUT", "/admin/config", data=document)
            assert (status, nack["status"], nack["path"], nack["running_revision"]) == (422, "nack", path, 3), document
            assert nack["reason"]
            assert await running_revision(harness) == 3
        _, shown = await harness.admin("GET", "/admin/config")
        assert set(shown["last_nack"]) == {"revision", "path", "reason", "at"}
        assert (await harness.chat()).status == 200


async def test_random_damage_leaves_the_old_or_the_new_configuration(two: list[FakeReplica]) -> None:
    chance = random.Random(11)
    old, new = config(two[:1]), config(two[1:], settings=PrefixHashSettings())
    async with routed(old, revision=1) as harness:
        for revision in range(2, 60):
            document = bytearray(dump_snapshot(new, revision).document)
            for _ in range(chance.randrange(3)):
                document[chance.randrange(len(document))] = chance.randrange(256)
            status, _ = await harness.admin("PUT", "/admin/config", data=bytes(document))
            assert status in {200, 409, 422}
            _, shown = await harness.admin("GET", "/admin/config")
            assert shown["config"]["pools"][0]["replicas"][0]["name"] in {"replica-0", "replica-1"}
            running = harness.router.active.config
            assert running in (old, new) or status == 200


async def test_configurations_change_under_load_without_losing_a_request(two: list[FakeReplica]) -> None:
    async def script(call: Call) -> None:
        await call.send(STREAM_HEAD, chunk(sse({"n": 1})))
        await asyncio.sleep(0.005)
        await call.send(chunk(sse({"n": 2})), LAST_CHUNK)

    for replica in two:
        replica.script = script
    async with routed(config(two), revision=1) as harness:
        answered = 0
        done = asyncio.Event()

        async def keep_asking() -> None:
            nonlocal answered
            async with harness.connect() as client:
                while not done.is_set():
                    await client.send(post(CHAT))
                    response = await client.read_response()
                    assert (response.status, response.body) == (200, sse({"n": 1}) + sse({"n": 2}))
                    answered += 1

        asking = [asyncio.create_task(keep_asking()) for _ in range(8)]
        for revision in range(2, 40):
            members = (two, two[:1], two[1:])[revision % 3]
            settings = PrefixHashSettings() if revision % 2 else RoundRobinSettings()
            status, _ = await harness.push(config(members, settings=settings, policy_revision=revision), revision)
            assert status == 200
        before = answered
        await harness.until(lambda: answered > before + 20, "more answers")
        done.set()
        await asyncio.gather(*asking)
        await harness.at_rest()


async def test_a_request_keeps_its_configuration_and_its_replica(two: list[FakeReplica]) -> None:
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await call.send(STREAM_HEAD, chunk(sse({"n": 1})))
        await go.wait()
        await call.send(chunk(sse({"n": 2})), LAST_CHUNK)

    two[0].script = script
    async with routed(config(two[:1]), revision=1) as harness, harness.connect() as client:
        await client.send(post(CHAT))
        await two[0].wait_calls(1)
        await harness.push(config(two[1:]), 2)
        (old,) = harness.router._retired
        assert (old.name, old.connections) == ("replica-0", 1)
        go.set()
        assert (await client.read_response()).body == sse({"n": 1}) + sse({"n": 2})
        assert old.connections == 0  # not kept for another request


# --- on disk -----------------------------------------------------------------------------------------
async def test_a_router_starts_with_its_last_configuration(two: list[FakeReplica], tmp_path: Path) -> None:
    """A router serves without its control plane."""
    async with routed(None, state_dir=tmp_path) as harness:
        await harness.push(config(two[:1]), 6)
    assert (tmp_path / CURRENT).stat().st_mode & 0o077 == 0
    async with routed(None, state_dir=tmp_path) as harness:
        _, shown = await harness.admin("GET", "/admin/config")
        assert (shown["revision"], shown["source"]) == (6, "last_known_good")
        assert (await harness.chat()).replica == "replica-0"


async def test_a_file_wins_over_the_stored_configuration_unless_that_is_newer(
    two: list[FakeReplica], tmp_path: Path
) -> None:
    for revision, expected in ((5, 5), (4, 5), (5, 5), (7, 7)):
        async with routed(config(two), revision=revision, state_dir=tmp_path) as harness:
            assert await running_revision(harness) == expected


async def test_the_newer_stored_configuration_is_used_whichever_was_written_last(
    replica: FakeReplica, tmp_path: Path
) -> None:
    """Two routers that share a folder by mistake leave such files."""
    for revision in (9, 8):
        LastKnownGood(tmp_path).save(dump_snapshot(config([replica]), revision).document)
    store = ConfigStore(ready, LastKnownGood(tmp_path))
    await store.start(None)
    assert store.revision == 9


@pytest.mark.parametrize(("runs", "expected"), [({7, 8, 9}, 9), ({7, 8}, 8), ({7}, 7), (set(), None)])
@pytest.mark.parametrize("named", [None, 7])
async def test_a_stored_configuration_that_cannot_be_activated_is_skipped(
    runs: set[int], expected: int | None, named: int | None, replica: FakeReplica, tmp_path: Path
) -> None:
    """A router without a file waits for a push; one with a file fails."""

    async def prepare(snapshot: LoadedSnapshot) -> Swap:
        if snapshot.revision not in runs:
            raise ValueError("no room")
        return await ready(snapshot)

    def document(revision: int) -> bytes:
        return dump_snapshot(config([replica]), revision).document

    for revision in (8, 9):
        LastKnownGood(tmp_path).save(document(revision))
    store = ConfigStore(prepare, LastKnownGood(tmp_path))
    if named is None and expected == 7:
        expected = None
    if named is not None and expected is None:
        with pytest.raises(NackError, match="no room"):
            await store.start(document(named))
    else:
        await store.start(None if named is None else document(named))
    assert store.revision == expected
    assert (store.last_nack is None) == (expected == 9)


async def test_a_push_that_cannot_be_stored_is_not_acknowledged(replica: FakeReplica, tmp_path: Path) -> None:
    blocked = tmp_path / "state"
    blocked.write_text("a file where the folder should be")
    async with routed(None, state_dir=blocked) as harness:
        status, nack = await harness.push(config([replica]), 1)
        assert (status, nack["status"], await running_revision(harness)) == (422, "nack", None)


async def test_a_file_is_used_even_if_it_cannot_be_stored(
    replica: FakeReplica, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "state"
    blocked.write_text("a file where the folder should be")
    async with routed(config([replica]), revision=3, state_dir=blocked) as harness:
        assert (await harness.chat()).status == 200
        assert await running_revision(harness) == 3
    assert "last_known_good_not_written" in caplog.text


# --- processes ---------------------------------------------------------------------------------------
class Process:
    """A router process."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "routing", "serve", "--port=0", "--admin-port=0", *arguments]
        self.popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []

    def wait_ready(self) -> int:
        assert self.popen.stderr
        for line in self.popen.stderr:
            self.lines.append(line)
            if " is ready: http://127.0.0.1:" in line:
                return int(line.split("http://127.0.0.1:")[1].split()[0])
        raise AssertionError("".join(self.lines))

    def end(self) -> int:
        try:
            self.lines += (self.popen.communicate(timeout=10)[1] or "").splitlines(keepends=True)
        finally:
            self.popen.kill()
        return self.popen.returncode


async def test_the_first_signal_drains_and_the_second_stops(tmp_path: Path) -> None:
    """``test_shutdown.py`` covers the details."""

    async def hang(call: Call) -> None:
        await call.send(STREAM_HEAD, chunk(sse({"n": 1})))
        await call.wait_gone()

    async with fake_replicas(1, hang) as replicas:
        file = tmp_path / "config.json"
        file.write_bytes(dump_snapshot(config(replicas, limits=Limits(drain_timeout_s=60)), 3).document)
        process = Process("--config", str(file), "--state-dir", str(tmp_path / "state"), "--name", "one")
        port = await asyncio.to_thread(process.wait_ready)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        secret = json.dumps({"prompt": "tripwire-prompt", "user": "tripwire-user"}).encode()
        writer.write(
            post(b"/v1/completions", secret, [b"Authorization: Bearer tripwire-key", b"Cookie: tripwire=cookie"])
        )
        async with asyncio.timeout(10):
            await reader.readuntil(b"\n\n")
        process.popen.send_signal(signal.SIGTERM)
        while not any("draining" in line for line in process.lines):
            line = await asyncio.wait_for(asyncio.to_thread(process.popen.stderr.readline), 10)
            process.lines.append(line)
        assert process.popen.poll() is None
        process.popen.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.end) == 0
        writer.close()
    text = "".join(process.lines)
    assert "Router one is ready" in text
    build = {"version": __version__, "compiled": str("TEST_COMPILED" in os.environ).lower()}
    assert " INFO serving " + " ".join(f"{name}={value}" for name, value in build.items()) in text
    assert "revision=3" in text
    assert "tripwire" not in text


def test_a_process_that_cannot_serve_logs_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"revision": 1, "config": {"pools": []}}')
    process = Process("--config", str(file), "--state-dir", str(tmp_path / "state"), "--name", "one")
    assert process.end() == 2
    assert "hash_secret" in "".join(process.lines)
