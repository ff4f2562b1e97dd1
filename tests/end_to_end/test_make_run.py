"""A good policy, a bad canary, killed replicas: on the shared stack, after the tour and in this order."""

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.end_to_end.live_stack import BLANK_PAGE, BROWSER_MS, LiveStack, StackFailedError, slowdown
from tests.fakes.fake_webhook_receiver import receiving

pytestmark = pytest.mark.timeout(420)

LINE_S = 10  # between two lines of the player, each about what came since the one before
PAST_LINES = 12  # of a strategy, before a canary is compared with it


@pytest.fixture(scope="module")
def rest(stack: LiveStack) -> Iterator[httpx.Client]:
    with stack.rest() as client:
        yield client


# --- what the steps ask -----------------------------------------------------------------------------------


def fleet_hit_rate(stack: LiveStack, since: float, until: float | None = None) -> tuple[float, float]:
    """Hit rate and mean TTFT in the traffic generator's log between two times."""
    lines = [entry for at, entry in player_lines(stack) if at >= since and (until is None or at < until)]
    assert lines, "the player has said nothing yet"
    return sum(hit for hit, _ttft in lines) / len(lines), sum(ttft for _hit, ttft in lines) / len(lines)


def player_lines(stack: LiveStack) -> list[tuple[float, tuple[float, float]]]:
    found = []
    for at, line in list(stack.timed_lines):
        if match := re.search(r"hit rate ([\d.]+) %, TTFT p50 ([\d.]+) s", line):
            found.append((at, (float(match[1]), float(match[2]))))
    return found


def complete(stack: LiveStack, number: int) -> int:
    """One short request without streaming."""
    body = {"messages": [{"role": "user", "content": f"question {number} " * 40}], "max_tokens": 2}
    headers = {"X-Task-Group": "chat"}
    answer = httpx.post(f"{stack.router}/v1/chat/completions", json=body, headers=headers, timeout=30, trust_env=False)
    return answer.status_code


def revision_running(rest: httpx.Client) -> tuple[int | None, bool]:
    (router,) = rest.get("routers").json()["results"]
    return router["running_number"], router["in_sync"]


# --- the steps --------------------------------------------------------------------------------------------


def test_scripts_and_styles_are_compressed_and_kept_by_the_browser(stack, tab):
    tab.goto("/")
    expect(tab.locator("[data-chart] .js-plotly-plot").first).to_be_attached(timeout=BROWSER_MS)
    loaded = tab.evaluate("performance.getEntriesByType('resource').map((each) => [each.name, each.encodedBodySize])")
    static = {url: size for url, size in loaded if "/static/" in url}

    assert sum(static.values()) < 400_000, static
    assert any("plotly" in url for url in static)
    assert any("zone" in url for url in static)  # a script that other scripts import
    for url in static:
        answer = httpx.head(url, headers={"Accept-Encoding": "gzip"}, timeout=30, trust_env=False)
        assert re.search(r"\.[0-9a-f]{12}\.\w+$", url), url
        assert "immutable" in answer.headers["Cache-Control"], url
        assert answer.headers.get("Content-Encoding") == "gzip" or int(answer.headers["Content-Length"]) < 500, url


def test_publishing_prefix_hash_in_the_browser_raises_the_hit_rate_and_lowers_ttft(stack, rest, tab):
    worse = {"settings": {"strategy": "random"}}
    assert rest.put("policies/default/draft", json=worse).status_code in {200, 201}
    change = {"reason": "to be bettered", "confirm_faulted": True}
    assert rest.post("policies/default/publish", json=change).status_code == 202
    started_at = time.monotonic() + LINE_S
    stack.until(
        lambda: len([at for at, _ in player_lines(stack) if at > started_at + LINE_S]) > 1, 120, "lines of random"
    )
    before_hit, before_ttft = fleet_hit_rate(stack, started_at + LINE_S)

    tab.goto("/policies/")
    tab.get_by_role("link", name="default").first.click()
    tab.locator("a.choice", has_text=re.compile("prefix.hash", re.IGNORECASE)).click()
    tab.get_by_role("button", name="Save draft and review").click()
    tab.get_by_label("Reason").fill("keep shared prompts warm")
    tab.get_by_label("All at once").check()
    tab.get_by_role("button", name=re.compile("Publish revision")).click()
    expect(tab.locator("#rollout")).to_contain_text("router-1")
    stack.until(lambda: revision_running(rest)[1], 20, "the router to acknowledge")
    published = time.monotonic()
    tab.goto(BLANK_PAGE)

    def better() -> bool:
        lines = [line for line in player_lines(stack) if line[0] > published + LINE_S]
        if len(lines) < 2:
            return False
        hit, ttft = fleet_hit_rate(stack, lines[-3:][0][0])
        return hit >= before_hit + 10 and ttft < before_ttft

    stack.until(better, 120, f"more than {before_hit:.0f} % hits and less than {before_ttft:.2f} s to the first token")
    tab.goto("/")
    expect(tab.locator("#events")).to_contain_text("prefix_hash", timeout=BROWSER_MS)
    expect(tab.locator("[data-chart] .js-plotly-plot .annotation").first).to_be_attached(timeout=BROWSER_MS)


