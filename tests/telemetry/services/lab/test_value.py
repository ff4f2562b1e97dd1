"""What caches saved by week and day, in hours and money, and what is unknown."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest

from controlplane.errors import InvalidError
from controlplane.models import Pool, Rollout
from controlplane.services.fleet.pools import create_pool, update_pool
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from telemetry.channels.base import Message
from telemetry.channels.email import mail_of
from telemetry.channels.slack import blocks_of
from telemetry.metrics.windows import Window
from telemetry.models import Channel, Notification
from telemetry.services.lab.value import changes_of, notify_weekly_summary, saved_in, value_of
from telemetry.services.notifications.channels import create_channel
from telemetry.storage.partitions import ensure_days
from tests.telemetry.breakdown_bins import breakdown_bin
from tests.telemetry.channels.messages import config
from tests.telemetry.conftest import T0, fleet_of
from tests.telemetry.readings import route_reading, router_scraped
from tests.telemetry.services.lab.test_sizing import COSTS, learnt
from tests.telemetry.stored_decisions import a_router

pytestmark = pytest.mark.django_db
DAY = timedelta(days=1)
MONDAY = (T0 - timedelta(days=T0.weekday())).replace(hour=0)  # T0 is a Tuesday


def served(at, cached: int, *, pool: str = "chat", group: str = "agents", reported: int = 200, revision: int = 1):
    """200 responses of 1,000 prompt tokens in a scrape of half an hour; ``reported`` report their cached tokens."""
    ensure_days([at.date()])
    counts = {"prompt_tokens": reported * 1000, "cached_tokens": reported * cached, "usage_reported": reported}
    route_reading(a_router(), at, pool=pool, group=group, revision=revision, requests=200, ok_requests=200, **counts)


def scraped(*times) -> None:
    for at in times:
        ensure_days([at.date()])
        router_scraped(a_router(), at, covered_s=1800.0)


@pytest.fixture
def priced(pool: Pool) -> Pool:
    """1,000 tokens/s, two GPUs for 3.60 USD an hour each; yesterday a hit rate of 40 %, today 60 %."""
    learnt(pool)
    scraped(T0 - DAY, T0 - timedelta(hours=1))
    served(T0 - DAY, 400)
    served(T0 - timedelta(hours=1), 600)
    breakdown_bin(
        pool, T0 - timedelta(hours=1), requests=100, reachable=0.8, group="agents", split=70_000, predicted=60_000
    )
    return update_pool(pool, costs=COSTS)


def test_saved_tokens_are_hours_and_money_by_day(priced, django_assert_max_num_queries):
    with django_assert_max_num_queries(8):
        report = value_of([priced], T0, by="day")
    yesterday, today = report.periods
    assert (yesterday.start, today.end) == (MONDAY, T0)
    assert today.saved_ratio == pytest.approx(0.6)
    assert today.saved.tokens == pytest.approx(120_000)
    assert today.saved.replica_hours == pytest.approx(120 / 3600)
    assert today.saved.gpu_hours == pytest.approx(240 / 3600)
    assert today.saved.money == pytest.approx(240 / 3600 * 3.6)
    assert today.placement.tokens == pytest.approx(20_000)  # 10 % of 200,000
    assert yesterday.placement.tokens is None  # nothing was replayed
    assert today.measured_s == pytest.approx(1800)
    assert report.sentence == (
        "On Tue 04 Mar 2031, prefix caches saved 4.0 GPU-minutes (0.24 USD), 60 % of prefill; better placement could "
        "have saved another 0.7 GPU-minutes (0.04 USD)."
    )
    assert "200 requests in 30 minutes of 12.0 hours" in report.notes[0]
    assert "is unknown" in value_of([priced], T0, by="day", at=T0 - DAY).sentence


def test_a_response_that_reports_nothing_counts_with_the_mean_of_the_others(pool):
    learnt(pool)
    scraped(T0)
    served(T0, 500, reported=100)
    report = value_of([pool], T0, by="day")
    assert report.chosen.saved.tokens == pytest.approx(100_000)
    assert report.chosen.saved.unit == "replica-hours"
    assert any("50 % of the responses report" in note for note in report.notes)
    assert report.chosen.saved.money is None


def test_the_range_of_the_rate_is_that_of_the_hours(pool):
    learnt(pool, deviation=0.1)
    scraped(T0)
    served(T0, 500)
    low, high = value_of([pool], T0, by="day").hours_range
    hours = 100 / 3600
    assert (low, high) == (pytest.approx(hours * 0.8187, rel=1e-3), pytest.approx(hours * 1.2214, rel=1e-3))


def test_a_pool_of_unknown_rate_is_named_and_not_counted(priced, django_assert_max_num_queries):
    priced = update_pool(priced, models=["large"])
    other = create_pool("batch", models=["small"])
    served(T0 - timedelta(hours=1), 100, pool="batch")
    with django_assert_max_num_queries(6):
        report = value_of([priced, other], T0, by="day")
    assert report.chosen.missing == ["batch"]
    assert report.chosen.saved.gpu_hours == pytest.approx(240 / 3600)
    assert report.chosen.saved.tokens == pytest.approx(140_000)
    assert any("do not include batch" in note for note in report.notes)
    assert "saved 4.0 GPU-minutes (0.24 USD), without pool batch, and 35 % of prefill of all pools" in report.sentence
    Pool.objects.update(created_at=T0 - 9 * DAY)
    for number, pool in enumerate((priced, other, other)):
        add_replica(pool, name=f"r{number}", url=f"http://10.0.0.{number}:8000")
    until_tomorrow, pools = Window(T0 - DAY, T0 + DAY, 60), list(Pool.objects.order_by("-name"))
    saved = saved_in(fleet_of(*pools), pools, until_tomorrow, T0)
    assert (saved.whole_hours, saved.currency, saved.unpriced, saved.missing) == (48, "USD", None, [other])
    Pool.objects.update(created_at=T0 + DAY)  # another pool of this name, of another clock
    assert saved_in(fleet_of(), list(Pool.objects.all()), until_tomorrow, T0).whole_hours == 0
    learnt(other)
    assert value_of([priced, other], T0, by="day").chosen.saved.money is None  # one of two has no price
    other = update_pool(other, costs={**COSTS, "currency": "JPY"})
    assert value_of([priced, other], T0, by="day").chosen.saved.money is None
    assert saved_in(fleet_of(priced, other), [priced, other], until_tomorrow, T0).amount.money is None


def test_without_measurements_nothing_is_known(pool):
    report = value_of([pool], T0)
    assert (report.periods, report.chosen, report.notes) == ([], None, [])
    assert changes_of([pool], Rollout.objects.all(), report) == []
    scraped(T0)
    served(T0, 0, reported=0)
    assert "no response reports its cached tokens" in value_of([pool], T0).sentence


def test_a_change_has_the_hit_rate_of_its_revision_and_of_the_one_before(priced):
    rollout = publish_revision(save_draft(priced.policies.get(group=None), {"strategy": "random"}).pk)
    Rollout.objects.filter(pk=rollout.pk).update(started_at=T0 - timedelta(hours=2))
    served(T0 - timedelta(minutes=30), 200, revision=2)
    (change,) = changes_of([priced], Rollout.objects.all(), value_of([priced], T0, by="day"))
    assert (change.previous, change.before, change.after) == (1, pytest.approx(0.5), pytest.approx(0.2))
    assert change.difference == pytest.approx(-0.3)


WEEK = timedelta(weeks=1)


@pytest.fixture
def subscribed(priced) -> Channel:
    """A channel that asks for the summary, and one that does not; the pool is old."""
    Pool.objects.update(created_at=T0 - 2 * WEEK)
    create_channel("others", config={"url": "https://example.org/1"})
    return create_channel("managers", config={"url": "https://example.org/2"}, topics=["weekly_summary"])


def test_the_summary_of_a_week_is_queued_once_for_the_channels_that_ask_for_it(subscribed):
    after = MONDAY + WEEK + timedelta(hours=6)
    for now in (after, after + timedelta(hours=1), after + timedelta(days=6)):
        notify_weekly_summary(now)
    (sent,) = Notification.objects.all()
    assert (sent.channel.name, sent.kind, sent.payload["type"]) == ("managers", "summary", "summary.weekly")
    data = sent.payload["data"]
    assert data["summary"].startswith(
        "In the week of Mon 03 Mar 2031, prefix caches saved 0.111 GPU-hours (0.40 USD), 50 %"
    )
    assert ["Pool chat", "0.111 GPU-hours (0.40 USD) saved, 50 % of prefill"] in data["facts"]
    assert data["path"] == "/value/?by=week&at=2031-03-03"


def test_the_summary_waits_for_monday_morning_and_is_late_after_an_outage(subscribed):
    notify_weekly_summary(MONDAY + WEEK + timedelta(hours=5, minutes=59))  # that of the week before, without traffic
    assert [one.payload["data"]["week"] for one in Notification.objects.all()] == [(MONDAY - WEEK).isoformat()]
    assert "no traffic was measured" in Notification.objects.get().payload["data"]["summary"]
    notify_weekly_summary(MONDAY + WEEK + timedelta(days=4))
    assert Notification.objects.filter(payload__data__week=MONDAY.isoformat()).count() == 1


@pytest.mark.parametrize("kind", ["pagerduty", "alertmanager"])
def test_a_topic_that_a_channel_cannot_have_is_refused(db, kind):
    for topic, reason in (("alerts", "is no topic"), ("weekly_summary", "treat any other message as an incident")):
        with pytest.raises(InvalidError, match=reason):
            create_channel("c", kind=kind, config=config(kind, "example.org", 443), topics=[topic])


def test_mail_and_chat_show_the_facts_of_a_summary(subscribed):
    notify_weekly_summary(MONDAY + WEEK + DAY)
    message = Message("msg_1", T0, Notification.objects.get().payload)
    mail = mail_of(message, sender="w@x.org", recipients=["a@x.org"], site="https://w.example")
    for part in mail.iter_parts():
        assert "GPU-hours (0.40 USD) saved, 50 % of prefill" in part.get_content()
        assert "/value/?by=week" in part.get_content()
    blocks = json.dumps(blocks_of(message, "https://w.example"))
    assert "*Pool chat*" in blocks
    assert "https://w.example/value/?by=week&at=2031-03-03" in blocks
