"""Checks a page for axe violations and layout faults at each width and theme.

A page is loaded once and resized, which costs a fraction of loading it for each combination. The next page is loaded
at the last width and theme used, so every other page is loaded narrow. axe checks all rules once, at the widest width,
and at the other width the rules whose result it can change.

At that other width, ``make test`` asks axe about every fifth page, and ``make test-full`` about all.

The rules for colours take most of that, and their result follows from computed style alone: from the colours and the
size of a text and from what its ancestors paint behind it. They check a text of each style once per theme, whichever
page has it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.pace import some

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
# Tables of the points of a chart scroll; all others wrap or become cards, so that their actions are in sight.
TABLES = {
    "tables that scroll sideways": "[...document.querySelectorAll('.table-wrap:not(.sketch-wrap)')].filter((wrap) =>"
    " wrap.checkVisibility() && wrap.scrollWidth > wrap.clientWidth + 1 && !wrap.ariaLabel?.startsWith('Data of'))"
    ".map((wrap) => wrap.innerText.slice(0, 60))",
}
LAYOUT = {
    **TABLES,
    "scrolls sideways": "document.documentElement.scrollWidth > document.documentElement.clientWidth",
    "elements outside the viewport": "[...document.querySelectorAll('main *, .top *')].filter((element) => {"
    " const box = element.getBoundingClientRect();"
    " if (box.width < 2 || (box.right <= innerWidth + 1 && box.left >= -1)) return false;"
    " for (let over = element.parentElement; over; over = over.parentElement)"
    "  if (getComputedStyle(over).overflowX !== 'visible' && over.getBoundingClientRect().right <= innerWidth + 1)"
    "   return false;"
    " return element.checkVisibility() }).map((element) => element.outerHTML.slice(0, 90)).slice(0, 3)",
    "badges over other text": "[...document.querySelectorAll('.badge')].filter((badge) =>"
    " badge.getBoundingClientRect().right > badge.parentElement.getBoundingClientRect().right + 1"
    " && getComputedStyle(badge.parentElement).display !== 'inline').map((badge) => badge.innerText)",
    "table rows higher than five lines": "[...document.querySelectorAll('tbody tr')]"
    ".filter((row) => row.offsetHeight > 110 && getComputedStyle(row).display === 'table-row')"
    ".map((row) => row.innerText)",
    "parts of a drawing are out of sight": "[...document.querySelectorAll('.sketch :is(text, polyline)')]"
    ".filter((part) => { const box = part.getBoundingClientRect();"
    " const wrap = part.closest('.sketch-wrap').getBoundingClientRect();"
    " return box.left < wrap.left - 1 || box.right > wrap.right + 1 }).map((part) => part.textContent || 'line')",
    "the header takes more than two lines": "innerWidth < 640 && document.querySelector('.top')?.offsetHeight > 104",
    "buttons at the edge of the status strip": "[...document.querySelectorAll('.status .button')].filter((button) =>"
    " button.offsetHeight && button.getBoundingClientRect().top"
    " < button.closest('.message').getBoundingClientRect().top + 3).map((button) => button.innerText)",
    "badges wider than their text": "[...document.querySelectorAll('.badge')].filter((badge) => {"
    " const text = new Range(); text.selectNodeContents(badge);"
    " return badge.offsetHeight < 30 && badge.offsetWidth > text.getBoundingClientRect().width + 40 })"
    ".map((badge) => badge.innerText)",
    "badges of two lines": "innerWidth >= 1280 && [...document.querySelectorAll('.badge')]"
    ".filter((badge) => badge.offsetHeight > 30).map((badge) => badge.innerText)",
    "flags broken at a hyphen": "[...document.querySelectorAll('code')].filter((code) => {"
    " if (!code.innerText.startsWith('--') || code.firstChild.nodeType !== Node.TEXT_NODE) return false;"
    " const start = new Range(); start.setStart(code.firstChild, 0); start.setEnd(code.firstChild, 3);"
    " return start.getBoundingClientRect().height > 30 }).map((code) => code.innerText)",
    "figures that are cut": "[...document.querySelectorAll('.tile .value')]"
    ".filter((value) => value.scrollWidth > value.clientWidth + 1).map((value) => value.innerText)",
}
# The rules that a theme can break, and those that a narrow page can; all others hold everywhere or nowhere.
COLOURS = ["color-contrast", "link-in-text-block"]
CHECKED_STYLES: dict[str, set[str]] = {theme: set() for theme in THEMES}
# axe on texts whose style has not been checked, at most three of each: violations, and the styles with a result.
CHECK_COLOURS = """async ([rules, checked]) => {
    const known = new Set(checked), styles = new Map(), texts = new Map(), times = new Map();
    const styleOf = (element) => {
        if (!styles.has(element)) {
            const style = getComputedStyle(element);
            const own = [style.backgroundColor, style.backgroundImage, style.opacity, style.filter].join();
            const behind = element.parentElement ? styleOf(element.parentElement).layers : "";
            const paints = own !== "rgba(0, 0, 0, 0),none,1,none";
            styles.set(element, { style, layers: paints ? own + "|" + behind : behind });
        }
        return styles.get(element);
    };
    for (const element of document.querySelectorAll("body, body *")) {
        const hasText = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
        const box = hasText || element.matches("input, select, textarea") ? element.getBoundingClientRect() : null;
        if (!box || box.width <= 1) continue;
        if (!element.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
        const { style, layers } = styleOf(element), parent = styleOf(element.parentElement ?? element).style;
        const own = [style.color, style.fontSize, style.fontWeight, style.textShadow, style.textDecorationLine];
        const around = [parent.color, parent.fontWeight, parent.display, layers];
        const key = [element.tagName === "A", element.disabled, ...own, ...around].join(";");
        times.set(key, (times.get(key) ?? 0) + 1);
        if (!known.has(key) && times.get(key) <= 3) texts.set(element, key);
    }
    if (!texts.size) return [[], []];
    const options = { ...rules, elementRef: true, resultTypes: ["violations", "passes"] };
    const results = await axe.run({ include: [...texts.keys()] }, options);
    const passed = results.passes.flatMap((rule) => rule.nodes).map((node) => texts.get(node.element));
    return [results.violations.map(({ id, nodes }) => ({ id, nodes: nodes.map(({ target }) => ({ target })) })),
        [...new Set(passed)].filter(Boolean)];
}"""
NARROW = ["target-size", "scrollable-region-focusable", "button-name", "link-name", "label", "aria-hidden-focus"]
RULES_AT = {360: NARROW, 1280: None}  # None: all rules
FITTED = """[...document.querySelectorAll(".js-plotly-plot")].every(
    (plot) => !plot.clientWidth || Math.abs(plot._fullLayout.width - plot.clientWidth) < 1)"""
Wrong = list[tuple[str, object]]


def violations(page: Page, rules: list[str] | None = None) -> Wrong:
    """Violations of rules except those of colours, with up to three elements each. None: all rules."""
    if not page.evaluate("'axe' in window"):
        page.context.add_init_script(AXE)  # from the next page on: read once, where it takes each page anew
        page.evaluate(AXE)
    chosen = {"runOnly": rules} if rules else {"rules": {rule: {"enabled": False} for rule in COLOURS}}
    return named(page.evaluate("rules => axe.run(document, rules).then(found => found.violations)", RULES | chosen))


def colour_violations(page: Page, theme: str) -> Wrong:
    """Violations of the rules for colours, by texts with a style that no earlier page had."""
    page.emulate_media(color_scheme=theme)
    checked = CHECKED_STYLES[theme]
    found, passed = page.evaluate(CHECK_COLOURS, [RULES | {"runOnly": COLOURS}, sorted(checked)])
    checked.update(passed)
    return named(found)


def named(found: list[dict[str, Any]]) -> Wrong:
    return [(violation["id"], [node["target"] for node in violation["nodes"]][:3]) for violation in found]


def look(
    page: Page, widths: Iterable[int] = SIZES, themes: Iterable[str] = THEMES, *, with_narrow_rules: bool = True
) -> Wrong:
    """All faults of the current page, at each width and theme; as the page is now comes first."""
    wrong = broken(page, AS_LOADED)
    for width in sorted(widths, key=lambda width: width != page.viewport_size["width"]):
        resize(page, width)
        wrong += broken(page, LAYOUT)
        if with_narrow_rules or RULES_AT[width] is None:
            wrong += [(f"{rule}, {width}", where) for rule, where in violations(page, RULES_AT[width])]
        if width == max(SIZES):
            shown = "dark" if page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") else "light"
            for theme in sorted(themes, key=lambda theme: theme != shown):
                wrong += [(f"{rule}, {theme}", where) for rule, where in colour_violations(page, theme)]
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
    """Bring each chart into view, and wait until all are drawn."""
    charts = page.locator("[data-chart]").all()
    for chart in charts:
        chart.scroll_into_view_if_needed()
        expect(chart.locator(".js-plotly-plot")).to_have_count(1)
    if charts:
        expect(page.locator("[data-note]", has_text="Loading")).to_have_count(0)
        page.evaluate("scrollTo(0, 0)")


def eventually(page: Page, expression: str, timeout_s: float = 15) -> None:
    """Poll the page; ``wait_for_function`` needs ``unsafe-eval``, which the CSP denies."""
    deadline = time.monotonic() + timeout_s
    while not page.evaluate(expression):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout_s} s for {expression}")
        page.wait_for_timeout(50)


def look_at(
    page: Page, paths: Sequence[str], widths: Iterable[int] = SIZES, themes: Iterable[str] = THEMES
) -> dict[str, Wrong]:
    """Visit each URL; faults by URL. A redirect is a fault, because the page was not checked."""
    found = {}
    narrow = set(some(paths))
    for path in paths:
        page.goto(path, wait_until="load")
        drawn(page)
        led = [("leads elsewhere", page.url)] if not page.url.endswith(path) else []
        if wrong := [*led, *look(page, widths, themes, with_narrow_rules=path in narrow)]:
            found[path] = wrong
    return found
