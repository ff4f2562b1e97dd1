"""The metrics page of a modelled engine."""

from __future__ import annotations

from routing.simulation.engine import Engine, EngineConfig, Sequence
from routing.simulation.statistics import request_token_edges
from routing.standin.metrics import page


def test_histograms_are_cumulative_labels_are_escaped_and_counters_have_their_creation_time() -> None:
    engine = Engine(EngineConfig(blocks=10))
    engine.statistics.time_to_first_token.observe(0.002)
    engine.statistics.time_to_first_token.observe(9000.0)
    engine.submit(Sequence([], 20, 1, 0.0))
    engine.plan_step(0.0)

    lines = page(engine, 'say "hi"\n\\', 1795195532.5).decode().splitlines()

    labels = 'engine="0",model_name="say \\"hi\\"\\n\\\\"'
    ttft = "vllm:time_to_first_token_seconds"
    assert f'{ttft}_bucket{{{labels},le="0.001"}} 0.0' in lines
    assert f'{ttft}_bucket{{{labels},le="0.005"}} 1.0' in lines
    assert f'{ttft}_bucket{{{labels},le="+Inf"}} 2.0' in lines
    assert f"{ttft}_sum{{{labels}}} 9000.002" in lines
    assert f"vllm:prefix_cache_queries_total{{{labels}}} 20.0" in lines
    assert f"vllm:prefix_cache_queries_created{{{labels}}} 1795195532.5" in lines


def test_request_buckets_go_up_to_the_longest_request() -> None:
    assert request_token_edges(16_384) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000]
    assert request_token_edges(5) == [1, 2, 5]
