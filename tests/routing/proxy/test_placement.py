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
from routing.schema import LeastLoadSettings, PrefixHashSettings, RouterConfig
from routing.settings import STATE_URL, SettingsError, state_exchange
from tests.fakes.replica import FakeReplica, answering, streaming
from tests.routing.proxy.harness import (
    CHAT,
    HISTOGRAM,
    Harness,
    Response,
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


async def test_a_prompt_stays_on_its_rank_and_prompts_use_all_ranks(replica: FakeReplica) -> None:
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
async def test_a_client_cannot_choose_the_rank(name: bytes, fields: dict[str, str], replica: FakeReplica) -> None:
    async with routed(parallel([replica], **fields)) as harness:
        response = await harness.chat(chat_body(), [name + b": 77", b"X-Other: kept"])
    assert response.status == 200
    headers = [value for key, value in replica.calls[0].headers if key.replace(b"_", b"-") == b"x-data-parallel-rank"]
    assert headers in ([b"0"], [b"1"])
    assert replica.calls[0].header(b"x-other") == [b"kept"]


async def test_a_replica_with_one_rank_gets_the_clients_header(two: list[FakeReplica]) -> None:
    async with routed(parallel(two)) as harness:
        for number in range(30):
            await harness.chat(chat_body(text=f"Number {number}."), [b"X-Data-Parallel-Rank: 0"])
    ranks_used = [{rank for call in it.calls for rank in call.header(b"x-data-parallel-rank")} for it in two]
    assert ranks_used == [{b"0", b"1"}, {b"0"}]


async def test_explanations_and_replicas_show_every_rank(two: list[FakeReplica]) -> None:
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


async def test_a_failed_replica_is_not_retried_on_another_rank(two: list[FakeReplica]) -> None:
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


async def test_the_first_decision_of_a_second_describes_its_prompt_without_text(replica: FakeReplica) -> None:
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
def test_the_rate_of_descriptions_is_limited(groups: int, per_s: int, expected: float) -> None:
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
def test_a_failing_description_fails_no_request(caplog: pytest.LogCaptureFixture) -> None:
    assert structure_json(Decided("broken"), Asked(5.0)) is None  # type: ignore[arg-type]
    assert "prompt structure" in caplog.text


@pytest.mark.plain_python(reason="It replaces what the router calls.")
async def test_a_request_is_sent_before_its_prompt_is_described(
    replica: FakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
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


async def test_every_figure_has_the_revision_that_placed_the_request(pair: list[FakeReplica]) -> None:
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


async def test_an_explanation_names_the_revision_and_the_reason(pair: list[FakeReplica]) -> None:
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


async def test_a_retry_stays_with_its_revision(pair: list[FakeReplica]) -> None:
    pair[0].script = answering(b"{}", status=503)
    async with routed(with_canary(pair, 1.0)) as harness:
        responses = await ask_all(harness)
        decisions = harness.decisions

    assert {response.status for response in responses} == {200}
    assert {(it["revision"], it["arm"]) for it in decisions} == {(2, "canary")}
    assert any(it["retries"] for it in decisions)


async def test_without_a_canary_there_is_no_trace_of_one(pair: list[FakeReplica]) -> None:
    async with routed(config(pair)) as harness:
        [response, *_] = await ask_all(harness)
        models = await harness.send(get(b"/v1/models"))
        (decision, *_) = harness.decisions
        metrics_text = await series(harness)

    assert "x-warmpath-revision" not in response.headers | models.headers
    assert decision["arm"] is None
    assert not [name for name in metrics_text if name.startswith(HISTOGRAM)]


@pytest.mark.plain_python(reason="It sets a constant.")
async def test_the_histogram_stays_for_a_grace_period_after_the_canary(
    pair: list[FakeReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_an_invalid_url_is_an_error_that_does_not_show_it() -> None:
    with pytest.raises(SettingsError, match=f"^{STATE_URL}: expected redis://, rediss:// or unix:// ") as raised:
        state_exchange({STATE_URL: "http://user:secret@host"})

    assert "secret" not in str(raised.value)
    assert state_exchange({}) is None
