"""Which openings are kept for replicas that join: the worthiest, within limits, and only what comes again."""

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


def cut(tokens: int, size: int = 100) -> WarmUpPrompt:
    return WarmUpPrompt(PATH, b"x" * size, tokens, array("Q"))


def openings(max_bytes: int = 1 << 20, half_life_s: float = 100.0, min_tokens: int = 16) -> PopularPrefixes:
    return PopularPrefixes(half_life_s, max_bytes, min_tokens)


def meet(
    kept: PopularPrefixes, number: int, times: int = 1, *, tokens: int = 100, now_s: float = 0.0, size: int = 100
) -> int:
    """How often a body was asked for; each is given."""
    asked = 0
    for _ in range(times):
        if kept.count(key(number), now_s, Size(tokens)):
            asked += 1
            kept.store(key(number), cut(tokens, size))
    return asked


def order(kept: PopularPrefixes, max_prefixes: int = 1000, max_tokens: int = 1_000_000) -> list[int]:
    """The tokens of what is chosen, in order."""
    return [it.tokens for it, _ in kept.select(lambda _key, _cut: [HERE], max_prefixes, max_tokens)]


def test_what_came_once_is_not_kept() -> None:
    kept = openings()

    assert meet(kept, 1) == 0
    assert kept.bytes == 0
    assert meet(kept, 1) == 1
    assert kept.bytes >= 100
    assert meet(kept, 1, 20) == 0


def test_what_is_short_is_never_kept() -> None:
    kept = openings(min_tokens=128)

    assert meet(kept, 1, 50, tokens=127) == 0
    assert meet(kept, 2, 50, tokens=128) == 1


def test_the_worthiest_go_first_by_tokens_and_rate() -> None:
    kept = openings()
    meet(kept, 1, 2, tokens=1000)
    meet(kept, 2, 50, tokens=100)
    meet(kept, 3, 4, tokens=300)

    assert order(kept) == [100, 1000, 300]


def test_what_no_longer_comes_falls_behind() -> None:
    kept = openings(half_life_s=100.0)
    meet(kept, 1, 40, tokens=400)
    meet(kept, 2, 4, tokens=401, now_s=0.0)
    assert order(kept) == [400, 401]
    meet(kept, 2, 4, tokens=401, now_s=400.0)
    assert order(kept) == [401, 400]
    meet(kept, 1, 1, tokens=400, now_s=1e6)  # after so long that weights have begun anew
    assert order(kept) == [400, 401]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 10), st.integers(1, 200))
def test_the_budget_is_kept(lengths: list[int], max_prefixes: int, max_tokens: int) -> None:
    kept = openings(min_tokens=1)
    for number, tokens in enumerate(lengths):
        meet(kept, number, 2, tokens=tokens)
    chosen = order(kept, max_prefixes, max_tokens)

    assert sum(chosen) <= max_tokens
    assert len(chosen) <= max_prefixes
    left = max_tokens - sum(chosen)
    spared = list(lengths)
    for tokens in chosen:
        spared.remove(tokens)
    assert len(chosen) == max_prefixes or all(tokens > left for tokens in spared)


def test_each_of_several_homes_counts() -> None:
    kept = openings()
    meet(kept, 1, 2)
    ranks = [ReplicaId("a#0"), ReplicaId("a#1"), ReplicaId("a#2")]

    assert [home for _, home in kept.select(lambda _key, _cut: ranks, 2, 1000)] == ranks[:2]


@given(
    st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 9000)), max_size=300),
    st.integers(1 << 10, 1 << 16),
)
def test_memory_is_bounded_in_bytes_and_in_number(traffic: list[tuple[int, int]], max_bytes: int) -> None:
    kept = openings(max_bytes)
    for now_s, (number, size) in enumerate(traffic):
        meet(kept, number, 2, now_s=now_s, size=size)
        assert kept.bytes <= max_bytes
    assert sum(it.bytes for it, _ in kept.select(lambda *_: [HERE], 10_000, 10**9)) == kept.bytes


def test_ever_new_openings_are_forgotten() -> None:
    kept = openings(1 << 30)
    for number in range(10 * MAX_PREFIXES):
        meet(kept, number, 2)

    assert len(kept) <= 2 * MAX_PREFIXES
    assert kept.bytes <= 2 * MAX_PREFIXES * (100 + OVERHEAD_BYTES)


def test_what_had_to_go_is_asked_for_again_when_it_has_come_twice_as_often() -> None:
    room = 10 * (1000 + OVERHEAD_BYTES)
    kept = openings(room)
    meet(kept, 0, 2, size=1000)
    for number in range(1, 12):
        meet(kept, number, 5, size=1000)
    asked = [meet(kept, 0, size=1000) for _ in range(7)]  # it has come twice before, and never is worth its room

    assert asked == [0, 1, 0, 0, 0, 1, 0]


def test_one_body_takes_no_more_than_a_part_of_the_memory() -> None:
    kept = openings(8000)
    meet(kept, 1, 10, tokens=10_000, size=2000)

    assert kept.bytes == 0


def test_a_smaller_limit_lets_bodies_go_at_once() -> None:
    kept = openings()
    for number in range(20):
        meet(kept, number, 2 + number, size=1000)
    kept.configure(100.0, 5 * (1000 + OVERHEAD_BYTES), 16)

    assert 0 < kept.bytes <= 5 * (1000 + OVERHEAD_BYTES)


def test_another_half_life_keeps_the_order() -> None:
    kept = openings()
    for number, tokens in ((1, 100), (2, 200), (3, 300)):
        meet(kept, number, 2, tokens=tokens)
    kept.configure(7.0, 1 << 20, 16)

    assert order(kept) == [300, 200, 100]
    assert meet(kept, 1, 10, now_s=1.0) == 0
    assert order(kept)[0] == 100


def test_weights_are_brought_down_together() -> None:
    """After hundreds of half-lives weights are large; whoever comes just then gains nothing over the others."""
    kept = openings(half_life_s=1.0)
    for number, tokens in ((1, 100), (2, 101)):
        meet(kept, number, 2, tokens=tokens, now_s=0.0)
        meet(kept, number, 2, tokens=tokens, now_s=330.0)
    meet(kept, 1, tokens=100, now_s=335.0)
    meet(kept, 2, 3, tokens=101, now_s=335.0)

    assert order(kept) == [101, 100]


@pytest.mark.parametrize("known", [False, True])
def test_a_body_that_comes_late_is_no_harm(known: bool) -> None:
    kept = openings()
    if known:
        meet(kept, 1, 2)
    before = kept.bytes
    kept.store(key(1), cut(100))

    assert kept.bytes == before
