"""Seeded traces."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean, median

import pytest

from routing.replay.block_runs import Forest
from routing.replay.routed import pooled_hit_rate
from routing.traffic.columns import Columns
from tests import synthetic_traces as synthetic

MAKERS = (
    synthetic.chat,
    synthetic.hot_prefix,
    synthetic.session_pool,
    synthetic.nothing_shared,
    synthetic.bursts,
    synthetic.jobs,
    synthetic.agents,
    synthetic.mixed_lengths,
    synthetic.heavy_tails,
    synthetic.tides,
    synthetic.drifting,
    synthetic.small_groups,
    synthetic.giant_group,
    synthetic.families,
)
every_maker = pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
Make = Callable[[int, int], Columns]


@every_maker
def test_the_same_seed_makes_the_same_trace_and_another_another(make: Make) -> None:
    first, same, other = make(200, 1), make(200, 1), make(200, 2)

    assert (first.at_s, first.ids) == (same.at_s, same.ids)
    assert first.at_s != other.at_s


@every_maker
def test_rows_are_in_order_and_have_an_id_for_each_block(make: Make) -> None:
    columns = make(500, 1)

    assert len(columns) >= 500
    assert list(columns.at_s) == sorted(columns.at_s)
    for index, tokens in enumerate(columns.prompt_tokens):
        assert columns.starts[index + 1] - columns.starts[index] == -(-tokens // columns.block_tokens)
    Forest(columns)  # ids stand for a block and all before it


def test_chat_has_the_statistics_of_the_production_trace() -> None:
    columns = synthetic.chat(6000, 1)
    forest = Forest(columns)

    assert mean(columns.prompt_tokens) == pytest.approx(12_870, rel=0.1)
    assert median(columns.prompt_tokens) == pytest.approx(7640, rel=0.1)
    assert mean(columns.output_tokens) == pytest.approx(346, rel=0.1)
    assert columns.offered_tokens_per_s() == pytest.approx(40_897, rel=0.1)
    hits = [100 * (pooled_hit_rate(forest, capacity) or 0) for capacity in (1500, 4000, 12_000, 32_000, None)]
    assert hits == pytest.approx([4.8, 9.1, 23.1, 32.9, 34.7], abs=2.0)


@pytest.mark.parametrize(("make", "shared"), [(synthetic.nothing_shared, 0.0), (synthetic.session_pool, 0.85)])
def test_what_is_shared_is_what_the_name_says(make: Make, shared: float) -> None:
    assert pooled_hit_rate(Forest(make(20_000, 1)), None) == pytest.approx(shared, abs=0.02)
