"""What a subject's charts say, from readings whose sums are known."""

from datetime import UTC, datetime, timedelta

import pytest

from controlplane.services.fleet.replicas import add_replica, record_engine_facts
from controlplane.services.routers import announce
from telemetry.metrics.windows import PointState, Window
from telemetry.services.figures import engine, figures
from telemetry.services.figures.overview import Subject
from telemetry.services.figures.replicas import CELLS, heat_strips
from telemetry.storage.dimension_sums import engine_counter_sums
from tests.telemetry.breakdown_bins import breakdown_bin
from tests.telemetry.readings import cache_reading, engine_reading, gap, route_reading, router_scraped, steps

START = datetime(2031, 3, 4, 12, tzinfo=UTC)
WINDOW = Window(START, START + timedelta(seconds=20), 10)
AT, LATER = START + timedelta(seconds=5), START + timedelta(seconds=15)


@pytest.fixture
def replicas(pool):
    return [add_replica(pool, name=f"r{n}", url=f"http://10.0.0.{n}:8000") for n in (1, 2)]


@pytest.fixture
def router(db):
    return announce(name="router-1", boot="b1", version="0.1.0", admin_url="http://10.0.1.1:8081")


def values(found):
    return {line.label: [value for _, value in line.points] for line in found}


def test_a_pools_hit_rate_is_sums_over_sums_with_the_local_cache_told_apart(pool, replicas):
    first, second = replicas
    for at in steps(START, 2):
        engine_reading(first, at, queries=900, hits=90, external_hits=90)
        engine_reading(second, at, queries=100, hits=100, external_hits=0)

    found = values(figures.hit_rate(Subject.of_pool(pool), WINDOW))

    assert found == {"Hit rate": [0.28, None], "Local cache only": [0.19, None]}


def test_tiers_are_shares_of_the_queries_and_only_those_that_are_there(pool, replicas):
    """H4"""
    engine_reading(replicas[0], START + timedelta(seconds=5), queries=1000, hits=400, external_hits=200,
                   device_tokens=400, host_tokens=150, p2p_tokens=0, disk_tokens=50, other_tokens=0)  # fmt: skip

    found = values(figures.tiers(Subject.of_pool(pool), WINDOW))

    assert found == {"device": [0.4, None], "host memory": [0.15, None], "disk": [0.05, None]}


def test_engines_that_report_no_tiers_are_left_out_of_the_shares_and_a_note_says_so(pool, replicas):
    """H4: hits of such an engine may be of any tier, as those of SGLang without `cache_source` and of TensorRT-LLM."""
    at = START + timedelta(seconds=5)
    engine_reading(replicas[0], at, queries=1000, hits=400, device_tokens=400, host_tokens=0)
    engine_reading(replicas[1], at, queries=3000, hits=600, external_hits=200, not_reported=["device_tokens"])

    (device,) = figures.tiers(Subject.of_pool(pool), WINDOW)

    assert (device.points[0][1], device.states[0]) == (0.4, PointState.OK)
    assert device.note == "Tiers: of 25.0 % of the queried tokens; the other engines do not report tiers."


def test_a_pool_whose_engines_report_no_tiers_says_so(pool, replicas):
    engine_reading(replicas[0], START + timedelta(seconds=5), queries=1000, hits=400, not_reported=["device_tokens"])

    (device,) = figures.tiers(Subject.of_pool(pool), WINDOW)

    assert (device.points[0][1], device.states[0]) == (None, PointState.NOT_REPORTED)


def test_a_group_knows_its_hit_rate_its_reachable_share_and_when_it_had_no_traffic(pool, replicas, router):
    for at in steps(START, 4):
        router_scraped(router, at)
    counted = {"requests": 10, "usage_reported": 10, "prompt_tokens": 1000, "cached_tokens": 600}
    route_reading(router, START + timedelta(seconds=5), group="coding", **counted)
    route_reading(router, START + timedelta(seconds=5), group="other", **counted | {"cached_tokens": 0})

    assert len(figures.hit_rate(Subject.of_pool(pool, "coding"), WINDOW)) == 1  # no breakdown yet: no line
    breakdown_bin(pool, START - timedelta(minutes=5), group="coding", requests=100, reachable=0.85, spread=0.1)

    rate, reachable = figures.hit_rate(Subject.of_pool(pool, "coding"), WINDOW)

    assert values([rate])["Hit rate"] == [0.6, None]
    assert values([reachable]) == {"Reachable": pytest.approx([0.85, 0.85])}
    assert all(low < 0.85 < high for low, high in reachable.band)
    assert figures.hit_rate(Subject.of_replica(replicas[0]), WINDOW)[1:] == []
    assert rate.states == [PointState.OK, PointState.NO_TRAFFIC]


