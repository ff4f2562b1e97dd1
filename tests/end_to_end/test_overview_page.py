"""The overview in a browser: page weight, zoom, legend, table, theme, live updates."""

from __future__ import annotations

import gzip
import re

import pytest
from django.utils import timezone
from playwright.sync_api import expect

from telemetry.models import Reading, ScrapeState
from tests.end_to_end.looking import eventually

pytestmark = pytest.mark.timeout(300)  # the first test of a process prepares database and browser
MOST_SCRIPT_BYTES = 450_000  # gzipped


def wait_for_charts(page) -> None:
    expect(page.locator(".js-plotly-plot")).to_have_count(6)


@pytest.fixture
def scripts():
    """Responses with scripts, by URL."""
    return {}


@pytest.fixture
def page(site, full, complaints, scripts):
    page = site.open(viewport={"width": 1280, "height": 900})
    complaints.listen(page)
    page.on(
        "response", lambda answer: answer.request.resource_type == "script" and scripts.update({answer.url: answer})
    )
    page.goto("/")
    wait_for_charts(page)
    return page


def axis(page, chart: str) -> list[str]:
    return page.evaluate(f"document.querySelector('[data-chart={chart}] [data-plot]').layout.xaxis.range.map(String)")


def test_the_first_load_is_small_and_a_chart_says_in_a_sentence_what_it_shows(page, scripts):
    total = sum(len(gzip.compress(answer.body())) for answer in scripts.values())
    assert 300_000 < total <= MOST_SCRIPT_BYTES
    expect(page.get_by_role("img", name="Hit rate and reachable")).to_have_accessible_name(
        re.compile(r"^Hit rate and reachable hit rate, .* UTC. Latest values: Hit rate")
    )


def test_zooming_one_chart_zooms_all_is_undone_and_becomes_the_pages_range(page):
    whole = axis(page, "ttft")
    page.locator("[data-chart=hit-rate]").get_by_role("button", name="Zoom in").click()
    expect(page.locator("[data-zoom-out]:not([hidden])")).to_have_count(6)
    assert axis(page, "ttft") != whole
    assert axis(page, "ttft") == axis(page, "hit-rate")

    page.locator("[data-chart=ttft]").get_by_role("button", name="Zoom out").click()
    expect(page.locator("[data-zoom-out]:not([hidden])")).to_have_count(0)

    chart = page.locator("[data-chart=hit-rate]")
    chart.get_by_role("button", name="Zoom in").click()
    chart.get_by_role("button", name="Use this range").click()
    page.wait_for_url("**from=*")
    expect(page.get_by_text("Fixed range")).to_be_visible()


def test_the_legend_hides_a_line_and_charts_follow_the_theme_which_is_kept(page):
    page.goto("/?by=replica")
    wait_for_charts(page)
    button = page.locator("[data-chart=hit-rate]").get_by_role("button", name="gpu-3")
    button.click()
    expect(button).to_have_attribute("aria-pressed", "false")
    shown = (
        "document.querySelector('[data-chart=hit-rate] [data-plot]').data.find((line) => line.name === 'gpu-3').visible"
    )
    assert page.evaluate(shown) is False

    colour = "document.querySelector('.js-plotly-plot').layout.font.color"
    light = page.evaluate(colour)
    page.get_by_role("button", name="Dark").click()
    eventually(page, f"{colour} !== '{light}'")
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def test_figures_follow_what_is_measured_without_a_reload_unless_they_are_paused(page):
    page.keyboard.press("p")
    expect(page.locator("[data-live-text]")).to_have_text("Paused")
    now = timezone.now()
    Reading.objects.update(hits=0, external_hits=None)
    ScrapeState.objects.update(at=now, ok_at=now)
    expect(page.locator("#tiles .value").first).not_to_have_text("0.0 %")

    page.get_by_role("button", name="Resume").click()
    expect(page.locator("[data-live-text]")).to_have_text("Live")
    expect(page.locator("#tiles .value").first).to_have_text("0.0 %")
