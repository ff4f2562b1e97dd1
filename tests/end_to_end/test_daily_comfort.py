"""Daily use: a chart that fails, delayed refreshes, clocks, keyboard shortcuts, copied links, pages without
scripts.
"""

from __future__ import annotations

import re
from urllib.parse import parse_qs, urlsplit

from django.utils import timezone
from playwright.sync_api import expect

from telemetry.models import Alert, Silence
from tests.end_to_end.looking import drawn, eventually

WIDE = {"width": 1280, "height": 900}


def test_one_chart_that_fails_says_so_and_leaves_the_others(site, full):
    page, broken = site.open(viewport=WIDE), [True]
    page.clock.install()
    page.route(
        "**/charts/ttft/figure/**",
        lambda route: route.fulfill(status=500, body="") if broken[0] else route.continue_(),
    )
    page.goto("/")
    expect(page.locator(".js-plotly-plot")).to_have_count(1)
    chart, stale = page.locator("[data-chart=ttft]"), page.locator("[data-stale]:not([hidden])")
    expect(chart).to_contain_text("The chart could not be loaded: the server responded with status 500.")
    expect(page.locator("[data-live-text]")).to_have_text("Live")

    broken[0] = False
    page.clock.run_for(20_000)
    expect(page.locator(".js-plotly-plot")).to_have_count(2)
    expect(chart).not_to_contain_text("could not be loaded")

    broken[0] = True
    page.clock.run_for(20_000)
    expect(stale).to_have_count(1)
    expect(stale).to_contain_text(re.compile(r"Not up to date: .* The chart shows data from \d\d:\d\d:\d\d UTC"))
    broken[0] = False
    page.clock.run_for(20_000)
    expect(stale).to_have_count(0)


# Counts what a page asks for once it is drawn, and answers at once, so that nothing stands in line.
ASKED = """
window.asked = null;
const real = window.fetch;
window.fetch = (what, ...rest) => {
  if (!asked) return real(what, ...rest);
  asked.push(new URL(what.url ?? what, location).pathname);
  return Promise.resolve(new Response("", { status: 503 }));
};
Object.defineProperty(document, "hidden", { get: () => window.away ?? false });
"""


def test_refreshes_wait_while_nobody_looks_or_what_they_change_is_under_the_pointer(site, full):
    page = site.open(viewport=WIDE)
    page.clock.install()
    page.add_init_script(ASKED)
    page.goto("/")
    drawn(page)

    def asked_for(path: str) -> int:
        for _ in range(2):  # what was under way when something changed is over after the first
            page.evaluate("asked = []")
            page.clock.run_for(20_000)
        return page.evaluate("asked").count(path)

    chart, live = "/charts/hit-rate/figure/", "/live/"
    page.mouse.move(5, 5)
    assert asked_for(chart) >= 1
    assert asked_for(live) >= 1
    page.locator("[data-chart=hit-rate] [data-plot]").hover()
    assert asked_for(chart) == 0
    page.locator("#replicas tbody tr").first.hover()
    assert asked_for(live) == 0
    page.mouse.move(5, 5)
    assert asked_for(live) >= 1
    page.evaluate("window.away = true; document.dispatchEvent(new Event('visibilitychange'))")
    assert asked_for(live) == asked_for(chart) == 0
    page.evaluate("asked = []; window.away = false; document.dispatchEvent(new Event('visibilitychange'))")
    assert page.evaluate("asked").count(live) == 1, "at once when one comes back"


def test_times_are_told_in_the_zone_that_was_chosen_and_say_which(site, full, complaints):
    page = site.open(viewport=WIDE, timezone_id="Asia/Kolkata")
    complaints.listen(page)
    clock = "document.querySelector('[data-chart=hit-rate] [data-plot]').layout.annotations.at(-1).text"
    end = "Date.parse(document.querySelector('[data-chart=hit-rate] [data-plot]').layout.xaxis.range[1] + 'Z')"
    page.goto("/?range=20m")
    drawn(page)
    utc = page.evaluate(end)
    assert page.evaluate(clock) == "UTC"

    page.get_by_role("button", name="local time").click()
    expect(page.get_by_role("button", name="local time")).to_have_attribute("aria-pressed", "true")
    eventually(page, f"{clock} === 'GMT+5:30'")
    assert -1000 <= page.evaluate(end) - utc - 5.5 * 3_600_000 <= 60_000
    chart = page.locator("[data-chart=hit-rate]")
    chart.get_by_role("button", name="Show as table").click()
    expect(chart.get_by_role("columnheader", name="From (GMT+5:30)")).to_be_visible()
    chart.get_by_role("button", name="Zoom in").click()
    (zoom,) = parse_qs(urlsplit(page.url).query)["zoom"]
    now = timezone.now().replace(tzinfo=None).isoformat()
    assert zoom.split("~")[0] < zoom.split("~")[1] < now, "addresses hold UTC whatever is shown"

    page.goto("/alerts/silences/new/")  # remembered, on any page
    expect(page.get_by_role("button", name="local time")).to_have_attribute("aria-pressed", "true")
    page.goto("/charts/hit-rate/")
    expect(page.locator("time[data-at]").first).to_have_text(re.compile(r"GMT\+5:30$"))
    page.goto("/charts/hit-rate/?tz=utc")  # a link may say which
    expect(page.locator("time[data-at]").first).to_have_text(re.compile(r"UTC$"))


