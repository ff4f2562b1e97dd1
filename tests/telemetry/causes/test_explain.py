"""Each cause is created in a simulated fleet and must be ranked first. All variations: ``make bench``."""

from __future__ import annotations

from datetime import timedelta

import pytest

from controlplane.models import Event, EventKind
from controlplane.services.events import record_event
from telemetry.causes import CauseKind
from telemetry.models import Alert
from telemetry.services.alerts.explanations import _drop_and_baseline, evidence_of, explain_drop
from telemetry.services.lab.replays import replay_pool
from tests.telemetry.breakdown_bins import PROMPT, breakdown_bin
from tests.telemetry.causes.fleet import SCRAPE_S, T0
from tests.telemetry.causes.scenarios import LONG_S, SCENARIOS, Scenario, play

pytestmark = pytest.mark.django_db
SHORT_S = 200.0  # of usual traffic
ONE_OF_EACH = {
    scenario.kind: scenario for scenario in SCENARIOS
}  # where there is one: with something else that happens as well


def test_every_cause_has_a_scenario() -> None:
    assert ONE_OF_EACH.keys() == set(CauseKind)


@pytest.mark.parametrize("scenario", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
def test_the_true_cause_is_named_first(scenario: Scenario, pool, settings, time_machine) -> None:
    settings.SCRAPE_INTERVAL_S = SCRAPE_S
    when = play(scenario, 1, pool, lambda at: time_machine.move_to(at, tick=False), SHORT_S)

    causes = explain_drop(pool, **when.as_spans())

    first = causes[0]
    assert first.kind == scenario.kind
    assert 0.25 < first.confidence <= 1
    assert first.summary.endswith(".")
    assert first.advice
    assert first.evidence["lost_tokens"] > 0.03 * 1000 * SCRAPE_S  # it was a drop indeed
    assert [it.confidence for it in causes] == sorted((it.confidence for it in causes), reverse=True)


def test_the_breakdown_separates_workload_changes_from_small_caches(pool, settings, time_machine) -> None:
    settings.SCRAPE_INTERVAL_S = SCRAPE_S
    scenario = next(it for it in SCENARIOS if it.variation.startswith("long questions"))
    when = play(scenario, 1, pool, lambda at: time_machine.move_to(at, tick=False), LONG_S)
    assert replay_pool(pool, when.end) == 3

    first = explain_drop(pool, **when.as_spans())[0]

    assert first.kind == CauseKind.WORKLOAD_CHANGED
    assert first.evidence["baseline_reachable_ratio"] - first.evidence["reachable_ratio"] > 0.1


def test_without_data_there_are_no_causes(pool, django_assert_max_num_queries) -> None:
    hour = timedelta(hours=1)
    with django_assert_max_num_queries(18):
        assert explain_drop(pool, start=T0, end=T0 + hour, baseline_start=T0 - hour, baseline_end=T0) == []


def test_a_breakdown_bin_of_the_drop_is_not_part_of_the_baseline(pool) -> None:
    """The drop began 30 s after a bin did: that bin is of the drop, though its first requests are of before."""
    breakdown_bin(pool, T0, requests=400, reachable=0.9, delivered=400 * PROMPT * 0.4)
    onset, end = T0 + timedelta(seconds=30), T0 + timedelta(minutes=3)

    evidence = evidence_of(pool, None, (T0 - timedelta(minutes=2), onset), (onset, end))

    assert evidence.before.breakdown is None
    assert evidence.now.breakdown is not None


@pytest.mark.parametrize(
    ("detail", "baseline_min"),
    [
        ({}, (-60, 0)),
        ({"comparable_since": -20}, (-20, 0)),  # a drop before this one ended then
        ({"steady_until": -480, "comparable_since": -700}, (-540, -480)),  # an idle night before the drop
        ({"comparable_since": -1}, (-2, 0)),
    ],
)
def test_the_baseline_is_the_traffic_before_a_drop_since_anything_else_was_wrong(
    detail: dict[str, int], baseline_min: tuple[int, int]
) -> None:
    times = {name: (T0 + timedelta(minutes=minute)).isoformat() for name, minute in (detail | {"onset": 0}).items()}

    start, baseline = _drop_and_baseline(Alert(started_at=T0 + timedelta(minutes=1), detail=times))

    assert start == T0
    assert baseline == tuple(T0 + timedelta(minutes=minute) for minute in baseline_min)


@pytest.mark.parametrize("has_restarted", [True, False])
def test_a_replica_that_only_hung_is_not_said_to_have_restarted(
    has_restarted: bool, pool, settings, time_machine
) -> None:
    settings.SCRAPE_INTERVAL_S = SCRAPE_S
    when = play(ONE_OF_EACH["replica_restarted"], 1, pool, lambda at: time_machine.move_to(at, tick=False), SHORT_S)
    if not has_restarted:  # the same, as after a pause of the process
        restart = Event.objects.filter(kind="replica_restarted").last()
        down, up = (restart.at - timedelta(seconds=seconds) for seconds in (40, 0))
        for kind, at in ((EventKind.REPLICA_DOWN, down), (EventKind.REPLICA_UP, up)):
            record_event(kind, f"{restart.replica.name} {kind}.", pool=pool, replica=restart.replica, at=at)
        Event.objects.filter(kind="replica_restarted").update(kind="replica_warmed")

    first = explain_drop(pool, **when.as_spans())[0]

    assert first.kind == "replica_restarted"
    assert ("restarted with an empty cache" in first.summary) == has_restarted
    assert ("was unavailable for a while" in first.summary) == (not has_restarted)
