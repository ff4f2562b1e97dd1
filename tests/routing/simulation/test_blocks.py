"""The block pool, by example and by property."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from routing.simulation.blocks import BlockPool, OutOfBlocksError


def serve(pool: BlockPool, keys: list[int]) -> int:
    """Take whole-block prompts through a pool; the blocks that hit."""
    found = pool.lookup(keys, len(keys))
    pool.hold(found)
    blocks = found + pool.take(len(keys) - len(found))
    for block, key in zip(blocks, keys, strict=True):
        pool.cache(block, key)
    pool.release(blocks)
    return len(found)


def test_a_prompt_finds_the_blocks_of_the_longest_common_opening() -> None:
    pool = BlockPool(10)
    serve(pool, [1, 2, 3])

    assert [len(pool.lookup(keys, 10)) for keys in ([1, 2, 3], [1, 2, 9], [9, 2, 3], [])] == [3, 2, 0, 0]


def test_a_lookup_stops_at_its_limit() -> None:
    pool = BlockPool(10)
    serve(pool, [1, 2, 3])

    assert len(pool.lookup([1, 2, 3], 2)) == 2


def test_never_used_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(4)
    serve(pool, [1, 2])
    serve(pool, [3, 4])

    assert serve(pool, [1, 2]) == 2


def test_a_requests_tail_is_evicted_before_its_head() -> None:
    pool = BlockPool(4)
    serve(pool, [1, 2, 3])
    serve(pool, [7, 8])

    assert len(pool.lookup([1, 2, 3], 3)) == 2


def test_the_least_recently_used_request_is_evicted_first() -> None:
    pool = BlockPool(4)
    serve(pool, [1, 2])
    serve(pool, [3, 4])
    serve(pool, [1, 2])
    serve(pool, [5, 6])

    assert [len(pool.lookup(keys, 2)) for keys in ([1, 2], [3, 4], [5, 6])] == [2, 0, 2]


def test_a_block_that_caches_nothing_goes_before_any_that_does() -> None:
    pool = BlockPool(3)
    serve(pool, [1, 2])
    pool.release(pool.take(1))
    pool.release(pool.take(1))

    assert len(pool.lookup([1, 2], 2)) == 2


def test_a_full_block_without_a_key_takes_its_turn_in_the_queue() -> None:
    pool = BlockPool(2)
    blocks = pool.take(1)
    pool.cache(blocks[0], None)
    pool.release(blocks)
    serve(pool, [1])
    pool.take(1)

    assert len(pool.lookup([1], 1)) == 1


def test_a_key_in_two_blocks_is_gone_with_the_second() -> None:
    pool = BlockPool(2)
    twins = pool.take(2)
    for block in twins:
        pool.cache(block, 5)
    pool.release(twins)

    pool.take(1)
    assert pool.lookup([5], 1)
    pool.take(1)
    assert not pool.lookup([5], 1)


def test_held_blocks_are_not_for_taking() -> None:
    pool = BlockPool(2)
    pool.take(2)

    assert pool.available == 0
    with pytest.raises(OutOfBlocksError, match="1 blocks asked for, 0 free"):
        pool.take(1)


def test_hits_that_are_free_count_against_the_room() -> None:
    pool = BlockPool(3)
    serve(pool, [1, 2])

    assert pool.fits(pool.lookup([1, 2], 2), 1)
    assert not pool.fits(pool.lookup([1, 2], 2), 2)


def test_a_reset_forgets_everything_unless_a_block_is_held() -> None:
    pool = BlockPool(3)
    serve(pool, [1, 2])
    held = pool.take(1)

    assert not pool.reset()
    pool.release(held)
    assert pool.reset()
    assert (pool.lookup([1, 2], 2), pool.held) == ([], 0)


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 6), max_size=6), max_size=30))
def test_a_pool_without_limit_hits_what_was_ever_there(prompts: list[list[int]]) -> None:
    """Keys are chained by hand here: a key is a whole opening."""
    pool = BlockPool(None)
    seen: set[tuple[int, ...]] = set()
    numbers: dict[tuple[int, ...], int] = {}
    for prompt in prompts:
        openings = [tuple(prompt[: end + 1]) for end in range(len(prompt))]
        keys = [numbers.setdefault(opening, len(numbers)) for opening in openings]

        assert serve(pool, keys) == sum(1 for opening in openings if opening in seen)
        seen.update(openings)


class PoolMachine(RuleBasedStateMachine):
    """Any order of holding, caching and releasing keeps the books straight."""

    CAPACITY = 7
    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.CAPACITY)
        self.held: list[list[int]] = []

    @rule(target=requests, keys=st.lists(st.integers(0, 4), max_size=4), partial=st.integers(0, 2))
    def admit(self, keys: list[int], partial: int) -> list[int]:
        hits = self.pool.lookup(keys, len(keys))
        fresh = len(keys) - len(hits) + partial
        if not self.pool.fits(hits, fresh):
            return []
        self.pool.hold(hits)
        blocks = hits + self.pool.take(fresh)
        for block, key in zip(blocks, keys, strict=False):
            self.pool.cache(block, key)
        self.held.append(blocks)
        return blocks

    @rule(blocks=consumes(requests))
    def finish(self, blocks: list[int]) -> None:
        if blocks in self.held:
            self.held.remove(blocks)
            self.pool.release(blocks)

    @precondition(lambda self: not any(self.held))
    @rule()
    def reset(self) -> None:
        assert self.pool.reset()

    @invariant()
    def held_and_available_are_all_there_is(self) -> None:
        distinct = {block for blocks in self.held for block in blocks}
        assert self.pool.held == len(distinct)
        assert self.pool.available == self.CAPACITY - len(distinct)

    @invariant()
    def references_are_never_negative_and_count_the_holders(self) -> None:
        for block, count in enumerate(self.pool._refs):
            assert count == sum(blocks.count(block) for blocks in self.held) >= 0

    @invariant()
    def what_a_lookup_finds_is_what_the_block_caches(self) -> None:
        assert len(self.pool._refs) <= self.CAPACITY
        for key, block in self.pool._cached.items():
            assert self.pool._keys[block] == key
        for key, others in self.pool._duplicates.items():
            assert others
            assert all(self.pool._keys[block] == key for block in others)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=50, stateful_step_count=40)
