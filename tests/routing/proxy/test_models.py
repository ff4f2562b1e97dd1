"""Names of models: what clients may ask for, what engines are sent, and who is asked."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from routing.schema import Access, Adapter, Alias, PrefixHashSettings, RouterConfig
from tests.fakes.replica import FakeReplica, fake_replicas
from tests.routing.proxy.harness import CHAT, config, get, routed
from tests.routing.proxy.test_access import api_key, asking, bearer

SQL = Adapter("sql", "tiny")


def named(replicas: list[FakeReplica], **fields: Any) -> RouterConfig:
    """A pool of one model, with more names."""
    snapshot = config(replicas, models=("tiny",), settings=PrefixHashSettings())
    pool = replace(snapshot.pools[0], aliases=(Alias("gpt", "tiny"), Alias("text-to-sql", "sql")), adapters=(SQL,))
    return replace(snapshot, pools=(replace(pool, **fields),))


def holding(replicas: list[FakeReplica], *held: tuple[str, ...] | None) -> RouterConfig:
    snapshot = named(replicas)
    members = [replace(member, adapters=it) for member, it in zip(snapshot.pools[0].replicas, held, strict=True)]
    return replace(snapshot, pools=(replace(snapshot.pools[0], replicas=tuple(members)),))


@pytest.fixture
async def two() -> Any:
    async with fake_replicas(2) as replicas:
        yield replicas


async def test_an_unknown_model_is_refused_as_an_engine_would(replica: FakeReplica) -> None:
    async with routed(named([replica])) as harness:
        answer = await harness.chat(asking("nope"))
    assert answer.status == 404
    assert answer.error == {
        "message": "The model `nope` does not exist.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
    assert replica.calls == []


async def test_models_lists_every_name_once_and_each_is_answered(replica: FakeReplica) -> None:
    async with routed(named([replica])) as harness, harness.connect() as client:
        await client.send(get(b"/v1/models"))
        cards = json.loads((await client.answer()).body)["data"]
        statuses = [(await harness.chat(asking(card["id"]))).status for card in cards]
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        ("tiny", "tiny", None),
        ("gpt", "tiny", None),
        ("text-to-sql", "sql", None),
        ("sql", "sql", "tiny"),
    ]
    assert statuses == [200] * 4


async def test_an_engine_is_sent_the_name_that_an_alias_stands_for(replica: FakeReplica) -> None:
    async with routed(named([replica])) as harness:
        for model in ("gpt", "text-to-sql", "tiny", "sql"):
            await harness.chat(asking(model))
        await harness.at_rest()
        _, shown = await harness.admin("GET", "/admin/decisions")
    assert [json.loads(call.body)["model"] for call in replica.calls] == ["tiny", "sql", "tiny", "sql"]
    assert replica.calls[2].body == asking("tiny")  # byte by byte
    gpt, text_to_sql, tiny, sql = [record["prefix"] for record in shown["decisions"]]
    assert gpt == tiny != sql == text_to_sql


async def test_a_key_for_a_model_is_good_for_its_aliases_and_not_for_its_adapters(replica: FakeReplica) -> None:
    snapshot = replace(named([replica]), access=Access(keys=(api_key(models=("tiny",)),)))
    async with routed(snapshot) as harness, harness.connect() as client:
        asked = {model: await harness.chat(asking(model), [bearer()]) for model in ("tiny", "gpt", "sql", "nope")}
        await client.send(get(b"/v1/models", [bearer()]))
        listed = [card["id"] for card in json.loads((await client.answer()).body)["data"]]
    assert {model: answer.status for model, answer in asked.items()} == {
        "tiny": 200,
        "gpt": 200,
        "sql": 403,
        "nope": 403,
    }
    assert listed == ["tiny", "gpt"]


async def test_an_adapters_requests_go_to_replicas_that_hold_it(two: list[FakeReplica]) -> None:
    async with routed(holding(two, (), ("sql",))) as harness:
        met = {
            model: {(await harness.chat(asking(model, str(n)))).replica for n in range(12)} for model in ("tiny", "sql")
        }
        body = json.loads(asking("text-to-sql"))
        _, shown = await harness.admin("POST", "/admin/explain", json={"path": CHAT.decode(), "body": body})
    assert met == {"tiny": {two[0].name, two[1].name}, "sql": {two[1].name}}
    assert (shown["model"], shown["adapter"]) == ("tiny", "sql")
    assert [candidate["replica"] for candidate in shown["candidates"]] == [two[1].name]


async def test_where_nobody_holds_the_adapter_the_refusal_names_it(two: list[FakeReplica]) -> None:
    async with routed(holding(two, (), ())) as harness:
        answer = await harness.chat(asking("sql"))
        assert (await harness.chat(asking())).status == 200
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert "'sql'" in answer.error["message"]
