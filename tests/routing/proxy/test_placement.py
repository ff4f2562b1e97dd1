"""Placement seen from outside: affinity, ranks, canaries, prompt structures."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from msgspec.structs import replace

from routing.observability import metrics
from routing.observability.decision_log import GROUP_S, MAX_PER_S, StructureSampler, structure_json
from routing.proxy import exchange
from routing.schema import (
    Access,
    Boundary,
    GroupMatch,
    LeastLoadSettings,
    LowestCostSettings,
    PrefixHashSettings,
    RouterConfig,
    TaskGroupConfig,
    Tier1,
)
from routing.settings import STATE_URL, SettingsError, state_exchange
from tests.fakes.replica import FakeReplica, answering, streaming
from tests.routing.proxy.harness import (
    CHAT,
    HISTOGRAM,
    KEY,
    OTHER,
    Harness,
    Response,
    api_key,
    bearer,
    body,
    chat_body,
    config,
    get,
    routed,
    samples,
    with_canary,
)

RANKS = 2


def parallel(replicas: list[FakeReplica], **fields: Any) -> RouterConfig:
    """A pool whose first replica has ranks."""
    snapshot = config(replicas, settings=PrefixHashSettings(slack_s=60))
    first, *rest = snapshot.pools[0].replicas
    members = replace(first, data_parallel_size=RANKS, **fields), *rest
    return replace(snapshot, pools=(replace(snapshot.pools[0], replicas=members),))


async def test_a_prompt_stays_on_its_rank_and_prompts_use_all_ranks(replica):
    async with routed(parallel([replica])) as harness:
        for _ in range(2):
            for number in range(20):
                await harness.chat(chat_body(text=f"Number {number}."))
        await harness.at_rest()
        _, shown = await harness.admin("GET", "/admin/decisions")
    ranks = [call.header(b"x-data-parallel-rank") for call in replica.calls]
    assert ranks[:20] == ranks[20:]
    assert {tuple(rank) for rank in ranks} == {(b"0",), (b"1",)}
    assert [[b"%d" % record["rank"]] for record in shown["decisions"]] == ranks
    assert {record["replica"] for record in shown["decisions"]} == {replica.name}


@pytest.mark.parametrize("name", [b"X-Data-Parallel-Rank", b"x-data-parallel-rank", b"X_Data_Parallel_Rank"])
@pytest.mark.parametrize("fields", [{}, {"api_key": "own"}])
async def test_a_client_cannot_choose_the_rank(name, fields, replica):
    async with routed(parallel([replica], **fields)) as harness:
        response = await harness.chat(chat_body(), [name + b": 77", b"X-Other: kept"])
    assert response.status == 200
    headers = [value for key, value in replica.calls[0].headers if key.replace(b"_", b"-") == b"x-data-parallel-rank"]
    assert headers in ([b"0"], [b"1"])
    assert replica.calls[0].header(b"x-other") == [b"kept"]


async def test_a_replica_with_one_rank_gets_the_clients_header(two):
    async with routed(parallel(two)) as harness:
        for number in range(30):
            await harness.chat(chat_body(text=f"Number {number}."), [b"X-Data-Parallel-Rank: 0"])
    ranks_used = [{rank for call in it.calls for rank in call.header(b"x-data-parallel-rank")} for it in two]
    assert ranks_used == [{b"0", b"1"}, {b"0"}]


async def test_explanations_and_replicas_show_every_rank(two):
    async with routed(parallel(two)) as harness:
        explained_request = {"path": CHAT.decode(), "body": json.loads(chat_body())}
        _, explained = await harness.admin("POST", "/admin/explain", json=explained_request)
        await harness.chat(chat_body())
        await harness.at_rest()
        _, shown = await harness.admin("GET", "/admin/replicas")
        sent = [call.header(b"x-data-parallel-rank") for it in two for call in it.calls]
    assert [it["replica"] for it in explained["candidates"]] == [f"{two[0].name}#0", f"{two[0].name}#1", two[1].name]
    assert sent == [[] if explained["rank"] is None else [b"%d" % explained["rank"]]]
    assert [len(row["ranks"]) for row in shown["replicas"]] == [RANKS, 1]
    assert all(row["running"] == row["waiting_tokens"] == 0 for row in shown["replicas"])


async def test_a_failed_replica_is_not_retried_on_another_rank(two):
    async with routed(parallel(two)) as harness:
        two[0].kill()
        responses = [await harness.chat(chat_body(text=f"Number {number}.")) for number in range(10)]
        await harness.at_rest()
        _, shown = await harness.admin("GET", "/admin/decisions")
    assert {(response.status, response.replica) for response in responses} == {(200, two[1].name)}
    assert max(record["retries"] for record in shown["decisions"]) == 1


def structured_body(**fields: Any) -> bytes:
    messages = [{"role": "system", "content": "Today is 2026-11-21. Canary."}, {"role": "user", "content": "Hello"}]
    return json.dumps({"model": "tiny", "messages": messages, **fields}).encode()


async def test_the_first_decision_of_a_second_describes_its_prompt_without_text(replica):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"b": 1, "a": 2}}}]
    async with routed(config([replica])) as harness:
        await harness.chat(structured_body(tools=tools, user="someone"))
        await harness.chat(structured_body())
        _, listed = await harness.admin("GET", "/admin/decisions")
    first, second = listed["decisions"]

    structure = first["prompt_structure"]
    assert [segment["kind"] for segment in structure["segments"]] == ["tools", "system", "user"]
    assert [(token["kind"], token["bytes"]) for token in structure["volatile"]][-1] == ("date", 10)
    assert structure["tools"]["count"] == 1
    assert structure["session"]
    assert "Canary" not in json.dumps(listed)
    assert second["prompt_structure"] is None
    assert all("cost" in candidate for candidate in first["candidates"])
    assert not any("cost" in candidate for candidate in second["candidates"])


class Decided:
    """A decision of a task group for the sampler."""

    def __init__(self, group: str) -> None:
        self.pool, self.group = "chat", group
        self.described = 0

    @property
    def keys(self) -> Any:
        return self

    def structure(self, _tools: Any) -> Any:
        raise ValueError("no such thing")


class Asked:
    """A request with an arrival time."""

    structured_body = b"{}"

    def __init__(self, at: float) -> None:
        self.arrived_at = at


@pytest.mark.plain_python(reason="Its decisions are of a class of their own.")
@pytest.mark.parametrize(("groups", "per_s", "expected"), [(1, 100, 1.0), (4, 400, 4.0), (100, 1000, MAX_PER_S)])
def test_the_rate_of_descriptions_is_limited(groups, per_s, expected):
    sampler, checks, seconds, chance = StructureSampler(), 0, 20, random.Random(5)
    decided = [Decided(f"group-{number}") for number in range(groups)]
    for number in range(per_s * seconds):
        at, chosen = number / per_s, chance.choice(decided)
        checks += at >= sampler.due_at
        chosen.described += sampler.should_sample(chosen, at)  # type: ignore[arg-type]
    described = [router_a.described for router_a in decided]

    assert sum(described) <= expected * seconds + groups
    assert sum(described) >= 0.8 * expected * seconds
    assert max(described) <= seconds / GROUP_S + 1
    assert checks <= 60 * seconds


@pytest.mark.plain_python(reason="Its decisions are of a class of their own.")
def test_a_failing_description_fails_no_request(caplog):
    assert structure_json(Decided("broken"), Asked(5.0)) is None  # type: ignore[arg-type]
    assert "prompt structure" in caplog.text


@pytest.mark.plain_python(reason="It replaces what the router calls.")
async def test_a_request_is_sent_before_its_prompt_is_described(replica, monkeypatch):
    reported: list[str] = []

    def noting(name: str, owner: Any, attribute: str) -> None:
        genuine = getattr(owner, attribute)
        monkeypatch.setattr(owner, attribute, lambda *args: (reported.append(name), genuine(*args))[1])

    noting("sent", exchange.Exchange, "send_on")
    noting("described", exchange, "structure_json")
    async with routed(config([replica])) as harness:
        await harness.chat()  # opens the connection
        reported.clear()
        harness.router.services.structure_sampler = StructureSampler()
        await harness.chat()

    assert reported == ["sent", "described"]


# --- A canary revision, as clients, scrapers and operators see it ---


USAGE = b'{"usage":{"prompt_tokens":33,"prompt_tokens_details":{"cached_tokens":16}}}'
ACTIVE, CANARY = "1", "2"
PROMPTS = 20


async def ask_all(harness: Harness) -> list[Response]:
    return [await harness.chat(body(number)) for number in range(PROMPTS)]


async def series(harness: Harness) -> dict[str, list[tuple[dict[str, str], float]]]:
    _, text = await harness.admin("GET", "/metrics")
    return samples(text)


@pytest.fixture
def pair(two: list[FakeReplica]) -> list[FakeReplica]:
    """Replicas that report their usage."""
    for replica in two:
        replica.script = streaming(b"data: " + USAGE + b"\n\n")
    return two


async def test_every_figure_has_the_revision_that_placed_the_request(pair):
    async with routed(with_canary(pair)) as harness:
        responses = await ask_all(harness)
        decisions = harness.decisions
        metrics_text = await series(harness)
    reported = [response.headers["x-warmpath-revision"] for response in responses]
    by_revision = {revision: reported.count(revision) for revision in (ACTIVE, CANARY)}

    assert min(by_revision.values()) > 0
    assert [str(decision["revision"]) for decision in decisions] == reported
    arms = {(it["revision"], it["arm"], it["strategy"]) for it in decisions}
    assert arms == {(1, "active", "prefix_hash"), (2, "canary", "least_load")}
    for name in ("requests_total", "usage_reported_total"):
        counted = dict.fromkeys(by_revision, 0.0)
        for labels, value in metrics_text[f"warmpath_router_{name}"]:
            counted[labels["revision"]] += value
        assert counted == by_revision, name
    timed = {labels["revision"]: value for labels, value in metrics_text[f"{HISTOGRAM}_count"]}
    assert timed == by_revision
    assert {tuple(labels) for labels, _ in metrics_text[f"{HISTOGRAM}_count"]} == {
        ("pool", "group", "policy", "revision")
    }


async def test_an_explanation_names_the_revision_and_the_reason(pair):
    async with routed(with_canary(pair)) as harness:
        for number in range(6):
            explained_request = json.dumps({"path": "/v1/chat/completions", "body": json.loads(body(number))})
            _, explained = await harness.admin("POST", "/admin/explain", data=explained_request)
            sent = await harness.chat(body(number))
            canary = explained["canary"]
            is_canary = canary["place"] < 0.5
            assert canary | {"place": 0} == {
                "arm": "canary" if is_canary else "active",
                "why": "within_share" if is_canary else "beyond_share",
                "active_revision": 1,
                "canary_revision": 2,
                "share": 0.5,
                "place": 0,
            }
            assert (
                str(explained["revision"]) == sent.headers["x-warmpath-revision"] == (CANARY if is_canary else ACTIVE)
            )


async def test_a_retry_stays_with_its_revision(pair):
    pair[0].script = answering(b"{}", status=503)
    async with routed(with_canary(pair, 1.0)) as harness:
        responses = await ask_all(harness)
        decisions = harness.decisions

    assert {response.status for response in responses} == {200}
    assert {(it["revision"], it["arm"]) for it in decisions} == {(2, "canary")}
    assert any(it["retries"] for it in decisions)


async def test_without_a_canary_there_is_no_trace_of_one(pair):
    async with routed(config(pair)) as harness:
        [response, *_] = await ask_all(harness)
        models = await harness.send(get(b"/v1/models"))
        (decision, *_) = harness.decisions
        metrics_text = await series(harness)

    assert "x-warmpath-revision" not in response.headers | models.headers
    assert decision["arm"] is None
    assert not [name for name in metrics_text if name.startswith(HISTOGRAM)]


@pytest.mark.plain_python(reason="It sets a constant.")
async def test_the_histogram_stays_for_a_grace_period_after_the_canary(pair, monkeypatch):
    async with routed(with_canary(pair)) as harness:
        await ask_all(harness)
        ended = config(pair, settings=LeastLoadSettings(), policy_revision=2)
        assert (await harness.push(ended, 2))[0] == 200
        responses = await ask_all(harness)
        counted = {labels["revision"]: value for labels, value in (await series(harness))[f"{HISTOGRAM}_count"]}
        monkeypatch.setattr(metrics, "GRACE_S", -1.0)
        after_grace = await series(harness)

    assert "x-warmpath-revision" not in responses[0].headers
    assert sum(counted.values()) == PROMPTS  # nothing was added after the end of the canary
    assert not [name for name in after_grace if name.startswith(HISTOGRAM)]
    assert {labels["revision"] for labels, _ in after_grace["warmpath_router_requests_total"]} == {CANARY}


def test_an_invalid_url_is_an_error_that_does_not_show_it():
    with pytest.raises(SettingsError, match=f"^{STATE_URL}: expected redis://, rediss:// or unix:// ") as raised:
        state_exchange({STATE_URL: "http://user:secret@host"})

    assert "secret" not in str(raised.value)
    assert state_exchange({}) is None


# --- Which task group a request belongs to, as clients, decisions and explanations show it ---


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


async def test_a_task_group_uses_its_own_replicas_and_unknown_names_are_ignored(two):
    groups = (TaskGroupConfig(name="coding", replicas=("replica-1",)),)
    async with routed(config(two, groups=groups)) as harness:
        for _ in range(4):
            assert (await harness.chat(headers=[b"X-Task-Group: coding"])).replica == "replica-1"
        replicas = {(await harness.chat(headers=[b"X-Task-Group: nobody"])).replica for _ in range(2)}
        assert replicas == {"replica-0", "replica-1"}
        _, text = await harness.admin("GET", "/metrics")
        assert 'group="coding"' in text
        assert "nobody" not in text


async def test_a_hash_from_an_explanation_can_match_a_group(two):
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


async def test_a_group_has_its_own_tier_1_boundary(two):
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


async def test_a_key_can_match_a_group_and_explanations_accept_a_key(two):
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


async def test_an_explanation_uses_up_no_rate(two):
    snapshot = replace(grouped(two), access=Access(keys=(api_key("main", requests_per_s=0.001, burst=1),)))
    async with routed(snapshot) as harness:
        for _ in range(3):
            await explained(harness, chat_body(), key="main")
        assert (await harness.chat(chat_body(), [bearer()])).status == 200
        assert (await harness.chat(chat_body(), [bearer()])).status == 429
