"""A restarted router knows what replicas have cached, unless an engine, a replica or the file has changed."""

from __future__ import annotations

import stat
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from email.utils import formatdate
from pathlib import Path

import pytest
from msgspec.structs import replace

from routing.proxy import saved_residency
from routing.schema import LowestCostSettings, RouterConfig
from tests.fakes.replica import FakeReplica, fake_replicas
from tests.routing.proxy.harness import SECRET, Harness, chat_body, config, routed

PROMPTS = 40
DAY_S = 86_400.0


def snapshot_of(replicas: list[FakeReplica]) -> RouterConfig:
    return config(replicas, settings=LowestCostSettings())


async def placements(harness: Harness) -> list[tuple[str, str]]:
    """Replica and reason of each of some prompts, sent one after the other."""
    responses = [await harness.chat(chat_body(text=f"Document {number}. " * 60)) for number in range(PROMPTS)]
    return [(response.replica, response.headers["x-warmpath-reason"]) for response in responses]


@asynccontextmanager
async def router(snapshot: RouterConfig, folder: Path) -> AsyncIterator[Harness]:
    """A router that drains at the end of the block."""
    async with routed(snapshot, state_dir=folder) as harness:
        yield harness
        await harness.server.data.drain()


async def fill(snapshot: RouterConfig, folder: Path) -> list[str]:
    """The replicas of the prompts, as a router placed them that has saved its residency."""
    async with router(snapshot, folder) as harness:
        placed = await placements(harness)
    assert {reason for _, reason in placed} == {"cold"}
    assert len({replica for replica, _ in placed}) > 1
    return [replica for replica, _ in placed]


async def reasons_after_restart(snapshot: RouterConfig, folder: Path) -> set[str]:
    async with router(snapshot, folder) as harness:
        return {reason for _, reason in await placements(harness)}


async def test_a_restarted_router_finds_what_it_has_sent(three, tmp_path):
    before = await fill(snapshot_of(three), tmp_path)

    async with router(snapshot_of(three), tmp_path) as harness:
        after = await placements(harness)

    assert after == [(replica, "hit") for replica in before]


def written_at(file: Path) -> int:
    """Time of the last snapshot in ns; 0 without one."""
    return file.stat().st_mtime_ns if file.exists() else 0


async def until_saved(harness: Harness, file: Path) -> None:
    """Send a request, without which there is no snapshot, and wait until one has been written from now on."""
    before = written_at(file)
    await harness.chat(chat_body(text="Another document. " * 60))
    await harness.until(lambda: written_at(file) > before, "a snapshot")


async def test_a_router_that_is_killed_has_saved_before(three, tmp_path, monkeypatch):
    monkeypatch.setattr(saved_residency, "SAVE_S", 0.02)
    file = tmp_path / "residency-0"
    async with routed(snapshot_of(three), state_dir=tmp_path) as harness:
        await placements(harness)
        await until_saved(harness, file)  # may lack the last prompts, if it began before they were sent
        await until_saved(harness, file)

    assert await reasons_after_restart(snapshot_of(three), tmp_path) == {"hit"}


def started(age_s: float, clock_ahead_s: float) -> tuple[Callable[[], bytes], bytes]:
    """The ``/metrics`` and ``Date`` of an engine that started so long ago, by a clock that differs from ours."""

    def metrics() -> bytes:
        return b"# HELP x\nprocess_start_time_seconds %.2f\nother 1\n" % (time.time() + clock_ahead_s - age_s)

    return metrics, b"Date: %b\r\n" % formatdate(time.time() + clock_ahead_s, usegmt=True).encode()


@pytest.mark.parametrize("clock_ahead_s", [0.0, 3 * DAY_S, -3 * DAY_S])
async def test_what_an_engine_had_before_its_restart_is_forgotten(three, tmp_path, clock_ahead_s):
    before = await fill(snapshot_of(three), tmp_path)
    for replica, age_s in zip(three, (DAY_S, DAY_S, 0.0), strict=True):
        replica.metrics, replica.metrics_headers = started(age_s, clock_ahead_s)

    async with router(snapshot_of(three), tmp_path) as harness:
        after = await placements(harness)

    reasons = {replica.name: set[str]() for replica in three}
    for replica, (_, reason) in zip(before, after, strict=True):
        reasons[replica].add(reason)
    assert reasons == {three[0].name: {"hit"}, three[1].name: {"hit"}, three[2].name: {"cold"}}


