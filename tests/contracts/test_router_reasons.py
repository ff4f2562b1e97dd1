"""Telemetry knows every reason that the router records."""

from routing.types import Reason
from telemetry.metrics.router import NO_PREFERENCE_REASONS, OVERFLOW_REASONS

PREFERRED = {"affinity", "hit", "cold", "no_key"}


def test_every_reason_is_overflow_preferred_or_without_preference():
    assert {str(reason) for reason in Reason} == PREFERRED | OVERFLOW_REASONS | (NO_PREFERENCE_REASONS - {""})
    assert not OVERFLOW_REASONS & NO_PREFERENCE_REASONS
