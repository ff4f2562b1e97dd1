"""The frame of each page, and the search dialog: nothing is cut off at small sizes and large text, keys reach all."""

import json
from urllib.parse import urljoin

import pytest
from playwright.sync_api import expect

from controlplane.models import Replica
from tests.end_to_end.keyboard import hold_still, tab_to
from tests.end_to_end.looking import TABLES, broken, drawn

# Links and buttons of the frame that are outside the window, or smaller than they should be.
CUT = """(least) => [...document.querySelectorAll(".rail a, .top :is(a, button, summary)")]
    .filter((element) => element.checkVisibility() && !element.closest("details:not([open]) > :not(summary)"))
    .filter((element) => {
        element.scrollIntoView({ block: "nearest", inline: "nearest" }); // tabs scroll on a phone
        const box = element.getBoundingClientRect(), fixed = element.closest(".rail");
        const inside = box.left >= 0 && box.right <= innerWidth + 1 && (!fixed || box.bottom <= innerHeight + 1);
        return !inside || element.scrollWidth > element.clientWidth + 1 || box.height < least || box.width < least;
    }).map((element) => element.innerText)"""
# The room to the right of the widest form or menu of the toolbar.
ROOM = """() => Math.min(...[...document.querySelectorAll(".toolbar details")].map((details) => {
    details.open = true;
    const { right } = details.lastElementChild.getBoundingClientRect();
    details.open = false;
    return innerWidth - right;
}))"""
OVERLAPS = """() => {
    const boxes = [...document.querySelectorAll(".rail li a, .tabs a, .top-end > *, .toolbar > *")]
        .filter((element) => element.checkVisibility())
        .map((element) => [element.innerText, element.getBoundingClientRect(), element.parentElement])
        .filter(([, box, around]) => box.right <= around.getBoundingClientRect().right + 1); // tabs scroll on a phone
    const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
    return boxes.flatMap(([name, box], at) =>
        boxes.slice(at + 1).filter(([, other]) => meet(box, other)).map(([other]) => [name, other]));
}"""


def test_nothing_of_the_frame_is_cut_off(site, full):
    wrong = {}
    page = site.open()
    for path in ("/?range=45m", "/requests/?range=45m", "/channels/", "/no-such-page/"):
        page.goto(path)
        for width, height in ((1440, 900), (900, 700), (390, 844)):
            page.set_viewport_size({"width": width, "height": height})
            for text in (100, 200):
                page.evaluate(
                    "(size) => { document.documentElement.style.fontSize = `${size}%`; scrollTo(0, 0) }", text
                )
                cut = page.evaluate(CUT, 44 if width == 390 else 24)
                sideways = page.evaluate("document.documentElement.scrollWidth") - width
                if "range" in path:
                    assert page.evaluate(ROOM) >= 0, (path, width, text)
                if cut or sideways > 0 or page.evaluate(OVERLAPS):
                    wrong[path, width, text] = cut, sideways, page.evaluate(OVERLAPS)
    assert wrong == {}
    page.set_viewport_size({"width": 900, "height": 700})
    page.goto("/?wall=1")
    assert page.locator("main").bounding_box()["width"] > 800
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto("/?range=45m")  # the tabs, and below them the range, which folds
    expect(page.get_by_role("link", name="last 6h")).to_be_hidden()
    assert page.locator("main").bounding_box()["y"] <= 150
    page.get_by_text("Last 45m", exact=True).click()
    expect(page.get_by_role("link", name="last 6h")).to_be_visible()
    page.locator(".account > summary").click()
    page.get_by_role("button", name="local time").click()
    expect(page.locator("time[data-at]").first).not_to_contain_text("UTC")
    expect(page.get_by_role("navigation", name="Main").get_by_role("link")).to_have_count(6)  # on a phone


@pytest.mark.parametrize(("width", "text"), [(900, 100), (1440, 200), (390, 100)])
def test_actions_of_tables_are_in_sight_without_scrolling_sideways(site, full, width, text):
    page = site.open(viewport={"width": width, "height": 800})
    page.add_init_script(
        f"document.addEventListener('DOMContentLoaded', () => document.documentElement.style.fontSize = '{text}%')"
    )
    wrong = {}
    for path in ("/policies/", "/fleet/", "/value/", "/breakdown/", "/alerts/", "/sessions/", "/"):
        page.goto(path)
        if found := broken(page, TABLES):
            wrong[path] = found
    assert wrong == {}


