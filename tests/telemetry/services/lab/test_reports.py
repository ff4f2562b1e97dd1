"""Reports of a pool before and after a time: windows, figures, differences, and what is unknown."""

from __future__ import annotations

from datetime import timedelta

import pytest

from controlplane.errors import InvalidError
from controlplane.models import Event, EventKind, Pool, Rollout
from controlplane.services.events import record_event
from controlplane.services.fleet.pools import update_pool
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from telemetry.metrics.windows import Window
from telemetry.models import CapacityCurve
from telemetry.services.lab.reports import Windows, events_between, report_of, report_windows
from telemetry.storage.partitions import ensure_days
from tests.telemetry.breakdown_bins import breakdown_bin
from tests.telemetry.conftest import T0
from tests.telemetry.readings import route_reading, router_scraped
from tests.telemetry.stored_decisions import a_router

pytestmark = pytest.mark.django_db
HOUR = timedelta(hours=1)
BEFORE, AFTER = Window(T0 - HOUR, T0, 3600), Window(T0, T0 + HOUR, 3600)


def served(at, cached: int, *, requests: int = 200, replicas: tuple[str, ...] = ("r1", "r2"), ttft: int = 100) -> None:
    """Requests of group agents in one scrape of 5 s, 1,000 tokens each, the first replica with half of all."""
    router = a_router()
    router_scraped(router, at)
    for number, replica in enumerate(replicas):
        share = requests // 2 if number == 0 else requests // 2 // (len(replicas) - 1)
        counts = dict.fromkeys(("requests", "ok_requests", "usage_reported"), share)
        counts |= {"prompt_tokens": share * 1000, "cached_tokens": share * cached}
        route_reading(router, at, group="agents", replica=replica, ttft=None, **counts)
    route_reading(router, at, group="agents", ttft={ttft: requests})


@pytest.fixture
def traffic(pool: Pool) -> Pool:
    """Before: a hit rate of 30 % on two replicas; after: 60 %, faster, on three."""
    ensure_days([T0.date()])
    served(T0 - timedelta(minutes=30), 300, ttft=140)
    served(T0 + timedelta(minutes=30), 600, replicas=("r1", "r2", "r3"), ttft=120)
    return pool


def test_figures_of_both_windows_and_their_differences(traffic):
    traffic = update_pool(traffic, costs={"gpu_hour_price": 3.6})
    CapacityCurve.objects.create(pool=traffic, at=T0, prefill_rate=1000.0, fitted_requests=500)
    breakdown_bin(traffic, T0 - timedelta(minutes=30), requests=400, reachable=0.8, group="agents")

    report = report_of(traffic, Windows(BEFORE, AFTER))

    before, after = report.figures.before, report.figures.after
    assert (before.hit_rate, after.hit_rate) == (pytest.approx(0.3), pytest.approx(0.6))
    assert report.figures.difference["hit_rate"] == pytest.approx(0.3)
    assert (before.requests, before.timed_requests) == (200, 200)
    assert after.ttft_p50_s < before.ttft_p50_s
    assert (before.reachable, after.reachable) == (pytest.approx(0.8), None)
    assert report.figures.difference["reachable"] is None
    assert (before.load_max_over_mean, after.load_max_over_mean) == (pytest.approx(1.0), pytest.approx(1.5))
    # 140,000 tokens at 1,000/s in the 5 s that were scraped
    assert before.prefill_s_per_day == pytest.approx(140 * 86_400 / 5)
    assert before.money_per_day == pytest.approx(140 * 86_400 / 5 * 3.6 / 3600)
    (agents,) = report.groups
    assert (agents.group, agents.before.hit_rate, agents.after.hit_rate) == ("agents", before.hit_rate, after.hit_rate)
    assert agents.before.load_max_over_mean is None


def test_what_is_unknown_stays_unknown(pool):
    report = report_of(pool, Windows(BEFORE, AFTER))
    for side in (report.figures.before, report.figures.after):
        assert {side.hit_rate, side.ttft_p50_s, side.prefill_s_per_day, side.money_per_day, side.reachable} == {None}
        assert side.requests is None
    text = " ".join(report.notes)
    assert report.no_verdict == ("No verdict: only 0 requests before.", "No verdict: only 0 requests after.")
    assert "prefill rate is unknown" in text
    assert report.groups == []


