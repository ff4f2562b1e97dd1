"""The clairvoyant placer and the pooled hit rate, which strategies are compared with."""

from __future__ import annotations

import pytest

from routing.replay.block_runs import Forest
from routing.replay.fast_engine import FastEngineConfig
from routing.replay.replay import replay
from routing.replay.routed import Clairvoyant, pooled_hit_rate
from tests.routing.replay.prompts import BLOCK, Row, columns_of

MODEL = FastEngineConfig(100, block_tokens=BLOCK, prefill_rate=1000.0, chunk_tokens=16)
LONG = tuple(range(100, 110))


def test_a_request_goes_to_the_replica_with_the_earliest_first_token() -> None:
    rows = [
        Row(0.0, 40, 2, LONG),  # both replicas are idle: the first one is chosen
        Row(0.0, 9, 2, (1, 2, 3)),  # the first replica is busy now
        Row(0.001, 38, 2, (*LONG[:9], 77)),  # waiting for a prefill in progress takes less time than a second prefill
        Row(9.0, 38, 2, (*LONG[:9], 78)),  # the prefix is cached at the first replica
    ]

    result = replay(Forest(columns_of(rows)), [MODEL] * 2, Clairvoyant())

    assert list(result.placements) == [0, 1, 0, 0]
    assert list(result.cached_tokens) == [0, 0, 36, 36]


def test_a_prefix_is_computed_again_where_waiting_for_its_replica_would_take_longer() -> None:
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
def test_a_single_cache_for_all_prompts_hits_what_fits_in_it(capacity: int | None, expected: int) -> None:
    rows = [Row(0.0, 9, 5, (1, 2, 3)), Row(1.0, 17, 5, (5, 6, 7, 8, 9)), Row(2.0, 9, 5, (1, 2, 4))]

    assert pooled_hit_rate(Forest(columns_of(rows)), capacity) == pytest.approx(expected / 35)


def test_an_empty_trace_has_no_hit_rate() -> None:
    assert pooled_hit_rate(Forest(columns_of([])), None) is None
