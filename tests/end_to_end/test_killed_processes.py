"""``make run`` with each process killed in turn, which resume within seconds; and stopped and started again."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from tests.compiled.package import runs_compiled
from tests.end_to_end.live_stack import FIRST_START_S, ROOT, LiveStack, signed_in, slowdown
from tests.fakes.fake_webhook_receiver import receiving
from tests.pace import is_within

pytestmark = pytest.mark.timeout(600)

BACK_WITHIN_S = 60.0  # 15 where nothing else runs
PROCESSES = {
    "web": r"uvicorn controlplane",
    "worker": r"celery .*\bworker\b",
    "beat": r"celery .*\bbeat\b",
    "router": r"routing serve",
    "postgres": r"postgres .*-D ",
    "valkey": r"(valkey|redis)-server",
    "traffic": r"routing play",
    "replica": r"routing replica",
}


@dataclass
class Stand:
    """A running stack with a REST client."""

    stack: LiveStack
    rest: httpx.Client
    published: int = 0

    def pids(self, name: str) -> set[int]:
        """Process ids of the supervisor's children by command line; Valkey overwrites its environment."""
        (supervisor,) = self.stack.pids(r"manage\.py demo").values()
        children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        return {int(pid) for pid in children if re.search(PROCESSES[name], command_of(pid))}

    def works(self, since: float) -> bool:
        """Whether replicas were scraped and rules evaluated after a time of the monotonic clock."""
        return all(age < time.monotonic() - since for age in self.ages())

    def ages(self) -> list[float]:
        text = httpx.get(f"{self.stack.web}/metrics", timeout=5, trust_env=False).text
        found = re.findall(r"^warmpath_controlplane_(?:scrape|evaluation)_age_seconds ([\d.]+)", text, re.MULTILINE)
        return [float(age) for age in found] if len(found) == 2 else [float("inf")]

    def publish(self) -> bool:
        """Publish a revision with different settings."""
        draft = {"settings": {"strategy": "prefix_hash", "slack_s": 1.5 + self.published % 7 / 4}}
        return (
            self.rest.put("policies/default/draft", json=draft).is_success
            and self.rest.post("policies/default/publish", json={"reason": "a try"}).is_success
        )

    def publish_once(self, within_s: float) -> None:
        """Publish, retrying while the control plane rejects it."""
        self.published += 1
        self.stack.until(self.publish, within_s, "the control plane to publish")

    def lags(self) -> bool:
        """Whether an alert says that evaluation is late; a channel hears of it only once."""
        alerts = self.rest.get("alerts", params={"state": "firing"}).json()["results"]
        return any(alert["kind"] == "evaluator_lag" for alert in alerts)

    def lost_routers(self) -> set[str]:
        """Severities of the alerts of lost routers that fire."""
        alerts = self.rest.get("alerts", params={"state": "firing"}).json()["results"]
        return {alert["severity"] for alert in alerts if alert["kind"] == "router_lost"}

    def in_sync(self) -> bool:
        answer = self.rest.get("routers")
        routers = answer.json()["results"] if answer.is_success else []
        return bool(routers) and all(router["in_sync"] for router in routers)


