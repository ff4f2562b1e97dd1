"""``make run`` with each process killed in turn: scraping, evaluation and pushes resume within seconds."""

import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.live_stack import LiveStack, slowdown
from tests.fakes.fake_webhook_receiver import receiving

pytestmark = pytest.mark.timeout(300)

BACK_WITHIN_S = 15.0
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
        draft = {"settings": {"strategy": "prefix_hash", "load_factor": 1.5 + self.published % 7 / 4}}
        return (
            self.rest.put("policies/default/draft", json=draft).is_success
            and self.rest.post("policies/default/publish", json={"reason": "a try"}).is_success
        )

    def publish_once(self) -> None:
        """Publish, retrying while the control plane rejects it."""
        self.published += 1
        self.stack.until(self.publish, BACK_WITHIN_S * slowdown(), "the control plane to publish")

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
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    stack = LiveStack(tmp_path_factory.mktemp("stack"), WARMPATH_SCRAPE_INTERVAL_S="2", WARMPATH_DEMO_REPLICAS="2")
    try:
        stack.start(within_s=180)
        with stack.rest() as rest:
            stand = Stand(stack, rest)
            stack.until(lambda: stand.works(time.monotonic() - 10), 60, "the first scrape and evaluation")
            yield stand
    finally:
        stack.kill()


@pytest.mark.parametrize("name", PROCESSES)
def test_scraping_evaluation_and_pushes_are_back_soon_after_a_kill(stand, name):
    before = stand.pids(name)
    assert before, f"no process looks like {PROCESSES[name]}"
    killed, allowed_s = time.monotonic(), BACK_WITHIN_S * slowdown()
    os.kill(min(before), signal.SIGKILL)

    stand.publish_once()
    stand.stack.until(lambda: stand.works(killed) and stand.in_sync(), allowed_s, "scraping, evaluation and the push")

    assert time.monotonic() - killed < allowed_s * max(1.0, slowdown())
    if name != "replica":  # a stand-in that was killed stays away for 20 s, for operators to see
        stand.stack.until(lambda: stand.pids(name) - before, allowed_s, f"another {name}")


def test_a_worker_that_hangs_is_reported_by_the_web_process(stand):
    with receiving() as receiver:
        assert stand.rest.post("channels", json={"name": "on-call", "config": {"url": receiver.url}}).is_success
        rules = {rule["kind"] for rule in stand.rest.get("alert-rules").json()["results"]}
        if "evaluator_lag" not in rules:
            rule = {"pool": "default", "name": "lag", "kind": "evaluator_lag"}
            assert stand.rest.post("alert-rules", json=rule).is_success
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


def heard(receiver) -> bool:
    """Whether a notification names the rule kind that monitors telemetry."""
    data = [one.payload["data"] for one in receiver.received if one.payload["type"] == "alert.firing"]
    return "evaluator_lag" in {alert["kind"] for one in data for alert in one.get("alerts", [one])}
