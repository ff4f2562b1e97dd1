"""Warm-up of joining replicas, everything that ends it early, and what it stores and reports."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from routing.admin import announce
from routing.admin.announce import Announcement, announce_forever
from routing.admin.events import EventSpool
from routing.schema import (
    Access,
    LowestCostSettings,
    PrefixHashSettings,
    TaskGroupConfig,
    WarmUp,
)
from tests.fakes.control_plane import control_plane
from tests.fakes.replica import Call, FakeReplica, Script, answering, fake_replicas, plain_answer, resetting
from tests.routing.proxy.harness import Harness, api_key, bearer, config, routed, samples
from tests.routing.proxy.warm_ups import (
    CANARY,
    PREFIXES,
    QUICK,
    body,
    endings,
    is_warming_up,
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

USAGE = b'{"usage":{"prompt_tokens":300,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":16}}}'


def hanging_on_warm_ups(replica: FakeReplica) -> Script:
    """Answers clients only."""

    async def script(call: Call) -> None:
        await (call.wait_gone() if call in sent_to_warm(replica) else call.send(plain_answer(b"{}")))

    return script


async def begin_warm_up(harness: Harness, replicas: list[FakeReplica], **options: Any) -> None:
    """Add the last of the replicas; its warm-up ends when the test says so."""
    await harness.push(with_warm_up(replicas, WarmUp(time_limit_s=600), **options), 2)
    await replicas[-1].wait_calls(2)


async def test_a_new_replica_gets_its_prefixes_once_before_traffic(three):
    async with with_traffic(three) as (harness, new):
        new.script = answering(USAGE)
        assert (await harness.push(with_warm_up(three), 2))[0] == 200
        await wait_joined(harness, new.name)
        warmed = sent_to_warm(new)
        own = (await preferred_replicas(harness))[new.name]
        assert (await endings(harness, new.name)) == {"complete": 1}
        own_requests = harness.router.services.own_requests.counts[new.name]

    assert own_requests == (len(warmed), 300 * len(warmed), 16 * len(warmed))
    assert len(own) > 1
    assert sorted(system_prompts(warmed)) == sorted(prefix_text(number) for number in own)
    for call in warmed:
        reported = json.loads(call.body)
        assert (reported["max_tokens"], reported["stream"], reported["priority"]) == (1, False, 1000)
        assert set(reported) == {"model", "messages", "max_tokens", "stream", "priority"}
    assert new.calls[: len(warmed)] == warmed  # before client requests


async def test_no_request_goes_to_a_replica_that_warms_up_and_none_waits(three):
    release = asyncio.Event()

    async def slow(call: Call) -> None:
        await release.wait()
        await call.send(plain_answer(b"{}"))

    async with with_traffic(three) as (harness, new):
        new.script = slow
        await harness.push(with_warm_up(three), 2)
        await new.wait_calls(2)
        used = await preferred_replicas(harness)
        shown = await replica_row(harness, new.name)
        _, text = await harness.admin("GET", "/metrics")
        release.set()
        await wait_joined(harness, new.name)
        after = await preferred_replicas(harness)
        share = (await replica_row(harness, new.name))["share"]

    assert new.name not in used
    assert after[new.name]
    assert share < 1.0  # with a slow start
    assert shown["warming"] == {
        "prefixes_done": 0,
        "prefixes": len(after[new.name]),
        "tokens_done": 0,
        "tokens": shown["warming"]["tokens"],
    }
    assert shown["warming"]["tokens"] > 100 * len(after[new.name])
    gauges = {labels["replica"]: value for labels, value in samples(text)["warmpath_router_replica_warming"]}
    assert gauges == {"replica-0": 0, "replica-1": 0, new.name: 1}


async def test_a_replica_that_was_down_is_warmed_up(three):
    async with routed(with_warm_up(three)) as harness:
        await send_traffic(harness)
        own = (await preferred_replicas(harness))["replica-2"]
        three[2].health_status = 503
        await harness.until(lambda: not harness.health.is_up("replica-2"), "the replica to be down")
        before = len(three[2].calls)
        three[2].health_status = 200
        await harness.until(lambda: bool(sent_to_warm(three[2])), "the first warm-up request")
        await wait_joined(harness, "replica-2")
        warmed = three[2].calls[before:]

    assert sorted(system_prompts(warmed)) == sorted(prefix_text(number) for number in own)


async def test_a_replica_at_a_new_address_is_warmed_up(three):
    """As after a restart on another host, without a failed health check."""
    *rest, moving = three
    async with fake_replicas(1) as (moved,), routed(with_warm_up(three)) as harness:
        moved.name = moving.name
        await send_traffic(harness)
        own = (await preferred_replicas(harness))[moving.name]
        assert (await harness.push(with_warm_up([*rest, moved]), 2))[0] == 200
        await wait_joined(harness, moving.name)
        share = (await replica_row(harness, moving.name))["share"]

    assert sorted(system_prompts(sent_to_warm(moved))) == sorted(prefix_text(number) for number in own)
    assert share < 1.0


async def test_a_replica_that_stays_is_never_warmed_up(three):
    async with routed(with_warm_up(three)) as harness:
        await send_traffic(harness)
        await harness.push(with_warm_up(three, WarmUp(max_prefixes=3)), 2)
        await send_traffic(harness)

    assert not any(map(sent_to_warm, three))


async def test_the_budget_is_kept(three):
    tight = WarmUp(max_prefixes=2, concurrency=1)
    async with with_traffic(three, tight) as (harness, new):
        await harness.push(with_warm_up(three, tight), 2)
        await wait_joined(harness, new.name)
        first_count = len(sent_to_warm(new))
        await harness.push(with_warm_up(three[:2], tight), 3)
        short = WarmUp(max_tokens=1024)  # prefixes have some 200 tokens
        await harness.push(with_warm_up(three, short), 4)
        await wait_joined(harness, new.name)
        chosen = sent_to_warm(new)[first_count:]

    assert first_count == 2
    assert sum(len(text) for text in system_prompts(chosen)) <= 4 * 1024


async def test_the_time_limit_ends_the_warm_up(three):
    async with with_traffic(three) as (harness, new):
        new.script = hanging_on_warm_ups(new)
        await harness.push(with_warm_up(three, WarmUp(time_limit_s=0.3)), 2)
        await new.wait_calls(2)
        await wait_joined(harness, new.name)
        used = await preferred_replicas(harness)
        await asyncio.gather(*(asyncio.wait_for(call.gone.wait(), 10) for call in sent_to_warm(new)))
        assert (await endings(harness, new.name)) == {"time_limit": 1}
        await harness.at_rest()

    assert used[new.name]


@pytest.mark.parametrize("script", [answering(b"{}", status=500), answering(b"{}", status=401)])
async def test_three_failures_end_the_warm_up(three, script):
    async with with_traffic(three) as (harness, new):
        new.script = script
        await harness.push(with_warm_up(three, WarmUp(concurrency=1)), 2)
        await wait_joined(harness, new.name)
        assert (await endings(harness, new.name)) == {"failing": 1}
        new.script = answering()
        assert (await preferred_replicas(harness))[new.name]

    assert len(sent_to_warm(new)) == 3


async def test_a_replica_that_goes_down_during_its_warm_up_starts_again(three):
    async with with_traffic(three) as (harness, new):
        new.script = Call.wait_gone
        await begin_warm_up(harness, three)
        new.health_status = 503
        await wait_joined(harness, new.name)
        assert new.name not in await preferred_replicas(harness)
        new.script, new.health_status = answering(), 200
        before = len(new.calls)
        await harness.until(lambda: len(new.calls) > before, "a second warm-up")
        await wait_joined(harness, new.name)
        own = (await preferred_replicas(harness))[new.name]
        assert (await endings(harness, new.name)) == {"withdrawn": 1, "complete": 1}

    assert sorted(system_prompts(sent_to_warm(new)[2:])) == sorted(prefix_text(number) for number in own)


async def test_a_request_that_all_others_fail_ends_the_warm_up(three):
    """Although the others' health checks still succeed."""
    async with with_traffic(three) as (harness, new):
        new.script = hanging_on_warm_ups(new)
        await begin_warm_up(harness, three)
        for replica in three[:2]:
            replica.script = resetting
        response = await harness.chat(body(0))
        assert (response.status, response.replica) == (200, "replica-2")
        assert (await endings(harness, new.name)) == {"needed": 1}


