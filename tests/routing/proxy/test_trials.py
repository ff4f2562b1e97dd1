"""A revision on trial, as clients, scrapers and operators see it."""

from __future__ import annotations

import json

import pytest

from routing.observability import metrics
from routing.schema import LeastLoadSettings
from tests.fakes.replica import FakeReplica, answering, streaming
from tests.routing.proxy.harness import Answer, Harness, config, get, routed
from tests.routing.proxy.scraped import samples
from tests.routing.proxy.trials import HISTOGRAM, body, trying

USAGE = b'{"usage":{"prompt_tokens":33,"prompt_tokens_details":{"cached_tokens":16}}}'
IN_FORCE, TRIED = "1", "2"
PROMPTS = 20


async def all_asked(harness: Harness) -> list[Answer]:
    return [await harness.chat(body(number)) for number in range(PROMPTS)]


async def series(harness: Harness) -> dict[str, list[tuple[dict[str, str], float]]]:
    _, text = await harness.admin("GET", "/metrics")
    return samples(text)


@pytest.fixture(autouse=True)
def _usage(two: list[FakeReplica]) -> None:
    for replica in two:
        replica.script = streaming(b"data: " + USAGE + b"\n\n")


async def test_every_figure_of_a_request_carries_the_revision_that_placed_it(two: list[FakeReplica]) -> None:
    async with routed(trying(two)) as harness:
        answers = await all_asked(harness)
        _, listed = await harness.admin("GET", "/admin/decisions")
        seen = await series(harness)
    told = [answer.headers["x-warmpath-revision"] for answer in answers]
    by_revision = {revision: told.count(revision) for revision in (IN_FORCE, TRIED)}

    assert min(by_revision.values()) > 0
    assert [str(decision["revision"]) for decision in listed["decisions"]] == told
    arms = {(one["revision"], one["arm"], one["strategy"]) for one in listed["decisions"]}
    assert arms == {(1, "in_force", "prefix_hash"), (2, "trial", "least_load")}
    for name in ("requests_total", "usage_reported_total"):
        counted = dict.fromkeys(by_revision, 0.0)
        for labels, value in seen[f"warmpath_router_{name}"]:
            counted[labels["revision"]] += value
        assert counted == by_revision, name
    timed = {labels["revision"]: value for labels, value in seen[f"{HISTOGRAM}_count"]}
    assert timed == by_revision
    assert {tuple(labels) for labels, _ in seen[f"{HISTOGRAM}_count"]} == {("pool", "group", "policy", "revision")}


async def test_an_explanation_says_which_revision_and_why(two: list[FakeReplica]) -> None:
    async with routed(trying(two)) as harness:
        for number in range(6):
            asked = json.dumps({"path": "/v1/chat/completions", "body": json.loads(body(number))})
            _, explained = await harness.admin("POST", "/admin/explain", data=asked)
            sent = await harness.chat(body(number))
            said = explained["trial"]
            is_tried = said["place"] < 0.5
            assert said | {"place": 0} == {
                "arm": "trial" if is_tried else "in_force",
                "why": "within_share" if is_tried else "beyond_share",
                "in_force": 1,
                "on_trial": 2,
                "share": 0.5,
                "place": 0,
            }
            assert (
                str(explained["revision"]) == sent.headers["x-warmpath-revision"] == (TRIED if is_tried else IN_FORCE)
            )


async def test_a_router_that_is_not_named_keeps_the_revision_in_force_and_measures_it(two: list[FakeReplica]) -> None:
    async with routed(trying(two, 1.0, routers=("another",))) as harness:
        answers = await all_asked(harness)
        seen = await series(harness)

    assert {answer.headers["x-warmpath-revision"] for answer in answers} == {IN_FORCE}
    assert [(labels["revision"], value) for labels, value in seen[f"{HISTOGRAM}_count"]] == [(IN_FORCE, PROMPTS)]


async def test_a_retry_stays_with_its_revision(two: list[FakeReplica]) -> None:
    two[0].script = answering(b"{}", status=503)
    async with routed(trying(two, 1.0)) as harness:
        answers = await all_asked(harness)
        _, listed = await harness.admin("GET", "/admin/decisions")

    assert {answer.status for answer in answers} == {200}
    assert {(one["revision"], one["arm"]) for one in listed["decisions"]} == {(2, "trial")}
    assert any(one["retries"] for one in listed["decisions"])


async def test_without_a_trial_nothing_speaks_of_one(two: list[FakeReplica]) -> None:
    async with routed(config(two)) as harness:
        [answer, *_] = await all_asked(harness)
        async with harness.connect() as client:
            await client.send(get(b"/v1/models"))
            models = await client.answer()
        _, listed = await harness.admin("GET", "/admin/decisions")
        seen = await series(harness)

    assert "x-warmpath-revision" not in answer.headers | models.headers
    assert listed["decisions"][0]["arm"] is None
    assert not [name for name in seen if name.startswith(HISTOGRAM)]


@pytest.mark.plain_python(reason="It sets a constant.")
async def test_the_histogram_stays_for_a_last_reading_after_the_trial_and_then_goes(
    two: list[FakeReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with routed(trying(two)) as harness:
        await all_asked(harness)
        ended = config(two, settings=LeastLoadSettings(), policy_revision=2)
        assert (await harness.push(ended, 2))[0] == 200
        answers = await all_asked(harness)
        counted = {labels["revision"]: value for labels, value in (await series(harness))[f"{HISTOGRAM}_count"]}
        monkeypatch.setattr(metrics, "GRACE_S", -1.0)
        gone = await series(harness)

    assert "x-warmpath-revision" not in answers[0].headers
    assert sum(counted.values()) == PROMPTS  # nothing was added after the trial's end
    assert not [name for name in gone if name.startswith(HISTOGRAM)]
    assert {labels["revision"] for labels, _ in gone["warmpath_router_requests_total"]} == {TRIED}
