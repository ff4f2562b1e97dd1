"""Breakdowns from stored decisions: each minute is replayed once, again after late decisions, from stored states."""

from __future__ import annotations

from datetime import timedelta

import pytest

from controlplane.models import Pool, Replica
from controlplane.services.fleet.replicas import add_replica, record_engine_facts
from controlplane.services.snapshots import single_snapshot
from telemetry.lab.breakdown import BIN, breakdown_from
from telemetry.metrics.windows import Window
from telemetry.models import BreakdownBin, Decision, ReplayState
from telemetry.services.lab import replays
from telemetry.services.lab.breakdowns import breakdown_of, breakdowns_by_group, breakdowns_over_time, curve_of
from telemetry.services.lab.replays import replay_pools, update_curve, update_curves
from tests.telemetry.conftest import T0
from tests.telemetry.decisions import store
from tests.telemetry.lab.replaying import replayed
from tests.telemetry.lab.traces import HASH_TOKENS, Request, sampled, traffic

pytestmark = pytest.mark.django_db
CAPACITY_BLOCKS = 600  # of the size that routers hash
CAPACITIES = {f"r{number}": CAPACITY_BLOCKS for number in range(4)}


def add_fleet(pool: Pool) -> Pool:
    """Add four replicas of known cache size."""
    with single_snapshot(reason="a fleet"):
        for name in CAPACITIES:
            record_engine_facts(
                add_replica(pool, name=name, url=f"http://{name}"),
                block_tokens=16,
                capacity_blocks=CAPACITY_BLOCKS * HASH_TOKENS // 16,
            )
    return pool


@pytest.fixture
def fleet(pool: Pool) -> Pool:
    """Four replicas of known cache size."""
    return add_fleet(pool)


def spread(requests: list[Request], minutes: float = 12) -> list[Request]:
    """The same requests, spread evenly over ``minutes`` from T0 on."""
    step_s = minutes * 60 / len(requests)
    return [one._replace(at_s=T0.timestamp() + number * step_s) for number, one in enumerate(requests)]


def at(minutes: float):
    return T0 + timedelta(minutes=minutes)


HOUR = Window(at(0), at(60), 300)


def test_a_pools_breakdown_is_computed_from_its_decisions(fleet):
    requests = spread(traffic(1200, placed="random"))
    store(requests)
    store(spread(traffic(50, seed=9)), pool="other", boot="b2")
    store([], pool="chat")

    assert replay_pools(at(30)) == 6  # bins, including empty ones up to now

    unsampled = replayed(requests, CAPACITIES)
    expected, breakdown = breakdown_from(unsampled, sample_ratio=1), breakdown_of(fleet, HOUR)
    assert breakdown.requests == 1200
    for (name, actual), (_, exact) in zip(breakdown.terms, expected.terms, strict=True):
        assert actual == pytest.approx(exact, rel=0.02), name  # capacities are converted to blocks once per bin
    assert [row.group for row in breakdowns_by_group(fleet, HOUR)] != []
    assert sum(row.breakdown.requests for row in breakdowns_by_group(fleet, HOUR)) == 1200
    assert sum(row.breakdown.predicted for row in breakdowns_by_group(fleet, HOUR)) == pytest.approx(
        breakdown.predicted
    )
    assert [one.requests for _, one in breakdowns_over_time(fleet, HOUR)] == [500, 500, 200]
    assert breakdown_of(fleet, HOUR, "g1").requests + breakdown_of(fleet, HOUR, "g0").requests < 1200
    assert breakdown_of(fleet, HOUR, "none such") is None
    assert breakdown_of(fleet, Window(at(-60), at(-5), 300)) is None


def test_runs_every_minute_give_the_same_bins_as_one_run(fleet):
    requests = sampled(spread(traffic(1200, placed="random")), 0.5)
    store(requests)
    replay_pools(at(30))
    at_once = {
        row.pk: (row.predicted, row.split, row.reachable, row.sampling_error) for row in BreakdownBin.objects.all()
    }
    BreakdownBin.objects.all().delete()
    ReplayState.objects.all().delete()

    for minute in range(1, 31):
        replay_pools(at(minute))

    assert BreakdownBin.objects.count() == len(at_once) == 9  # three groups, three bins with requests
    for row in BreakdownBin.objects.all():
        assert (row.predicted, row.split, row.reachable, row.sampling_error) == pytest.approx(at_once[row.pk])
    assert ReplayState.objects.count() <= replays.MAX_STATES + 1  # and that of the newest minute


def test_a_complete_bin_is_replayed_again_only_after_many_late_decisions(fleet, monkeypatch):
    requests = spread(traffic(1200))
    store(requests[:300] + requests[500:])
    replay_pools(at(14))
    assert breakdown_of(fleet, HOUR).requests == 1000
    assert replay_pools(at(15)) == 1  # the current bin
    store(requests[300:303])
    assert replay_pools(at(15)) == 1  # too few late decisions for a restart
    store(requests[303:500])

    assert replay_pools(at(15)) > 2

    assert breakdown_of(fleet, HOUR).requests == 1200
    assert BreakdownBin.objects.filter(group="g0").count() == 3


