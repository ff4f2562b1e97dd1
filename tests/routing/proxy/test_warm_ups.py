"""A replica that joins is warm before it takes traffic, and whatever goes wrong takes its turn."""

from __future__ import annotations

import asyncio
import json

import pytest
from msgspec.structs import replace

from routing.schema import (
    Access,
    LowestCostSettings,
    TaskGroupConfig,
    WarmUp,
)
from tests.fakes.replica import Call, FakeReplica, Script, answering, fake_replicas, plain_answer, resetting
from tests.routing.proxy.api_keys import api_key, bearer
from tests.routing.proxy.harness import routed
from tests.routing.proxy.scraped import samples
from tests.routing.proxy.warm_ups import (
    OPENINGS,
    asked,
    body,
    ended,
    homes,
    is_joining,
    joined,
    opening,
    row,
    sent_to_warm,
    taught,
    teach,
    warming,
)


async def test_a_new_replica_gets_its_openings_once_and_takes_traffic_then(three: list[FakeReplica]) -> None:
    async with taught(three) as (harness, new):
        assert (await harness.push(warming(three), 2))[0] == 200
        await joined(harness, new.name)
        warmed = sent_to_warm(new)
        own = (await homes(harness))[new.name]
        assert (await ended(harness, new.name)) == {"complete": 1}

    assert len(own) > 1
    assert sorted(asked(warmed)) == sorted(opening(number) for number in own)
    for call in warmed:
        told = json.loads(call.body)
        assert (told["max_tokens"], told["stream"], told["priority"]) == (1, False, 1000)
        assert set(told) == {"model", "messages", "max_tokens", "stream", "priority"}
    assert new.calls[: len(warmed)] == warmed  # before anybody's


async def test_no_request_goes_there_before_it_is_warm_and_none_waits(three: list[FakeReplica]) -> None:
    release = asyncio.Event()

    async def slow(call: Call) -> None:
        await release.wait()
        await call.send(plain_answer(b"{}"))

    async with taught(three) as (harness, new):
        new.script = slow
        await harness.push(warming(three), 2)
        await new.wait_calls(2)
        met = await homes(harness)
        shown = await row(harness, new.name)
        _, text = await harness.admin("GET", "/metrics")
        release.set()
        await joined(harness, new.name)
        after = await homes(harness)
        share = (await row(harness, new.name))["share"]

    assert new.name not in met
    assert after[new.name]
    assert share < 1.0  # it starts slowly all the same
    assert shown["warming"] == {
        "prefixes_done": 0,
        "prefixes": len(after[new.name]),
        "tokens_done": 0,
        "tokens": shown["warming"]["tokens"],
    }
    assert shown["warming"]["tokens"] > 100 * len(after[new.name])
    gauges = {labels["replica"]: value for labels, value in samples(text)["warmpath_router_replica_warming"]}
    assert gauges == {"replica-0": 0, "replica-1": 0, new.name: 1}


async def test_a_replica_that_was_down_is_warmed_when_it_is_back(three: list[FakeReplica]) -> None:
    async with routed(warming(three)) as harness:
        await teach(harness)
        own = (await homes(harness))["replica-2"]
        three[2].health_status = 503
        await harness.until(lambda: not harness.router.balancer.health.is_up("replica-2"), "the replica to be down")
        before = len(three[2].calls)
        three[2].health_status = 200
        await harness.until(lambda: bool(sent_to_warm(three[2])), "the first warm-up request")
        await joined(harness, "replica-2")
        warmed = three[2].calls[before:]

    assert sorted(asked(warmed)) == sorted(opening(number) for number in own)


async def test_a_replica_that_has_moved_is_a_new_one(three: list[FakeReplica]) -> None:
    """As one that was started anew on another host is, which never was seen to be down."""
    *others, moving = three
    async with fake_replicas(1) as (elsewhere,), routed(warming(three)) as harness:
        elsewhere.name = moving.name
        await teach(harness)
        own = (await homes(harness))[moving.name]
        assert (await harness.push(warming([*others, elsewhere]), 2))[0] == 200
        await joined(harness, moving.name)
        share = (await row(harness, moving.name))["share"]

    assert sorted(asked(sent_to_warm(elsewhere))) == sorted(opening(number) for number in own)
    assert share < 1.0


async def test_one_that_moves_meanwhile_begins_anew_where_it_is(three: list[FakeReplica]) -> None:
    async with taught(three) as (harness, new), fake_replicas(1) as (elsewhere,):
        new.script, elsewhere.name = Call.wait_gone, new.name
        await harness.push(warming(three, WarmUp(time_limit_s=600)), 2)
        await new.wait_calls(2)
        await harness.push(warming([*three[:2], elsewhere]), 3)
        await joined(harness, new.name)
        assert (await ended(harness, new.name)) == {"withdrawn": 1, "complete": 1}


async def test_a_replica_that_stays_is_never_warmed(three: list[FakeReplica]) -> None:
    async with routed(warming(three)) as harness:
        await teach(harness)
        await harness.push(warming(three, WarmUp(max_prefixes=3)), 2)
        await teach(harness)

    assert not any(map(sent_to_warm, three))


