"""The pool of runs gives the same results as the pool of single blocks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.replay.block_runs import Forest, Run, RunPool, Segment, shared_path
from routing.simulation.blocks import BlockPool
from tests.routing.replay.prompts import BLOCK, Plan, Row, columns_of, plans, rows_of


class SingleBlocks:
    """A pool of single blocks, used like an engine uses it."""

    def __init__(self, capacity: int) -> None:
        self.pool = BlockPool(capacity)

    def admit(self, row: Row) -> tuple[int, list[int]] | None:
        pool, total = self.pool, -(-(row.prompt_tokens + row.output_tokens) // BLOCK)
        hits = pool.lookup(row.keys, (row.prompt_tokens - 1) // BLOCK)
        if not pool.fits(hits, total - len(hits)):
            return None
        pool.hold(hits)
        blocks = hits + pool.take(total - len(hits))
        for index in range(len(hits), (row.prompt_tokens + row.output_tokens - 1) // BLOCK):
            pool.cache(blocks[index], row.keys[index] if index < len(row.keys) else None)
        return len(hits), blocks

    def cached(self, keys: Sequence[int]) -> list[bool]:
        return [bool(self.pool.lookup([key], 1)) for key in keys]


def cached_by_runs(pool: RunPool, path: tuple[Run, ...]) -> list[bool]:
    """Which blocks of a path are cached, as far as other prompts can match them."""
    return [index < pool.cached(run) for run in path for index in range(run.length)]


@settings(max_examples=300, deadline=None)
@given(plans=plans, capacity=st.integers(10, 40), ends=st.lists(st.integers(0, 5), min_size=80, max_size=80))
def test_hits_rejections_and_cached_blocks_are_those_of_single_blocks(
    plans: list[Plan], capacity: int, ends: list[int]
) -> None:
    rows = rows_of(plans)
    forest = Forest(columns_of(rows))
    paths = [shared_path(last) for last in forest.last_runs]
    single, runs = SingleBlocks(capacity), RunPool(capacity)
    running: list[tuple[list[int], list[Segment]]] = []
    pauses = iter(ends * 3)
    for row, path, last in zip(rows, paths, forest.last_runs, strict=True):
        total = -(-(row.prompt_tokens + row.output_tokens) // BLOCK)
        while True:
            expected = single.admit(row)
            again = bool(last and last.visits > 1 and not row.prompt_tokens % BLOCK)
            admitted = runs.admit(path, total, prompt_runs=len(path), recompute=again)
            assert (expected is None) == (admitted is None)
            assert runs.free == single.pool.available
            if expected and admitted:
                break
            blocks, segments = running.pop(0)
            single.pool.release(blocks)
            runs.release(segments)
        assert admitted[0] == expected[0]
        running.append((expected[1], admitted[1]))
        for _ in range(min(next(pauses) - 2, len(running))):
            blocks, segments = running.pop(next(pauses) % len(running))
            single.pool.release(blocks)
            runs.release(segments)
        for other in paths:
            keys = [forest.columns.ids[run.start + index] for run in other for index in range(run.length)]
            assert cached_by_runs(runs, other) == single.cached(keys)


def test_eviction_shortens_a_run_from_its_tail() -> None:
    rows = [Row(0.0, 9, 1, (1, 2, 3)), Row(1.0, 9, 1, (1, 2, 4)), Row(2.0, 5, 1, (9, 10))]
    forest = Forest(columns_of(rows))
    pool = RunPool(4)
    path = shared_path(forest.last_runs[0])
    first = pool.admit(path, 3, prompt_runs=len(path), recompute=False)
    assert first is not None
    pool.release(first[1])
    assert pool.cached(shared_path(forest.last_runs[0])[0]) == 2

    path = shared_path(forest.last_runs[2])
    pool.admit(path, 3, prompt_runs=len(path), recompute=False)

    assert pool.cached(shared_path(forest.last_runs[0])[0]) == 1
    assert pool.evicted == 1


def test_a_pool_has_at_least_one_block() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        RunPool(0)
