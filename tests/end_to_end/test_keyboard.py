"""Keyboard only: sign in, find a replica, its charts and tables, an alert, a silence; no focus trap."""

import re

import pytest
from playwright.sync_api import expect

from telemetry.models import Silence
from tests.end_to_end.keyboard import FOCUSED, hold_still, tab_to, tabs_to_the_end
from tests.end_to_end.looking import drawn


def test_from_signing_in_to_the_figures_of_a_replica(site, full, complaints):
    page = site.new_context(base_url=site.url, viewport={"width": 1280, "height": 800}).new_page()
    page.goto("/routers/")
    complaints.listen(page)
    tab_to(page, "Username")
    page.keyboard.type("olga")
    tab_to(page, "Password")
    page.keyboard.type("a long enough password")
    page.keyboard.press("Enter")
    page.wait_for_url(f"{site.url}/routers/")  # whole: a heading is there before the scripts that hear keys are
    expect(page.get_by_role("heading", name="Routers")).to_be_visible()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the first stop leads past the rail
    assert page.evaluate("document.activeElement.id") == "main"

    page.keyboard.press("/")
    page.keyboard.type("gpu-7")
    expect(page.locator("#search-found a")).to_have_count(1)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url("**/replicas/gpu-7/")
    tab_to(page, "last 1h")
    page.keyboard.press("Enter")
    page.wait_for_url("**range=1h")
    drawn(page)

    tab_to(page, "Zoom in")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("zoom="))
    page.keyboard.press("t")
    page.keyboard.press("z")
    expect(page.locator("[data-zoom-out]:not([hidden])")).to_have_count(0)
    tab_to(page, "Show as Table")
    page.keyboard.press("Enter")
    expect(page.locator("[data-table]:not([hidden]) table")).to_have_count(1)
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keyboard")).to_be_visible()
    tab_to(page, "Close", most=3)
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_an_alert_is_acknowledged_and_silenced(site, full, complaints):
    page = site.open(viewport={"width": 1280, "height": 800})
    complaints.listen(page)
    page.goto("/fleet/")
    page.keyboard.type("ga")
    page.wait_for_url("**/alerts/")
    tab_to(page, "Investigate")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"/alerts/\d+/$"))
    tab_to(page, "Note")
    page.keyboard.type("a replica is being added")
    tab_to(page, "Acknowledge")
    page.keyboard.press("Enter")
    expect(page.locator(".page").get_by_text("Acknowledged by olga")).to_be_visible()
    tab_to(page, "Silence")
    page.keyboard.press("Enter")
    page.wait_for_url("**/silences/new/**")
    tab_to(page, "Reason")
    page.keyboard.type("a replica is being added")
    tab_to(page, "Show matching alerts")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="1 current alert matches")).to_be_visible()
    tab_to(page, "Create silence")
    page.keyboard.press("Enter")
    page.wait_for_url("**/alerts/silences/")

    assert Silence.objects.get().comment == "a replica is being added"


@pytest.mark.parametrize("width", [360, 1280])
def test_no_page_keeps_the_focus_and_each_stop_shows_it(site, full, width):
    page = site.open(viewport={"width": width, "height": 800})
    for path in (
        "/",
        "/?pool=chat",
        "/alerts/",
        "/events/",
        "/fleet/",
        f"/policies/{full.policies.get(group=None).pk}/edit/",
    ):
        page.goto(path)
        drawn(page)
        hold_still(page)
        names = tabs_to_the_end(page)
        assert names[0] == "Skip to main content"
        assert len(names) > 25


REFRESHED = """() => new Promise((done) => {
    const live = document.querySelector("#live");
    document.addEventListener("htmx:after:swap", () => done(live.contains(document.activeElement)), { once: true });
    live.dispatchEvent(new CustomEvent("refresh"));
})"""


def test_a_refresh_takes_the_focus_from_nobody(site, full, complaints):
    page = site.open(viewport={"width": 360, "height": 800})
    complaints.listen(page)
    page.goto("/?pool=chat")
    drawn(page)
    page.locator("#live").get_by_role("link").last.focus()
    before = page.evaluate(FOCUSED)
    assert before["name"]
    for _ in range(3):
        assert page.evaluate(REFRESHED)
        assert page.evaluate(FOCUSED) == before
