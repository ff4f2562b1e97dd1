"""The README's tour, with the times it states: charts, its commands, the alert, predictions, screenshots, roll back."""

import json
import re
import struct
import subprocess
import textwrap
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

from tests.end_to_end.keyboard import tab_to
from tests.end_to_end.live_stack import (
    BLANK_PAGE,
    BROWSER_MS,
    PASSWORD,
    ROOT,
    LiveStack,
    admin_token,
    signed_in,
    slowdown,
)
from tests.end_to_end.screenshots import SIZE, capture
from tests.pace import is_within

pytestmark = pytest.mark.timeout(600)
LINES = 12  # of the traffic generator, one each ten seconds: the time at which the tour publishes a bad change
BACK = 0.1  # within this of its baseline, the hit rate is back


def commands() -> str:
    """The README's shell session that publishes a bad revision."""
    sessions = re.findall(r"^ *```sh\n(.*?)^ *```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (session,) = [textwrap.dedent(one) for one in sessions if "get alerts" in one]
    return session


def stated_s() -> list[float]:
    """The times of the tour's steps, in seconds from its start."""
    tour = (ROOT / "README.md").read_text().partition("## Tour")[2].partition("\n## ")[0]
    return [60.0 * int(minutes) + int(seconds) for minutes, seconds in re.findall(r"\*\*(\d+):(\d\d)\*\*", tour)]


def traffic_lines(stack: LiveStack) -> int:
    return sum("requests/s" in line for line in stack.lines)


def drops(rest: httpx.Client) -> list[dict[str, Any]]:
    found = rest.get("alerts", params={"state": "firing"}).json()["results"]
    return [one for one in found if one["kind"] == "hit_rate_drop"]


def test_the_overview_shows_live_charts_within_a_minute_of_the_ready_line(stack, tab):
    drawn = ".js-plotly-plot .scatterlayer .trace"
    charts = tab.locator("[data-chart]")
    expect(charts).to_have_count(2)
    for index in range(2):
        expect(charts.nth(index).locator(drawn).first).to_be_attached(timeout=60_000)
    expect(tab.locator("#replicas tbody tr")).to_have_count(4)
    expect(tab.locator("#tiles")).to_contain_text("4 of 4", timeout=BROWSER_MS)
    tab.goto(BLANK_PAGE)


def test_the_lines_to_copy_reach_the_router(stack):
    with signed_in(stack.web) as browser:
        page = browser.get("/start/").text
    lines = [unescape(text) for text in re.findall(r"<textarea[^>]*>\n(.*?)</textarea>", page, re.DOTALL)]
    curl, openai, anthropic, *_ = lines
    assert all(stack.router in text for text in lines)
    done = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=120, check=False)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"], done.stderr
    # What these clients send: the base URL with the path of their API, and their own header for the key.
    sent = {
        f"{base_url(openai)}/chat/completions": {"Authorization": "Bearer none"},
        f"{base_url(anthropic)}/v1/messages": {"x-api-key": "none", "anthropic-version": "2023-06-01"},
    }
    model = re.search(r'model="([^"]+)"', openai)
    assert model
    body = {"model": model[1], "max_tokens": 100, "messages": [{"role": "user", "content": "Hello"}]}
    for url, headers in sent.items():
        answer = httpx.post(url, json=body, headers=headers, timeout=120, trust_env=False)
        assert answer.status_code == 200, answer.text


def base_url(lines: str) -> str:
    found = re.search(r'base_url="([^"]+)"', lines)
    assert found, lines
    return found[1]


def test_the_tour_s_drop_shows_its_alert_with_the_revision_as_its_cause(stack, tmp_path):
    stack.until(lambda: traffic_lines(stack) >= LINES, 240 * slowdown(), "two minutes of traffic")
    with stack.rest() as rest:
        assert drops(rest) == []
        session = commands().replace("http://127.0.0.1:8000", stack.web)

        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", session],
            env=stack.environment | {"XDG_CONFIG_HOME": str(tmp_path)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )

        with stack.telling():
            assert done.returncode == 0, done.stdout + done.stderr
            assert "points below its baseline" in done.stdout.splitlines()[-1], done.stdout
        (alert,) = drops(rest)
        assert alert["baseline_ratio"] - alert["value_ratio"] > 0.1
        published = rest.get("revisions", params={"policy": "default"}).json()["results"]
        random = next(one for one in published if one["settings"]["strategy"] == "random")
        published_at = datetime.fromisoformat(random["published_at"])
        _, _, changed_s, alerted_s, *_ = stated_s()
        fired_s = (datetime.fromisoformat(alert["fired_at"]) - published_at).total_seconds()
        assert is_within(fired_s, 2 * (alerted_s - changed_s)), "the README says when the alert fires"
        onset_s = (datetime.fromisoformat(alert["detail"]["onset"]) - published_at).total_seconds()
        assert -15 <= onset_s <= 15 * slowdown()

        def named() -> int | None:
            """The revision that is the likeliest cause."""
            causes = drops(rest)[0]["causes"]
            return causes[0]["evidence"].get("revision") if causes else None

        stack.until(lambda: named() == random["number"], 60 * slowdown(), "the revision as the drop's cause")


