"""Several routers in a replay: what they lose without common state, and what events tell them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from routing.replay.block_runs import Forest
from routing.replay.fast_engine import FastEngineConfig
from routing.replay.replay import replay, report
from routing.replay.routers import Arrivals, SeveralRouters, Sharing, router_placers
from routing.schema import LowestCostSettings
from routing.traffic.columns import Columns
from routing.traffic.trace import read_columns
from routing.types import PrefixHash
from tests import synthetic_traces
from tests.routing.simulation.test_reference import FOUND, NAME
from tests.synthetic_traces import SMALL_BLOCK_TOKENS

REPLICAS = 8
LOAD = 0.7  # offered prompt tokens / what the replicas can prefill
SMALL_BLOCKS = FastEngineConfig(48_000, block_tokens=SMALL_BLOCK_TOKENS)
NAMES = (
    "agents",
    "bursts",
    "drifting",
    "families",
    "giant_group",
    "heavy_tails",
    "hot_prefix",
    "jobs",
    "mixed_lengths",
    "small_groups",
    "tides",
)
REQUESTS = {"agents": 3600, "tides": 4800}  # with 2,400, as of the others, too few prefixes come twice
WORKLOADS: dict[str, tuple[Callable[[], Columns], FastEngineConfig]] = {
    name: (partial(getattr(synthetic_traces, name), REQUESTS.get(name, 2400), 1), SMALL_BLOCKS) for name in NAMES
} | {"chat": (partial(synthetic_traces.chat, 3000, 1), FastEngineConfig(4000))}

SHARED = {"agents", "chat", "families", "mixed_lengths", "tides"}  # where requests of one prefix overlap


def figures(
    columns: Columns,
    model: FastEngineConfig,
    routers: int,
    sharing: Sharing = Sharing.NONE,
    arrivals: Arrivals = Arrivals.RANDOM,
    delay_s: float | None = None,
    sessions: Sequence[PrefixHash] | None = None,
    load: float = LOAD,
) -> tuple[float, float]:
    """Token hit rate and mean TTFT of ``lowest_cost`` on so many routers, in the second half of the requests."""
    forest = Forest(columns)
    scale = load * REPLICAS * model.prefill_rate / columns.offered_tokens_per_s()
    placers = router_placers(LowestCostSettings(), columns, model, REPLICAS, routers, sessions)
    placer = SeveralRouters(placers, sharing, arrivals, delay_s)
    row = report(replay(forest, [model] * REPLICAS, placer, scale), columns, len(columns) // 2)
    return row["token_hit_rate"], row["ttft_s"]["mean"]


def hit_rate(columns: Columns, model: FastEngineConfig, routers: int, *sharing: Any, **options: Any) -> float:
    return figures(columns, model, routers, *sharing, **options)[0]


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_several_routers_without_common_state_reach_95_percent_of_the_hits_of_one_and_with_it_place_as_one_does(name):
    make, model = WORKLOADS[name]
    columns = make()
    single, unshared = (figures(columns, model, routers) for routers in (1, 4))

    assert unshared[0] >= 0.95 * single[0]
    if name in SHARED:
        shared = figures(columns, model, 4, Sharing.STATE)
        assert shared[0] == pytest.approx(single[0], abs=0.01)
        assert shared[1] <= 1.1 * single[1]
        assert shared[1] < unshared[1]


@pytest.mark.skipif(not FOUND, reason=f"TRACE NOT FOUND: {NAME} (set WARMPATH_TRACES to its folder)")
def test_two_routers_reach_95_percent_of_the_hits_of_one_on_a_real_trace():
    columns, model = read_columns(FOUND[0]), FastEngineConfig(4000)

    assert hit_rate(columns, model, 2) >= 0.95 * hit_rate(columns, model, 1)


def test_with_events_a_router_knows_what_others_have_sent():
    make, model = WORKLOADS["families"]
    columns = make()
    single, unshared, shared = (
        hit_rate(columns, model, routers, sharing, Arrivals.WORST)
        for routers, sharing in ((1, Sharing.NONE), (8, Sharing.NONE), (8, Sharing.EVENTS))
    )

    assert unshared < shared
    assert shared == pytest.approx(single, rel=0.02)


def test_events_that_are_late_help_less():
    make, model = WORKLOADS["families"]
    columns = make()
    at_once, late, never = (
        hit_rate(columns, model, 8, sharing, delay_s=delay_s)
        for sharing, delay_s in ((Sharing.EVENTS, 0.0), (Sharing.EVENTS, 600.0), (Sharing.NONE, 0.0))
    )

    assert late < at_once
    assert never < at_once


def test_two_routers_without_common_state_find_the_conversations_whose_session_keys_clients_send():
    columns, model = synthetic_traces.coding(1500, 1), FastEngineConfig(1500)
    sessions = synthetic_traces.sessions_of(columns)
    single, unknown, known = (
        figures(columns, model, routers, sessions=keys, load=1.5)
        for routers, keys in ((1, sessions), (2, None), (2, sessions))
    )

    assert known[0] >= single[0] - 0.03
    assert known[1] <= 1.5 * single[1] < unknown[1]


def test_state_that_is_shared_late_helps_less():
    make, model = WORKLOADS["mixed_lengths"]
    columns = make()
    at_once, late, never = (
        figures(columns, model, 8, sharing, delay_s=delay_s)[1]
        for sharing, delay_s in ((Sharing.STATE, 0.02), (Sharing.STATE, 1.0), (Sharing.NONE, 0.0))
    )

    assert at_once < late < never


def test_in_the_worst_case_a_request_arrives_at_a_router_that_does_not_know_its_prompt():
    columns = Columns(SMALL_BLOCK_TOKENS)
    for number in range(8):  # the same prompt, a minute apart
        columns.append(60.0 * number, 1600, 10, array("Q", range(100)))
    placers = router_placers(LowestCostSettings(), columns, SMALL_BLOCKS, REPLICAS, 8)

    replay(Forest(columns), [SMALL_BLOCKS] * REPLICAS, SeveralRouters(placers, arrivals=Arrivals.WORST))

    assert [sum(placer.reasons.values()) for placer in placers] == [1] * 8