@pytest.mark.parametrize("group", [None, "coding"])
def test_the_reachable_line_is_not_below_the_hit_rate_of_the_same_time(pool, replicas, router, group):
    """A replay that finds less than was delivered, in steps of half an hour; shorter steps say that they differ."""
    at = START + timedelta(seconds=5)
    engine_reading(replicas[0], at, queries=1000, hits=600)
    router_scraped(router, at)
    counted = {"requests": 10, "usage_reported": 10, "prompt_tokens": 1000, "cached_tokens": 600}
    route_reading(router, at, group="coding", **counted)
    breakdown_bin(pool, START, group="coding", requests=100, reachable=0.5, spread=0.1)
    subject = Subject.of_pool(pool, group)

    rate, reachable = figures.hit_rate(subject, Window(START, START + timedelta(hours=1), 1800.0))
    assert values([rate, reachable]) == {"Hit rate": [0.6, None], "Reachable": pytest.approx([0.6, None])}
    assert reachable.note.endswith("would have had, at least the measured one.")
    assert all(low < 0.6 < high for low, high in filter(None, reachable.band))

    rate, reachable = figures.hit_rate(subject, WINDOW)
    assert (values([rate])["Hit rate"][0], reachable.points[0][1]) == (0.6, pytest.approx(0.5))
    assert "in the 30 minutes up to each point; that of one point may be higher" in reachable.note


def test_where_a_groups_requests_went_adds_up_to_one(pool, replicas, router):
    at = START + timedelta(seconds=5)
    for name, requests in (("r1", 30), ("r2", 10)):
        route_reading(router, at, group="coding", replica=name, requests=requests)
    route_reading(router, at, group="other", replica="r2", requests=500)

    assert values(figures.requests_by_replica(Subject.of_pool(pool, "coding"), WINDOW)) == {
        "r1": [0.75, None],
        "r2": [0.25, None],
    }


def test_the_share_in_time_is_counted_at_an_edge_and_says_which(pool, replicas):
    """T6"""
    engine_reading(replicas[0], START + timedelta(seconds=5), ttft={0: 6, 1: 3, 2: 1}, queries=1, hits=0)

    (line,) = figures.share_within(Subject.of_pool(pool), WINDOW, 0.7)

    assert line.label == "within 0.7 s (engine)"
    assert line.points[0][1] == 0.9  # of edges 0.1, 0.5, 1 and 5 s, all up to 0.5 s
    assert "0.5 s" in line.note


def test_outcomes_are_a_second_and_zero_only_where_routers_were_read(pool, replicas, router):
    router_scraped(router, START + timedelta(seconds=5))
    router_scraped(router, START + timedelta(seconds=15), stale=True)
    route_reading(
        router,
        START + timedelta(seconds=5),
        requests=20,
        ok_requests=15,
        replica_error_requests=5,
        cancelled_requests=0,
    )

    answered, errors = figures.outcomes(Subject.of_pool(pool), WINDOW)

    assert values([answered, errors]) == {"OK": [3.0, None], "replica errors": [1.0, None]}
    assert answered.states[1] == PointState.STALE


def test_objectives_are_kept_by_a_share_of_each_group_s_requests_that_have_one(pool, router):
    route_reading(router, AT, group="coding", requests=500)
    for at, requests, kept in ((AT, 8, 6), (LATER, 2, None)):
        cache_reading(router, at, group="coding", objective_requests=requests, objective_kept=kept)
    cache_reading(router, AT, group="", objective_requests=1, objective_kept=1)

    found = figures.objectives_kept(Subject.of_pool(pool), WINDOW)

    assert values(found) == {"no group": [1.0, None], "coding": [0.75, 0.0]}
    assert found[1].note == "coding: 10 requests had an objective."
    assert values(figures.objectives_kept(Subject.of_pool(pool, "coding"), WINDOW)) == {"coding": [0.75, 0.0]}


def test_a_replica_has_a_line_a_rank(pool, replicas):
    for rank, hits in (("0", 20), ("1", 80)):
        engine_reading(replicas[0], START + timedelta(seconds=5), engine=rank, queries=100, hits=hits)

    found = values(figures.hit_rate_by_rank(Subject.of_replica(replicas[0]), WINDOW))

    assert found == {"rank 0 (tiny)": [0.2, None], "rank 1 (tiny)": [0.8, None]}


def test_a_strip_joins_cells_that_look_the_same_and_keeps_gaps(pool, replicas):
    window = Window(START, START + timedelta(seconds=5 * CELLS), 5)
    for at in steps(START, CELLS // 2):
        engine_reading(replicas[0], at, queries=100, hits=55)
    gap(replicas[0], START + timedelta(seconds=5 * (CELLS // 2 + 1)))

    strip = heat_strips(replicas, window)["r1"]

    assert [(run.cells, run.style) for run in strip.runs] == [(18, "h5"), (1, "stale"), (17, "unknown")]
    assert (strip.lowest_ratio, strip.highest_ratio) == (0.55, 0.55)


def test_ttft_by_reuse_of_a_group_says_of_what_share_of_the_responses_it_is(pool, router):
    at = START + timedelta(seconds=5)
    router_scraped(router, at)
    route_reading(router, at, group="coding", ttft={10: 6}, plain={10: 4})
    for reuse, count in (("hit", 2), ("miss", 3)):
        route_reading(router, at, group="coding", ttft={10: count}, reuse=reuse)

    found = figures.ttft_by_reuse(Subject.of_pool(pool, "coding"), WINDOW)

    assert {line.note for line in found} == {"TTFT by reuse covers 50.0 % of the responses."}


# What only some engines report: queue and prefill, waiting by reason, sources, multimodal, KV blocks.


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