def test_a_verdict_is_a_minute_away_by_keyboard_alone(stack, chromium):
    page = chromium.new_context(viewport={"width": 1280, "height": 800}).new_page()
    page.goto(f"{stack.web}/")
    tab_to(page, "Username")
    page.keyboard.type("admin")
    tab_to(page, "Password")
    page.keyboard.type(PASSWORD)
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Overview").wait_for()
    page.wait_for_load_state("load")

    page.keyboard.type("gw")
    page.wait_for_url("**/what-if/")
    tab_to(page, "prefix_hash")
    page.keyboard.press("Space")
    tab_to(page, "Cache per replica")
    tab_to(page, "Predict")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"/what-if/\d+/$"))
    with stack.telling():
        verdict = re.compile("^(Best: |No candidate is better|Not calibrated)")
        expect(page.get_by_role("heading", name=verdict)).to_be_visible(timeout=1000 * 60 * slowdown())
    expect(page.get_by_role("row", name=re.compile("^(lowest_cost|prefix_hash)")).first).to_contain_text("%")
    page.context.close()


def test_the_command_line_and_rest_bring_the_same_prediction(stack, tmp_path):
    with signed_in(stack.web) as browser:
        token = admin_token(browser)
    command = ".venv/bin/python -m controlplane.cli --json what-if default -s strategy=lowest_cost"
    done = subprocess.run(
        command.split(),
        env=stack.environment | {"WARMPATH_URL": stack.web, "WARMPATH_TOKEN": token, "XDG_CONFIG_HOME": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120 * slowdown(),
        check=False,
    )
    with stack.telling():
        printed = json.loads(done.stdout or "null")
        assert printed, done.stderr
        assert printed["state"] == "done", printed["reason"]
    result = printed["result"]
    assert done.returncode == (0 if result["calibration"]["is_calibrated"] else 1)
    active, candidate = (row["figures"] for row in result["candidates"])
    assert candidate["hit_rate"] > active["hit_rate"] + 0.1, "lowest_cost has more hits than random"
    with stack.rest() as rest:
        assert rest.get(f"what-ifs/{printed['id']}").json()["result"] == result


def test_the_screenshots_show_the_overview_in_both_themes(stack, chromium, tmp_path):
    light, dark = (file.read_bytes() for file in capture(chromium, stack.web, tmp_path))
    assert light != dark
    for image in (light, dark):
        assert image.startswith(b"\x89PNG")
        assert struct.unpack(">II", image[16:24]) == tuple(SIZE.values())


def test_the_roll_back_brings_the_hit_rate_back_in_the_time_of_the_tour(stack):
    *_, rolled_back_s, back_s = stated_s()
    assert back_s <= 300, "a tour of five minutes"
    with stack.rest() as rest:
        (alert,) = drops(rest)
        body = {"revision": 1, "reason": "the hit rate fell"}
        assert rest.post("policies/default/revert", json=body).status_code in {200, 202}
        at = datetime.now(UTC)

        def newest() -> float | None:
            query = {"metric": "hit_rate", "from": (datetime.now(UTC) - timedelta(seconds=20)).isoformat(), "step": 20}
            line = rest.get("series", params=query).json()["series"][0]  # the reachable one follows
            return next((point["value"] for point in reversed(line["points"]) if point["value"] is not None), None)

        limit = alert["baseline_ratio"] - BACK
        stack.until(lambda: (newest() or 0.0) > limit, 120 * slowdown(), f"a hit rate above {limit:.0%}", every_s=2)
        assert is_within((datetime.now(UTC) - at).total_seconds(), 2 * (back_s - rolled_back_s))