def command_of(pid: str) -> str:
    """Command line of a process; empty after its exit."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


@pytest.fixture(scope="module")
def stand(stack: LiveStack) -> Iterator[Stand]:
    with stack.rest() as rest:
        stand = Stand(stack, rest)
        stack.until(lambda: stand.works(time.monotonic() - 10), 60, "the first scrape and evaluation")
        yield stand


@pytest.mark.parametrize("name", PROCESSES)
def test_scraping_evaluation_and_pushes_are_back_soon_after_a_kill(stand, name):
    before = stand.pids(name)
    assert before, f"no process looks like {PROCESSES[name]}"
    killed, allowed_s = time.monotonic(), BACK_WITHIN_S * slowdown()
    os.kill(min(before), signal.SIGKILL)

    stand.publish_once(allowed_s)
    stand.stack.until(lambda: stand.works(killed) and stand.in_sync(), allowed_s, "scraping, evaluation and the push")

    if name != "replica":  # a stand-in that was killed stays away for 20 s, for operators to see
        stand.stack.until(lambda: stand.pids(name) - before, allowed_s, f"another {name}")


def test_a_worker_that_hangs_is_reported_by_the_web_process(stand):
    with receiving() as receiver:
        assert stand.rest.post("channels", json={"name": "absences", "config": {"url": receiver.url}}).is_success
        rules = {rule["kind"] for rule in stand.rest.get("alert-rules").json()["results"]}
        if "evaluator_lag" not in rules:
            rule = {"pool": "default", "name": "lag", "kind": "evaluator_lag"}
            assert stand.rest.post("alert-rules", json=rule).is_success
        stand.stack.until(lambda: not stand.lags(), 120 * slowdown(), "an earlier alert about absence to end")
        (worker,) = stand.pids("worker")
        os.kill(worker, signal.SIGSTOP)
        try:
            stand.stack.until(lambda: heard(receiver), 90 * slowdown(), "a message of the worker's absence")
            ready = httpx.get(f"{stand.stack.web}/readyz", timeout=10, trust_env=False)
            assert (ready.status_code, ready.json()["worker"]) == (200, "late")
        finally:
            os.kill(worker, signal.SIGCONT)
        back = time.monotonic()
        stand.stack.until(lambda: stand.works(back), 30 * slowdown(), "the worker to go on")


def test_the_only_router_that_hangs_is_shown_in_red_within_15_s_and_is_a_critical_alert(stand):
    until = stand.stack.until
    (router,) = stand.pids("router")
    with signed_in(stand.stack.web) as browser:

        def is_shown() -> bool:
            return 'id="router-outage"' in browser.get("/status/").text

        until(lambda: not is_shown(), 60 * slowdown(), "the router to be there")
        os.kill(router, signal.SIGSTOP)
        try:
            stopped = time.monotonic()
            until(is_shown, 60 * slowdown(), "the overview to show it")
            assert is_within(time.monotonic() - stopped, 15.0)
            until(lambda: "critical" in stand.lost_routers(), 90 * slowdown(), "an alert")
        finally:
            os.kill(router, signal.SIGCONT)
        until(lambda: not is_shown() and not stand.lost_routers(), 60 * slowdown(), "its end")


def heard(receiver) -> bool:
    """Whether a notification names the rule kind that monitors telemetry."""
    data = [one.payload["data"] for one in receiver.received if one.payload["type"] == "alert.firing"]
    return "evaluator_lag" in {alert["kind"] for one in data for alert in one.get("alerts", [one])}


@contextmanager
def running_replica(port: int) -> Iterator[str]:
    """A replica outside the stack for the length of a block; its base URL."""
    command = [sys.executable, "-m", "routing", "replica", "--port", str(port)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        assert f":{port}" in process.stdout.readline()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=20)
        process.stdout.close()


def write_trace(path: Path) -> Path:
    with gzip.open(path, "wt") as file:
        for number in range(200):
            row = {"timestamp": number * 200, "input_length": 1024, "output_length": 4, "hash_ids": [0, number % 7 + 1]}
            file.write(json.dumps(row) + "\n")
    return path


def is_compiled() -> bool:
    script = "import sys; sys.path.insert(0, 'deploy'); import compiled; print(compiled.is_compiled())"
    return subprocess.check_output([sys.executable, "-c", script], cwd=ROOT, text=True).strip() == "True"


def test_ctrl_c_leaves_no_process_and_the_next_start_finds_its_data_with_named_replicas_and_a_trace(stack, tmp_path):
    """The named replica is one that the fleet has; the other stand-ins are gone."""
    with stack.rest() as rest:
        policy = rest.get("policies/default").json()["live"]
    stack.interrupt()
    stack.until_gone()

    trace = write_trace(tmp_path / "trace.jsonl.gz")
    with running_replica(stack.replica_port) as url:
        again = LiveStack(stack.data_dir, WARMPATH_TRACE=str(trace), WARMPATH_REPLICAS=url)
        try:
            again.start(within_s=FIRST_START_S)
            assert not again.pids(r"routing replica")
            (router,) = again.pids(r"routing serve").values()
            assert runs_compiled(router) == is_compiled(), "the compiled router is used while it is up to date"
            again.until(lambda: any("hit rate" in line for line in again.lines), 60, "the trace to be played")
            with again.rest() as rest:
                assert rest.get("policies/default").json()["live"] == policy
                since = (datetime.now(UTC) - timedelta(minutes=30)).isoformat()
                query = {"metric": "hit_rate", "from": since, "to": datetime.now(UTC).isoformat(), "by": "replica"}
                earlier = rest.get("series", params=query).json()["series"]
            assert any(point["value"] is not None for line in earlier for point in line["points"]), earlier
            again.interrupt()
            again.until_gone()
        finally:
            again.kill()
