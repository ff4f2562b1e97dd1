"""Helpers that navigate a page by keyboard only."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

MOST_TABS = 90
FOCUSED = """() => {
    const e = document.activeElement, style = getComputedStyle(e), box = e.getBoundingClientRect();
    return {
        name: (e.labels?.[0]?.innerText ?? e.getAttribute("aria-label") ?? e.textContent ?? "")
            .replace(/\\s+/g, " ").trim(),
        rings: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2,
        inView: box.bottom > 0 && box.top < innerHeight && box.width > 0,
        nowhere: e === document.body,
    };
}"""


def tab_to(page: Page, name: str, *, most: int = MOST_TABS) -> None:
    """Press Tab until the focused element has this name; fail if its focus is not visible."""
    for _ in range(most):
        page.keyboard.press("Tab")
        focused = page.evaluate(FOCUSED)
        if focused["name"].startswith(name):
            assert focused["rings"], f"{name} has the focus and does not show it"
            assert focused["inView"], f"{name} has the focus out of sight"
            return
    pytest.fail(f"{most} tabs did not reach {name!r}")


def hold_still(page: Page) -> None:
    """Pause a live page, because rows that arrive above the focus can scroll it out of view."""
    if page.locator("[data-live='live']").count():
        page.keyboard.press("p")
        expect(page.locator("[data-live]")).to_have_attribute("data-state", "paused")


def tabs_to_the_end(page: Page, *, most: int = 400) -> list[str]:
    """Press Tab until the focus leaves the page; the focused elements in order. A focus trap never ends."""
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    names, unseen = [], []
    for _ in range(most):
        page.keyboard.press("Tab")
        focused = page.evaluate(FOCUSED)
        if focused["nowhere"]:
            assert unseen == [], f"these have the focus and do not show it: {unseen}"
            return names
        names.append(focused["name"])
        if not (focused["rings"] and focused["inView"]):
            unseen.append(focused["name"])
    pytest.fail(f"a trap: {most} tabs did not lead out of the page; the last were {names[-6:]}")
