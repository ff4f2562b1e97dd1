"""What warm-ups store and report, and that first requests hit the cache after a warm-up."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from routing.admin import announce
from routing.admin.announce import Announcement, announce_forever
from routing.admin.events import EventSpool
from routing.health.engine_probe import MAX_METRICS_BYTES
from routing.schema import (
    PrefixHashSettings,
    RouterConfig,
    WarmUp,
)
from routing.upstream.client import fetch
from tests.fakes.control_plane import control_plane
from tests.fakes.replica import Call, FakeReplica, answering
from tests.routing.proxy.harness import Harness, config, routed, samples
from tests.routing.proxy.warm_ups import (
    CANARY,
    QUICK,
    body,
    preferred_replicas,
    prefix_text,
    replica_row,
    send_traffic,
    sent_to_warm,
    system_prompts,
    wait_joined,
    with_traffic,
    with_warm_up,
)
from tests.routing.standin.replica_process import replica_process


async def test_without_warm_up_nothing_is_stored_or_sent(three: list[FakeReplica]) -> None:
    cold = config(three, settings=PrefixHashSettings(slack_s=60), health=QUICK)
    async with routed(config(three[:2], settings=PrefixHashSettings(slack_s=60), health=QUICK)) as harness:
        await send_traffic(harness)
        assert harness.router.services.warm_ups is None
        await harness.push(cold, 2)
        assert (await preferred_replicas(harness))["replica-2"]  # without delay
        _, text = await harness.admin("GET", "/metrics")
        assert "warm" not in text.replace("warmpath", "")
        assert (await replica_row(harness, "replica-2"))["warming"] is None

        await harness.push(with_warm_up(three), 3)
        await send_traffic(harness)
        await harness.push(cold, 4)
        assert harness.router.services.all_warm_ups._popular_prefixes == {}  # disabling it drops the stored prefixes
        await harness.push(with_warm_up(three), 5)
        assert harness.router.services.all_warm_ups._popular_prefixes["chat"].bytes == 0
    assert not any(map(sent_to_warm, three))


async def test_stored_prefixes_stay_within_the_memory_limit(three: list[FakeReplica]) -> None:
    small = WarmUp(memory_bytes=1 << 16)
    async with routed(with_warm_up(three[:2], small)) as harness:
        stored = harness.router.services.all_warm_ups._popular_prefixes["chat"]
        highest = 0
        for number in range(120):
            for _ in range(2):
                await harness.chat(body(number))
            highest = max(highest, stored.bytes)
        _, text = await harness.admin("GET", "/metrics")

    assert (1 << 15) < highest <= (1 << 16)
    assert samples(text)["warmpath_router_warm_up_kept_bytes"] == [({"pool": "chat"}, stored.bytes)]


async def test_no_prompt_text_is_shown_or_logged(
    three: list[FakeReplica], caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    caplog.set_level(logging.DEBUG)
    *existing, new = three
    async with routed(with_warm_up(existing), state_dir=tmp_path) as harness:
        await send_traffic(harness)
        new.script = answering(b"{}", status=400)
        await harness.push(with_warm_up(three, WarmUp(concurrency=1)), 2)
        await wait_joined(harness, new.name)
        shown = [await harness.admin("GET", path) for path in ("/metrics", "/admin/replicas", "/admin/decisions")]
        shown.append(await harness.admin("GET", "/admin/config"))

    assert CANARY in str(system_prompts(sent_to_warm(new)))
    assert "warm_up_ended" in caplog.text
    assert CANARY not in caplog.text
    assert CANARY not in json.dumps(shown)
    assert not any(CANARY.encode() in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


async def test_heartbeats_report_the_progress(three: list[FakeReplica], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announce, "HEARTBEAT_S", 0.02)
    async with with_traffic(three) as (harness, new), control_plane([200]) as (url, heard):
        new.script = Call.wait_gone
        announcement = Announcement(url, "http://admin", "http://data", "1.0", None)
        spool = EventSpool(Path("/nonexistent"), "boot")
        task = asyncio.create_task(announce_forever(harness.server.data.view, announcement, spool))
        await harness.until(lambda: bool(heard), "a heartbeat")
        assert "warming" not in heard[-1]
        await harness.push(with_warm_up(three, WarmUp(time_limit_s=600)), 2)
        await harness.until(lambda: heard[-1].get("warming"), "news of the warm-up")
        [(name, progress)] = heard[-1]["warming"].items()
        task.cancel()

    assert name == new.name
    assert set(progress) == {"prefixes_done", "prefixes", "tokens_done", "tokens"}


OPENINGS = 16
JSON = [b"Content-Type: application/json"]


@dataclass
class StandIn:
    """A replica process for the harness's configuration."""

    name: str
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


async def cached_ratio(harness: Harness, number: int, question: str) -> tuple[str, float]:
    """The replica, and the cached part of the prompt."""
    messages = [{"role": "system", "content": prefix_text(number)}, {"role": "user", "content": question}]
    response = await harness.chat(json.dumps({"model": "tiny", "messages": messages, "max_tokens": 2}).encode(), JSON)
    usage = json.loads(response.body)["usage"]
    return response.replica, usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]


async def engine_counts(harness: Harness, replica: str) -> tuple[float, ...]:
    """Finished requests, prompt tokens and cached tokens, as the engine counts them."""
    fleet = harness.router.active
    assert fleet is not None
    status, text = await fetch(fleet.connection_pools[replica].address, "/metrics", max_bytes=MAX_METRICS_BYTES)
    assert status == 200
    counted = samples(text.decode())
    names = ("request_success_total", "prompt_tokens_total", "prefix_cache_hits_total")
    return tuple(sum(value for _, value in counted[f"vllm:{name}"]) for name in names)


@pytest.mark.parametrize("is_warmed", [True, False])
async def test_first_requests_to_a_warmed_replica_hit_the_cache(is_warmed: bool) -> None:
    with ExitStack() as processes:
        ports = [processes.enter_context(replica_process("--prefill-rate", "80000")).port for _ in range(3)]
        fleet = [StandIn(f"replica-{number}", port) for number, port in enumerate(ports)]

        def configured(count: int) -> RouterConfig:
            whole = with_warm_up(fleet[:count])  # type: ignore[arg-type]  # name and url are all that it reads
            return replace(whole, pools=(replace(whole.pools[0], warm_up=WarmUp() if is_warmed else None),))

        async with routed(configured(2)) as harness:
            for turn in range(2):
                for number in range(OPENINGS):
                    await cached_ratio(harness, number, f"Question {turn}")
            assert (await harness.push(configured(3), 2))[0] == 200
            await wait_joined(harness, "replica-2")
            own = harness.router.services.own_requests.counts.get("replica-2", (0, 0, 0))
            counted = await engine_counts(harness, "replica-2")
            first = [await cached_ratio(harness, number, "And now?") for number in range(OPENINGS)]
            assert (await replica_row(harness, "replica-2"))["health"] == "up"

    assert own == counted
    assert (own[1] > 500) is is_warmed
    ratios = [ratio for replica, ratio in first if replica == "replica-2"]
    assert len(ratios) > 2
    assert all((ratio > 0.8) is is_warmed for ratio in ratios)