def test_events_of_the_pool_in_both_windows_are_listed(pool):
    for minutes in (-90, -30, 30, 90):
        summary = f"at {minutes}"
        event = record_event(EventKind.REPLICA_CHANGED, summary, pool=pool)
        Event.objects.filter(summary=summary).update(at=T0 + timedelta(minutes=minutes))
        del event
    events, more = events_between(pool, Windows(BEFORE, AFTER), Event.objects.all())
    assert ([event.summary for event in events], more) == (["at 30", "at -30"], False)
    assert events_between(pool, Windows(BEFORE, AFTER), Event.objects.none()) == ([], False)


@pytest.fixture
def old_pool(pool: Pool) -> Pool:
    Pool.objects.filter(pk=pool.pk).update(created_at=T0 - timedelta(days=30))
    pool.refresh_from_db()
    return pool


def published(pool: Pool, start, end=None) -> Rollout:
    strategies = ("random", "round_robin")
    settings = {"strategy": strategies[Rollout.objects.count() % 2]}
    rollout = publish_revision(save_draft(pool.policies.get(group=None), settings).pk)
    Rollout.objects.filter(pk=rollout.pk).update(started_at=start, finished_at=end or start, state="complete")
    rollout.refresh_from_db()
    return rollout


def test_a_window_ends_now_and_begins_not_before_the_pool_existed(old_pool):
    windows = report_windows(T0, old_pool, at=T0 - timedelta(hours=2), span=timedelta(hours=24))
    assert (windows.before.length_s, windows.after.length_s, windows.after.end) == (86_400, 7200, T0)
    windows = report_windows(T0, old_pool, span=HOUR)
    assert (windows.before.start, windows.before.end, windows.after.end) == (T0 - 2 * HOUR, T0 - HOUR, T0)

    old_pool.created_at = T0 - timedelta(hours=3)
    windows = report_windows(T0, old_pool, at=T0 - timedelta(hours=2), span=timedelta(hours=24))
    assert windows.before.start == T0 - timedelta(hours=3)
    assert "The pool was created at" in windows.limits[0]
    with pytest.raises(InvalidError, match="compare with"):
        report_windows(T0, old_pool, at=T0 - timedelta(hours=3), span=HOUR)


def test_windows_around_a_rollout_have_one_revision_each(old_pool):
    minute = timedelta(minutes=1)
    published(old_pool, T0 - 9 * HOUR, T0 - 8 * HOUR)
    rollout = published(old_pool, T0 - 3 * HOUR, T0 - 3 * HOUR + minute)
    published(old_pool, T0 - 2 * HOUR)
    published(old_pool, T0 - HOUR)

    windows = report_windows(T0, old_pool, rollout=rollout, span=timedelta(hours=24))

    assert (windows.before.start, windows.before.end) == (T0 - 8 * HOUR, T0 - 3 * HOUR)
    assert (windows.after.start, windows.after.end) == (T0 - 3 * HOUR + minute, T0 - 2 * HOUR)
    assert "was published at" in windows.limits[0]
    assert "followed at" in windows.limits[1]


def test_a_revision_that_was_replaced_at_once_gets_no_verdict(old_pool):
    rollout = published(old_pool, T0 - 2 * HOUR, T0 - 2 * HOUR)
    published(old_pool, T0 - 2 * HOUR + timedelta(minutes=3))
    windows = report_windows(T0, old_pool, rollout=rollout, span=HOUR)
    assert report_of(old_pool, windows).no_verdict[1] == "No verdict: only 3.0 minutes after."


@pytest.mark.parametrize(
    ("at", "span", "field"),
    [(T0 - HOUR, timedelta(minutes=1), "span"), (T0 - HOUR, timedelta(days=31), "span"), (T0, HOUR, "at")],
)
def test_a_window_of_no_use_is_refused(old_pool, at, span, field):
    with pytest.raises(InvalidError) as raised:
        report_windows(T0, old_pool, at=at, span=span)
    assert raised.value.faults[0].path == f"$.{field}"
