"""Models, aliases and adapters: what clients may request, and what engines get."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from routing.schema import Access, Adapter, Alias, HealthCheck, PrefixHashSettings, RouterConfig
from routing.types import ReplicaId
from tests.fakes.replica import Call, FakeReplica, Script, answering
from tests.routing.proxy.harness import CHAT, KEY, OTHER, Harness, api_key, bearer, chat_body, config, get, routed

SQL = Adapter("sql", "tiny")


def named(replicas: list[FakeReplica], *adapter_names: tuple[str, ...] | None, **fields: Any) -> RouterConfig:
    """A pool of one model with aliases and an adapter; ``adapter_names``: the adapters of each replica."""
    snapshot = config(replicas, models=("tiny",), settings=PrefixHashSettings(), **fields)
    pool = replace(snapshot.pools[0], aliases=(Alias("gpt", "tiny"), Alias("text-to-sql", "sql")), adapters=(SQL,))
    adapters_of = adapter_names or [("sql",)] * len(replicas)
    members = tuple(replace(member, adapters=it) for member, it in zip(pool.replicas, adapters_of, strict=True))
    return replace(snapshot, pools=(replace(pool, replicas=members),))


async def test_an_unknown_model_gets_a_404_like_an_engines(replica):
    async with routed(named([replica])) as harness:
        response = await harness.chat(chat_body("nope"))
    assert response.status == 404
    assert response.error == {
        "message": "The model `nope` does not exist.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
    assert replica.calls == []


async def test_models_lists_every_name_once_and_each_can_be_used(replica):
    async with routed(named([replica])) as harness, harness.connect() as client:
        cards = json.loads((await client.ask(get(b"/v1/models"))).body)["data"]
        statuses = [(await harness.chat(chat_body(card["id"]))).status for card in cards]
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        ("tiny", "tiny", None),
        ("gpt", "tiny", None),
        ("text-to-sql", "sql", None),
        ("sql", "sql", "tiny"),
    ]
    assert statuses == [200] * 4


async def test_an_alias_is_replaced_by_its_model(replica):
    async with routed(named([replica])) as harness:
        for model in ("gpt", "text-to-sql", "tiny", "sql"):
            await harness.chat(chat_body(model))
        await harness.at_rest()
        _, shown = await harness.admin("GET", "/admin/decisions")
    assert [json.loads(call.body)["model"] for call in replica.calls] == ["tiny", "sql", "tiny", "sql"]
    assert replica.calls[2].body == chat_body("tiny")  # byte by byte
    gpt, text_to_sql, tiny, sql = [record["prefix"] for record in shown["decisions"]]
    assert gpt == tiny != sql == text_to_sql


async def test_a_key_for_a_model_is_valid_for_its_aliases_and_not_for_its_adapters(replica):
    snapshot = replace(named([replica]), access=Access(keys=(api_key(models=("tiny",)),)))
    async with routed(snapshot) as harness, harness.connect() as client:
        queries = {model: await harness.chat(chat_body(model), [bearer()]) for model in ("tiny", "gpt", "sql", "nope")}
        await client.send(get(b"/v1/models", [bearer()]))
        listed = [card["id"] for card in json.loads((await client.read_response()).body)["data"]]
    assert {model: response.status for model, response in queries.items()} == {
        "tiny": 200,
        "gpt": 200,
        "sql": 403,
        "nope": 403,
    }
    assert listed == ["tiny", "gpt"]


async def test_requests_for_an_adapter_go_to_replicas_that_have_it(two):
    async with routed(named(two, (), ("sql",))) as harness:
        used = {
            model: {(await harness.chat(chat_body(model, str(n)))).replica for n in range(12)}
            for model in ("tiny", "sql")
        }
        body = json.loads(chat_body("text-to-sql"))
        _, shown = await harness.admin("POST", "/admin/explain", json={"path": CHAT.decode(), "body": body})
    assert used == {"tiny": {two[0].name, two[1].name}, "sql": {two[1].name}}
    assert (shown["model"], shown["adapter"]) == ("tiny", "sql")
    assert [candidate["replica"] for candidate in shown["candidates"]] == [two[1].name]


async def test_without_a_replica_that_has_the_adapter_the_error_names_it(two):
    async with routed(named(two, (), ())) as harness:
        response = await harness.chat(chat_body("sql"))
        assert (await harness.chat(chat_body())).status == 200
    assert (response.status, response.headers["retry-after"]) == (503, "1")
    assert "'sql'" in response.error["message"]


def spread(replicas: list[FakeReplica], adapters: int, adapter_replicas: int) -> RouterConfig:
    """Replicas that all have the adapters ``0``, ``1`` ..., each of which so many serve."""
    names = tuple(map(str, range(adapters)))
    snapshot = config(replicas, models=("tiny",), settings=PrefixHashSettings())
    pool = replace(
        snapshot.pools[0],
        adapters=tuple(Adapter(name, "tiny") for name in names),
        adapter_replicas=adapter_replicas,
        replicas=tuple(replace(member, adapters=names) for member in snapshot.pools[0].replicas),
    )
    return replace(snapshot, pools=(pool,))


async def used_replicas(harness: Harness, model: str) -> frozenset[str]:
    return frozenset({(await harness.chat(chat_body(model, str(number)))).replica for number in range(16)})


async def test_each_adapter_uses_two_replicas_and_adapters_differ_in_them(four):
    async with routed(spread(four, adapters=8, adapter_replicas=2)) as harness:
        serving = {name: await used_replicas(harness, name) for name in map(str, range(8))}
        assert {len(replicas) for replicas in serving.values()} == {2}
        assert frozenset[str]().union(*serving.values()) == {it.name for it in four}
        assert len(await used_replicas(harness, "tiny")) == 4
        down, other = sorted(serving["0"])
        harness.health.mark(ReplicaId(down), up=False)
        after = await used_replicas(harness, "0")
    assert other in after
    assert down not in after
    assert len(after) == 2


async def test_a_retry_may_leave_the_replicas_that_serve_an_adapter(two):
    async with routed(spread(two, adapters=1, adapter_replicas=1)) as harness:
        (serving,) = await used_replicas(harness, "0")
        failing = next(it for it in two if it.name == serving)
        failing.script = answering(status=503)
        response = await harness.chat(chat_body("0", "anew"))
    assert response.status == 200
    assert response.replica != serving


# --- adapters that replicas tell of ------------------------------------------------------------------


def telling(adapter_names: dict[str, list[str]]) -> Any:
    """Responds to ``/v1/models`` with the replica's current adapters."""

    def script(name: str) -> Any:
        async def response(call: Call) -> None:
            body = json.dumps({"object": "list", "data": [{"id": it} for it in adapter_names[name]]}).encode()
            await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

        return response

    return script