async def test_disabling_warm_up_starts_the_replica_slowly(three):
    async with with_traffic(three) as (harness, new):
        new.script = Call.wait_gone
        await begin_warm_up(harness, three)
        whole = with_warm_up(three)
        await harness.push(replace(whole, pools=(replace(whole.pools[0], warm_up=None),)), 3)
        assert not is_warming_up(harness, new.name)
        assert [(await replica_row(harness, replica.name))["share"] for replica in three] == [1.0, 1.0, 0.25]


async def test_a_request_that_the_replica_cannot_serve_ends_no_warm_up(three):
    """A request of a task group on other replicas, of which none is left."""
    only = (TaskGroupConfig(name="lonely", replicas=("replica-0",)),)
    async with with_traffic(three) as (harness, new):
        new.script = Call.wait_gone
        await begin_warm_up(harness, three, groups=only)
        three[0].script = resetting
        assert (await harness.chat(body(0), headers=[b"X-Task-Group: lonely"])).status == 502
        three[0].health_status = 503
        await harness.until(lambda: not harness.health.is_up("replica-0"), "the replica to be down")
        assert (await harness.chat(body(0), headers=[b"X-Task-Group: lonely"])).status == 503
        assert is_warming_up(harness, new.name)


async def test_a_request_that_only_this_replica_can_serve_ends_the_warm_up(three):
    only = (TaskGroupConfig(name="lonely", replicas=("replica-2",)),)
    async with with_traffic(three) as (harness, new):
        new.script = hanging_on_warm_ups(new)
        await begin_warm_up(harness, three, groups=only)
        response = await harness.chat(body(0), headers=[b"X-Task-Group: lonely"])
        assert (response.status, response.replica) == (200, "replica-2")
        assert (await endings(harness, new.name)) == {"needed": 1}


