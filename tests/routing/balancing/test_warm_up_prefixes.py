"""Popular prefixes: the most valuable ones are stored, within limits, and only if they occur again."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.balancing.warm_up_prefixes import MAX_PREFIXES, OVERHEAD_BYTES, PopularPrefixes, PrefixKey, WarmUpPrompt
from routing.types import PrefixHash, ReplicaId

HERE = ReplicaId("here")
PATH = "/v1/chat/completions"


@dataclass
class Size:
    tier1_tokens: int


def key(number: int) -> PrefixKey:
    return "", PrefixHash(number)


def prompt_of(tokens: int, size: int = 100) -> WarmUpPrompt:
    return WarmUpPrompt(PATH, b"x" * size, tokens, array("Q"))


def popular_prefixes(max_bytes: int = 1 << 20, half_life_s: float = 100.0, min_tokens: int = 16) -> PopularPrefixes:
    return PopularPrefixes(half_life_s, max_bytes, min_tokens)


def count_requests(
    popular: PopularPrefixes, number: int, times: int = 1, *, tokens: int = 100, now_s: float = 0.0, size: int = 100
) -> int:
    """Count requests of a prefix, store each requested body, and return the number of these."""
    requested = 0
    for _ in range(times):
        if popular.count(key(number), now_s, Size(tokens)):
            requested += 1
            popular.store(key(number), prompt_of(tokens, size))
    return requested


def selected(popular: PopularPrefixes, max_prefixes: int = 1000, max_tokens: int = 1_000_000) -> list[int]:
    """The tokens of the selected prompts, in order."""
    return [it.tokens for it, _ in popular.select(lambda _key, _cut: [HERE], max_prefixes, max_tokens)]


def test_a_prefix_that_occurred_once_is_not_stored():
    popular = popular_prefixes()

    assert count_requests(popular, 1) == 0
    assert popular.bytes == 0
    assert count_requests(popular, 1) == 1
    assert popular.bytes >= 100
    assert count_requests(popular, 1, 20) == 0


def test_a_short_prefix_is_never_stored():
    popular = popular_prefixes(min_tokens=128)

    assert count_requests(popular, 1, 50, tokens=127) == 0
    assert count_requests(popular, 2, 50, tokens=128) == 1


def test_prefixes_are_ordered_by_tokens_times_rate():
    popular = popular_prefixes()
    count_requests(popular, 1, 2, tokens=1000)
    count_requests(popular, 2, 50, tokens=100)
    count_requests(popular, 3, 4, tokens=300)

    assert selected(popular) == [100, 1000, 300]


def test_prefixes_that_no_longer_occur_lose_value():
    popular = popular_prefixes(half_life_s=100.0)
    count_requests(popular, 1, 40, tokens=400)
    count_requests(popular, 2, 4, tokens=401, now_s=0.0)
    assert selected(popular) == [400, 401]
    count_requests(popular, 2, 4, tokens=401, now_s=400.0)
    assert selected(popular) == [401, 400]
    count_requests(popular, 1, 1, tokens=400, now_s=1e6)  # so late that weights were scaled down
    assert selected(popular) == [400, 401]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 10), st.integers(1, 200))
def test_the_limits_of_prefixes_and_tokens_hold(lengths, max_prefixes, max_tokens):
    popular = popular_prefixes(min_tokens=1)
    for number, tokens in enumerate(lengths):
        count_requests(popular, number, 2, tokens=tokens)
    chosen = selected(popular, max_prefixes, max_tokens)

    assert sum(chosen) <= max_tokens
    assert len(chosen) <= max_prefixes
    left = max_tokens - sum(chosen)
    remaining = list(lengths)
    for tokens in chosen:
        remaining.remove(tokens)
    assert len(chosen) == max_prefixes or all(tokens > left for tokens in remaining)


def test_each_of_several_preferred_replicas_counts():
    popular = popular_prefixes()
    count_requests(popular, 1, 2)
    ranks = [ReplicaId("a#0"), ReplicaId("a#1"), ReplicaId("a#2")]

    assert [target for _, target in popular.select(lambda _key, _cut: ranks, 2, 1000)] == ranks[:2]


@given(
    st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 9000)), max_size=300),
    st.integers(1 << 10, 1 << 16),
)
def test_memory_is_bounded_in_bytes_and_in_number(traffic, max_bytes):
    popular = popular_prefixes(max_bytes)
    for now_s, (number, size) in enumerate(traffic):
        count_requests(popular, number, 2, now_s=now_s, size=size)
        assert popular.bytes <= max_bytes
    assert sum(it.bytes for it, _ in popular.select(lambda *_: [HERE], 10_000, 10**9)) == popular.bytes


def test_the_number_of_counted_prefixes_is_bounded():
    popular = popular_prefixes(1 << 30)
    for number in range(10 * MAX_PREFIXES):
        count_requests(popular, number, 2)

    assert len(popular) <= 2 * MAX_PREFIXES
    assert popular.bytes <= 2 * MAX_PREFIXES * (100 + OVERHEAD_BYTES)


def test_a_dropped_prompt_is_requested_again_after_twice_as_many_requests():
    room = 10 * (1000 + OVERHEAD_BYTES)
    popular = popular_prefixes(room)
    count_requests(popular, 0, 2, size=1000)
    for number in range(1, 12):
        count_requests(popular, number, 5, size=1000)
    requested = [
        count_requests(popular, 0, size=1000) for _ in range(7)
    ]  # it occurred twice before, and is never valuable enough

    assert requested == [0, 1, 0, 0, 0, 1, 0]


def test_one_body_may_take_only_a_part_of_the_memory():
    popular = popular_prefixes(8000)
    count_requests(popular, 1, 10, tokens=10_000, size=2000)

    assert popular.bytes == 0


def test_a_smaller_limit_drops_bodies_at_once():
    popular = popular_prefixes()
    for number in range(20):
        count_requests(popular, number, 2 + number, size=1000)
    popular.configure(100.0, 5 * (1000 + OVERHEAD_BYTES), 16)

    assert 0 < popular.bytes <= 5 * (1000 + OVERHEAD_BYTES)


def test_another_half_life_keeps_the_order():
    popular = popular_prefixes()
    for number, tokens in ((1, 100), (2, 200), (3, 300)):
        count_requests(popular, number, 2, tokens=tokens)
    popular.configure(7.0, 1 << 20, 16)

    assert selected(popular) == [300, 200, 100]
    assert count_requests(popular, 1, 10, now_s=1.0) == 0
    assert selected(popular)[0] == 100


def test_weights_are_scaled_down_together():
    """Scaling down large weights after hundreds of half-lives favours no prefix."""
    popular = popular_prefixes(half_life_s=1.0)
    for number, tokens in ((1, 100), (2, 101)):
        count_requests(popular, number, 2, tokens=tokens, now_s=0.0)
        count_requests(popular, number, 2, tokens=tokens, now_s=330.0)
    count_requests(popular, 1, tokens=100, now_s=335.0)
    count_requests(popular, 2, 3, tokens=101, now_s=335.0)

    assert selected(popular) == [101, 100]


@pytest.mark.parametrize("known", [False, True])
def test_a_late_body_is_ignored(known):
    popular = popular_prefixes()
    if known:
        count_requests(popular, 1, 2)
    before = popular.bytes
    popular.store(key(1), prompt_of(100))

    assert popular.bytes == before
