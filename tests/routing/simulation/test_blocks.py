"""The block pool: prefix lookup, eviction order, reference counts, and lifetimes of sampled blocks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from routing.simulation.blocks import BlockPool, BlockResidency, OutOfBlocksError
from routing.simulation.engine import Engine, EngineConfig, Sequence
from routing.simulation.statistics import Histogram


def serve(pool: BlockPool, keys: list[int | None], at_s: float = 0.0) -> int:
    """Take one prompt from admission to end; the number of hits. A block with key None is not full."""
    if pool.residency is not None:
        pool.residency.now_s = at_s
    hits = pool.lookup(keys, len(keys))
    pool.hold(hits)
    blocks = hits + pool.take(len(keys) - len(hits))
    for block, key in zip(blocks, keys, strict=True):
        if key is not None:
            pool.cache(block, key)
    pool.release(blocks)
    return len(hits)


def cached(pool: BlockPool, *keys: int) -> int:
    return len(pool.lookup(keys, len(keys)))


def test_a_lookup_finds_the_longest_common_prefix_up_to_its_limit():
    pool = BlockPool(10)
    serve(pool, [1, 2, 3])
    assert [cached(pool, *keys) for keys in ([1, 2, 3], [1, 2, 9], [9, 2, 3], [])] == [3, 2, 0, 0]
    assert len(pool.lookup([1, 2, 3], 2)) == 2


@pytest.mark.parametrize(
    ("capacity", "prompts", "expected"),
    [
        pytest.param(4, [[1, 2], [3, 4]], {(1, 2): 2, (3, 4): 2}, id="never-used blocks are taken first"),
        pytest.param(4, [[1, 2, 3], [7, 8]], {(1, 2, 3): 2}, id="the tail of a request is evicted before its head"),
        pytest.param(
            4, [[1, 2], [3, 4], [1, 2], [5, 6]], {(1, 2): 2, (3, 4): 0, (5, 6): 2}, id="least recently used first"
        ),
        pytest.param(3, [[1, 2], [None], [None]], {(1, 2): 2}, id="blocks that cache nothing are taken first"),
    ],
)
def test_eviction_order(capacity, prompts, expected):
    pool = BlockPool(capacity)
    for prompt in prompts:
        serve(pool, prompt)
    assert {keys: cached(pool, *keys) for keys in expected} == expected


def test_a_full_block_without_a_key_is_evicted_in_its_turn():
    pool = BlockPool(2)
    blocks = pool.take(1)
    pool.cache(blocks[0], None)
    pool.release(blocks)
    serve(pool, [1])
    pool.take(1)
    assert cached(pool, 1) == 1


def test_a_key_in_two_blocks_leaves_the_cache_with_the_second():
    pool = BlockPool(2)
    twins = pool.take(2)
    for block in twins:
        pool.cache(block, 5)
    pool.release(twins)
    pool.take(1)
    assert cached(pool, 5) == 1
    pool.take(1)
    assert cached(pool, 5) == 0


def test_held_blocks_and_hits_limit_what_can_be_taken():
    pool = BlockPool(3)
    serve(pool, [1, 2])
    hits = pool.lookup([1, 2], 2)
    assert pool.fits(hits, 1)
    assert not pool.fits(hits, 2)
    pool.take(2)
    with pytest.raises(OutOfBlocksError, match="2 blocks requested, 1 free"):
        pool.take(2)


def test_a_reset_empties_the_cache_unless_a_block_is_held():
    pool = BlockPool(3)
    serve(pool, [1, 2])
    held = pool.take(1)
    assert not pool.reset()
    pool.release(held)
    assert pool.reset()
    assert (cached(pool, 1, 2), pool.held) == (0, 0)


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 6), max_size=6), max_size=30))
def test_an_unlimited_pool_hits_every_prefix_that_was_served_before(prompts):
    pool = BlockPool(None)
    served: set[tuple[int, ...]] = set()
    numbers: dict[tuple[int, ...], int] = {}
    for prompt in prompts:
        prefixes = [tuple(prompt[: end + 1]) for end in range(len(prompt))]
        keys: list[int | None] = [numbers.setdefault(prefix, len(numbers)) for prefix in prefixes]
        assert serve(pool, keys) == sum(1 for prefix in prefixes if prefix in served)
        served.update(prefixes)


class PoolMachine(RuleBasedStateMachine):
    """Any order of holding, caching and releasing keeps the pool consistent."""

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
    def the_pool_is_consistent(self) -> None:
        distinct = {block for blocks in self.held for block in blocks}
        assert self.pool.held == len(distinct)
        assert self.pool.available == self.CAPACITY - len(distinct)
        assert len(self.pool._refs) <= self.CAPACITY
        for block, count in enumerate(self.pool._refs):
            assert count == sum(blocks.count(block) for blocks in self.held) >= 0
        for key, block in self.pool._cached.items():
            assert self.pool._keys[block] == key
        for key, others in self.pool._duplicates.items():
            assert others
            assert all(self.pool._keys[block] == key for block in others)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=50, stateful_step_count=40)


# --- lifetimes of sampled blocks ---


def sums(histogram: Histogram) -> tuple[int, float]:
    return histogram.count, histogram.total


def test_evictions_observe_lifetime_idle_time_and_reuse_gaps():
    residency = BlockResidency(1.0)
    pool = BlockPool(3, residency)
    for at_s in (0.0, 5.0, 8.0):
        serve(pool, [1, 2], at_s)
    assert sums(residency.lifetime) == (0, 0.0)
    serve(pool, [7, 8, 9], at_s=10.0)  # takes the never-used block, and the two allocated 10 s ago
    assert sums(residency.lifetime) == (2, 20.0)
    assert sums(residency.idle_before_evict) == (2, 4.0)
    assert sums(residency.reuse_gap) == (2, 6.0)


def test_a_block_that_cached_nothing_counts_as_evicted_when_it_is_reused():
    """As in vLLM: the partial last block of each prompt is the first to be reused."""
    residency = BlockResidency(1.0)
    pool = BlockPool(2, residency)
    for second in range(4):
        serve(pool, [1, None], float(second))
    assert sums(residency.lifetime) == (3, 3.0)


def test_an_engine_observes_blocks_at_the_time_of_its_steps():
    """Four blocks of 16 tokens: the second prompt evicts the blocks of the first, allocated 100 s earlier."""
    engine = Engine(EngineConfig(blocks=4, block_tokens=16, block_sample_ratio=1.0))
    for first_key, at_s in ((10, 50.0), (20, 150.0)):
        engine.submit(Sequence([*range(first_key, first_key + 4)], 63, 1, at_s))
        step = engine.plan_step(at_s)
        assert step is not None
        engine.finish(step)
    assert engine.residency is not None
    assert sums(engine.residency.lifetime) == (4, 400.0)
    assert Engine(EngineConfig(blocks=4)).residency is None


def test_the_configured_share_of_blocks_is_sampled_and_a_reset_is_no_eviction():
    residency = BlockResidency(0.1, seed=3)
    pool = BlockPool(1000, residency)
    serve(pool, list(range(1000)), at_s=0.0)
    serve(pool, list(range(1000, 2000)), at_s=1.0)
    evicted = residency.lifetime.count
    assert 70 <= evicted <= 130
    assert pool.reset()
    serve(pool, list(range(1000)), at_s=9.0)
    assert residency.lifetime.count == evicted
