"""The seeded mix and traces: reproducible, at their rate, with their lengths and their sharing."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from statistics import mean, median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.standin.requests import block_keys, count_tokens, encode, render_chat
from routing.traffic.mix import (
    BLOCK_BYTES,
    CHAT_SCALE,
    GROUPS,
    Mix,
    TraceWorkload,
    passage,
    trace_messages,
)
from routing.traffic.trace import BLOCK_TOKENS, TraceError, TraceRequest, read_trace, spread_stamps


def test_the_same_seed_gives_the_same_jobs_and_another_seed_gives_others():
    def first(seed: int) -> list[tuple[float, str, int]]:
        jobs = Mix(seed).jobs()
        return [(job.at_s, job.script.group, job.output_tokens) for job in (next(jobs) for _ in range(200))]

    assert first(1) == first(1) != first(2)


def test_jobs_are_in_order_and_have_the_configured_rate_from_the_first_minute():
    jobs = list(takewhile(lambda job: job.at_s < 600, Mix(3, rate=4.0).jobs()))

    assert [job.at_s for job in jobs] == sorted(job.at_s for job in jobs)
    assert jobs[0].at_s >= 0
    assert len(jobs) == pytest.approx(4 * 600, rel=0.1)
    assert sum(job.at_s < 60 for job in jobs) == pytest.approx(4 * 60, rel=0.25)


def test_each_group_has_its_share_of_the_requests():
    jobs = list(takewhile(lambda job: job.at_s < 1200, Mix(4).jobs()))
    counts = Counter(job.script.group for job in jobs)

    for group in GROUPS:
        assert counts[group.name] / len(jobs) == pytest.approx(group.share, abs=0.05)
    assert sum(group.share for group in GROUPS) == pytest.approx(1.0)


def test_a_turn_contains_the_previous_responses_and_the_same_system_prompt():
    jobs = takewhile(lambda job: job.at_s < 600, Mix(5).jobs())
    job = next(job for job in jobs if job.turn == 2 and job.script.group == "coding-assistant")

    body = job.body("m", ["first answer", "second answer"])

    roles = [message["role"] for message in body["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    assert body["messages"][2]["content"] == "first answer"
    assert body["messages"][:4] == job.body("m", ["first answer"] * 2)["messages"][:4]
    assert (body["tool_choice"], body["stream_options"]) == ("none", {"include_usage": True})
    assert len(body["tools"]) > 20
    assert job.script.session_id is not None


def test_batch_requests_have_no_session_and_chat_turns_do():
    jobs = list(takewhile(lambda job: job.at_s < 120, Mix(6).jobs()))

    assert {job.script.session_id is None for job in jobs if job.script.group == "batch-summaries"} == {True}
    assert {job.script.session_id is None for job in jobs if job.script.group != "batch-summaries"} == {False}


def test_chat_follows_the_traces_statistics_at_its_scale():
    """The trace's: median 7,640, mean 12,870, p90 28,637 tokens a prompt; 65 % of the requests open a conversation."""
    jobs = takewhile(lambda job: job.at_s < 4000, Mix(7).jobs())
    chat = [job for job in jobs if job.script.group == "chat"]
    first_turns = [job for job in chat if job.turn == 0]
    lengths = sorted(CHAT_SCALE * len(job.script.messages(0, [])[1]["content"]) / 4 for job in first_turns)

    assert len(first_turns) / len(chat) == pytest.approx(0.65, abs=0.06)
    assert median(lengths) == pytest.approx(7640, rel=0.15)
    assert lengths[int(0.9 * len(lengths))] == pytest.approx(28_637, rel=0.2)
    assert CHAT_SCALE * mean(job.output_tokens for job in chat) == pytest.approx(346, rel=0.1)


# --- A trace's requests as chat text: lengths and sharing are the trace's own ---


