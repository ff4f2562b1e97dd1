"""Telemetry knows every reason that the router records."""

from routing.types import Reason
from telemetry.metrics.router import NO_PREFERENCE_REASONS, OVERFLOW_REASONS

HOME = {"affinity", "hot", "hit", "cold", "no_key"}


def test_every_reason_is_away_for_load_at_home_or_without_one():
    assert {str(reason) for reason in Reason} == HOME | OVERFLOW_REASONS | (NO_PREFERENCE_REASONS - {""})
    assert not OVERFLOW_REASONS & NO_PREFERENCE_REASONS
