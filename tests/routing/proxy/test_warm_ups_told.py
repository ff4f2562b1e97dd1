"""What warm-ups keep, within what bounds, and what is told of them."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from routing.admin import announce
from routing.admin.announce import Announcement, announce_forever
from routing.admin.events import EventSpool
from routing.schema import (
    PrefixHashSettings,
    WarmUp,
)
from tests.fakes.control_plane import control_plane
from tests.fakes.replica import Call, FakeReplica, answering
from tests.routing.proxy.harness import config, routed
from tests.routing.proxy.scraped import samples
from tests.routing.proxy.warm_ups import (
    CANARY,
    QUICK,
    asked,
    body,
    homes,
    joined,
    row,
    sent_to_warm,
    taught,
    teach,
    warming,
)


async def test_without_the_setting_nothing_is_kept_or_sent(three: list[FakeReplica]) -> None:
    cold = config(three, settings=PrefixHashSettings(), health=QUICK)
    async with routed(config(three[:2], settings=PrefixHashSettings(), health=QUICK)) as harness:
        await teach(harness)
        assert harness.router.services.warm_ups is None
        await harness.push(cold, 2)
        assert (await homes(harness))["replica-2"]  # at once
        _, text = await harness.admin("GET", "/metrics")
        assert "warm" not in text.replace("warmpath", "")
        assert (await row(harness, "replica-2"))["warming"] is None

        await harness.push(warming(three), 3)
        await teach(harness)
        await harness.push(cold, 4)
        assert harness.router.services.all_warm_ups._popular_prefixes == {}  # switched off, it lets go of what it had
        await harness.push(warming(three), 5)
        assert harness.router.services.all_warm_ups._popular_prefixes["chat"].bytes == 0
    assert not any(map(sent_to_warm, three))


async def test_memory_stays_within_its_limit(three: list[FakeReplica]) -> None:
    small = WarmUp(memory_bytes=1 << 16)
    async with routed(warming(three[:2], small)) as harness:
        kept = harness.router.services.all_warm_ups._popular_prefixes["chat"]
        highest = 0
        for number in range(120):
            for _ in range(2):
                await harness.chat(body(number))
            highest = max(highest, kept.bytes)
        _, text = await harness.admin("GET", "/metrics")

    assert (1 << 15) < highest <= (1 << 16)
    assert samples(text)["warmpath_router_warm_up_kept_bytes"] == [({"pool": "chat"}, kept.bytes)]


async def test_no_text_of_a_prompt_is_shown_or_logged(
    three: list[FakeReplica], caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    caplog.set_level(logging.DEBUG)
    *known, new = three
    async with routed(warming(known), state_dir=tmp_path) as harness:
        await teach(harness)
        new.script = answering(b"{}", status=400)
        await harness.push(warming(three, WarmUp(concurrency=1)), 2)
        await joined(harness, new.name)
        shown = [await harness.admin("GET", path) for path in ("/metrics", "/admin/replicas", "/admin/decisions")]
        shown.append(await harness.admin("GET", "/admin/config"))

    assert CANARY in str(asked(sent_to_warm(new)))
    assert "warm_up_ended" in caplog.text
    assert CANARY not in caplog.text
    assert CANARY not in json.dumps(shown)
    assert not any(CANARY.encode() in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


async def test_the_control_plane_hears_how_far_it_is(three: list[FakeReplica], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announce, "HEARTBEAT_S", 0.02)
    async with taught(three) as (harness, new), control_plane([200]) as (url, heard):
        new.script = Call.wait_gone
        what = Announcement(url, "http://admin", "http://data", "1.0", None)
        spool = EventSpool(Path("/nonexistent"), "boot")
        task = asyncio.create_task(announce_forever(harness.server.data.view, what, spool))
        await harness.until(lambda: bool(heard), "a heartbeat")
        assert "warming" not in heard[-1]
        await harness.push(warming(three, WarmUp(time_limit_s=600)), 2)
        await harness.until(lambda: heard[-1].get("warming"), "news of the warm-up")
        [(name, progress)] = heard[-1]["warming"].items()
        task.cancel()

    assert name == new.name
    assert set(progress) == {"prefixes_done", "prefixes", "tokens_done", "tokens"}