def request(tokens: int, ids: tuple[int, ...] | None = None, at_s: float = 0.0) -> TraceRequest:
    blocks = -(-tokens // BLOCK_TOKENS)
    return TraceRequest(at_s, tokens, 5, ids if ids is not None else tuple(range(blocks)))


def rendered(request: TraceRequest) -> bytes:
    return encode(render_chat(trace_messages(request)))


prompts = st.lists(st.integers(0, 3), min_size=1, max_size=6).flatmap(
    lambda ids: st.tuples(st.just(tuple(ids)), st.integers(1, BLOCK_TOKENS))
)


def chained(ids: tuple[int, ...]) -> tuple[int, ...]:
    """Ids as a trace has them: of the block and everything before it."""
    return tuple(hash(ids[: end + 1]) & 0xFFFFFFFF for end in range(len(ids)))


def shared(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading items are equal."""
    return next(
        (at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]),
        min(len(first), len(second)),
    )


@settings(max_examples=200)
@given(first=prompts, second=prompts)
def test_two_prompts_share_exactly_the_blocks_with_common_ids(first, second):
    pair = [request((len(ids) - 1) * BLOCK_TOKENS + last, chained(ids)) for ids, last in (first, second)]
    by_id = shared(*(request.keys for request in pair))

    keys = [block_keys(rendered(request), BLOCK_TOKENS)[: request.prompt_tokens // BLOCK_TOKENS] for request in pair]

    assert shared(*keys) == by_id


@given(st.integers(30, 5 * BLOCK_TOKENS))
def test_a_prompt_has_the_length_of_the_trace(tokens):
    length = count_tokens(rendered(request(tokens)))

    remainder = tokens % BLOCK_TOKENS
    slack = 0
    if remainder < 7:
        slack = 7  # the template's end never eats into a full block
    if BLOCK_TOKENS < tokens <= BLOCK_TOKENS + 12:
        slack = 12  # after the first block the change of roles takes tokens too
    assert tokens <= length <= tokens + slack


def test_the_first_block_is_the_system_prompt():
    messages = trace_messages(request(2000))

    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[0] == trace_messages(request(9000))[0]


def test_a_passage_is_a_function_of_its_key():
    assert passage("a", 3000) == passage("a", 5000)[:3000]
    assert passage("a", 64) != passage("b", 64)
    assert len(passage("c", 600_000)) == 600_000
    assert passage("a", BLOCK_BYTES).isascii()


def test_a_looped_trace_continues_with_later_times():
    workload = TraceWorkload([request(600, at_s=0.0), request(700, at_s=9.0)], loop=True)
    jobs = workload.jobs()

    assert [next(jobs).at_s for _ in range(5)] == [0.0, 9.0, 13.5, 22.5, 27.0]
    assert len(list(TraceWorkload(workload.requests).jobs())) == 2
    assert list(TraceWorkload([], loop=True).jobs()) == []


# --- Reading traces in Mooncake's format ---


def line(at_ms: int, tokens: int = 600, ids: list[int] | None = None, **fields: object) -> bytes:
    row = {"timestamp": at_ms, "input_length": tokens, "output_length": 5, "hash_ids": [0, 1] if ids is None else ids}
    return json.dumps({**row, **fields}).encode()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_rows_are_read_with_their_times_in_seconds_and_their_full_blocks_as_keys(tmp_path, name):
    text = b"\n".join([line(1500), line(2500), b""])
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    first, second = read_trace(tmp_path / name)

    assert (first.at_s, first.prompt_tokens, first.output_tokens, second.at_s) == (1.5, 600, 5, 2.5)
    assert (first.hash_ids, first.keys) == ((0, 1), (0,))


@pytest.mark.parametrize(
    ("stamps", "expected"), [([0, 0, 0, 3, 3], [0.0, 1.0, 2.0, 3.0, 4.5]), ([], []), ([7.0], [7.0])]
)
def test_requests_with_one_timestamp_are_spread_over_the_gap_to_the_next(stamps, expected):
    assert list(spread_stamps(stamps)) == expected


@pytest.mark.parametrize(
    ("invalid", "message"),
    [
        (b"{", "t, line 2: Input data was truncated"),
        (line(0, tokens=0), "t, line 2: Expected `int` >= 1"),
        (line(0, ids=[1]), "t, line 2: 1 hash_ids for 2 blocks of 512 tokens"),
        (line(-5), "t, line 2: Expected `float` >= 0"),
        (b'{"timestamp": 1}', "t, line 2: Object missing required field"),
        (line(10), "t, line 2: the timestamp is before that of the previous line"),
    ],
)
def test_an_invalid_line_is_named_in_the_error(tmp_path, invalid, message):
    (tmp_path / "t").write_bytes(line(20) + b"\n" + invalid)
    with pytest.raises(TraceError, match=message.replace("`", ".")):
        read_trace(tmp_path / "t")