async def test_the_budget_is_kept(three: list[FakeReplica]) -> None:
    tight = WarmUp(max_prefixes=2, concurrency=1)
    async with taught(three, tight) as (harness, new):
        await harness.push(warming(three, tight), 2)
        await joined(harness, new.name)
        few = len(sent_to_warm(new))
        await harness.push(warming(three[:2], tight), 3)
        short = WarmUp(max_tokens=1024)  # of openings of some 200 tokens
        await harness.push(warming(three, short), 4)
        await joined(harness, new.name)
        chosen = sent_to_warm(new)[few:]

    assert few == 2
    assert sum(len(text) for text in asked(chosen)) <= 4 * 1024


async def test_at_its_time_limit_a_replica_takes_traffic_and_its_warm_up_is_dropped(three: list[FakeReplica]) -> None:
    async def hanging_on_warm_ups(call: Call) -> None:
        if call in sent_to_warm(three[2]):
            await call.wait_gone()
        else:
            await call.send(plain_answer(b"{}"))

    async with taught(three) as (harness, new):
        new.script = hanging_on_warm_ups
        await harness.push(warming(three, WarmUp(time_limit_s=0.3)), 2)
        await new.wait_calls(2)
        await joined(harness, new.name)
        met = await homes(harness)
        await asyncio.gather(*(asyncio.wait_for(call.gone.wait(), 10) for call in sent_to_warm(new)))
        assert (await ended(harness, new.name)) == {"time_limit": 1}
        await harness.at_rest()

    assert met[new.name]


@pytest.mark.parametrize("script", [answering(b"{}", status=500), answering(b"{}", status=401)])
async def test_a_replica_that_fails_its_warm_up_takes_traffic_after_three(
    three: list[FakeReplica], script: Script
) -> None:
    async with taught(three) as (harness, new):
        new.script = script
        await harness.push(warming(three, WarmUp(concurrency=1)), 2)
        await joined(harness, new.name)
        assert (await ended(harness, new.name)) == {"failing": 1}
        new.script = answering()
        assert (await homes(harness))[new.name]

    assert len(sent_to_warm(new)) == 3


async def test_one_that_goes_down_meanwhile_begins_anew_when_it_is_back(three: list[FakeReplica]) -> None:
    async with taught(three) as (harness, new):
        new.script = Call.wait_gone
        await harness.push(warming(three, WarmUp(time_limit_s=600)), 2)
        await new.wait_calls(2)
        new.health_status = 503
        await joined(harness, new.name)
        assert new.name not in await homes(harness)
        new.script, new.health_status = answering(), 200
        before = len(new.calls)
        await harness.until(lambda: len(new.calls) > before, "a second warm-up")
        await joined(harness, new.name)
        own = (await homes(harness))[new.name]
        assert (await ended(harness, new.name)) == {"withdrawn": 1, "complete": 1}

    assert sorted(asked(sent_to_warm(new)[2:])) == sorted(opening(number) for number in own)


async def test_where_all_others_fail_a_request_it_takes_that_at_once(three: list[FakeReplica]) -> None:
    """Though their health checks are well, and say so until they know better."""
    async with taught(three) as (harness, new):

        async def hanging_on_warm_ups(call: Call) -> None:
            await (call.wait_gone() if call in sent_to_warm(new) else call.send(plain_answer(b"{}")))

        new.script = hanging_on_warm_ups
        await harness.push(warming(three, WarmUp(time_limit_s=600)), 2)
        await new.wait_calls(2)
        for replica in three[:2]:
            replica.script = resetting
        answer = await harness.chat(body(0))
        assert (answer.status, answer.replica) == (200, "replica-2")
        assert (await ended(harness, new.name)) == {"needed": 1}


async def test_where_warm_ups_are_switched_off_meanwhile_it_starts_slowly_as_it_is(three: list[FakeReplica]) -> None:
    async with taught(three) as (harness, new):
        new.script = Call.wait_gone
        await harness.push(warming(three, WarmUp(time_limit_s=600)), 2)
        await new.wait_calls(2)
        whole = warming(three)
        await harness.push(replace(whole, pools=(replace(whole.pools[0], warm_up=None),)), 3)
        assert not is_joining(harness, new.name)
        assert [(await row(harness, replica.name))["share"] for replica in three] == [1.0, 1.0, 0.25]


async def test_a_request_that_it_could_not_serve_either_costs_no_warm_up(three: list[FakeReplica]) -> None:
    """Of a task group that other replicas are for: one of them fails, and there is no further one."""
    only = (TaskGroupConfig(name="lonely", replicas=("replica-0",)),)
    async with taught(three) as (harness, new):
        new.script = Call.wait_gone
        await harness.push(warming(three, WarmUp(time_limit_s=600), groups=only), 2)
        await new.wait_calls(2)
        three[0].script = resetting
        assert (await harness.chat(body(0), headers=[b"X-Task-Group: lonely"])).status == 502
        three[0].health_status = 503
        await harness.until(lambda: not harness.router.balancer.health.is_up("replica-0"), "the replica to be down")
        assert (await harness.chat(body(0), headers=[b"X-Task-Group: lonely"])).status == 503
        assert is_joining(harness, new.name)


