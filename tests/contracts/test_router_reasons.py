"""Telemetry knows every reason and every kind of match that the router records."""

from routing.types import MatchedBy, Reason
from telemetry.metrics.router import REASONS
from telemetry.web.decisions import MATCHES


def test_every_reason_has_its_texts_and_its_meaning_for_overflow():
    assert set(REASONS) == set(map(str, Reason)), "a row of a table in telemetry/metrics/router.py"
    assert set(MATCHES) == set(map(str, MatchedBy)), "a row of MATCHES in telemetry/web/decisions.py"
