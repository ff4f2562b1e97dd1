"""Quantiles in a report, and replicas whose queue grows until the end."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product

import pytest

from routing.balancing.strategies.registry import STRATEGIES
from routing.replay.block_runs import Forest
from routing.replay.fast_engine import FastEngine, FastEngineConfig, ModelledRequest
from routing.replay.replay import Placer, quantile, replay, report, table
from routing.replay.routed import StrategyPlacer
from routing.schema import LeastLoadSettings, Settings
from routing.traffic.columns import Columns
from tests.pace import some
from tests.synthetic_traces import SMALL_BLOCK_TOKENS, nothing_shared

ENGINE = FastEngineConfig(48_000, block_tokens=SMALL_BLOCK_TOKENS)
REPLICAS = 8
ALL = tuple(kind() for kind in STRATEGIES)


def test_a_quantile_is_a_value_that_occurs():
    assert [quantile([1.0, 2.0, 3.0, 4.0], q) for q in (0.0, 0.5, 0.51, 1.0)] == [1.0, 2.0, 3.0, 4.0]


def test_no_values_have_no_quantile():
    assert quantile([], 0.5) is None


# --- overload --------------------------------------------------------------------------------------------------------


class FirstHalf:
    """Places all requests at half of the replicas, as ``least_load`` would do it among them."""

    def __init__(self, inner: StrategyPlacer) -> None:
        self._inner = inner
        self.on_first_token, self.on_ended = inner.on_first_token, inner.on_ended

    def place(self, request: ModelledRequest, engines: Sequence[FastEngine], now_s: float) -> int:
        return self._inner.place(request, engines, now_s)


@cache
def requests(seed: int, count: int) -> Columns:
    return nothing_shared(count, seed)


def capacity_s(columns: Columns) -> float:
    """Seconds that all replicas need for all requests."""
    per_token = 1 / ENGINE.prefill_rate + ENGINE.step_s / ENGINE.chunk_tokens
    return (sum(columns.prompt_tokens) * per_token + sum(columns.output_tokens) * ENGINE.decode_s) / REPLICAS


def at_load(load: float, shape: Callable[[float], float] = float, *, seed: int = 1, count: int = 4000) -> Columns:
    """Requests that need ``load`` of all replicas' time; ``shape``: share of the requests -> share of the time."""
    source = requests(seed, count)
    span_s = capacity_s(source) / load
    columns = Columns(source.block_tokens)
    for name in ("prompt_tokens", "output_tokens", "starts", "ids"):
        setattr(columns, name, getattr(source, name))
    columns.at_s = array("d", [span_s * shape(at_s / source.at_s[-1]) for at_s in source.at_s])
    return columns


def overloaded(columns: Columns, settings: Settings | None = None, placer: Placer | None = None) -> int:
    placer = placer or StrategyPlacer(settings or LeastLoadSettings(), columns, ENGINE, REPLICAS)
    result = replay(Forest(columns), [ENGINE] * REPLICAS, placer)
    found = report(result, columns)
    lines = table({"p.json": found})
    count: int = found["overloaded_replicas"]
    assert lines[2:] == (
        [f"p.json: overload: the queue of {count} of {REPLICAS} replicas grows until the end"] if count else []
    )
    return count


@pytest.mark.parametrize("settings", ALL, ids=lambda settings: settings.name)
def test_the_queues_of_a_fleet_with_a_tenth_too_much_work_grow_until_the_end(settings):
    assert overloaded(at_load(1.1, count=6000), settings) >= REPLICAS / 2


@pytest.mark.generated
@pytest.mark.parametrize(("load", "seed"), some([*product([0.95, 0.5, 0.7, 0.9], [1, 2, 3])]))
def test_a_fleet_that_can_do_its_work_is_not_overloaded(load, seed):
    assert overloaded(at_load(load, seed=seed)) == 0


def test_half_of_the_replicas_are_overloaded_by_twice_their_share():
    columns = at_load(0.9)
    inner = StrategyPlacer(LeastLoadSettings(), columns, ENGINE, REPLICAS // 2)
    assert overloaded(columns, placer=FirstHalf(inner)) == REPLICAS // 2


def wave(periods: float, phase: float) -> Callable[[float], float]:
    """The load varies from 0 to twice its mean."""
    width = 2 * math.pi * periods
    return lambda share: share + 0.95 / width * (math.sin(width * share + phase) - math.sin(phase))


@pytest.mark.generated
@pytest.mark.parametrize(("periods", "phase"), some([*product([1, 2, 5], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])]))
def test_waves_are_no_overload(periods, phase):
    assert overloaded(at_load(0.8, wave(periods, phase), count=6000)) == 0


@pytest.mark.parametrize(
    "shape",
    [
        lambda share: share if share < 0.9 else 0.9 + (share - 0.9) * 0.3,
        lambda share: 0.1 * share if share < 0.4 else 0.04 + (share - 0.4) * 1.6,
        lambda share: share if share < 0.5 else 1.0 if share == 1.0 else 0.5,
        lambda share: (
            30 * share
            if share < 0.01
            else 0.3
            if share < 0.15
            else 0.55
            if share < 0.45
            else 0.78 + 0.22 * (share == 1.0)
        ),
    ],
    ids=["burst at the end", "burst at the beginning", "burst in the middle", "growing bursts"],
)
def test_bursts_are_no_overload(shape):
    assert overloaded(at_load(0.5, shape)) == 0


def test_requests_of_less_than_a_minute_are_a_burst():
    columns = at_load(3.0, count=2000)
    assert columns.at_s[-1] < 60
    assert overloaded(columns) == 0


def test_a_trace_of_one_request_is_no_overload():
    assert overloaded(at_load(1.0, count=1)) == 0
