"""Telemetry knows every reason that the router records."""

from routing.types import Reason
from telemetry.metrics.router import AWAY_FOR_LOAD, NO_HOME

HOME = {"affinity", "hot", "hit", "cold", "no_key"}


def test_every_reason_is_away_for_load_at_home_or_without_one():
    assert {str(reason) for reason in Reason} == HOME | AWAY_FOR_LOAD | (NO_HOME - {""})
    assert not AWAY_FOR_LOAD & NO_HOME