@pytest.mark.timeout(780)
def test_a_bad_canary_on_half_of_the_prefixes_is_rolled_back_automatically(stack, rest, tab):
    begun = time.monotonic()

    def has_a_past() -> bool:
        return len([at for at, _ in player_lines(stack) if at > begun]) >= PAST_LINES

    stack.until(has_a_past, 240, "a past with warm caches, which the canary is compared with")
    tab.goto("/policies/")
    tab.get_by_role("link", name="prefix_hash").first.click()
    tab.locator("[data-edit]").click()
    tab.locator("a.choice[href='?strategy=random']").click()
    tab.get_by_role("button", name="Save draft and review").click()
    tab.get_by_label("Reason").fill("try random placement")
    tab.get_by_label("By share of prefixes").check()
    tab.get_by_text("Steps and analysis of a gradual rollout").click()
    for name, value in {"shares": "50", "observe_min": "1", "warm_up_s": "4", "min_requests": "30"}.items():
        tab.locator(f"[name$='{name}']").fill(value)
    for confirmation in tab.get_by_label("Publish these settings again").all():  # where an alert of the tour named them
        confirmation.check()
    tab.get_by_role("button", name=re.compile("Publish revision")).click()
    expect(tab.locator(".messages")).to_be_visible()
    rollout = rest.get("rollouts", params={"policy": "default"}).json()["results"][0]  # the newest
    tab.goto(f"/rollouts/{rollout['id']}/")
    expect(tab.get_by_role("heading", name="Canary: 50 % of prefixes")).to_be_visible()

    tab.goto(BLANK_PAGE)
    # Which prefixes the half takes in is chance; where they suffer little, the guard holds until it is sure.
    judged = list[str]()

    def is_finished() -> bool:
        answer = rest.get(f"rollouts/{rollout['id']}").json()
        judged[:] = [reading["detail"] for reading in answer["readings"]]
        return answer["finished_at"] is not None

    try:
        stack.until(is_finished, 400, "the guard to take it back", every_s=2)
    except StackFailedError as error:
        error.add_note("\n".join(judged))
        raise

    ended = rest.get(f"rollouts/{rollout['id']}").json()
    assert (ended["state"], ended["history"][-1]["by"]) == ("rolled_back", None)
    assert any(reading["verdict"] == "failed" for reading in ended["history"][-1]["evidence"])
    assert rest.get("policies/default").json()["live"]["settings"]["strategy"] == "prefix_hash"
    tab.goto(f"/rollouts/{rollout['id']}/")
    expect(tab.get_by_text("Rolled back automatically:")).to_be_visible()
    expect(tab.locator("table").first).to_contain_text("failed")
    tab.goto(BLANK_PAGE)


