"""The README's tour: its last commands as written, the alert they lead to, and the screenshots."""

import re
import struct
import subprocess
import textwrap
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser

from tests.end_to_end.live_stack import ROOT, LiveStack, slowdown
from tests.end_to_end.screenshots import SIZE, capture

pytestmark = pytest.mark.timeout(600)
FIRST_START_S = 180
PACE = 2  # the README's waits are divided by it, and so are scrapes and bins
QUICK = {"bin_s": 5, "min_requests": 20}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    """A stack that scrapes twice as often as by default."""
    running = LiveStack(tmp_path_factory.mktemp("tour"), WARMPATH_SCRAPE_INTERVAL_S="2.5")
    try:
        running.start(within_s=FIRST_START_S)
        yield running
    finally:
        running.kill()


def commands() -> str:
    """The README's shell session that publishes a bad revision."""
    sessions = re.findall(r"^ *```sh\n(.*?)^ *```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (session,) = [textwrap.dedent(one) for one in sessions if "get alerts" in one]
    return session


def drops(rest: httpx.Client) -> list[dict[str, Any]]:
    found = rest.get("alerts", params={"state": "firing"}).json()["results"]
    return [one for one in found if one["kind"] == "hit_rate_drop"]


def test_the_tour_s_drop_shows_its_alert_with_the_revision_as_its_cause(stack: LiveStack, tmp_path: Path) -> None:
    with stack.rest() as rest:
        (rule,) = [one for one in rest.get("alert-rules").json()["results"] if one["kind"] == "hit_rate_drop"]
        assert rest.patch(f"alert-rules/{rule['id']}", json={"settings": QUICK}).status_code == 200
        session = commands().replace("http://127.0.0.1:8000", stack.web)
        paced = f"sleep() {{ command sleep $(($1 / {PACE})); }}\n{session}"

        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", paced],
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
        onset_s = (datetime.fromisoformat(alert["detail"]["onset"]) - published_at).total_seconds()
        assert -15 <= onset_s <= 15 * slowdown()
        explained = stack.until(lambda: drops(rest)[0]["causes"], 60, "the causes of the drop")
        assert (explained[0]["kind"], explained[0]["evidence"]["revision"]) == ("revision", random["number"])


def test_the_screenshots_show_the_overview_in_both_themes(stack: LiveStack, chromium: Browser, tmp_path: Path) -> None:
    light, dark = (file.read_bytes() for file in capture(chromium, stack.web, tmp_path))
    assert light != dark
    for image in (light, dark):
        assert image.startswith(b"\x89PNG")
        assert struct.unpack(">II", image[16:24]) == tuple(SIZE.values())