async def test_a_request_that_ends_the_warm_up_has_its_tenants_salt(three):
    only = (TaskGroupConfig(name="lonely", replicas=("replica-2",)),)
    access = Access(keys=(api_key(tenant="acme"),))
    async with routed(replace(with_warm_up(three[:2]), access=access)) as harness:
        for number in range(3):
            await harness.chat(body(number), headers=[bearer()])
            await harness.chat(body(number), headers=[bearer()])
        await harness.push(replace(with_warm_up(three, WarmUp(time_limit_s=600), groups=only), access=access), 2)
        response = await harness.chat(body(0), headers=[bearer(), b"X-Task-Group: lonely"])
        assert (response.status, response.replica) == (200, "replica-2")
    (system_prompts,) = (json.loads(call.body) for call in three[2].calls if call not in sent_to_warm(three[2]))
    assert {system_prompts["cache_salt"]} == {
        json.loads(call.body)["cache_salt"] for it in three[:2] for call in it.calls
    }


async def test_the_only_replica_of_a_pool_is_not_held_back(three):
    async with routed(with_warm_up(three[:1])) as harness:
        await send_traffic(harness)
        three[0].health_status = 503
        await harness.until(lambda: not harness.health.is_up("replica-0"), "the replica to be down")
        three[0].health_status = 200
        await harness.until(lambda: harness.health.is_up("replica-0"), "the replica to be up")
        assert not is_warming_up(harness, "replica-0")
    assert not sent_to_warm(three[0])


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_an_engine_without_priorities_gets_requests_without(three, concurrency):
    """For each prefix, including those in flight at the first rejection."""

    async def strict(call: Call) -> None:
        if b'"priority"' in call.body:
            error_body = b'{"error":{"message":"Got priority 1000 but Priority scheduling is not enabled.","code":400}}'
            await call.send(plain_answer(error_body, status=400))
        else:
            await call.send(plain_answer(b"{}"))

    async with with_traffic(three) as (harness, new):
        new.script = strict
        await harness.push(with_warm_up(three, WarmUp(concurrency=concurrency)), 2)
        await wait_joined(harness, new.name)
        warmed = sent_to_warm(new)
        own = (await preferred_replicas(harness))[new.name]
        assert (await endings(harness, new.name)) == {"complete": 1}

    without = [call for call in warmed if b'"priority"' not in call.body]
    assert len(warmed) - len(without) == concurrency
    assert sorted(system_prompts(without)) == sorted(prefix_text(number) for number in own)


async def test_warmed_prefixes_count_as_cached(three):
    async with with_traffic(three, settings=LowestCostSettings()) as (harness, new):
        await harness.push(with_warm_up(three, settings=LowestCostSettings()), 2)
        await wait_joined(harness, new.name)
        warmed = system_prompts(sent_to_warm(new))
        number = next(number for number in range(PREFIXES) if prefix_text(number) in warmed)
        asked_for = json.dumps({"path": "/v1/chat/completions", "body": json.loads(body(number))})
        _, explained = await harness.admin("POST", "/admin/explain", data=asked_for)

    hit_tokens = {candidate["replica"]: candidate["hit_tokens"] for candidate in explained["candidates"]}
    assert hit_tokens[new.name] > 100


async def test_only_prefixes_of_the_replicas_groups_are_sent(three):
    groups = (TaskGroupConfig(name="apart", replicas=("replica-0", "replica-1")),)
    async with routed(with_warm_up(three[:2], groups=groups)) as harness:
        for number in range(PREFIXES):
            for _ in range(3):
                await harness.chat(body(number), headers=[b"X-Task-Group: apart"])
        await harness.push(with_warm_up(three, groups=groups), 2)
        await wait_joined(harness, "replica-2")

    assert sent_to_warm(three[2]) == []


# --- What warm-ups store and report ---


async def test_without_warm_up_nothing_is_stored_or_sent(three):
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


async def test_stored_prefixes_stay_within_the_memory_limit(three):
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


async def test_no_prompt_text_is_shown_or_logged(three, caplog, tmp_path):
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


async def test_heartbeats_report_the_progress(three, monkeypatch):
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


async def test_a_replica_that_moves_during_its_warm_up_starts_again(three):
    async with with_traffic(three) as (harness, new), fake_replicas(1) as (moved,):
        new.script, moved.name = Call.wait_gone, new.name
        await begin_warm_up(harness, three)
        await harness.push(with_warm_up([*three[:2], moved]), 3)
        await wait_joined(harness, new.name)
        assert (await endings(harness, new.name)) == {"withdrawn": 1, "complete": 1}
