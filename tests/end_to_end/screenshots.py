"""Take the README's screenshots: ``.venv/bin/python -m tests.end_to_end.screenshots``.

Runs the demo stack for about ten minutes, as the README's tour does: a bad change, which is rolled back, so that the
overview shows the hit rate fall and rise. Writes ``docs/overview-light.png`` and ``docs/overview-dark.png``. Needs
Chromium.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import httpx
from playwright.sync_api import Browser, sync_playwright

from tests.end_to_end.conftest import FLAGS, NO_BROWSER, browser_builds
from tests.end_to_end.live_stack import PASSWORD, ROOT, LiveStack

FOLDER = ROOT / "docs"
BEFORE_S = 240  # under lowest_cost
BAD_S = 120  # under random
AFTER_S = 240  # after the roll back
SIZE = {"width": 1280, "height": 860}


def publish(rest: httpx.Client, strategy: str) -> None:
    rest.put("policies/default/draft", json={"settings": {"strategy": strategy}}).raise_for_status()
    rest.post("policies/default/publish", json={"reason": "Spread the load evenly"}).raise_for_status()


def capture(browser: Browser, web: str, folder: Path) -> list[Path]:
    """Sign in and save the overview in both themes; the files."""
    files = []
    page = browser.new_context(viewport=SIZE, reduced_motion="reduce").new_page()
    page.goto(f"{web}/")
    page.get_by_label("Username").fill("admin")
    page.get_by_label("Password").fill(PASSWORD)
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Overview").wait_for()
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        page.goto(f"{web}/?range=15m")
        page.locator(".js-plotly-plot").first.wait_for()
        page.wait_for_load_state("networkidle")
        files.append(folder / f"overview-{theme}.png")
        page.screenshot(path=files[-1])
    page.context.close()
    return files


def main() -> None:
    """Start a stack of its own, take the screenshots, stop the stack."""
    program = next(iter(browser_builds()), None)
    if program is None:
        sys.exit(NO_BROWSER)
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="wpb-") as data_dir:
        stack = LiveStack(Path(data_dir))
        try:
            stack.start(within_s=180)
            time.sleep(BEFORE_S)
            with stack.rest() as rest:
                publish(rest, "random")
                time.sleep(BAD_S)
                body = {"revision": 1, "reason": "The hit rate fell"}
                rest.post("policies/default/revert", json=body).raise_for_status()
            time.sleep(AFTER_S)
            with sync_playwright() as playwright:
                for file in capture(
                    playwright.chromium.launch(executable_path=program, args=list(FLAGS)), stack.web, FOLDER
                ):
                    sys.stdout.write(f"{file.relative_to(ROOT)}\n")
            stack.interrupt()
        finally:
            stack.kill()


if __name__ == "__main__":
    main()
