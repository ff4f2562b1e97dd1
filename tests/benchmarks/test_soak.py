"""The soak rows run at a small size, and failures lead to exit status 1."""

from __future__ import annotations

import argparse

import pytest

from routing.balancing.residency import Residency
from tests.benchmarks import soak
from tests.benchmarks.soak import config_file, prefixes, streams
from tests.benchmarks.soak.verdict import SLACK_KIB, Verdict


def test_what_is_wrong_ends_the_whole_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(verdict: Verdict, _: argparse.Namespace) -> None:
        verdict.holds("clients", "3 refused", well=False)

    def broken(_: Verdict, __: argparse.Namespace) -> None:
        raise RuntimeError("the router did not start")

    monkeypatch.setattr(soak, "ROWS", {"R6": row, "R9": broken})
    with pytest.raises(SystemExit) as end:
        soak.main([])
    assert end.value.code == 1
    said = capsys.readouterr().out
    assert "R6: clients: 3 refused" in said
    assert "R9: ended by: RuntimeError('the router did not start')" in said


def test_what_is_well_ends_it_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "ROWS", {"R6": lambda verdict, _: verdict.holds("clients", "none refused", well=True)})
    soak.main([])


@pytest.mark.parametrize(("after_kib", "well"), [(104_000, True), (106_000, False), (90_000, True)])
def test_memory_may_drift_by_a_twentieth(after_kib: int, well: bool) -> None:
    verdict = Verdict("R21")
    verdict.memory(100_000, after_kib)
    assert (not verdict.wrong) is well


def test_little_memory_may_grow_by_an_arena() -> None:
    verdict = Verdict("R21")
    verdict.memory(10_000, 10_000 + SLACK_KIB)
    assert not verdict.wrong
    verdict.memory(10_000, 10_001 + SLACK_KIB)
    assert verdict.wrong


def test_full_sets_the_goals_own_figures_but_for_those_that_are_given() -> None:
    given = soak.parsed(["--full", "--only", "R6", "R9", "--kills", "7"])
    assert (given.only, given.kills, given.aborts, given.file_kills) == (["R6", "R9"], 7, 100_000, 1000)
    assert (given.prefixes, given.streams) == (50_000_000, 5000)
    assert soak.parsed([]).kills < 500


async def test_killed_writers_leave_a_whole_file_and_a_router_serves_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_file, "EVERY", 30)
    monkeypatch.setattr(config_file, "SERVES_S", 10.0)  # here other tests run beside it
    verdict = Verdict("R2")
    await config_file.measure(verdict, 30, seed=3)
    assert verdict.wrong == []


def test_what_a_router_keeps_of_prompts_is_bounded_and_says_no_name_of_a_clients() -> None:
    """R21 in short: through all that keeps anything, with an index of a size that a test can fill."""
    kept = prefixes.Kept(Residency(max_entries=200))
    for number in range(300):
        kept.take(number)
    series = kept.series
    for number in range(300, 1500):
        kept.take(number)
    assert (len(kept.residency), kept.series) == (200, series)
    assert kept.book.audit() == {}


async def test_streams_at_once_are_whole() -> None:
    verdict = Verdict("streams")
    await streams.measure(verdict, 60, seconds=1.0)
    assert [wrong for wrong in verdict.wrong if "memory" not in wrong and "resident" not in wrong] == []
