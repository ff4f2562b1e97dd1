"""A canary revision, as clients, scrapers and operators see it."""

from __future__ import annotations

import json

import pytest

from routing.observability import metrics
from routing.schema import LeastLoadSettings
from tests.fakes.replica import FakeReplica, answering, streaming
from tests.routing.proxy.harness import HISTOGRAM, Harness, Response, body, config, get, routed, samples, with_canary

USAGE = b'{"usage":{"prompt_tokens":33,"prompt_tokens_details":{"cached_tokens":16}}}'
ACTIVE, CANARY = "1", "2"
PROMPTS = 20


async def ask_all(harness: Harness) -> list[Response]:
    return [await harness.chat(body(number)) for number in range(PROMPTS)]


async def series(harness: Harness) -> dict[str, list[tuple[dict[str, str], float]]]:
    _, text = await harness.admin("GET", "/metrics")
    return samples(text)


@pytest.fixture(autouse=True)
def _usage(two: list[FakeReplica]) -> None:
    for replica in two:
        replica.script = streaming(b"data: " + USAGE + b"\n\n")


async def test_every_figure_has_the_revision_that_placed_the_request(two: list[FakeReplica]) -> None:
    async with routed(with_canary(two)) as harness:
        responses = await ask_all(harness)
        _, listed = await harness.admin("GET", "/admin/decisions")
        metrics_text = await series(harness)
    reported = [response.headers["x-warmpath-revision"] for response in responses]
    by_revision = {revision: reported.count(revision) for revision in (ACTIVE, CANARY)}

    assert min(by_revision.values()) > 0
    assert [str(decision["revision"]) for decision in listed["decisions"]] == reported
    arms = {(it["revision"], it["arm"], it["strategy"]) for it in listed["decisions"]}
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


async def test_an_explanation_names_the_revision_and_the_reason(two: list[FakeReplica]) -> None:
    async with routed(with_canary(two)) as harness:
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


async def test_a_router_outside_the_canary_uses_and_measures_the_active_revision(two: list[FakeReplica]) -> None:
    async with routed(with_canary(two, 1.0, routers=("another",))) as harness:
        responses = await ask_all(harness)
        metrics_text = await series(harness)

    assert {response.headers["x-warmpath-revision"] for response in responses} == {ACTIVE}
    assert [(labels["revision"], value) for labels, value in metrics_text[f"{HISTOGRAM}_count"]] == [(ACTIVE, PROMPTS)]


async def test_a_retry_stays_with_its_revision(two: list[FakeReplica]) -> None:
    two[0].script = answering(b"{}", status=503)
    async with routed(with_canary(two, 1.0)) as harness:
        responses = await ask_all(harness)
        _, listed = await harness.admin("GET", "/admin/decisions")

    assert {response.status for response in responses} == {200}
    assert {(it["revision"], it["arm"]) for it in listed["decisions"]} == {(2, "canary")}
    assert any(it["retries"] for it in listed["decisions"])


async def test_without_a_canary_there_is_no_trace_of_one(two: list[FakeReplica]) -> None:
    async with routed(config(two)) as harness:
        [response, *_] = await ask_all(harness)
        async with harness.connect() as client:
            await client.send(get(b"/v1/models"))
            models = await client.read_response()
        _, listed = await harness.admin("GET", "/admin/decisions")
        metrics_text = await series(harness)

    assert "x-warmpath-revision" not in response.headers | models.headers
    assert listed["decisions"][0]["arm"] is None
    assert not [name for name in metrics_text if name.startswith(HISTOGRAM)]


@pytest.mark.plain_python(reason="It sets a constant.")
async def test_the_histogram_stays_for_a_grace_period_after_the_canary(
    two: list[FakeReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with routed(with_canary(two)) as harness:
        await ask_all(harness)
        ended = config(two, settings=LeastLoadSettings(), policy_revision=2)
        assert (await harness.push(ended, 2))[0] == 200
        responses = await ask_all(harness)
        counted = {labels["revision"]: value for labels, value in (await series(harness))[f"{HISTOGRAM}_count"]}
        monkeypatch.setattr(metrics, "GRACE_S", -1.0)
        after_grace = await series(harness)

    assert "x-warmpath-revision" not in responses[0].headers
    assert sum(counted.values()) == PROMPTS  # nothing was added after the end of the canary
    assert not [name for name in after_grace if name.startswith(HISTOGRAM)]
    assert {labels["revision"] for labels, _ in after_grace["warmpath_router_requests_total"]} == {CANARY}
