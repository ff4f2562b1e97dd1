"""Request digests in decisions: what an exact cache would look up, through a router whose groups have no cache."""

from __future__ import annotations

import json
from typing import Any

import pytest

from routing.observability.decision_log import DIGEST_PERIOD_S, MAX_DIGESTED_PER_S
from routing.response_cache.keys import RequestDigests
from routing.schema import TaskGroupConfig
from tests.routing.building import SECRET
from tests.routing.proxy.harness import Harness, config, post, routed

GREEDY = {"model": "tiny", "messages": [{"role": "user", "content": "What is a prefix cache?"}], "temperature": 0}
GROUPS = (TaskGroupConfig(name="faq"), TaskGroupConfig(name="other"))


async def digest_of(
    harness: Harness, body: dict[str, Any], *headers: bytes, path: bytes = b"/v1/chat/completions"
) -> str | None:
    """The digest in the decision of a request."""
    response = await harness.send(post(path, json.dumps(body).encode(), headers or (b"X-Task-Group: faq",)))
    assert response.status == 200
    await harness.at_rest()
    _, page = await harness.admin("GET", "/admin/decisions")
    record = page["decisions"][-1]
    assert record["digest_ratio"] == 1
    digest: str | None = record["request_digest"]
    return digest


async def test_requests_with_one_entry_have_one_digest(replica):
    async with routed(config([replica], models=("tiny", "big"), groups=GROUPS)) as harness:
        first = await digest_of(harness, GREEDY)
        same = [
            dict(reversed(GREEDY.items())),
            GREEDY | {"stream": True, "stream_options": {"include_usage": True}},
            GREEDY | {"user": "ann", "cache": True},
        ]
        assert first is not None
        assert [await digest_of(harness, body) for body in same] == [first] * len(same)

        others = [
            GREEDY | {"max_tokens": 5},
            GREEDY | {"top_p": 0.5},
            GREEDY | {"seed": 1},
            GREEDY | {"model": "big"},
            GREEDY | {"cache": {"namespace": "docs"}},
        ]
        digests = [first, *[await digest_of(harness, body) for body in others]]
        digests.append(await digest_of(harness, GREEDY, b"X-Task-Group: other"))
        digests.append(await digest_of(harness, GREEDY, b"X-Task-Group: faq", b"Authorization: Bearer other"))
        digests.append(await digest_of(harness, GREEDY, b"X-Unrelated: 1"))  # of no task group
    assert None not in digests
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 1},
        {"temperature": None},
        {"n": 2},
        {"cache": False},
        {"cache": {"ttl": 1}},  # malformed, and ignored by a router without a cache
        {"padding": "x" * (300 << 10)},
    ],
)
async def test_a_request_that_no_cache_could_answer_has_no_digest(replica, change):
    async with routed(config([replica], groups=GROUPS)) as harness:
        assert await digest_of(harness, GREEDY | change) is None


@pytest.mark.parametrize("directive", [b"no-store", b"no-cache"])
async def test_a_client_that_wants_no_stored_response_has_no_digest(replica, directive):
    async with routed(config([replica], groups=GROUPS)) as harness:
        assert await digest_of(harness, GREEDY, b"X-Task-Group: faq", b"Cache-Control: " + directive) is None


async def test_the_digest_is_no_part_of_the_entrys_name_and_needs_the_secret(replica):
    other = config([replica], groups=GROUPS)
    async with routed(other) as harness:
        first = await digest_of(harness, GREEDY)
    async with routed(type(other)(hash_secret="cd" * 16, pools=other.pools)) as harness:
        assert await digest_of(harness, GREEDY) != first


def test_many_requests_halve_the_part_of_the_prompts_and_never_separate_repeats():
    digests = RequestDigests(SECRET).sampler
    budget = int(MAX_DIGESTED_PER_S * DIGEST_PERIOD_S)
    prompts = [b"prompt %d" % number for number in range(20 * budget)]
    taken = [digests.should_digest(prompt, 1.0) for prompt in prompts]
    assert sum(taken) < 6 * budget
    assert digests.level >= 4

    level = digests.level
    first = [digests.should_digest(prompt, 2.0) for prompt in prompts[:2000]]
    assert digests.level == level
    assert [digests.should_digest(prompt, 3.0) for prompt in prompts[:2000]] == first
    assert 0 < sum(first) < 4 * 2000 * 2.0**-level
    for period in range(1, 30):
        digests.should_digest(b"one", 3.0 + period * DIGEST_PERIOD_S)
    assert digests.level == 0
