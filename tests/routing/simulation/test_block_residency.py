"""The life of sampled KV blocks, with the time told."""

from __future__ import annotations

import pytest

from routing.simulation.blocks import BlockPool, BlockResidency, Histogram
from routing.simulation.engine import Engine, EngineConfig
from routing.simulation.sequence import Sequence


def serve(pool: BlockPool, keys: list[int | None], at_s: float) -> None:
    """One prompt, from its admission to its end at once; a block of the key None is not full."""
    assert pool.residency is not None
    pool.residency.now_s = at_s
    hits = pool.lookup(keys, len(keys))
    pool.hold(hits)
    blocks = hits + pool.take(len(keys) - len(hits))
    for block, key in zip(blocks, keys, strict=True):
        if key is not None:
            pool.cache(block, key)
    pool.release(blocks)


def seen(histogram: Histogram) -> tuple[int, float]:
    return histogram.count, histogram.total


def test_evicted_blocks_tell_their_lifetime_idle_time_and_reuse_gaps() -> None:
    residency = BlockResidency(1.0)
    pool = BlockPool(3, residency)
    serve(pool, [1, 2], at_s=0.0)
    serve(pool, [1, 2], at_s=5.0)
    serve(pool, [1, 2], at_s=8.0)
    assert seen(residency.lifetime) == (0, 0.0)

    serve(pool, [7, 8, 9], at_s=10.0)  # takes the block that was never used, and the two that lived for 10 s

    assert seen(residency.lifetime) == (2, 20.0)
    assert seen(residency.idle_before_evict) == (2, 4.0)
    assert seen(residency.reuse_gap) == (2, 6.0)


def test_a_block_that_cached_nothing_counts_as_evicted_when_it_is_reused() -> None:
    """As in vLLM: the partial last block of each prompt is the first to be reused."""
    residency = BlockResidency(1.0)
    pool = BlockPool(2, residency)
    for second in range(4):
        serve(pool, [1, None], at_s=float(second))

    assert seen(residency.lifetime) == (3, 3.0)


def test_an_engine_observes_blocks_by_the_clock_of_its_steps() -> None:
    """Four blocks of 16 tokens: the second prompt evicts what the first one left 100 s earlier."""
    engine = Engine(EngineConfig(blocks=4, block_tokens=16, block_sample_ratio=1.0))
    for first_key, at_s in ((10, 50.0), (20, 150.0)):
        engine.submit(Sequence([*range(first_key, first_key + 4)], 63, 1, at_s))
        step = engine.begin(at_s)
        assert step is not None
        engine.finish(step)

    assert engine.residency is not None
    assert seen(engine.residency.lifetime) == (4, 400.0)
    assert Engine(EngineConfig(blocks=4)).residency is None


def test_about_the_asked_share_of_the_blocks_is_sampled() -> None:
    residency = BlockResidency(0.1, seed=3)
    pool = BlockPool(1000, residency)
    serve(pool, list(range(1000)), at_s=0.0)
    serve(pool, list(range(1000, 2000)), at_s=1.0)

    assert 70 <= residency.lifetime.count <= 130


def test_a_reset_of_the_cache_is_no_eviction() -> None:
    residency = BlockResidency(1.0)
    pool = BlockPool(2, residency)
    serve(pool, [1, 2], at_s=0.0)
    assert pool.reset()
    serve(pool, [3, 4], at_s=9.0)

    assert residency.lifetime.count == 0


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.1])
def test_a_share_that_cannot_be_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        BlockResidency(ratio)
