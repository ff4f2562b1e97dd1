"""Chains of blocks as runs, and the pool of runs; ``test_fast_engine.py`` compares it with one of single blocks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given

from routing.replay.block_runs import Forest, ForestError, Run, RunPool, shared_path
from tests.routing.replay.prompts import BLOCK, Plan, Row, columns_of, plans, rows_of


def path_to(last: Run | None) -> tuple[Run, ...]:
    return () if last is None else last.path


@given(plans=plans)
def test_the_runs_of_a_prompt_are_its_full_blocks(plans: list[Plan]) -> None:
    rows = rows_of(plans)
    columns = columns_of(rows)

    forest = Forest(columns)

    for row, last in zip(rows, forest.last_runs, strict=True):
        ids = [id_ for run in path_to(last) for id_ in columns.ids[run.start : run.start + run.length]]
        assert tuple(ids) == row.keys


@given(plans=plans)
def test_all_blocks_of_a_run_occur_in_the_same_prompts(plans: list[Plan]) -> None:
    rows = rows_of(plans)
    columns = columns_of(rows)
    prompts = Counter(id_ for row in rows for id_ in row.keys)

    for last in Forest(columns).last_runs:
        for run in path_to(last):
            assert {prompts[id_] for id_ in columns.ids[run.start : run.start + run.length]} == {run.visits}


def test_a_prompt_of_25_blocks_is_a_few_runs() -> None:
    rows = [Row(float(n), 25 * BLOCK + 1, 1, (0, *range(100 * n, 100 * n + 25))) for n in range(1, 5)]
    rows += [Row(9.0, 25 * BLOCK + 1, 1, (0, *range(100, 120), *range(900, 905)))]

    forest = Forest(columns_of(rows))

    assert [[run.length for run in path_to(last)] for last in forest.last_runs] == [
        [1, 20, 4], [1, 24], [1, 24], [1, 24], [1, 20, 4],
    ]  # fmt: skip


def test_an_id_that_follows_different_blocks_is_rejected() -> None:
    rows = [Row(0.0, 9, 1, (1, 2, 3)), Row(1.0, 9, 1, (1, 4, 5)), Row(2.0, 9, 1, (2, 3, 7))]

    with pytest.raises(ForestError, match="block id 2 "):
        Forest(columns_of(rows))


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
