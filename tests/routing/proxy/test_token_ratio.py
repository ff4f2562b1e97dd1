"""Estimates, cache capacity, budgets and metrics follow the tokens that responses report."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from routing.http import auth
from routing.schema import LowestCostSettings
from routing.traffic.mix import passage
from tests.fakes.replica import Call, Script, answering
from tests.routing.proxy.harness import (
    CHAT,
    Harness,
    api_key,
    bearer,
    chat_body,
    config,
    post,
    routed,
    samples,
    with_keys,
)

TOKENS_PER_BYTE = 0.4
TEXT_BYTES = 8000


def tokenizing(tokens_per_byte: float = TOKENS_PER_BYTE) -> Script:
    """A replica with this ratio of tokens per byte of message text."""

    async def script(call: Call) -> None:
        texts = (str(message["content"]) for message in json.loads(call.body)["messages"])
        tokens = round(tokens_per_byte * sum(map(len, texts)))
        usage = {"prompt_tokens": tokens, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
        await answering(json.dumps({"usage": usage}).encode())(call)

    return script


def chat(number: int, content: Callable[[str], Any] = str, **fields: Any) -> dict[str, Any]:
    """A request with a unique text."""
    text = passage(f"prompt {number}", TEXT_BYTES)
    return {"model": "tiny", "messages": [{"role": "user", "content": content(text)}], **fields}


async def send_requests(harness: Harness, count: int, **options: Any) -> None:
    for number in range(count):
        assert (await harness.chat(json.dumps(chat(number, **options)).encode())).status == 200


async def explained(harness: Harness, number: int = 0) -> Any:
    explained_request = {"path": CHAT.decode(), "body": chat(number)}
    return (await harness.admin("POST", "/admin/explain", json=explained_request))[1]


async def test_estimates_follow_reported_tokens(replica):
    replica.script = tokenizing()
    async with routed(config([replica], settings=LowestCostSettings(), models=("tiny",))) as harness:
        before = await explained(harness)
        await send_requests(harness, 40)
        after = await explained(harness)
        scraped = samples((await harness.admin("GET", "/metrics"))[1])

    assert (before["prompt_tokens_estimate"], before["hash_tokens"]) == (pytest.approx(TEXT_BYTES / 4, abs=5), 64)
    assert after["prompt_tokens_estimate"] == pytest.approx(TOKENS_PER_BYTE * TEXT_BYTES, rel=0.05)
    assert after["tokens_per_byte"] == pytest.approx(TOKENS_PER_BYTE, rel=0.05)
    assert after["hash_tokens"] == pytest.approx(256 * TOKENS_PER_BYTE, rel=0.05)
    assert after["hit_tokens"] == pytest.approx(TOKENS_PER_BYTE * TEXT_BYTES, rel=0.08)
    labels = {"pool": "chat", "model": "tiny"}
    assert scraped["warmpath_router_tokens_per_byte"] == [(labels, pytest.approx(TOKENS_PER_BYTE, rel=0.05))]
    assert scraped["warmpath_router_tokens_per_byte_samples_total"] == [(labels, 40)]


async def test_an_estimate_divided_by_its_tokens_a_block_is_the_length_of_the_prompt(replica):
    async def script(call: Call) -> None:
        text = str(json.loads(call.body)["messages"][0]["content"])
        await tokenizing(0.25 if text.startswith("a") else 0.9)(call)

    texts = [passage("first", TEXT_BYTES)[1:], passage("second", TEXT_BYTES)[1:]]
    replica.script = script
    async with routed(config([replica], settings=LowestCostSettings(), models=("tiny",))) as harness:
        for number in range(24):
            content = "ab"[number % 2] + texts[number % 2]
            body = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
            assert (await harness.chat(json.dumps(body).encode())).status == 200
        decisions = (await harness.admin("GET", "/admin/decisions?after=0"))[1]["decisions"]

    latest = decisions[-2:]
    assert latest[1]["prompt_tokens_estimate"] > 3 * latest[0]["prompt_tokens_estimate"]  # corrected by what is known
    for decision in decisions:
        length = decision["prompt_tokens_estimate"] / decision["hash_tokens"]
        assert decision["block_count"] <= length < 1.01 * (decision["block_count"] + 1)


@pytest.mark.parametrize(
    "odd",
    [
        {
            "content": lambda text: [
                {"type": "text", "text": text},
                {"type": "image_url", "image_url": {"url": "data:"}},
            ]
        },
        {"content": lambda text: {"type": "unknown", "text": text}},
        {"chat_template": "{{ messages[0].content[:9] }}"},
        {"truncate_prompt_tokens": 100},
    ],
    ids=["image", "odd", "template", "truncated"],
)
async def test_prompts_with_hidden_tokens_teach_nothing(replica, odd):
    replica.script = tokenizing(2.0)
    async with routed(config([replica], models=("tiny",))) as harness:
        await send_requests(harness, 10, **odd)
        after = await explained(harness)

    assert (after["hash_tokens"], after["tokens_per_byte"]) == (64, 0.25)


async def test_token_ids_are_counted_exactly_and_teach_nothing(replica):
    replica.script = answering(b'{"usage":{"prompt_tokens":8000}}')
    body = {"model": "tiny", "prompt": list(range(4000))}
    async with routed(config([replica], settings=LowestCostSettings(), models=("tiny",))) as harness:
        for _ in range(5):
            assert (await harness.send(post(b"/v1/completions", json.dumps(body).encode()))).status == 200
        record = (await harness.admin("GET", "/admin/decisions"))[1]["decisions"][-1]

    assert record["prompt_tokens_estimate"] == pytest.approx(4000, abs=5)
    assert record["hash_tokens"] == 64


@pytest.mark.plain_python(reason="the clock of budgets is replaced")
async def test_token_budgets_use_the_learned_ratio(monkeypatch, replica):
    monkeypatch.setattr(auth, "monotonic", lambda: 1000.0)
    replica.script = tokenizing()
    async with routed(with_keys([replica], api_key(tokens_per_min=1_000_000))) as harness:
        for number in range(40):
            await harness.chat(chat_body(text=passage(f"prompt {number}", TEXT_BYTES)), [bearer()])
        assert harness.router.active is not None
        assert harness.router.active.access is not None
        budget = harness.router.active.access.grant_of("team").tokens
        left = budget.available(1000.0)
        replica.script = answering(b'{"error":{}}', status=400)
        await harness.chat(chat_body(text=passage("last", TEXT_BYTES)), [bearer()])

        assert left - budget.available(1000.0) == pytest.approx(TOKENS_PER_BYTE * TEXT_BYTES, rel=0.06)