def test_letters_of_charts_grow_with_the_text(site, full):
    page, heights = site.open(viewport={"width": 1440, "height": 900}), []
    for text in (100, 200):
        page.add_init_script(
            f"document.addEventListener('DOMContentLoaded', () => document.documentElement.style.fontSize = '{text}%')"
        )
        page.goto("/charts/hit-rate/")
        drawn(page)
        heights.append(page.locator(".ytick text").first.bounding_box()["height"])
    assert heights[1] > 1.8 * heights[0]


def test_each_rule_shows_its_kind(site, full):
    page = site.open(viewport={"width": 390, "height": 844})
    page.goto("/alerts/")
    second = page.locator("#rules [data-kind='Router lost']")
    assert "Router lost" in second.first.evaluate("(name) => getComputedStyle(name, '::after').content")
    page.set_viewport_size({"width": 1440, "height": 900})
    lefts = "[...document.querySelectorAll('#rules th[scope=row]')].map((name) => {"
    lefts += " const text = new Range(); text.selectNodeContents(name); return text.getBoundingClientRect().left })"
    assert len(set(page.evaluate(lefts))) == 1


def test_one_menu_is_open_and_escape_closes_it(site, full):
    page = site.open(viewport={"width": 1440, "height": 900})
    page.goto("/?range=45m")
    page.get_by_text("Custom range").click()
    page.locator(".account > summary").click()
    expect(page.locator(".popover[open]")).to_have_count(1)
    page.get_by_text("Custom range").click()
    page.get_by_label("Last").focus()
    page.keyboard.press("Escape")
    expect(page.locator(".popover[open]")).to_have_count(0)
    expect(page.locator(".range > summary")).to_be_focused()


def test_the_typed_range_stays_in_sight_and_is_carried(site, full):
    page = site.open(viewport={"width": 900, "height": 700})
    page.goto("/?range=45m")
    expect(page.locator(".toolbar [aria-current=true]", has_text="45m")).to_be_visible()
    page.get_by_role("link", name="Why").click()
    page.wait_for_url("**/breakdown/?range=45m")
    expect(page.locator(".tabs [aria-current=page]")).to_have_text("Breakdown")


@pytest.mark.parametrize("width", [390, 1280])
def test_an_action_is_found_and_opened_by_keyboard(site, full, complaints, width):
    page = site.open(viewport={"width": width, "height": 800})
    complaints.listen(page)
    page.goto("/?range=45m")
    hold_still(page)
    page.keyboard.press("/")
    expect(page.locator("#search-found kbd").first).to_be_visible()
    page.keyboard.type("drain gpu-2")
    expect(page.locator("#search-found a")).to_have_count(1)
    expect(page.locator("#search-help")).to_contain_text("1 result.")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.keyboard.press("/")
    expect(page.locator("#search-found a")).to_have_count(1)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/fleet/replicas/{Replica.objects.get(name='gpu-2').pk}/state/draining/")
    page.keyboard.press("/")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.type("dark")
    expect(page.locator("#search-found a")).to_have_text(["Dark theme"])
    page.keyboard.press("Enter")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.keyboard.press("?")
    assert page.evaluate("document.querySelector('#keys').scrollTop") == 0
    expect(page.get_by_role("heading", name="Keyboard shortcuts")).to_be_in_viewport()
    page.keyboard.press("Escape")
    tab_to(page, "Replicas")


def test_search_and_account_work_without_scripts(site, full):
    page = site.open(java_script_enabled=False)
    page.goto("/policies/?range=45m")
    page.get_by_role("link", name="Search").click()
    page.get_by_label("Search for").fill("breakdown")
    page.get_by_role("button", name="Search").click()
    expect(page.get_by_text("1 result.")).to_be_visible()
    page.locator(".account > summary").click()
    page.get_by_role("link", name="Sessions").click()
    expect(page.locator(".rail [aria-current=true]")).to_have_text("Settings")


def test_pages_can_be_installed_as_an_app(site, full):
    page = site.open()
    page.goto("/alerts/")
    manifest = page.context.new_cdp_session(page).send("Page.getAppManifest")
    assert manifest["errors"] == []
    found = json.loads(manifest["data"])
    assert page.request.get(found["start_url"]).ok
    assert {page.request.get(urljoin(manifest["url"], icon["src"])).status for icon in found["icons"]} == {200}