async def test_where_nobody_else_can_serve_it_takes_traffic_at_once(three: list[FakeReplica]) -> None:
    only = (TaskGroupConfig(name="lonely", replicas=("replica-2",)),)
    async with taught(three) as (harness, new):

        async def hanging_on_warm_ups(call: Call) -> None:
            if call in sent_to_warm(new):
                await call.wait_gone()
            else:
                await call.send(plain_answer(b"{}"))

        new.script = hanging_on_warm_ups
        await harness.push(warming(three, WarmUp(time_limit_s=600), groups=only), 2)
        await new.wait_calls(2)
        answer = await harness.chat(body(0), headers=[b"X-Task-Group: lonely"])
        assert (answer.status, answer.replica) == (200, "replica-2")
        assert (await ended(harness, new.name)) == {"needed": 1}


async def test_a_request_that_nobody_else_can_serve_has_its_tenants_salt_as_all_others(
    three: list[FakeReplica],
) -> None:
    only = (TaskGroupConfig(name="lonely", replicas=("replica-2",)),)
    access = Access(keys=(api_key(tenant="acme"),))
    async with routed(replace(warming(three[:2]), access=access)) as harness:
        for number in range(3):
            await harness.chat(body(number), headers=[bearer()])
            await harness.chat(body(number), headers=[bearer()])
        await harness.push(replace(warming(three, WarmUp(time_limit_s=600), groups=only), access=access), 2)
        answer = await harness.chat(body(0), headers=[bearer(), b"X-Task-Group: lonely"])
        assert (answer.status, answer.replica) == (200, "replica-2")
    (asked,) = (json.loads(call.body) for call in three[2].calls if call not in sent_to_warm(three[2]))
    assert {asked["cache_salt"]} == {json.loads(call.body)["cache_salt"] for one in three[:2] for call in one.calls}


async def test_the_only_replica_of_a_pool_is_not_kept_back(three: list[FakeReplica]) -> None:
    async with routed(warming(three[:1])) as harness:
        await teach(harness)
        three[0].health_status = 503
        await harness.until(lambda: not harness.router.balancer.health.is_up("replica-0"), "the replica to be down")
        three[0].health_status = 200
        await harness.until(lambda: harness.router.balancer.health.is_up("replica-0"), "the replica to be up")
        assert not is_joining(harness, "replica-0")
    assert not sent_to_warm(three[0])


@pytest.mark.parametrize("concurrency", [1, 2, 4])
async def test_an_engine_that_takes_no_priority_is_asked_without(three: list[FakeReplica], concurrency: int) -> None:
    """For each opening, those included that were under way together when it first said so."""

    async def strict(call: Call) -> None:
        if b'"priority"' in call.body:
            said = b'{"error":{"message":"Got priority 1000 but Priority scheduling is not enabled.","code":400}}'
            await call.send(plain_answer(said, status=400))
        else:
            await call.send(plain_answer(b"{}"))

    async with taught(three) as (harness, new):
        new.script = strict
        await harness.push(warming(three, WarmUp(concurrency=concurrency)), 2)
        await joined(harness, new.name)
        warmed = sent_to_warm(new)
        own = (await homes(harness))[new.name]
        assert (await ended(harness, new.name)) == {"complete": 1}

    without = [call for call in warmed if b'"priority"' not in call.body]
    assert len(warmed) - len(without) == concurrency
    assert sorted(asked(without)) == sorted(opening(number) for number in own)


async def test_what_was_warmed_counts_as_held(three: list[FakeReplica]) -> None:
    async with taught(three, settings=LowestCostSettings()) as (harness, new):
        await harness.push(warming(three, settings=LowestCostSettings()), 2)
        await joined(harness, new.name)
        warmed = asked(sent_to_warm(new))
        number = next(number for number in range(OPENINGS) if opening(number) in warmed)
        asked_for = json.dumps({"path": "/v1/chat/completions", "body": json.loads(body(number))})
        _, explained = await harness.admin("POST", "/admin/explain", data=asked_for)

    held = {candidate["replica"]: candidate["hit_tokens"] for candidate in explained["candidates"]}
    assert held[new.name] > 100


async def test_a_group_that_has_its_own_replicas_warms_only_those(three: list[FakeReplica]) -> None:
    groups = (TaskGroupConfig(name="apart", replicas=("replica-0", "replica-1")),)
    async with routed(warming(three[:2], groups=groups)) as harness:
        for number in range(OPENINGS):
            for _ in range(3):
                await harness.chat(body(number), headers=[b"X-Task-Group: apart"])
        await harness.push(warming(three, groups=groups), 2)
        await joined(harness, "replica-2")

    assert sent_to_warm(three[2]) == []
