"""Checks a page for axe violations and layout faults at each width and theme.

A page is loaded once and resized, which costs a fraction of loading it for each combination. The next page is loaded
at the last width used, so every other page is loaded narrow. axe checks all rules once, at the widest width in light,
and for each other combination the rules whose result width or theme can change: axe takes most of the time.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

AXE = Axe().axe_script
RULES = {
    "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"],
    "preload": False,  # what it would fetch again is for rules that are not asked
    "resultTypes": ["violations"],  # of what passes nobody asks for every element
}
SIZES = {360: {"width": 360, "height": 740}, 1280: {"width": 1280, "height": 800}}
THEMES = ("light", "dark")

# Scripts that return what is wrong with a page's layout, or nothing: as it was loaded, and at each width.
AS_LOADED = {
    "the current page is out of sight in the rail": "[...document.querySelectorAll('nav [aria-current=page]')]"
    ".filter((link) => { const at = link.getBoundingClientRect(), rail = link.closest('nav').getBoundingClientRect();"
    " return at.right > Math.min(innerWidth, rail.right) + 1 || at.bottom > rail.bottom + 1 })"
    ".map((link) => link.innerText)",
}
LAYOUT = {
    "scrolls sideways": "document.documentElement.scrollWidth > document.documentElement.clientWidth",
    "table rows higher than five lines": "[...document.querySelectorAll('tbody tr')]"
    ".filter((row) => row.offsetHeight > 110).map((row) => row.innerText)",
    "the newest part of a drawing is out of sight": "[...document.querySelectorAll('.sketch-wrap')]"
    ".filter((wrap) => wrap.querySelector('svg').getBoundingClientRect().right"
    " > wrap.getBoundingClientRect().right + 1).map((wrap) => wrap.innerText)",
    "figures that are cut": "[...document.querySelectorAll('.tile .value')]"
    ".filter((value) => value.scrollWidth > value.clientWidth + 1).map((value) => value.innerText)",
}
# The rules that a theme can break, and those that a narrow page can; all others hold everywhere or nowhere.
COLOURS = ["color-contrast", "link-in-text-block"]
NARROW = ["target-size", "scrollable-region-focusable", "button-name", "link-name", "label", "aria-hidden-focus"]
RULES_AT = {360: ((THEMES[0], NARROW),), 1280: ((THEMES[1], COLOURS), (THEMES[0], None))}  # None: all rules
FITTED = """[...document.querySelectorAll(".js-plotly-plot")].every(
    (plot) => !plot.clientWidth || plot._fullLayout.width === plot.clientWidth)"""
Wrong = list[tuple[str, object]]


def violations(page: Page, rules: list[str] | None = None) -> Wrong:
    """Violations that axe reports, with up to three elements each."""
    if not page.evaluate("'axe' in window"):
        page.context.add_init_script(AXE)  # from the next page on: read once, where it takes each page anew
        page.evaluate(AXE)
    found = page.evaluate(
        "rules => axe.run(document, rules).then(results => results.violations)",
        RULES | {"runOnly": rules or RULES["runOnly"]},
    )
    return [(violation["id"], [node["target"] for node in violation["nodes"]][:3]) for violation in found]


def look(page: Page, widths: Iterable[int] = SIZES, themes: Container[str] = THEMES) -> Wrong:
    """All faults of the current page, at each width and theme."""
    wrong = broken(page, AS_LOADED)
    for width in sorted(widths, key=lambda width: width != page.viewport_size["width"]):  # as it is now comes first
        resize(page, width)
        wrong += broken(page, LAYOUT)
        for theme, rules in RULES_AT[width]:
            if theme not in themes:
                continue
            page.emulate_media(color_scheme=theme)
            wrong += [(f"{rule}, {theme}, {width}", where) for rule, where in violations(page, rules)]
    return wrong


def broken(page: Page, checks: dict[str, str]) -> Wrong:
    """Names and results of the scripts that found a fault."""
    width = page.viewport_size["width"]
    return [(f"{name}, {width}", seen) for name, script in checks.items() if (seen := page.evaluate(script))]


def resize(page: Page, width: int) -> None:
    """Set the viewport width and wait until the charts have resized."""
    page.set_viewport_size(SIZES[width])
    eventually(page, FITTED)


def drawn(page: Page) -> None:
    """Wait until all charts are drawn."""
    charts = page.locator("[data-chart]").count()
    if charts:
        expect(page.locator(".js-plotly-plot")).to_have_count(charts)
        expect(page.locator("[data-note]", has_text="Loading")).to_have_count(0)


def eventually(page: Page, expression: str, timeout_s: float = 15) -> None:
    """Poll the page; ``wait_for_function`` needs ``unsafe-eval``, which the CSP denies."""
    deadline = time.monotonic() + timeout_s
    while not page.evaluate(expression):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout_s} s for {expression}")
        page.wait_for_timeout(50)


def look_at(
    page: Page, paths: Iterable[str], widths: Iterable[int] = SIZES, themes: Container[str] = THEMES
) -> dict[str, Wrong]:
    """Visit each URL; faults by URL. A redirect is a fault, because the page was not checked."""
    found = {}
    for path in paths:
        page.goto(path, wait_until="load")
        drawn(page)
        led = [("leads elsewhere", page.url)] if not page.url.endswith(path) else []
        if wrong := [*led, *look(page, widths, themes)]:
            found[path] = wrong
    return found
