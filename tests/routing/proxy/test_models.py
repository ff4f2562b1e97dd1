"""Names of models: what clients may ask for, what engines are sent, and who is asked."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from routing.schema import Access, Adapter, Alias, HealthCheck, PrefixHashSettings, RouterConfig
from routing.types import ReplicaId
from tests.fakes.replica import Call, FakeReplica, answering
from tests.routing.proxy.api_keys import api_key, asking, bearer
from tests.routing.proxy.harness import CHAT, config, get, routed

SQL = Adapter("sql", "tiny")


def named(replicas: list[FakeReplica], *held: tuple[str, ...] | None, **fields: Any) -> RouterConfig:
    """A pool of one model, with more names; each replica holds the adapter unless ``held`` says other things."""
    snapshot = config(replicas, models=("tiny",), settings=PrefixHashSettings(), **fields)
    pool = replace(snapshot.pools[0], aliases=(Alias("gpt", "tiny"), Alias("text-to-sql", "sql")), adapters=(SQL,))
    said = held or [("sql",)] * len(replicas)
    members = tuple(replace(member, adapters=it) for member, it in zip(pool.replicas, said, strict=True))
    return replace(snapshot, pools=(replace(pool, replicas=members),))


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
    async with routed(named(two, (), ("sql",))) as harness:
        met = {
            model: {(await harness.chat(asking(model, str(n)))).replica for n in range(12)} for model in ("tiny", "sql")
        }
        body = json.loads(asking("text-to-sql"))
        _, shown = await harness.admin("POST", "/admin/explain", json={"path": CHAT.decode(), "body": body})
    assert met == {"tiny": {two[0].name, two[1].name}, "sql": {two[1].name}}
    assert (shown["model"], shown["adapter"]) == ("tiny", "sql")
    assert [candidate["replica"] for candidate in shown["candidates"]] == [two[1].name]


async def test_where_nobody_holds_the_adapter_the_refusal_names_it(two: list[FakeReplica]) -> None:
    async with routed(named(two, (), ())) as harness:
        answer = await harness.chat(asking("sql"))
        assert (await harness.chat(asking())).status == 200
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert "'sql'" in answer.error["message"]


# --- adapters that replicas tell of ------------------------------------------------------------------


def telling(held: dict[str, list[str]]) -> Any:
    """Answers ``/v1/models`` with what its replica holds at the time; everything else is answered as ever."""
    answered = answering()

    def script(name: str) -> Any:
        async def answer(call: Call) -> None:
            if b"GET /v1/models " not in call.head:
                await answered(call)
                return
            body = json.dumps({"object": "list", "data": [{"id": it} for it in held[name]]}).encode()
            await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

        return answer

    return script


async def test_a_replica_tells_which_adapters_it_holds_and_is_believed_until_it_tells_others(
    two: list[FakeReplica],
) -> None:
    held = {two[0].name: ["tiny"], two[1].name: ["tiny", "sql", "another"]}
    script = telling(held)
    for one in two:
        one.script = script(one.name)
    snapshot = named(two, None, None, health=HealthCheck(interval_s=0.01))
    async with routed(snapshot) as harness:
        health = harness.router.balancer.health

        def holders() -> list[bool]:
            return [health.has_adapter(ReplicaId(one.name), "sql") for one in two]

        await harness.until(lambda: holders() == [False, True], "both to tell")
        met = {(await harness.chat(asking("sql", str(number)))).replica for number in range(8)}
        held[two[0].name], held[two[1].name] = held[two[1].name], held[two[0].name]
        await harness.until(lambda: holders() == [True, False], "both to tell anew")
        later = {(await harness.chat(asking("sql", str(number)))).replica for number in range(8)}
    assert (met, later) == ({two[1].name}, {two[0].name})


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 401 X\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"\r\nContent-Length:2\r\n\r\n",
        b'HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n{"x":' + b"[" * 999_995,
    ],
)
async def test_who_does_not_tell_may_hold_any_adapter(answer: bytes, replica: FakeReplica) -> None:
    asked = 0
    answered = answering()

    async def script(call: Call) -> None:
        nonlocal asked
        if b"GET /v1/models " not in call.head:
            await answered(call)
            return
        asked += 1
        await call.send(answer)
        call.close()

    replica.script = script
    async with routed(named([replica], None, health=HealthCheck(interval_s=0.01))) as harness:
        await harness.until(lambda: asked >= 2, "two questions")
        assert (await harness.chat(asking("sql"))).status == 200
        _, shown = await harness.admin("GET", "/admin/replicas")
    assert shown["replicas"][0]["health"] == "up"


async def test_nobody_is_asked_for_models_where_there_are_no_adapters(replica: FakeReplica) -> None:
    async with routed(config([replica], models=("tiny",), health=HealthCheck(interval_s=0.01))) as harness:
        await harness.until(lambda: replica.probes >= 12, "a dozen checks")
    assert replica.calls == []
