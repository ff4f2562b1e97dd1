"""Figures that only some engines report: queue and prefill, waiting by reason, sources, multimodal, KV blocks."""

from datetime import UTC, datetime, timedelta

import pytest

from controlplane.services.fleet.pools import create_pool
from controlplane.services.fleet.replicas import add_replica, record_engine_facts
from telemetry.metrics.windows import PointState, Window
from telemetry.services.figures import engine
from telemetry.services.figures.overview import Subject
from telemetry.storage.dimension_sums import engine_counter_sums
from tests.telemetry.readings import engine_reading, gap

pytestmark = pytest.mark.django_db
START = datetime(2031, 3, 4, 12, tzinfo=UTC)
WINDOW = Window(START, START + timedelta(seconds=20), 10)
AT, LATER = START + timedelta(seconds=5), START + timedelta(seconds=15)


@pytest.fixture
def pool():
    return create_pool("chat")


@pytest.fixture
def replicas(pool):
    return [add_replica(pool, name=f"r{n}", url=f"http://10.0.0.{n}:8000") for n in (1, 2)]


def values(found):
    return {line.label: [value for _, value in line.points] for line in found}


def test_queue_and_prefill_are_means_over_the_requests_of_all_replicas(pool, replicas):
    """Sums over sums (H2): 10 requests waited 9 s in all, 30 waited 3 s."""
    engine_reading(replicas[0], AT, queue_ms=9000, queue_count=10, prefill_ms=1000, prefill_count=10)
    engine_reading(replicas[1], AT, queue_ms=3000, queue_count=30, prefill_ms=7000, prefill_count=30)
    engine_reading(replicas[0], LATER, queue_ms=0, queue_count=0, prefill_ms=0, prefill_count=0)

    queue, prefill = engine.queue_and_prefill(Subject.of_pool(pool), WINDOW)

    assert values([queue, prefill]) == {"in queue": [0.3, None], "in prefill": [0.2, None]}
    assert queue.states == [PointState.OK, PointState.NO_TRAFFIC]


def test_waiting_requests_by_reason_are_means_of_each_engine_added_up(pool, replicas):
    engine_reading(replicas[0], AT, gauges={"waiting_capacity": 2.0, "waiting_deferred": 1.0})
    engine_reading(replicas[0], AT + timedelta(seconds=5), gauges={"waiting_capacity": 4.0, "waiting_deferred": 0.0})
    engine_reading(replicas[1], AT, gauges={"waiting_capacity": 5.0, "waiting_deferred": 0.0})

    found = values(engine.waiting_by_reason(Subject.of_pool(pool), WINDOW))

    assert found == {"capacity": [8.0, None], "deferred": [0.5, None]}


def test_the_multimodal_cache_has_a_line_only_where_it_was_asked(pool, replicas):
    engine_reading(replicas[0], AT, mm_cache_queries=0, mm_cache_hits=0)
    assert engine.mm_hit_rate(Subject.of_pool(pool), WINDOW) == []

    engine_reading(replicas[0], LATER, mm_cache_queries=8, mm_cache_hits=6)
    found = values(engine.mm_hit_rate(Subject.of_pool(pool), WINDOW))
    assert found == {"Multimodal hit rate": [None, 0.75]}


def test_sampled_evictions_are_a_rate_per_replica(pool, replicas):
    """6 blocks in the 5 s that were read of a step of 10 s: 72 a minute. A replica that samples none has no line."""
    engine_reading(replicas[0], AT, block_lifetime_count=4, block_lifetime_ms=1)
    engine_reading(replicas[0], AT, engine="1", block_lifetime_count=2, block_lifetime_ms=1)
    engine_reading(replicas[0], LATER, block_lifetime_count=0, block_lifetime_ms=0)
    engine_reading(replicas[1], AT, queries=10, hits=5)

    found = values(engine.sampled_evictions(Subject.of_pool(pool), WINDOW))

    assert found == {"r1": [pytest.approx(72.0), 0.0]}


def test_churn_is_what_is_written_over_the_capacity(pool, replicas):
    """1,000 + 600 + 400 tokens of 16,000 in 5 s are 90 turnovers an hour. Cached tokens are not written again."""
    record_engine_facts(replicas[0], block_tokens=16, capacity_blocks=1000)
    written = {"computed_prompt_tokens": 1000, "transferred_prompt_tokens": 600, "cached_prompt_tokens": 70_000}
    engine_reading(replicas[0], AT, **written, generation_tokens=400)
    gap(replicas[0], LATER)

    (churn,) = engine.cache_churn(Subject.of_pool(pool), WINDOW)

    assert values([churn]) == {"r1": [pytest.approx(90.0), None]}
    assert churn.states == [PointState.OK, PointState.STALE]


def test_churn_is_unknown_without_a_capacity_or_the_computed_tokens(pool, replicas):
    record_engine_facts(replicas[1], block_tokens=16, capacity_blocks=1000)
    engine_reading(replicas[0], AT, computed_prompt_tokens=1000, transferred_prompt_tokens=0, generation_tokens=400)
    engine_reading(replicas[1], AT, generation_tokens=400)

    assert engine.cache_churn(Subject.of_pool(pool), WINDOW) == []


@pytest.mark.parametrize(
    "figure",
    [
        engine.queue_and_prefill,
        engine.prompt_sources,
        engine.mm_hit_rate,
        engine.waiting_by_reason,
        engine.block_times,
        engine.sampled_evictions,
        engine.cache_churn,
    ],
)
def test_what_no_engine_reports_has_no_line(pool, replicas, figure):
    engine_reading(replicas[0], AT, queries=100, hits=50, gauges={"waiting": 3.0})

    assert figure(Subject.of_pool(pool), WINDOW) == []


def test_only_counters_of_a_reading_can_be_asked_for():
    with pytest.raises(ValueError, match="cannot be read here"):
        engine_counter_sums([1], WINDOW, ["waiting"], by="replica")
