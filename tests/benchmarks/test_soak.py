"""The soak rows run at a small size, and failures lead to exit status 1."""

from __future__ import annotations

import argparse

import pytest

from routing.balancing.residency import Residency
from tests.benchmarks import soak
from tests.benchmarks.soak import config_file, event_faults, prefixes, shared_state, streams
from tests.benchmarks.soak.verdict import SLACK_KIB, Verdict
from tests.side_by_side import alone


def test_a_failed_condition_or_row_leads_to_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(verdict: Verdict, _: argparse.Namespace) -> None:
        verdict.check("clients", "3 refused", passed=False)

    def failing_row(_: Verdict, __: argparse.Namespace) -> None:
        raise RuntimeError("the router did not start")

    monkeypatch.setattr(soak, "ROWS", {"kills": row, "aborts": failing_row})
    with pytest.raises(SystemExit) as end:
        soak.main([])
    assert end.value.code == 1
    output = capsys.readouterr().out
    assert "kills: clients: 3 refused" in output
    assert "aborts: ended by: RuntimeError('the router did not start')" in output


def test_the_exit_status_is_0_if_all_conditions_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"kills": lambda verdict, _: verdict.check("clients", "none refused", passed=True)}
    monkeypatch.setattr(soak, "ROWS", row)
    soak.main([])


@pytest.mark.parametrize(("after_kib", "passed"), [(104_000, True), (106_000, False), (90_000, True)])
def test_memory_may_grow_by_five_percent(after_kib: int, passed: bool) -> None:
    verdict = Verdict("prefixes")
    verdict.check_memory(100_000, after_kib)
    assert (not verdict.failures) is passed


def test_a_small_process_may_grow_by_one_malloc_arena() -> None:
    verdict = Verdict("prefixes")
    verdict.check_memory(10_000, 10_000 + SLACK_KIB)
    assert not verdict.failures
    verdict.check_memory(10_000, 10_001 + SLACK_KIB)
    assert verdict.failures


def test_full_sets_full_sizes_except_for_explicit_options() -> None:
    options = soak.parse_options(["--full", "--only", "kills", "aborts", "--kills", "7"])
    assert (options.only, options.kills, options.aborts, options.file_kills) == (["kills", "aborts"], 7, 100_000, 1000)
    assert (options.prefixes, options.streams) == (50_000_000, 5000)
    assert soak.parse_options([]).kills < 500


async def test_killed_writers_leave_a_complete_file_from_which_a_router_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_file, "ROUTER_EVERY", 30)
    monkeypatch.setattr(config_file, "SERVES_S", 10.0)  # other tests run at the same time
    verdict = Verdict("config_file")
    await config_file.measure(verdict, 30, seed=3)
    assert verdict.failures == []


def test_memory_for_prompts_is_bounded_and_client_names_create_no_series() -> None:
    """At a small size: through every object that keeps state, with an index that a test can fill."""
    state = prefixes.RouterState(Residency(max_entries=200))
    for number in range(300):
        state.serve(number)
    series = state.series
    for number in range(300, 1500):
        state.serve(number)
    assert (len(state.residency), state.series) == (200, series)
    assert state.load_tracker.audit() == {}


async def test_concurrent_streams_are_complete() -> None:
    verdict = Verdict("streams")
    await streams.measure(verdict, 60, seconds=1.0)
    assert [failure for failure in verdict.failures if "memory" not in failure and "resident" not in failure] == []


@alone
@pytest.mark.timeout(120)
async def test_faults_of_kv_event_streams_are_not_noticed_by_clients() -> None:
    verdict = Verdict("events")
    await event_faults.measure(verdict, 8.0, seed=4)
    assert [failure for failure in verdict.failures if "resident" not in failure] == []


@alone
@pytest.mark.timeout(400)
async def test_faults_of_shared_state_are_not_noticed_by_clients() -> None:
    verdict = Verdict("sharing")
    await shared_state.measure(verdict, 1.0, seed=4)
    measured = ("resident", "all seen", "alone without", "view lost")  # these need a machine that does not stall
    assert [failure for failure in verdict.failures if not any(name in failure for name in measured)] == []
