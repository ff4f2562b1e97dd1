"""The reachable share of pools and task groups: from the hit-rate breakdown, with time range and error, or unknown."""

from __future__ import annotations

import random
import statistics
from datetime import timedelta
from math import sqrt

import pytest

from controlplane.services.fleet.pools import create_pool
from telemetry.lab.breakdown import MAX_REACHABLE_ERROR, Sums, breakdown_from, reachable_error
from telemetry.metrics.windows import Window
from telemetry.services.lab.replays import replay_pools
from telemetry.storage.reachable import (
    reachable_by_group,
    reachable_by_pool,
    reachable_over_time,
    reachable_over_time_by,
    reachable_share,
)
from tests.telemetry.breakdown_bins import breakdown_bin
from tests.telemetry.conftest import T0
from tests.telemetry.decisions import store
from tests.telemetry.lab.replaying import replayed
from tests.telemetry.lab.traces import sampled, traffic
from tests.telemetry.services.lab.test_breakdowns import at, fleet, spread  # noqa: F401 - a fixture

pytestmark = pytest.mark.django_db
MINUTE = Window(T0 - timedelta(minutes=1), T0, 5)
HALF_HOUR = Window(T0 - timedelta(minutes=30), T0, 300)


def test_the_share_is_the_breakdown_s_for_the_same_minutes(fleet):  # noqa: F811
    requests = spread(traffic(2400, placed="random"))
    store(requests)
    replay_pools(at(30))

    share = reachable_share(["chat"], Window(at(0), at(15), 300))

    expected = breakdown_from(replayed(requests, None), sample_ratio=1)
    assert share.ratio == pytest.approx(expected.reachable / expected.prompt_tokens, abs=0.01)
    assert (share.requests, share.start, share.end) == (2400, at(0), at(15))
    assert 0 < share.standard_error < 0.01
    assert 0 < share.delivered_ratio < 1
    groups = reachable_by_group(["chat"], Window(at(0), at(15), 300))
    assert sum(share.requests for share in groups.values()) == 2400
    assert groups["chat", "g1"] == reachable_share(["chat"], Window(at(0), at(15), 300), group="g1")


def test_a_sampled_breakdown_has_a_larger_error_also_with_unknown_caches(fleet):  # noqa: F811
    type(fleet.replicas.first()).objects.update(capacity_blocks=None)
    requests = spread(traffic(2400, placed="random"))
    store(sampled(requests, 1 / 16))
    replay_pools(at(30))

    share = reachable_share(["chat"], Window(at(0), at(15), 300))

    whole = breakdown_from(replayed(requests, None), sample_ratio=1)
    assert share.standard_error > 0.004
    assert share.ratio == pytest.approx(whole.reachable / whole.prompt_tokens, abs=4 * share.standard_error)


def test_the_share_is_unknown_with_too_few_requests(pool):
    assert reachable_share(["chat"], MINUTE) is None
    breakdown_bin(pool, T0 - timedelta(minutes=5), requests=99, reachable=0.85)
    assert reachable_share(["chat"], MINUTE) is None
    assert reachable_over_time(["chat"], MINUTE) == {}
    breakdown_bin(pool, T0 - timedelta(minutes=10), requests=1, reachable=0.85)
    assert reachable_share(["chat"], MINUTE).requests == 100


def test_the_share_is_unknown_if_its_error_is_too_large(pool):
    breakdown_bin(pool, T0 - timedelta(minutes=5), requests=120, reachable=0.5, spread=0.5)
    assert reachable_share(["chat"], MINUTE).standard_error == pytest.approx(sqrt(0.25 / 119))
    breakdown_bin(pool, T0 - timedelta(minutes=10), requests=100, reachable=0.5, sampling_error=20_000.0)
    assert reachable_share(["chat"], MINUTE) is None
    assert MAX_REACHABLE_ERROR == 0.05


def test_a_short_window_is_extended_to_half_an_hour(pool):
    breakdown_bin(pool, T0 - timedelta(minutes=30), requests=200, reachable=0.4)
    breakdown_bin(pool, T0 - timedelta(minutes=5), requests=200, reachable=0.6)
    breakdown_bin(pool, T0 - timedelta(minutes=35), requests=200, reachable=1.0)
    share = reachable_share(["chat"], MINUTE)
    assert share.ratio == pytest.approx(0.5)
    assert (share.start, share.end) == (T0 - timedelta(minutes=30), T0)


def test_shares_by_pool_by_group_and_of_all(pool):
    other = create_pool("other", models=["m"])
    breakdown_bin(pool, T0 - timedelta(minutes=5), requests=100, reachable=0.2, group="a")
    breakdown_bin(other, T0 - timedelta(minutes=5), requests=300, reachable=0.6, group="a")
    assert reachable_share(None, MINUTE).ratio == pytest.approx(0.5)
    assert {name: of.ratio for name, of in reachable_by_pool(None, MINUTE).items()} == pytest.approx(
        {"chat": 0.2, "other": 0.6}
    )
    assert set(reachable_by_group(["other"], MINUTE)) == {("other", "a")}
    assert set(reachable_over_time_by(None, HALF_HOUR, by="group")) == {"chat/a", "other/a"}
    assert set(reachable_over_time_by(None, HALF_HOUR, by="pool")) == {"chat", "other"}


def test_over_time_each_step_uses_the_bins_of_the_last_half_hour(pool):
    for minutes, ratio in ((60, 0.2), (30, 0.8)):
        for earlier in range(0, 30, 5):
            breakdown_bin(pool, T0 - timedelta(minutes=minutes - earlier), requests=50, reachable=ratio)
    points = reachable_over_time(["chat"], Window(T0 - timedelta(minutes=60), T0, 900))
    assert [round(share.ratio, 2) for share in points.values()] == [0.2, 0.2, 0.5, 0.8]


def test_the_error_equals_the_spread_over_many_windows_of_the_same_traffic():
    chance = random.Random(5)
    ratios, errors = [], []
    for _ in range(400):
        sums = Sums()
        for _ in range(200):
            prompt = chance.choice((200.0, 1000.0, 6000.0))
            reachable = prompt * chance.choice((0.0, 0.3, 0.9))
            sums.requests += 1
            sums.prompt_tokens += prompt
            sums.reachable += reachable
            sums.prompt_squares += prompt**2
            sums.reachable_squares += reachable**2
            sums.reachable_products += prompt * reachable
        ratios.append(sums.reachable / sums.prompt_tokens)
        errors.append(reachable_error(sums))
    assert statistics.fmean(errors) == pytest.approx(statistics.stdev(ratios), rel=0.15)
