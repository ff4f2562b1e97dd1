"""Looking at a page: what axe finds in either theme, and what is wrong with its layout."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

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

# Scripts that return what is wrong with a page's layout, or nothing.
LAYOUT = {
    "scrolls sideways": "document.documentElement.scrollWidth > document.documentElement.clientWidth",
    "table rows higher than five lines": "[...document.querySelectorAll('tbody tr')]"
    ".filter((row) => row.offsetHeight > 110).map((row) => row.innerText)",
    "the current page is out of sight in the rail": "[...document.querySelectorAll('nav [aria-current=page]')]"
    ".filter((link) => { const at = link.getBoundingClientRect(), rail = link.closest('nav').getBoundingClientRect();"
    " return at.right > Math.min(innerWidth, rail.right) + 1 || at.bottom > rail.bottom + 1 })"
    ".map((link) => link.innerText)",
    "charts narrower than 320 px on a phone": "[...document.querySelectorAll('.js-plotly-plot')]"
    ".filter((chart) => innerWidth < 400 && chart.offsetWidth < 320).map((chart) => chart.offsetWidth)",
    "fields that leave their panel": "[...document.querySelectorAll('.panel :is(input, select, textarea)')]"
    ".filter((field) => field.offsetWidth && field.getBoundingClientRect().right"
    " > field.closest('.panel').getBoundingClientRect().right - 4).map((field) => field.name || field.id)",
    "figures that are cut": "[...document.querySelectorAll('.tile .value')]"
    ".filter((value) => value.scrollWidth > value.clientWidth + 1).map((value) => value.innerText)",
}
COLOURS = [
    "color-contrast",
    "link-in-text-block",
]  # the rules that a theme can break; all others hold in both or in none
Wrong = list[tuple[str, object]]


def violations(page: Page, rules: list[str] | None = None) -> Wrong:
    """What axe finds by some rules, or by all: each rule, and up to three elements that break it."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE)
    found = page.evaluate(
        "rules => axe.run(document, rules).then(results => results.violations)",
        RULES | {"runOnly": rules or RULES["runOnly"]},
    )
    return [(violation["id"], [node["target"] for node in violation["nodes"]][:3]) for violation in found]


def look(page: Page) -> Wrong:
    """What is wrong with the page that is open, in the light and in the dark."""
    wrong: Wrong = [(name, seen) for name, script in LAYOUT.items() if (seen := page.evaluate(script))]
    for theme, rules in zip(THEMES, (None, COLOURS), strict=True):
        page.emulate_media(color_scheme=theme)
        wrong += [(f"{rule}, {theme}", where) for rule, where in violations(page, rules)]
    return wrong


def drawn(page: Page) -> None:
    """Wait until the page's charts are there."""
    charts = page.locator("[data-chart]").count()
    if charts:
        expect(page.locator(".js-plotly-plot")).to_have_count(charts)


def eventually(page: Page, expression: str, timeout_s: float = 10) -> None:
    """Poll the page (``wait_for_function`` would need ``unsafe-eval``, which the CSP denies)."""
    deadline = time.monotonic() + timeout_s
    while not page.evaluate(expression):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout_s} s for {expression}")
        page.wait_for_timeout(50)


def look_at(page: Page, paths: Iterable[str], after: Callable[[Page], None] = drawn) -> dict[str, Wrong]:
    """Visit each address; what is wrong with its page, by address. To lead elsewhere is wrong: it was not seen."""
    return {path: wrong for path, wrong in _visits(page, paths, after) if wrong}


def _visits(page: Page, paths: Iterable[str], after: Callable[[Page], None]) -> Iterator[tuple[str, Wrong]]:
    for path in paths:
        page.goto(path, wait_until="load")
        after(page)
        led = [("leads elsewhere", page.url)] if not page.url.endswith(path) else []
        yield path, [*led, *look(page)]
