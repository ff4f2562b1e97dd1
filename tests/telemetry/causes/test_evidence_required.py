"""An event near a drop is its cause only if the replicas or requests that it concerns lost tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from telemetry.services.alerts.explanations import explain_drop
from tests.telemetry.causes.fleet import SCRAPE_S, Fleet
from tests.telemetry.causes.scenarios import SAME_AGAIN, SCENARIOS, Decoy, Scenario, Traffic, play

pytestmark = pytest.mark.django_db
SEED = 11


def _restart_busiest(fleet: Fleet, _: Traffic) -> None:
    fleet.restart(max(fleet.replicas, key=lambda it: it.engine.statistics.hits))


def _named(kind: str, variation: str, decoy: Decoy) -> Scenario:
    scenario = next(it for it in SCENARIOS if (it.kind, it.variation, it.decoy) == (kind, variation, None))
    return replace(scenario, decoy=decoy)


REVISION_BEFORE = next(it.decoy for it in SCENARIOS if it.decoy is not None and it.decoy.words == SAME_AGAIN)
HUNG = replace(_named("replica_lost", "one of four", replace(REVISION_BEFORE, ahead_s=60)), count=2, live=120)
FLOOD = _named("overflow", "a surge", Decoy("a restart, 4.5 minutes before", _restart_busiest, 270))


@pytest.mark.parametrize(
    ("scenario", "not_named"), [(HUNG, "revision"), (FLOOD, "replica_restarted")], ids=["hung replica", "flood"]
)
def test_an_event_without_loss_is_not_named_as_a_cause(
    scenario: Scenario, not_named: str, pool, settings, time_machine
) -> None:
    settings.SCRAPE_INTERVAL_S = SCRAPE_S
    when = play(scenario, SEED, pool, lambda at: time_machine.move_to(at, tick=False))

    causes = explain_drop(pool, **when.as_spans())

    assert causes[0].kind == scenario.kind
    assert not_named not in [cause.kind for cause in causes]
