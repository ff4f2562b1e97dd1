"""Which task group a request belongs to, as clients, decisions and explanations show it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from routing.schema import (
    Access,
    Boundary,
    ConfigError,
    GroupMatch,
    LowestCostSettings,
    RouterConfig,
    TaskGroupConfig,
    Tier1,
    dump_snapshot,
)
from tests.fakes.replica import FakeReplica
from tests.routing.proxy.harness import CHAT, KEY, OTHER, Harness, api_key, bearer, chat_body, config, routed

HANDBOOK = "Answer from the handbook. " * 40


def grouped(replicas: list[FakeReplica], *groups: TaskGroupConfig, **fields: Any) -> RouterConfig:
    """A pool in which each group has its own replica, so that the replica shows the group."""
    owned = tuple(replace(group, replicas=(replicas[at % len(replicas)].name,)) for at, group in enumerate(groups))
    snapshot = config(replicas, groups=owned, models=("tiny",), settings=LowestCostSettings())
    return replace(snapshot, pools=(replace(snapshot.pools[0], **fields),))


async def explained(harness: Harness, body: bytes, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    explained_request = {"path": CHAT.decode(), "body": json.loads(body), "headers": headers or {}, **fields}
    status, response = await harness.admin("POST", "/admin/explain", json=explained_request)
    assert status == 200, response
    return response


async def decided(harness: Harness) -> Any:
    """The latest decision's record."""
    await harness.at_rest()
    _, response = await harness.admin("GET", "/admin/decisions")
    return response["decisions"][-1]


async def test_a_task_group_uses_its_own_replicas_and_unknown_names_are_ignored(two: list[FakeReplica]) -> None:
    groups = (TaskGroupConfig(name="coding", replicas=("replica-1",)),)
    async with routed(config(two, groups=groups)) as harness:
        for _ in range(4):
            assert (await harness.chat(headers=[b"X-Task-Group: coding"])).replica == "replica-1"
        replicas = {(await harness.chat(headers=[b"X-Task-Group: nobody"])).replica for _ in range(2)}
        assert replicas == {"replica-0", "replica-1"}
        _, text = await harness.admin("GET", "/metrics")
        assert 'group="coding"' in text
        assert "nobody" not in text


async def test_a_hash_from_an_explanation_can_match_a_group(two: list[FakeReplica]) -> None:
    prompt = [{"role": "system", "content": HANDBOOK}, {"role": "user", "content": "Hello"}]
    body = json.dumps({"model": "tiny", "messages": prompt}).encode()
    async with routed(grouped(two, TaskGroupConfig(name="other"), TaskGroupConfig(name="handbook"))) as harness:
        before = await explained(harness, body)
        assert (before["group"], before["matched_by"]) == ("", "unmatched")
        claimed = GroupMatch(tier1_hashes=(before["tier1"]["hash_by_group"]["handbook"],))
        groups = TaskGroupConfig(name="other"), TaskGroupConfig(name="handbook", match=claimed)
        await harness.push(grouped(two, *groups), revision=2)
        after, response = await explained(harness, body), await harness.chat(body)
        record = await decided(harness)
    assert response.replica == two[1].name
    for shown in (after, record):
        assert (shown["group"], shown["matched_by"], shown["replica"]) == ("handbook", "tier1", two[1].name)
        assert shown["prefix"] == after["tier1"]["hash"] == claimed.tier1_hashes[0]
    assert HANDBOOK not in json.dumps([before, after, record])


async def test_a_group_has_its_own_tier_1_boundary(two: list[FakeReplica]) -> None:
    rule = Tier1(boundary=Boundary.MARKER, boundary_marker="<q>")
    bodies = [chat_body(text=f"{text} <q> {question}") for text, question in (("one", "a"), ("one", "b"), ("two", "a"))]
    async with routed(grouped(two, TaskGroupConfig(name="asked", tier1=rule))) as harness:
        first, same, second = [await explained(harness, body, {"X-Task-Group": "asked"}) for body in bodies]
        whole = await explained(harness, bodies[0])
    assert first["prefix"] == same["prefix"] != second["prefix"]
    assert first["tier1"]["rule"] == {
        "boundary": "marker",
        "boundary_bytes": 1024,
        "boundary_messages": 1,
        "boundary_marker": "<q>",
    }
    assert first["tier1"]["bytes"] < whole["tier1"]["bytes"]
    assert whole["tier1"]["hash_by_group"] == {"asked": first["prefix"]}


async def test_a_key_can_match_a_group_and_explanations_accept_a_key(two: list[FakeReplica]) -> None:
    groups = (
        TaskGroupConfig(name="red", match=GroupMatch(api_keys=("main",))),
        TaskGroupConfig(name="agents", match=GroupMatch(session_prefixes=("agent-",), api_key_prefixes=("batch-",))),
    )
    keys = (api_key("main"), api_key("batch-2", OTHER, groups=("agents",)))
    snapshot = replace(grouped(two, *groups), access=Access(keys=keys))
    async with routed(snapshot) as harness:
        for secret, key, group in ((KEY, "main", "red"), (OTHER, "batch-2", "agents")):
            assert (await harness.chat(chat_body(user="agent-7"), [bearer(secret)])).status == 200
            record, shown = await decided(harness), await explained(harness, chat_body(user="agent-7"), key=key)
            for it in (record, shown):
                assert (it["group"], it["matched_by"]) == (group, "api_key")
        assert (await explained(harness, chat_body(user="agent-7")))["group"] == "agents"
        explained_request = {"path": CHAT.decode(), "body": json.loads(chat_body()), "key": "nobody"}
        assert (await harness.admin("POST", "/admin/explain", json=explained_request))[0] == 422
        assert KEY not in json.dumps(await explained(harness, chat_body(), key="main"))


async def test_an_explanation_uses_up_no_rate(two: list[FakeReplica]) -> None:
    snapshot = replace(grouped(two), access=Access(keys=(api_key("main", requests_per_s=0.001, burst=1),)))
    async with routed(snapshot) as harness:
        for _ in range(3):
            await explained(harness, chat_body(), key="main")
        assert (await harness.chat(chat_body(), [bearer()])).status == 200
        assert (await harness.chat(chat_body(), [bearer()])).status == 429


async def test_two_groups_with_the_same_match_are_rejected(two: list[FakeReplica]) -> None:
    claim = GroupMatch(session_prefixes=("agent-",))
    groups = TaskGroupConfig(name="one", match=claim), TaskGroupConfig(name="two", match=claim)
    sound = grouped(two)
    with pytest.raises(ConfigError):
        dump_snapshot(grouped(two, *groups), 2)
    document = json.loads(dump_snapshot(sound, 2).document)
    document["config"]["pools"][0]["groups"] = [
        {"name": name, "match": {"session_prefixes": ["agent-"]}} for name in ("one", "two")
    ]
    del document["sha256"]
    async with routed(sound) as harness:
        status, nack = await harness.admin("PUT", "/admin/config", json=document)
        assert (status, nack["path"]) == (422, "$.pools[0].groups[1].match.session_prefixes[0]")
        assert "'one'" in nack["reason"]
        assert "'two'" in nack["reason"]
        assert (await harness.chat(chat_body())).status == 200
