"""The seeded traces of ``tests/synthetic_traces.py``."""

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


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_a_trace_depends_on_its_seed_and_is_well_formed(make: Callable[[int, int], Columns]) -> None:
    trace, same, other = make(200, 1), make(200, 1), make(200, 2)
    assert (trace.at_s, trace.ids) == (same.at_s, same.ids)
    assert trace.at_s != other.at_s
    assert len(trace) >= 200
    assert list(trace.at_s) == sorted(trace.at_s)
    for index, tokens in enumerate(trace.prompt_tokens):
        assert trace.starts[index + 1] - trace.starts[index] == -(-tokens // trace.block_tokens)
    Forest(trace)  # raises unless an id stands for a block and everything before it


def test_chat_has_the_statistics_of_the_production_trace() -> None:
    trace = synthetic.chat(6000, 1)
    forest = Forest(trace)
    assert mean(trace.prompt_tokens) == pytest.approx(12_870, rel=0.1)
    assert median(trace.prompt_tokens) == pytest.approx(7640, rel=0.1)
    assert mean(trace.output_tokens) == pytest.approx(346, rel=0.1)
    assert trace.offered_tokens_per_s() == pytest.approx(40_897, rel=0.1)
    hits = [100 * (pooled_hit_rate(forest, capacity) or 0) for capacity in (1500, 4000, 12_000, 32_000, None)]
    assert hits == pytest.approx([4.8, 9.1, 23.1, 32.9, 34.7], abs=2.0)
