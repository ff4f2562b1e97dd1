"""A replica with data-parallel ranks: which rank is asked, how clients cannot choose it, what is shown."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from routing.schema import PrefixHashSettings, RouterConfig
from tests.fakes.replica import FakeReplica
from tests.routing.proxy.api_keys import asking
from tests.routing.proxy.harness import CHAT, config, routed

RANKS = 2


def parallel(replicas: list[FakeReplica], **fields: Any) -> RouterConfig:
    """The first replica has ranks."""
    snapshot = config(replicas, settings=PrefixHashSettings())
    first, *others = snapshot.pools[0].replicas
    members = replace(first, data_parallel_size=RANKS, **fields), *others
    return replace(snapshot, pools=(replace(snapshot.pools[0], replicas=members),))


async def test_a_prompt_keeps_to_its_rank_and_prompts_spread_over_all(replica: FakeReplica) -> None:
    async with routed(parallel([replica])) as harness:
        for _ in range(2):
            for number in range(20):
                await harness.chat(asking(text=f"Number {number}."))
        await harness.at_rest()
        _, shown = await harness.admin("GET", "/admin/decisions")
    ranks = [call.header(b"x-data-parallel-rank") for call in replica.calls]
    assert ranks[:20] == ranks[20:]
    assert {tuple(rank) for rank in ranks} == {(b"0",), (b"1",)}
    assert [[b"%d" % record["rank"]] for record in shown["decisions"]] == ranks
    assert {record["replica"] for record in shown["decisions"]} == {replica.name}


@pytest.mark.parametrize("name", [b"X-Data-Parallel-Rank", b"x-data-parallel-rank", b"X_Data_Parallel_Rank"])
@pytest.mark.parametrize("fields", [{}, {"api_key": "own"}])
async def test_a_client_does_not_choose_the_rank(name: bytes, fields: dict[str, str], replica: FakeReplica) -> None:
    async with routed(parallel([replica], **fields)) as harness:
        answer = await harness.chat(asking(), [name + b": 77", b"X-Other: kept"])
    assert answer.status == 200
    headers = [value for key, value in replica.calls[0].headers if key.replace(b"_", b"-") == b"x-data-parallel-rank"]
    assert headers in ([b"0"], [b"1"])
    assert replica.calls[0].header(b"x-other") == [b"kept"]


async def test_a_replica_of_one_rank_gets_what_the_client_says(two: list[FakeReplica]) -> None:
    async with routed(parallel(two)) as harness:
        for number in range(30):
            await harness.chat(asking(text=f"Number {number}."), [b"X-Data-Parallel-Rank: 0"])
    met = [{rank for call in it.calls for rank in call.header(b"x-data-parallel-rank")} for it in two]
    assert met == [{b"0", b"1"}, {b"0"}]


async def test_an_explanation_and_the_list_of_replicas_show_every_rank(two: list[FakeReplica]) -> None:
    async with routed(parallel(two)) as harness:
        asked = {"path": CHAT.decode(), "body": json.loads(asking())}
        _, explained = await harness.admin("POST", "/admin/explain", json=asked)
        await harness.chat(asking())
        await harness.at_rest()
        _, shown = await harness.admin("GET", "/admin/replicas")
        sent = [call.header(b"x-data-parallel-rank") for it in two for call in it.calls]
    assert [it["replica"] for it in explained["candidates"]] == [f"{two[0].name}#0", f"{two[0].name}#1", two[1].name]
    assert sent == [[] if explained["rank"] is None else [b"%d" % explained["rank"]]]
    assert [len(row["ranks"]) for row in shown["replicas"]] == [RANKS, 1]
    assert all(row["running"] == row["waiting_tokens"] == 0 for row in shown["replicas"])


async def test_a_replica_that_refuses_is_not_asked_again_under_another_rank(two: list[FakeReplica]) -> None:
    async with routed(parallel(two)) as harness:
        two[0].kill()
        answers = [await harness.chat(asking(text=f"Number {number}.")) for number in range(10)]
        await harness.at_rest()
        _, shown = await harness.admin("GET", "/admin/decisions")
    assert {(answer.status, answer.replica) for answer in answers} == {(200, two[1].name)}
    assert max(record["retries"] for record in shown["decisions"]) == 1
