"""Chains of blocks as runs, and the pool of runs; ``test_fast_engine.py`` compares it with one of single blocks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given

from routing.replay.block_runs import Forest, ForestError, Run, RunPool, shared_path
from routing.replay.fast_engine import FastEngineConfig
from routing.replay.replay import replay
from routing.replay.routed import Clairvoyant, pooled_hit_rate
from tests.routing.replay.prompts import BLOCK, Row, columns_of, plans, rows_of


def path_to(last: Run | None) -> tuple[Run, ...]:
    return () if last is None else last.path


@given(plans=plans)
def test_the_runs_of_a_prompt_are_its_full_blocks(plans):
    rows = rows_of(plans)
    columns = columns_of(rows)

    forest = Forest(columns)

    for row, last in zip(rows, forest.last_runs, strict=True):
        ids = [id_ for run in path_to(last) for id_ in columns.ids[run.start : run.start + run.length]]
        assert tuple(ids) == row.keys


@given(plans=plans)
def test_all_blocks_of_a_run_occur_in_the_same_prompts(plans):
    rows = rows_of(plans)
    columns = columns_of(rows)
    prompts = Counter(id_ for row in rows for id_ in row.keys)

    for last in Forest(columns).last_runs:
        for run in path_to(last):
            assert {prompts[id_] for id_ in columns.ids[run.start : run.start + run.length]} == {run.visits}


def test_a_prompt_of_25_blocks_is_a_few_runs():
    rows = [Row(float(n), 25 * BLOCK + 1, 1, (0, *range(100 * n, 100 * n + 25))) for n in range(1, 5)]
    rows += [Row(9.0, 25 * BLOCK + 1, 1, (0, *range(100, 120), *range(900, 905)))]

    forest = Forest(columns_of(rows))

    assert [[run.length for run in path_to(last)] for last in forest.last_runs] == [
        [1, 20, 4], [1, 24], [1, 24], [1, 24], [1, 20, 4],
    ]  # fmt: skip


def test_an_id_that_follows_different_blocks_is_rejected():
    rows = [Row(0.0, 9, 1, (1, 2, 3)), Row(1.0, 9, 1, (1, 4, 5)), Row(2.0, 9, 1, (2, 3, 7))]

    with pytest.raises(ForestError, match="block id 2 "):
        Forest(columns_of(rows))


def test_eviction_shortens_a_run_from_its_tail():
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


def test_a_pool_has_at_least_one_block():
    with pytest.raises(ValueError, match="at least one block"):
        RunPool(0)


# --- The clairvoyant placer and the pooled hit rate, which strategies are compared with ---


MODEL = FastEngineConfig(100, block_tokens=BLOCK, prefill_rate=1000.0, chunk_tokens=16)
LONG = tuple(range(100, 110))


def test_a_request_goes_to_the_replica_with_the_earliest_first_token():
    rows = [
        Row(0.0, 40, 2, LONG),  # both replicas are idle: the first one is chosen
        Row(0.0, 9, 2, (1, 2, 3)),  # the first replica is busy now
        Row(0.001, 38, 2, (*LONG[:9], 77)),  # waiting for a prefill in progress takes less time than a second prefill
        Row(9.0, 38, 2, (*LONG[:9], 78)),  # the prefix is cached at the first replica
    ]

    result = replay(Forest(columns_of(rows)), [MODEL] * 2, Clairvoyant())

    assert list(result.placements) == [0, 1, 0, 0]
    assert list(result.cached_tokens) == [0, 0, 36, 36]


def test_a_prefix_is_computed_again_where_waiting_for_its_replica_would_take_longer():
    rows = [Row(0.0, 39, 2, LONG), Row(0.0, 400, 2, tuple(range(200, 300))), Row(0.1, 39, 2, (*LONG[:9], 99))]
    rows.insert(2, Row(0.05, 300, 2, tuple(range(400, 475))))

    config = FastEngineConfig(300, BLOCK, 1000.0, chunk_tokens=16)
    result = replay(Forest(columns_of(rows)), [config] * 2, Clairvoyant())

    assert list(result.placements) == [
        0,
        1,
        0,
        0,
    ]  # 0.3 s of work is queued at the replica with the prefix, and more at the other


@pytest.mark.parametrize(("capacity", "expected"), [(None, 8), (100, 8), (5, 0)])
def test_a_single_cache_for_all_prompts_hits_what_fits_in_it(capacity, expected):
    rows = [Row(0.0, 9, 5, (1, 2, 3)), Row(1.0, 17, 5, (5, 6, 7, 8, 9)), Row(2.0, 9, 5, (1, 2, 4))]

    assert pooled_hit_rate(Forest(columns_of(rows)), capacity) == pytest.approx(expected / 35)


def test_an_empty_trace_has_no_hit_rate():
    assert pooled_hit_rate(Forest(columns_of([])), None) is None
