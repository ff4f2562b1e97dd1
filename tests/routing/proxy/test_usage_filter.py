"""The usage chunk is removed from a stream however it is cut, and no byte of any other event."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.http.usage import MAX_EVENT_BYTES, UsageFilter
from tests.fakes.replica import sse

CAPTURES = Path(__file__).parents[2] / "data" / "vllm"
USAGE = b'data: {"id":"1","choices":[],"usage":{"prompt_tokens":5,"total_tokens":6}}\n\n'
EVENTS = (
    sse({"choices": [{"delta": {"content": "a"}}]}),
    sse({"choices": [{"delta": {"content": '"usage":{"choices":[]}'}}]}),
    sse({"choices": [{"text": "x"}], "usage": {"prompt_tokens": 5}}),  # continuous_usage_stats
    sse({"choices": [{"text": "x"}], "usage": None}),
    sse({"choices": [], "usage": None}),
    sse({"choices": [], "prompt_filter_results": []}),
    sse({"choices": [{"text": "long " * 5000}], "usage": {}}),
    sse("[DONE]"),
    b": ping\n\n",
    b"event: x\nid: 1\ndata: {}\n\n",
    b'data: {not json "usage" "choices":[]\n\n',
)
streams = st.lists(st.sampled_from((*EVENTS, USAGE)), max_size=8)


def passed(reads: list[bytes]) -> bytes:
    """All that a filter passes on of these reads."""
    usage_filter = UsageFilter()
    return b"".join(map(usage_filter.feed, reads)) + usage_filter.flush()


def cut(stream: bytes, seed: int) -> list[bytes]:
    chance = random.Random(seed)
    cuts = sorted(chance.sample(range(1, len(stream)), min(chance.choice((1, 3, 30)), len(stream) - 1)))
    return [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(streams, st.sampled_from([b"\n", b"\r\n", b"\r"]), st.integers(0, 99), st.binary(max_size=40))
def test_only_the_usage_chunk_is_removed_however_a_stream_is_cut(
    events: list[bytes], newline: bytes, seed: int, end: bytes
) -> None:
    as_sent = [event.replace(b"\n", newline) for event in events]
    kept = b"".join(
        event for event, is_usage in zip(as_sent, [it == USAGE for it in events], strict=True) if not is_usage
    )
    stream = b"".join(as_sent) + end.replace(b"\n", b"").replace(b"\r", b"")
    reads = cut(stream, seed) if len(stream) > 1 else [stream]

    assert passed(reads) == kept + stream[len(b"".join(as_sent)) :]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=400).filter(lambda text: b"usage" not in text), st.integers(0, 99))
def test_bytes_that_are_no_events_pass_unchanged(stream: bytes, seed: int) -> None:
    assert passed(cut(stream, seed) if len(stream) > 1 else [stream]) == stream


def test_reads_of_whole_events_are_passed_as_they_are() -> None:
    usage_filter = UsageFilter()
    for event in (EVENTS[0], EVENTS[0].replace(b"\n", b"\r\n"), EVENTS[0] + EVENTS[8]):
        assert usage_filter.feed(event) is event


def test_what_is_held_is_bounded() -> None:
    usage_filter = UsageFilter()
    endless = b"data: " + b"x" * (MAX_EVENT_BYTES + 1)

    assert usage_filter.feed(endless[:MAX_EVENT_BYTES]) == b""
    assert usage_filter.feed(endless[MAX_EVENT_BYTES:]) == endless
    assert usage_filter.is_inside_event
    assert usage_filter.feed(b"y") == b"y"
    assert usage_filter.feed(b"\n") == b"\n"
    assert usage_filter.feed(b"\n" + USAGE + EVENTS[0]) == b"\n" + EVENTS[0]
    assert not usage_filter.is_inside_event


@pytest.mark.parametrize("case", ["chat-stream-usage", "completion-stream", "chat-stream-n2"])
def test_streams_of_a_real_engine_lose_their_usage_chunk_alone(case: str) -> None:
    lines = map(json.loads, (CAPTURES / "vllm-http-0.32.0-ok.jsonl").read_text().splitlines())
    reads = [text.encode() for _, text in next(it for it in lines if it["case"] == case)["response"]["reads"]]
    kept = [read for read in reads if b'"choices":[]' not in read]

    assert passed(reads) == b"".join(kept)
    assert passed([b"".join(reads)]) == b"".join(kept)
