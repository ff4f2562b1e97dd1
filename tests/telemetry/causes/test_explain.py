"""Each cause is made to happen in a stand-in fleet, and has to be named first. All variations: ``make bench``."""

from __future__ import annotations

from datetime import timedelta

import pytest

from telemetry.causes import CauseKind
from telemetry.services.alerts.explanations import evidence_of, explain_drop
from telemetry.services.lab.replays import replay_pool
from tests.telemetry.causes.dramas import DRAMAS, LONG_S, Drama, play
from tests.telemetry.causes.fleet import SCRAPE_S, T0
from tests.telemetry.ladder_bins import PROMPT, ladder_bin

pytestmark = pytest.mark.django_db
ONE_OF_EACH = {drama.kind: drama for drama in DRAMAS}  # where there is one: with something else that happens as well


def test_there_is_a_drama_for_every_cause() -> None:
    assert ONE_OF_EACH.keys() == set(CauseKind)


@pytest.mark.parametrize("drama", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
def test_what_happened_is_named_first(drama: Drama, pool, settings, time_machine) -> None:
    settings.SCRAPE_INTERVAL_S = SCRAPE_S
    when = play(drama, 1, pool, lambda at: time_machine.move_to(at, tick=False))

    causes = explain_drop(pool, **when.as_spans())

    first = causes[0]
    assert first.kind == drama.kind
    assert 0.25 < first.confidence <= 1
    assert first.summary.endswith(".")
    assert first.advice
    assert first.evidence["lost_tokens"] > 0.03 * 1000 * SCRAPE_S  # it was a drop indeed
    assert [it.confidence for it in causes] == sorted((it.confidence for it in causes), reverse=True)


def test_the_ladder_tells_other_traffic_from_too_little_room(pool, settings, time_machine) -> None:
    settings.SCRAPE_INTERVAL_S = SCRAPE_S
    drama = next(it for it in DRAMAS if it.variation.startswith("long questions"))
    when = play(drama, 1, pool, lambda at: time_machine.move_to(at, tick=False), LONG_S)
    assert replay_pool(pool, when.end) == 3

    first = explain_drop(pool, **when.as_spans())[0]

    assert first.kind == CauseKind.WORKLOAD_CHANGED
    assert first.evidence["usual_reachable_ratio"] - first.evidence["reachable_ratio"] > 0.1


def test_where_nothing_is_known_nothing_is_said(pool, django_assert_max_num_queries) -> None:
    hour = timedelta(hours=1)
    with django_assert_max_num_queries(16):
        assert explain_drop(pool, start=T0, end=T0 + hour, baseline_start=T0 - hour, baseline_end=T0) == []


def test_a_ladder_s_bin_that_the_drop_fills_is_not_of_the_time_before(pool) -> None:
    """The drop began 30 s after a bin did: that bin is of the drop, though its first requests are of before."""
    ladder_bin(pool, T0, requests=400, reachable=0.9, delivered=400 * PROMPT * 0.4)
    onset, end = T0 + timedelta(seconds=30), T0 + timedelta(minutes=3)

    evidence = evidence_of(pool, None, (T0 - timedelta(minutes=2), onset), (onset, end))

    assert evidence.before.ladder is None
    assert evidence.now.ladder is not None