def test_a_complete_minute_is_not_read_again(fleet):
    store(spread(traffic(1200)))
    replay_pools(at(9))
    assert Decision.objects.filter(at__lt=at(7)).delete()[0] == 700
    replay_pools(at(10))
    assert [one.requests for _, one in breakdowns_over_time(fleet, HOUR)] == [500, 500]
    replay_pools(at(14))
    assert [one.requests for _, one in breakdowns_over_time(fleet, HOUR)] == [500, 500, 200]


def test_a_bin_has_a_reason_if_cache_sizes_were_unknown_in_one_of_its_minutes(fleet):
    Replica.objects.filter(name="r2").update(capacity_blocks=None)
    store(spread(traffic(1200)))
    replay_pools(at(4))
    Replica.objects.filter(name="r2").update(capacity_blocks=CAPACITY_BLOCKS * HASH_TOKENS // 16)
    replay_pools(at(12))
    assert [bool(one.reason) for _, one in breakdowns_over_time(fleet, HOUR)] == [True, False, False]


def test_the_next_bin_starts_with_warm_caches(fleet):
    requests = traffic(1000)
    twice = spread(requests + requests, minutes=10)
    store(twice)
    for minute in (6, 8, 14):
        replay_pools(at(minute))
    first, second = (one for _, one in breakdowns_over_time(fleet, HOUR))
    assert second.ratio(second.reachable) > 0.97 > first.ratio(first.reachable)


def test_an_unreadable_state_restarts_the_replay_cold(fleet):
    store(spread(traffic(1200)))
    replay_pools(at(14))
    ReplayState.objects.update(state=b"\x80")
    assert replay_pools(at(15)) >= 1
    assert replay_pools(at(120)) == 0  # no decisions for an hour


def test_terms_that_need_an_unknown_cache_size_are_unknown_and_the_reason_names_the_replica(fleet):
    Replica.objects.filter(name="r2").update(capacity_blocks=None)
    store(spread(traffic(600)))
    replay_pools(at(30))
    breakdown = breakdown_of(fleet, HOUR)
    assert "r2" in breakdown.reason
    assert (breakdown.capacity, breakdown.split, breakdown.best, breakdown.predicted) == (None, None, None, None)
    assert 0 < breakdown.delivered < breakdown.reachable < breakdown.prompt_tokens
    update_curve(fleet, at(30))
    assert (curve_of(fleet).points, "r2" in curve_of(fleet).reason) == ([], True)


def test_each_data_parallel_rank_has_its_own_capacity(pool):
    record_engine_facts(add_replica(pool, name="big", url="http://big"), block_tokens=16, capacity_blocks=8000)
    Replica.objects.update(data_parallel_size=2)
    assert replays.capacities_of(pool, set()).tokens == {"big#0": 64_000, "big#1": 64_000}


def test_the_capacity_curve_predicts_the_hit_rate_of_larger_caches(fleet):
    requests = spread(traffic(3000, placed="random"), minutes=30)
    store(requests)
    update_curves(at(40))
    curve = curve_of(fleet)
    points = {point["multiple"]: point for point in curve.points}
    assert (curve.requests, curve.replicas, curve.cache_tokens) == (2000, 4, CAPACITY_BLOCKS * HASH_TOKENS)
    assert points[1.0]["split"] < points[2.0]["split"] < points[1.0]["shared"]

    real = replayed(requests, dict.fromkeys(CAPACITIES, 2 * CAPACITY_BLOCKS))
    warm = replayed(requests[:1000], dict.fromkeys(CAPACITIES, 2 * CAPACITY_BLOCKS))
    expected = (real.predicted - warm.predicted) / (real.prompt_tokens - warm.prompt_tokens)
    assert points[2.0]["split"] == pytest.approx(expected, abs=0.03)

    update_curves(at(45))
    assert curve_of(fleet).at == at(40)  # not due yet
    update_curves(at(120))
    assert (curve_of(fleet).points, "Fewer than" in curve_of(fleet).reason) == ([], True)


def test_bins_are_kept_as_long_as_rollups_of_five_minutes(fleet, settings):
    store(spread(traffic(300)))
    replay_pools(at(14))
    replay_pools(at(14) + timedelta(days=settings.ROLLUP_RETENTION_DAYS[300] - 1))
    assert BreakdownBin.objects.count() > 0  # long after the readings
    replay_pools(at(14) + timedelta(days=settings.ROLLUP_RETENTION_DAYS[300], hours=1))
    assert BreakdownBin.objects.count() == 0
    assert timedelta(minutes=5) == BIN