def test_killing_replicas_fails_no_request_alerts_once_for_each_and_not_of_their_cold_return(stack, rest, tab):
    rules = {rule["kind"]: rule["id"] for rule in rest.get("alert-rules").json()["results"]}
    quick = {
        "replica_down": {"silent_s": 10, "keep_firing_s": 10},
        "hit_rate_drop": {
            "baseline_s": 600, "drop_points": 15, "min_requests": 20, "for_s": 0, "keep_firing_s": 5
        },
    }  # fmt: skip
    for kind, settings in quick.items():
        assert rest.patch(f"alert-rules/{rules[kind]}", json={"settings": settings}).status_code == 200
    names = {replica["name"] for replica in rest.get("replicas").json()["results"]}
    assert len(names) == 4
    rolled_back_at = datetime.now(UTC) + timedelta(seconds=20)
    stack.until(lambda: judged_well(rest, rules["hit_rate_drop"], rolled_back_at), 200, "a window after the canary")
    stack.until(
        lambda: not rest.get("alerts", params={"state": "firing"}).json()["results"], 60, "the canary's drop to end"
    )
    with receiving() as receiver:
        channel = rest.post("channels", json={"name": "on-call", "config": {"url": receiver.url}})
        assert channel.status_code == 201, channel.text

        kill_one_without_an_error(stack, tab)
        tab.goto(BLANK_PAGE)

        def kept_down_until_told() -> bool:
            kill_what_listens(stack)  # also what was started again meanwhile, or a slow machine misses it
            return set(told(receiver, "firing")) >= names

        stack.until(kept_down_until_told, 120, "the webhook to hear of each replica")
        stack.until(lambda: set(told(receiver, "resolved")) >= names, 120, "the webhook to hear the end of each")
        back = datetime.now(UTC)
        stack.until(lambda: judged_well(rest, rules["hit_rate_drop"], back), 200, "a hit rate of warm caches")

        assert sorted(told(receiver, "firing")) == sorted(told(receiver, "resolved")) == sorted(names)
        assert rest.delete(f"channels/{channel.json()['id']}").status_code == 204
    tab.goto("/alerts/")
    expect(tab.get_by_role("main")).to_contain_text("default")
    tab.goto(BLANK_PAGE)


def kill_one_without_an_error(stack: LiveStack, tab: Page) -> None:
    """Kill a replica during short requests: none fails, and its row shows *down* within ten seconds."""
    tab.goto("/")
    (pid,) = stack.pids(rf"replica --port {stack.replica_port}\b").values()
    statuses: list[int] = []
    done = threading.Event()

    def ask(worker: int) -> None:
        while not done.is_set() and len(statuses) < 1000:
            statuses.append(complete(stack, worker))  # the same again, or its misses would be a drop of their own

    with ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(ask, worker) for worker in range(4)]
        stack.until(lambda: len(statuses) >= 20, 30, "requests to flow")
        os.kill(pid, signal.SIGKILL)
        row = tab.locator("#replicas tbody tr", has_text=str(stack.replica_port))
        expect(row).to_contain_text("down", ignore_case=True, timeout=10_000 * slowdown())
        stack.until(lambda: len(statuses) >= 60, 30, "requests to flow on")
        done.set()
        for one in asking:
            one.result(timeout=40)
    assert set(statuses) == {200}


def kill_what_listens(stack: LiveStack) -> None:
    for pid in stack.pids(r"routing replica --port").values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


COUNTED = ("replica_down", "hit_rate_drop")


def told(receiver: Any, kind: str) -> list[str]:
    """Replicas named in notifications of a kind, with repeats; for hit-rate drops their text.

    Alerts about ejected replicas and failed requests are correct while replicas are down, and not counted.
    """
    of_kind = [one.payload["data"] for one in receiver.received if one.payload["type"] == f"alert.{kind}"]
    alerts = [alert for data in of_kind for alert in data.get("alerts", [data]) if alert["kind"] in COUNTED]
    return [alert["labels"]["replica"] if alert["kind"] == "replica_down" else alert["summary"] for alert in alerts]


def judged_well(rest: httpx.Client, rule: int, since: datetime) -> bool:
    """Whether the rule's result after ``since`` was OK."""
    found = rest.get(f"alert-rules/{rule}").json()
    return datetime.fromisoformat(found["evaluated_at"]) > since and found["verdict"].get("result") == "ok"


def test_the_router_serves_on_without_its_control_plane_also_after_its_own_restart(stack, rest):
    stack.until(lambda: complete(stack, 1) == 200, 60, "replicas to be back")
    frozen = stack.pids(r"uvicorn controlplane|celery|postgres|valkey-server|redis-server")
    assert len(frozen) >= 4
    for pid in frozen.values():
        os.kill(pid, signal.SIGSTOP)
    try:
        assert {complete(stack, number) for number in range(10)} == {200}
        (router,) = stack.pids(r"routing serve").values()
        os.kill(router, signal.SIGKILL)
        stack.until(
            lambda: stack.pids(r"routing serve").values() and complete(stack, 2) == 200, 30, "the router's return"
        )
        assert {complete(stack, number) for number in range(10)} == {200}
    finally:
        for pid in frozen.values():
            os.kill(pid, signal.SIGCONT)
    stack.until(lambda: revision_running(rest)[1], 60, "the router to be in sync again")
