"""The overview in a browser: page weight, zoom, legend, table, theme, live updates."""

from __future__ import annotations

import gzip
import re

import pytest
from django.utils import timezone
from playwright.sync_api import expect

from telemetry.models import Reading, ScrapeState
from tests.end_to_end.looking import eventually

MOST_SCRIPT_BYTES = 450_000  # gzipped, OPERATORS 2.4


def wait_for_charts(page) -> None:
    expect(page.locator(".js-plotly-plot")).to_have_count(6)


@pytest.fixture
def page(site, full, complaints):
    page = site.open(viewport={"width": 1280, "height": 900})
    complaints.listen(page)
    page.goto("/")
    wait_for_charts(page)
    return page


def axis(page, chart: str) -> list[str]:
    return page.evaluate(f"document.querySelector('[data-chart={chart}] [data-plot]').layout.xaxis.range.map(String)")


def test_the_scripts_of_the_first_load_stay_within_their_budget(site, full):
    page, sizes = site.open(), {}
    page.on("response", lambda answer: answer.request.resource_type == "script" and sizes.update({answer.url: answer}))
    page.goto("/")
    wait_for_charts(page)

    total = sum(len(gzip.compress(answer.body())) for answer in sizes.values())
    assert 300_000 < total <= MOST_SCRIPT_BYTES


def test_a_chart_says_in_a_sentence_what_it_shows(page):
    chart = page.get_by_role("img", name="Hit rate and reachable")

    expect(chart).to_have_accessible_name(
        re.compile(r"^Hit rate and reachable hit rate, .* UTC. Latest values: Hit rate")
    )


def test_zooming_one_chart_zooms_all_and_can_be_undone(page):
    whole = axis(page, "ttft")
    page.locator("[data-chart=hit-rate]").get_by_role("button", name="Zoom in").click()
    expect(page.locator("[data-zoom-out]:not([hidden])")).to_have_count(6)
    assert axis(page, "ttft") != whole
    assert axis(page, "ttft") == axis(page, "hit-rate")

    page.locator("[data-chart=ttft]").get_by_role("button", name="Zoom out").click()
    expect(page.locator("[data-zoom-out]:not([hidden])")).to_have_count(0)


def test_a_zoom_becomes_the_pages_range(page):
    chart = page.locator("[data-chart=hit-rate]")
    chart.get_by_role("button", name="Zoom in").click()
    chart.get_by_role("button", name="Use this range").click()

    page.wait_for_url("**from=*")
    expect(page.get_by_text("Fixed range")).to_be_visible()


def test_the_legend_hides_a_line(page):
    page.goto("/?by=replica")
    wait_for_charts(page)
    button = page.locator("[data-chart=hit-rate]").get_by_role("button", name="gpu-3")
    button.click()

    expect(button).to_have_attribute("aria-pressed", "false")
    shown = (
        "document.querySelector('[data-chart=hit-rate] [data-plot]').data.find((line) => line.name === 'gpu-3').visible"
    )
    assert page.evaluate(shown) is False


def test_the_table_behind_a_chart_opens_in_place(page):
    chart = page.locator("[data-chart=hit-rate]")
    chart.get_by_role("button", name="Show as table").click()

    expect(chart.get_by_role("columnheader", name="Hit rate")).to_be_visible()


def test_the_theme_is_kept_and_charts_follow_it(page):
    colour = "document.querySelector('.js-plotly-plot').layout.font.color"
    light = page.evaluate(colour)
    page.get_by_role("button", name="Dark").click()

    eventually(page, f"{colour} !== '{light}'")
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def test_figures_follow_what_is_measured_without_a_reload(page):
    now = timezone.now()
    Reading.objects.update(hits=0, external_hits=None)
    ScrapeState.objects.update(at=now, ok_at=now)

    expect(page.locator("#tiles .value").first).to_have_text("0.0 %")


def test_paused_means_paused(page):
    page.keyboard.press("p")

    expect(page.locator("[data-live-text]")).to_have_text("Paused")
    page.get_by_role("button", name="Resume").click()
    expect(page.locator("[data-live-text]")).to_have_text("Live")


def test_the_question_mark_opens_the_help(page):
    page.keyboard.press("?")

    expect(page.get_by_role("dialog", name="Keyboard")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_without_scripts_tables_are_there_and_charts_lead_to_theirs(site, full):
    page = site.open(java_script_enabled=False)
    page.goto("/")

    expect(page.get_by_role("rowheader", name="gpu-1")).to_be_visible()
    page.locator("[data-chart=hit-rate]").get_by_role("link", name="Show as table").click()
    expect(page.get_by_role("columnheader", name="Hit rate")).to_be_visible()
