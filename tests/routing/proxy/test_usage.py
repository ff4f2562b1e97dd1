"""Whatever a replica sends, and however it is cut: looking for its token usage never fails and never grows."""

from __future__ import annotations

import json
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from routing.http.usage import TAIL_BYTES, ResponseTail, prompt_and_cached
from tests.fakes.replica import sse

PIECES = (
    *(b'"usage"', b"usage", b":", b" ", b"\n", b"\r\n\r\n", b"{", b"}", b"{}", b"[", b"]", b"null", b",", b'"', b"\\"),
    *(b"data: ", b"data:", b'{"error":', b"[DONE]", b'"prompt_tokens":', b"5", b"-1", b"1e9", b"99999999999999999999"),
    *(b'"prompt_tokens_details":{', b'"cached_tokens":3}', b'"usage":{"prompt_tokens":7}', b"\xff", b"\0", b"\xc3"),
    b'"usage": {"prompt_tokens": 431, "prompt_tokens_details": {"cached_tokens": 416}}',
)
hostile = st.one_of(st.binary(max_size=200), st.lists(st.sampled_from(PIECES), max_size=40).map(b"".join))


def kept(reads: list[bytes]) -> ResponseTail:
    """What is kept of these reads, as a delivery keeps it."""
    tail = ResponseTail()
    for read in reads:
        tail.add(read)
    return tail


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.lists(hostile, max_size=12))
def test_any_bytes_in_any_cuts_are_looked_through(reads: list[bytes]) -> None:
    tail = kept(reads)

    usage = tail.usage()
    for count in prompt_and_cached(usage) if usage else ():
        assert count is None or 0 <= count <= 1 << 30
    assert tail.has_error() in {True, False}
    assert tail.ends_event() in {True, False}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.binary(max_size=300).filter(lambda text: b"usage" not in text), st.integers(0, 7))
def test_usage_at_the_end_is_found_however_the_end_is_cut(before: bytes, cuts: int) -> None:
    answer = (
        before + sse({"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}}) + sse("[DONE]")
    )
    chance = random.Random(cuts)
    at = sorted(chance.sample(range(1, len(answer)), cuts))
    reads = [answer[a:b] for a, b in zip([0, *at], [*at, len(answer)], strict=True)]

    usage = kept(reads).usage()
    assert usage is not None
    assert prompt_and_cached(usage) == (9, 4)


def test_what_is_kept_of_an_endless_answer_is_bounded() -> None:
    tail = kept([b'{"usage":{' * 100_000] * 100)

    assert len(tail.text) <= 4 * TAIL_BYTES
    assert tail.usage() is None


def test_generated_text_is_no_usage() -> None:
    said = {"choices": [{"text": '"usage":{"prompt_tokens":1}'}]}
    assert kept([json.dumps(said).encode()]).usage() is None
