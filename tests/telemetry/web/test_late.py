"""A telemetry that does not keep up says so on every page: its charts look like a quiet fleet."""

from __future__ import annotations

from datetime import timedelta

import pytest

from controlplane.models import ItemFailure, PeriodicTask
from telemetry.models import AlertRule, EvaluationState, ScrapeShard, ScrapeState
from telemetry.services.alerts.rules import ensure_default_rules


@pytest.mark.parametrize(("late_s", "words"), [(16, ""), (21, "scraping is 16 s late")])
def test_a_page_says_when_scraping_is_late(visitor, noon, settings, late_s, words):
    settings.SCRAPE_INTERVAL_S = 5
    ScrapeShard.objects.create(number=0, due_at=noon - timedelta(seconds=late_s), lag_s=0.01)

    text = visitor.get("/fleet/").text
    assert ("Telemetry is late:" in text, words in text) == (bool(words), True)


def test_the_notice_lists_each_late_task_and_what_is_not_affected(visitor, noon, fleet):
    ensure_default_rules(fleet)
    EvaluationState.objects.create(pk=1, at=noon - timedelta(minutes=3))
    ScrapeShard.objects.create(number=0, due_at=noon - timedelta(seconds=1), lag_s=90.0)

    text = visitor.get("/routers/").text

    assert "scraping is 90 s late, evaluating alert rules is 17" in text
    assert "Requests are not affected" in text
    AlertRule.objects.update(enabled=False)
    assert "evaluating" not in visitor.get("/routers/").text


def test_a_page_reports_missing_scrapes_once(visitor, noon, fleet):
    ScrapeShard.objects.create(number=0, due_at=noon - timedelta(minutes=5), lag_s=0.0)
    ScrapeState.objects.update(at=noon - timedelta(minutes=5), ok_at=noon - timedelta(minutes=5))

    text = visitor.get("/").text

    assert "Telemetry is late: scraping is " in text
    assert "Last successful scrape: " not in text


def test_a_page_says_that_items_of_background_tasks_fail_and_names_none(visitor, noon):
    at = noon
    ItemFailure.objects.create(task=PeriodicTask.BREAKDOWNS, item="secret-pool", since=at, at=at, error="KeyError")
    text = visitor.get("/fleet/").text
    assert "Background tasks fail for some items: hit-rate breakdowns (1)." in text
    assert "secret-pool" not in text
    ItemFailure.objects.all().delete()
    assert "Background tasks fail" not in visitor.get("/fleet/").text
