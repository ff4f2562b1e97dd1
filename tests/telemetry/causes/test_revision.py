"""A revision is the cause of a drop only if its own requests lost tokens since it was published."""

from dataclasses import replace
from datetime import timedelta

import pytest

from telemetry.causes import at_most_one, rank
from telemetry.causes.evidence import Cause, Evidence, Period, RelatedEvent, RevisionFacts, Route, Sums, evidence_lines
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


def test_the_sentence_names_the_strategy_the_author_and_the_reason():
    facts = RevisionFacts("random", "admin", "try it", T0 - timedelta(seconds=30))
    finding = check_revision(replace(evidence(route(1, 5000, 0.8)), revisions={("p", 2): facts}))

    assert finding.summary == (
        "Revision 2 of policy p (random, published by admin at 11:59:30 UTC: try it) places 100 % of the tokens: hit "
        "rate 50 %."
    )


def test_confidences_add_up_to_no_more_than_one():
    """A revision and a prompt change that each explain nearly everything."""
    causes = rank(replace(evidence(route(1, 5000, 0.8)), revisions={}))
    several = [Cause(kind, share, "", {}, "") for kind, share in (("a", 0.84), ("b", 0.112), ("c", 0.069))]

    assert [cause.confidence for cause in causes] == [0.85]
    assert [cause.confidence for cause in at_most_one(several)] == [0.82, 0.11, 0.07]
    assert [cause.confidence for cause in at_most_one(several[:2])] == [0.84, 0.11]


def test_evidence_is_told_in_sentences():
    facts = RevisionFacts("random", "admin", "try it", T0)
    (cause,) = rank(replace(evidence(route(1, 5000, 0.8)), revisions={("p", 2): facts}))

    assert evidence_lines(cause.as_json()) == [
        "Explains 1,500,000 of 1,500,000 lost tokens (100 %).",
        "Revision 2 of policy p, strategy random.",
        "Published by admin at 2031-03-04 12:00:00 UTC: try it.",
        "The requests of its task groups had a hit rate of 80 % in the hour before the drop.",
        "Share of the tokens now: 100 %.",
        "Revision 2.",
    ]
    assert evidence_lines(
        {"kind": "capacity", "evidence": {"gap_ratio": 0.37, "baseline_gap_ratio": 0.0, "new": 3}}
    ) == [
        "Evicted before it was used again: 37 %, 0 % before.",
        "New: 3.",
    ]
