"""Several workers, each with a beat, some with a clock that is an hour off."""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.conftest import wait_until
from tests.fakes.fake_router import FakeRouter
from tests.reliability import skewed
from tests.reliability.stand import ManagedProcess, Stand, soon

HOUR_S = 3600
LOST = """
    select count(*) from controlplane_event event join controlplane_router router on router.id = event.router_id
    where event.kind = 'router_lost' and router.name = %s
"""
SKEWED = Path(skewed.__file__)


@pytest.fixture(scope="module")
def log_start(stand: Stand) -> int:
    """Log length of the stand's worker before the test."""
    return len(stand.worker.lines)


@pytest.fixture(scope="module")
def workers(stand: Stand, log_start: int) -> Iterator[list[ManagedProcess]]:
    """Three more workers: one with the right clock, one ahead, one behind."""
    right = stand.another_worker("second")
    ahead, behind = (
        stand.another_worker(name, sys.executable, str(SKEWED), str(skew))
        for name, skew in (("ahead", HOUR_S), ("behind", -HOUR_S))
    )
    started = [right, ahead, behind]
    for worker in started:
        worker.start()
    yield started
    for worker in started:
        worker.kill()


def test_each_transition_is_one_row_and_one_notification(workers, fleet):
    for _ in range(2):  # one fires, one resolves
        fleet.change_hit_rate()
        fleet.until_received()
    fleet.until_delivered()
    assert fleet.received == fleet.transitions == fleet.expected
    assert fleet.notifications == len(fleet.expected)


def test_each_configuration_is_pushed_once_and_no_router_counts_as_lost(stand, workers, rest, monkeypatch):
    token = (stand.folder / "data" / "secrets" / "router_admin_token").read_text()
    monkeypatch.setattr("tests.fakes.fake_router.TOKEN", token)
    headers = {"Authorization": f"Bearer {token}"}
    with FakeRouter("heard-of") as router, httpx.Client(base_url=stand.url, headers=headers, trust_env=False) as client:

        def heartbeat() -> int:
            return client.post("/api/v1/routers/announce", json=router.announcement()).status_code

        assert heartbeat() == 200
        for number in range(4):
            created = rest.post("pools", json={"name": f"pool-{number}", "models": [f"model-{number}"]})
            assert created.status_code == 201, created.text
            newest = stand.query("select max(number) from controlplane_configsnapshot")
            soon(lambda number=newest: router.revision == number, 15, f"configuration {newest}")
            assert heartbeat() == 200
        for _ in range(5):  # of one worker or another, each after its pushes
            stand.until_ticks_resume(30)
    assert set(Counter(router.pushes).values()) == {1}
    assert stand.query(LOST, "heard-of") == 0


def test_a_worker_with_a_wrong_clock_logs_it_once_and_does_no_work(stand, log_start, workers):
    right, ahead, behind = workers
    wait_until(lambda: ahead.log_lines("clock is wrong") and behind.log_lines("clock is wrong"), 60, "both to log it")
    assert len(ahead.log_lines(r"clock is wrong \(\+3[56]\d\d s")) == 1
    assert len(behind.log_lines(r"clock is wrong \(-3[56]\d\d s")) == 1
    assert stand.worker.log_lines("Traceback|Error:", since=log_start) == []
    assert [line for worker in workers for line in worker.log_lines("Traceback|Error:")] == []
    assert right.log_lines("clock is wrong") == []
