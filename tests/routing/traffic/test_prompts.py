"""A trace's requests as chat text: lengths and sharing are the trace's own."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from routing.standin.requests import block_keys, count_tokens, encode, render_chat
from routing.traffic.mix import BLOCK_BYTES, TraceWorkload, passage, trace_messages
from routing.traffic.trace import BLOCK_TOKENS, TraceRequest


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


@settings(max_examples=200, deadline=None)
@given(first=prompts, second=prompts)
def test_two_prompts_share_exactly_the_blocks_with_common_ids(
    first: tuple[tuple[int, ...], int], second: tuple[tuple[int, ...], int]
) -> None:
    pair = [request((len(ids) - 1) * BLOCK_TOKENS + last, chained(ids)) for ids, last in (first, second)]
    by_id = shared(*(request.keys for request in pair))

    keys = [block_keys(rendered(request), BLOCK_TOKENS)[: request.prompt_tokens // BLOCK_TOKENS] for request in pair]

    assert shared(*keys) == by_id


@given(st.integers(30, 5 * BLOCK_TOKENS))
def test_a_prompt_has_the_length_of_the_trace(tokens: int) -> None:
    length = count_tokens(rendered(request(tokens)))

    remainder = tokens % BLOCK_TOKENS
    slack = 0
    if remainder < 7:
        slack = 7  # the template's end never eats into a full block
    if BLOCK_TOKENS < tokens <= BLOCK_TOKENS + 12:
        slack = 12  # after the first block the change of roles takes tokens too
    assert tokens <= length <= tokens + slack


def test_the_first_block_is_the_system_prompt() -> None:
    messages = trace_messages(request(2000))

    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[0] == trace_messages(request(9000))[0]


def test_a_passage_is_a_function_of_its_key() -> None:
    assert passage("a", 3000) == passage("a", 5000)[:3000]
    assert passage("a", 64) != passage("b", 64)
    assert len(passage("c", 600_000)) == 600_000
    assert passage("a", BLOCK_BYTES).isascii()


def test_a_looped_trace_continues_with_later_times() -> None:
    workload = TraceWorkload([request(600, at_s=0.0), request(700, at_s=9.0)], loop=True)
    jobs = workload.jobs()

    assert [next(jobs).at_s for _ in range(5)] == [0.0, 9.0, 13.5, 22.5, 27.0]
    assert len(list(TraceWorkload(workload.requests).jobs())) == 2
    assert list(TraceWorkload([], loop=True).jobs()) == []