def test_every_key_is_in_the_help_and_leads_where_it_says(site, full):
    page = site.open()
    page.goto("/fleet/")
    keys = page.eval_on_selector_all("[data-go]", "links => links.map((link) => [link.dataset.go, link.pathname])")
    assert len({key for key, _ in keys}) == len(keys) == 26
    page.keyboard.press("?")
    told = page.locator("#keys dt").evaluate_all("rows => rows.map((row) => row.innerText.replaceAll(/\\s+/g, ''))")
    assert sorted(told) == sorted([*(f"g{key}" for key, _ in keys), "?", "/", "p", "tz", "tc", "tv", "Esc"])
    page.keyboard.press("Escape")
    expect(page.locator("#keys")).to_be_hidden()
    shown = set()
    for key, path in keys:
        page.keyboard.press("g")
        page.keyboard.press(key)
        page.wait_for_url(f"{site.url}{path}", wait_until="domcontentloaded")  # its scripts have run: it hears keys
        page.locator("[data-live], main h1").first.wait_for()
        assert urlsplit(page.locator(".tabs [aria-current=page]").get_attribute("href")).path == path
        shown.add(page.locator(".rail [aria-current=true]").inner_text().split()[0])
    assert shown == {"Now", "Why", "Improve", "Change", "Fleet", "Settings"}


def test_a_copied_link_brings_back_what_was_seen(site, full):
    page = site.open(viewport=WIDE)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto("/?pool=chat&range=20m")
    drawn(page)
    page.locator("[data-chart=ttft] [data-table-toggle]").click()
    page.locator("[data-chart=hit-rate]").get_by_role("button", name="Zoom in").click()
    page.locator("[data-copy-link]").click()
    expect(page.locator("[data-copy-link]")).to_have_text("Copied")
    link = page.evaluate("navigator.clipboard.readText()")
    assert {"range", "table", "zoom", "tz"} <= set(parse_qs(urlsplit(link).query))
    axis = "document.querySelector('[data-chart=ttft] [data-plot]').layout.xaxis.range.map(String)"
    seen = page.evaluate(axis)

    page.goto(link)
    drawn(page)
    assert page.evaluate(axis) == seen
    expect(page.locator("[data-chart=ttft] [data-table] table")).to_be_visible()

    page.get_by_role("button", name="Save or link").click()
    page.get_by_role("button", name="Copy").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    short = page.evaluate("navigator.clipboard.readText()")
    assert len(urlsplit(short).path) < 20
    page.goto(short)
    drawn(page)
    assert page.url == link
    assert page.evaluate(axis) == seen


def test_alerts_are_acknowledged_silenced_and_filtered_without_scripts(site, full):
    page = site.open(java_script_enabled=False)
    main = page.locator(".page")  # the status strip has buttons of its own
    page.goto("/alerts/")
    alert = Alert.objects.get()
    main.get_by_role("link", name="Investigate").click()
    main.get_by_label("Note").fill("on it")
    main.get_by_role("button", name="Acknowledge").click()
    expect(main.get_by_text("Acknowledged by olga")).to_be_visible()
    main.get_by_role("button", name="Unacknowledge").click()
    main.get_by_role("link", name="Silence", exact=True).click()
    main.get_by_label("Reason").fill("")
    main.get_by_role("button", name="Create silence").click()
    expect(page.locator(".field .error")).to_be_visible()
    main.get_by_label("Reason").fill("we move a rack")
    main.get_by_role("button", name="Show matching alerts").click()
    expect(main.get_by_role("link", name=alert.summary)).to_be_visible()
    main.get_by_role("button", name="Create silence").click()
    expect(main.get_by_role("cell", name="we move a rack", exact=True)).to_be_visible()
    main.get_by_role("button", name="Expire").click()
    assert Silence.objects.get().ends_at <= timezone.now()
    page.goto("/?sort=-hit_rate_ratio")
    expect(page.locator("#replicas").get_by_role("rowheader", name="gpu-1")).to_be_visible()
    page.get_by_role("link", name="TTFT p50").first.click()
    expect(page).to_have_url(re.compile("sort="))
    page.get_by_text("Custom range").click()
    page.get_by_label("Last").fill("45m")
    page.get_by_role("button", name="Show").first.click()
    expect(page).to_have_url(re.compile("range=45m"))
    expect(page.locator(".zone")).to_contain_text("Times are in UTC.")
    expect(page.locator("[data-note]").first).to_contain_text("Charts need JavaScript")
