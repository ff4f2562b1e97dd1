"""The fast engine gives the same results as the engine of single steps."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.replay.block_runs import Forest
from routing.replay.fast_engine import FastEngine, FastEngineConfig, ModelledRequest
from routing.replay.replay import RequestTooLargeError, replay, report
from routing.simulation.engine import Engine, EngineConfig
from routing.simulation.tiers import TierConfig, build_lower_tiers
from tests.routing.replay.prompts import BLOCK, Plan, Row, columns_of, plans, rows_of
from tests.routing.simulation.stepwise import replay as replay_steps


@dataclass
class ScriptedPlacer:
    """Places requests on given engines, and records events."""

    choices: Sequence[int]

    def __post_init__(self) -> None:
        self.events: list[tuple[float, str, int]] = []

    def place(self, request: ModelledRequest, engines: Sequence[FastEngine], _now_s: float) -> int:
        return self.choices[request.index] % len(engines)

    def on_first_token(self, request: ModelledRequest, now_s: float) -> None:
        self.events.append((now_s, "first", request.index))

    def on_ended(self, request: ModelledRequest, now_s: float) -> None:
        self.events.append((now_s, "ended", request.index))


@settings(max_examples=300, deadline=None)
@given(
    plans=plans,
    choices=st.lists(st.integers(0, 5), min_size=25, max_size=25),
    replicas=st.integers(1, 3),
    blocks=st.integers(10, 30),
    chunk=st.sampled_from([3, 8, 16]),
    max_running=st.sampled_from([2, 256]),
)
def test_times_hits_and_the_order_of_events_are_those_of_single_steps(
    *, plans: list[Plan], choices: list[int], replicas: int, blocks: int, chunk: int, max_running: int
) -> None:
    compare(plans, choices, replicas, blocks=blocks, chunk_tokens=chunk, max_running=max_running)


def compare(plans: list[Plan], choices: list[int], replicas: int, **options: Any) -> Counter[str]:
    """Replay with both engines and compare; returns the number of blocks that were fetched, by cache tier."""
    rows = rows_of(plans)
    columns = columns_of(rows)
    # binary fractions, so that sums are exact and some steps end just when a request arrives
    options |= {"block_tokens": BLOCK, "prefill_rate": 1024.0, "step_s": 1 / 64, "decode_s": 1 / 512}
    model = FastEngineConfig(**options)
    placer = ScriptedPlacer(choices)

    remaining_choices = iter(choices)
    expected = replay_steps(
        rows,
        EngineConfig(**options, reserve_output=True),
        replicas,
        lambda _row, _engines: next(remaining_choices) % replicas,
    )
    result = replay(Forest(columns), [model] * replicas, placer)

    assert list(result.cached_tokens) == [sequence.cached_tokens for sequence in expected.sequences]
    assert list(result.ttft_s) == [sequence.first_token_s - sequence.arrived_s for sequence in expected.sequences]
    ended = {index: now_s for now_s, kind, index in placer.events if kind == "ended"}
    assert [ended[index] for index in range(len(rows))] == [sequence.finished_s for sequence in expected.sequences]
    assert placer.events == sorted(placer.events, key=lambda event: event[0])
    fetched: Counter[str] = Counter()
    for tier in model.tiers:
        blocks = [sequence.fetched_blocks.get(tier.name, 0) for sequence in expected.sequences]
        assert list(result.fetched_blocks[tier.name]) == blocks
        fetched[tier.name] = sum(blocks)
    return fetched


@pytest.mark.parametrize("seed", range(12))
def test_fetches_from_cache_tiers_are_those_of_single_steps(seed: int) -> None:
    rng = random.Random(seed)
    fetched: Counter[str] = Counter()
    for _ in range(10):
        plans = [
            (
                rng.choice((0, 0, 1, 2, 7)),
                tuple(rng.choice((0, 0, 0, 1, 2)) for _ in range(rng.randint(1, 7))),
                rng.randint(1, BLOCK),
                rng.randint(1, 9),
            )
            for _ in range(60)
        ]
        fetched += compare(
            plans,
            [rng.randrange(6) for _ in plans],
            rng.randint(1, 3),
            blocks=rng.randint(10, 16),
            chunk_tokens=rng.choice((3, 8, 16)),
            max_running=rng.choice((2, 256)),
            kv_bytes_per_token=1024,
            tiers=tuple(random_tier(rng, name) for name in ("first", "second")),
        )

    assert fetched["first"] > 0
    assert fetched["second"] > 0


def random_tier(rng: random.Random, name: str) -> TierConfig:
    """A tier of 1 to 30 blocks, from which a block takes 1/1024 to 1/192 s; its prefill takes 1/256 s."""
    latency_s = rng.choice((0.0, 1 / 1024, 1 / 512, 1 / 128))
    bytes_per_s = 2.0**20 * rng.choice((0.75, 1.5, 2, 4))
    return TierConfig(name, rng.randint(1, 30), latency_s, bytes_per_s, shared=rng.random() < 0.5)


def replayed(rows: list[Row], replicas: int = 1, **options: object) -> dict[str, Any]:
    """Requests 10 s apart, placed in turn, on GPU caches of 4 blocks; a token takes 0.1 s to prefill."""
    columns = columns_of([replace(row, at_s=10.0 * number) for number, row in enumerate(rows)])
    config = FastEngineConfig(4, BLOCK, prefill_rate=10.0, step_s=0.0, kv_bytes_per_token=1, **options)
    result = replay(Forest(columns), [config] * replicas, ScriptedPlacer(range(len(rows))))
    return report(result, columns) | {"ttfts": list(result.ttft_s)}


FIRST = Row(0.0, 13, 1, (1, 2, 3, 4))  # each takes all blocks of a replica
SECOND = Row(0.0, 13, 1, (5, 6, 7, 8))
CPU = TierConfig("cpu", 10, latency_s=0.2, bytes_per_s=40.0)  # 0.1 s per block


def test_an_evicted_block_is_fetched_from_the_next_tier_when_that_is_faster_than_prefill() -> None:
    found = replayed([FIRST, SECOND, FIRST], tiers=(CPU,))

    assert found["hit_tokens"] == {"gpu": 0, "cpu": 12}
    assert found["token_hit_rate"] == pytest.approx(12 / 39)
    assert found["ttfts"] == pytest.approx([1.3, 1.3, 0.2 + 3 * 0.1 + 0.1])

    slow = replayed([FIRST, SECOND, FIRST], tiers=(replace(CPU, latency_s=1.0),))
    assert slow["hit_tokens"] == {"gpu": 0, "cpu": 0}
    assert slow["ttfts"] == pytest.approx([1.3, 1.3, 1.3])


def test_a_full_tier_demotes_its_least_recently_used_blocks_to_the_next_one() -> None:
    third = Row(0.0, 13, 1, (9, 10, 11, 12))
    remote = TierConfig("remote", 2, latency_s=0.0, bytes_per_s=400.0)

    found = replayed([FIRST, SECOND, third, FIRST], tiers=(replace(CPU, blocks=4), remote))

    # The CPU has the second prompt and block 1; blocks 3 and 2 of the first prompt were evicted first.
    assert found["hit_tokens"] == {"gpu": 0, "cpu": 4, "remote": 8}


@pytest.mark.parametrize(("shared", "hits"), [(True, 12), (False, 0)])
def test_replicas_fetch_each_other_s_blocks_from_a_shared_tier(*, shared: bool, hits: int) -> None:
    tier = replace(CPU, shared=shared)

    found = replayed([FIRST, SECOND, SECOND, FIRST], replicas=2, tiers=(tier,))

    assert found["hit_tokens"]["cpu"] == hits


def test_cache_tiers_are_modelled_only_for_engines_that_reserve_the_output() -> None:
    (lower,) = build_lower_tiers([EngineConfig(10, tiers=(CPU,))])

    with pytest.raises(ValueError, match="reserve_output"):
        Engine(EngineConfig(10), lower)


def test_a_trace_with_a_request_that_no_cache_can_hold_is_rejected_before_it_is_replayed() -> None:
    columns = columns_of([Row(0.0, 3, 1, (1,)), Row(0.0, 13, 4, (1, 2, 3, 4))])

    with pytest.raises(RequestTooLargeError, match="request 2 needs 5 blocks of 4 tokens"):
        replay(Forest(columns), [FastEngineConfig(4, block_tokens=BLOCK)], ScriptedPlacer([0, 0]))