async def test_replicas_report_their_adapters(two):
    adapter_names = {two[0].name: ["tiny"], two[1].name: ["tiny", "sql", "another"]}
    script = telling(adapter_names)
    for it in two:
        it.on_models_read = script(it.name)
    snapshot = named(two, None, None, health=HealthCheck(interval_s=0.01))
    async with routed(snapshot) as harness:
        health = harness.health

        def holders() -> list[bool]:
            return [health.has_adapter(ReplicaId(it.name), "sql") for it in two]

        await harness.until(lambda: holders() == [False, True], "both to tell")
        used = {(await harness.chat(chat_body("sql", str(number)))).replica for number in range(8)}
        adapter_names[two[0].name], adapter_names[two[1].name] = adapter_names[two[1].name], adapter_names[two[0].name]
        await harness.until(lambda: holders() == [True, False], "both to tell anew")
        later = {(await harness.chat(chat_body("sql", str(number)))).replica for number in range(8)}
    assert (used, later) == ({two[1].name}, {two[0].name})


@pytest.mark.parametrize(
    "response",
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
async def test_a_replica_that_reports_no_adapters_may_have_any(response, replica):
    queries = 0

    async def script(call: Call) -> None:
        nonlocal queries
        queries += 1
        await call.send(response)
        call.close()

    replica.on_models_read = script
    async with routed(named([replica], None, health=HealthCheck(interval_s=0.01))) as harness:
        await harness.until(lambda: queries >= 2, "two questions")
        assert (await harness.chat(chat_body("sql"))).status == 200
        _, shown = await harness.admin("GET", "/admin/replicas")
    assert shown["replicas"][0]["health"] == "up"


def reporting(*models: dict[str, Any]) -> Script:
    return answering(json.dumps({"object": "list", "data": list(models)}).encode())


async def test_the_list_has_the_models_of_all_pools_with_the_shortest_length_of_each(four):
    for replica, length in zip(four, (32_768, 8192, None, 4096), strict=True):
        replica.on_models_read = reporting({"id": "tiny", "max_model_len": length})
    four[3].on_models_read = reporting(
        {"id": "other", "root": "org/other", "max_model_len": 4096}, {"id": "other-sql", "parent": "other"}
    )
    first, second = config(four[:3], models=("tiny",)), config(four[3:])
    pools = replace(first.pools[0], aliases=(Alias("gpt", "tiny"),)), replace(second.pools[0], name="any")
    keys = api_key(), api_key("limited", OTHER, models=("other", "tiny"))
    async with routed(replace(first, pools=pools, access=Access(keys=keys))) as harness, harness.connect() as client:
        await harness.until(lambda: len(harness.router.services.checks.models) == 4, "all to report")
        listed = {}
        for key in (KEY, OTHER):
            listed[key] = json.loads((await client.ask(get(b"/v1/models", [bearer(key)]))).body)["data"]
        await client.send(get(b"/v1/models", [bearer()], b"HEAD"), get(b"/v1/models/other", [bearer()]))
        head, one = await client.read_response(bodyless=True), await client.read_response()

    found = [(card["id"], card["root"], card["parent"], card["max_model_len"]) for card in listed[KEY]]
    assert found == [
        ("tiny", "tiny", None, 8192),
        ("gpt", "tiny", None, 8192),
        ("other", "org/other", None, 4096),
        ("other-sql", "other-sql", "other", 4096),
    ]
    assert [card["id"] for card in listed[OTHER]] == ["tiny", "gpt", "other"]
    assert (head.status, json.loads(one.body)) == (200, listed[KEY][2])
    assert all(replica.calls == [] for replica in four)


async def test_named_models_are_listed_before_another_pool_reports_any(two):
    first, second = config(two[:1], models=("tiny",)), config(two[1:])
    pools = first.pools[0], replace(second.pools[0], name="any")
    async with routed(replace(first, pools=pools)) as harness, harness.connect() as client:
        cards = json.loads((await client.ask(get(b"/v1/models"))).body)["data"]
    assert [(card["id"], card["max_model_len"]) for card in cards] == [("tiny", None)]