async def test_a_late_response_of_an_engine_counts_too(three, tmp_path, monkeypatch):
    monkeypatch.setattr(saved_residency, "CHECK_S", 0.01)
    monkeypatch.setattr(saved_residency, "CHECK_PAUSE_S", 0.05)
    await fill(snapshot_of(three), tmp_path)
    for replica in three:
        replica.metrics, replica.metrics_headers = started(0.0, 0.0)
        replica.is_stopped = True
    async with router(snapshot_of(three), tmp_path) as harness:
        residency = harness.router.balancer.residency
        assert len(residency) > 0
        for replica in three:
            replica.is_stopped = False
        await harness.until(lambda: len(residency) == 0, "the engines' ages")


@pytest.mark.parametrize(
    ("text", "headers"),
    [
        (b"process_start_time_seconds 1.2.3\n", b""),
        (b"process_start_time_seconds 1\n", b"X-Long: %b\r\n" % (b"x" * 70_000)),
    ],
)
async def test_unusable_metrics_of_an_engine_forget_nothing(three, tmp_path, monkeypatch, text, headers):
    monkeypatch.setattr(saved_residency, "CHECK_S", 0.2)
    await fill(snapshot_of(three), tmp_path)
    for replica in three:
        replica.metrics, replica.metrics_headers = lambda: text, headers

    assert await reasons_after_restart(snapshot_of(three), tmp_path) == {"hit"}


@pytest.mark.parametrize("change", ["secret", "url", "damage", "cut", "age"])
async def test_a_file_that_no_longer_applies_is_ignored(three, tmp_path, monkeypatch, change):
    snapshot, file = snapshot_of(three), tmp_path / "residency-0"
    await fill(snapshot, tmp_path)
    data = file.read_bytes()
    if change == "damage":
        file.write_bytes(data[:-9] + b"X" + data[-8:])
    elif change == "cut":
        file.write_bytes(data[: len(data) // 2])
    elif change == "age":
        present = time.time()
        monkeypatch.setattr(time, "time", lambda: present + 2 * 3600)
    elif change == "secret":
        snapshot = replace(snapshot, hash_secret="cd" * 16)
        assert snapshot.hash_secret != SECRET
    async with fake_replicas(3) as others:
        if change == "url":
            snapshot = snapshot_of(others)
        assert await reasons_after_restart(snapshot, tmp_path) == {"cold"}


async def test_prompts_of_removed_replicas_are_ignored(three, tmp_path):
    before = await fill(snapshot_of(three), tmp_path)
    async with router(snapshot_of(three[:2]), tmp_path) as harness:
        after = await placements(harness)
    for replica, (_, reason) in zip(before, after, strict=True):
        assert reason == ("cold" if replica == three[2].name else "hit")


async def test_the_file_is_private_and_has_no_text(three, tmp_path):
    await fill(snapshot_of(three), tmp_path)
    file = tmp_path / "residency-0"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    data = file.read_bytes()
    assert SECRET.encode() not in data
    assert b"Document" not in data


async def test_a_full_disk_leaves_the_last_snapshot_and_is_logged(three, tmp_path, caplog):
    await fill(snapshot_of(three), tmp_path)
    (tmp_path / "residency-0.new").symlink_to("/dev/full")
    assert await reasons_after_restart(snapshot_of(three), tmp_path) == {"hit"}
    assert "residency_not_saved" in caplog.text
    assert await reasons_after_restart(snapshot_of(three), tmp_path) == {"hit"}


async def test_a_file_has_a_bounded_size(three, tmp_path, monkeypatch):
    monkeypatch.setattr(saved_residency, "MAX_BYTES", 1000)
    before = await fill(snapshot_of(three), tmp_path)
    assert (tmp_path / "residency-0").stat().st_size < 1500
    async with router(snapshot_of(three), tmp_path) as harness:
        after = await placements(harness)
    reasons = [reason for _, reason in after]
    kept = reasons.count("hit")
    assert 3 <= kept < PROMPTS
    latest = {replica: max(index for index, name in enumerate(before) if name == replica) for replica in set(before)}
    assert all(reasons[index] == "hit" for index in latest.values())
