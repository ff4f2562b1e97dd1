"""A revision is the cause of a drop only if its own requests lost tokens since it was published."""

from datetime import timedelta

import pytest

from telemetry.causes.evidence import Evidence, Period, RelatedEvent, Route, Sums
from telemetry.causes.policies import check_revision
from tests.telemetry.conftest import T0

HOUR = timedelta(hours=1)


def route(revision, requests, rate):
    return Route("chat", "r1", "p", revision, Sums(requests, 1000 * requests, rate * 1000 * requests))


def evidence(*before, ahead_s=0.0):
    """Hit rates fell from 80 % to 50 %, at which time revision 2 places everything."""
    event = RelatedEvent(T0 - timedelta(seconds=ahead_s), "policy_published", "Revision 2.", revision=2, policy="p")
    return Evidence(
        Period(T0, T0 + HOUR, routes=[route(2, 5000, 0.5)]),
        Period(T0 - HOUR, T0, routes=before),
        [event],
        T0,
    )


@pytest.mark.parametrize(
    ("before", "was_normal", "certainty"),
    [
        ([route(1, 5000, 0.8)], False, 0.85),
        ([route(1, 5000, 0.8), route(2, 300, 0.79)], True, 0.255),  # it began to fall later, with the same revision
        ([route(1, 5000, 0.8), route(2, 300, 0.72)], True, 0.255),  # a few requests, within a third of the fall
        ([route(1, 5000, 0.8), route(2, 300, 0.6)], False, 0.85),  # it fell with it
        ([route(1, 5000, 0.8), route(2, 40, 0.79)], False, 0.85),  # too few to show anything
    ],
)
def test_a_revision_that_was_normal_before_the_drop_has_low_confidence(before, was_normal, certainty):
    finding = check_revision(evidence(*before))

    assert finding.evidence["normal_before_drop"] is was_normal
    assert finding.certainty == pytest.approx(certainty)


@pytest.mark.parametrize(("rate", "is_named"), [(0.79, False), (0.6, True)])
def test_a_revision_that_was_normal_since_its_event_is_not_named(rate, is_named):
    """Published a minute before the fall: what it placed since then shows whether that is its doing."""
    finding = check_revision(evidence(route(1, 5000, 0.8), route(2, 300, rate), ahead_s=60))

    assert (finding is not None) is is_named
