"""Texts of the breakdown."""

import pytest

from telemetry.lab.breakdown import LOSS_TEXTS, LOSSES, Breakdown, caveats, summary


def breakdown(*terms: float | None, **fields: object) -> Breakdown:
    """A breakdown of 100 prompt tokens and 1,000 requests."""
    return Breakdown(100.0, *terms, requests=1000, sample_ratio=1.0, **{"reported_ratio": 1.0, **fields})


@pytest.mark.parametrize(
    ("terms", "beginning"),
    [
        (
            (71, 62, 62, 56, 52, 52),
            "Hit rate 52 % of 71 % reachable: 9 points lost to capacity, 6 to spreading, 4 to place",
        ),
        ((71, 71, 71, 71, 71, 60), "Hit rate 60 % of 71 % reachable: 11 points lost to stale caches."),
        ((71, 71, 71, 71, 71, 71), "Hit rate 71 % of 71 % reachable: no significant loss."),
        ((71, 60, 60, 60, 50, None), "Predicted hit rate 50 % of 71 % reachable (no"),
        ((71, None, None, None, None, 50), "Hit rate 50 % of 71 % reachable; the causes of the rest are unknown."),
        ((71, None, None, None, None, None), "Hit rate unknown of 71 % reachable"),
    ],
)
def test_the_summary_of_a_breakdown(terms, beginning):
    reason = "" if terms[1] else "the cache size of r1 is unknown"
    assert summary(breakdown(*terms, reason=reason)).startswith(beginning)


def test_every_loss_has_texts():
    assert set(LOSS_TEXTS) == set(LOSSES.values())


def test_caveats_name_what_limits_accuracy():
    assert caveats(breakdown(71, 62, 62, 56, 52, 52)) == []
    uncertain = Breakdown(100.0, 71, 62, 62, 56, 52, 60, 12, 0.25, 0.5, 1.0)
    text = " ".join(caveats(uncertain))
    for expected in ("Only 12 requests", "1 of 4 block hashes", "2.0 points", "50 %", "8 points more"):
        assert expected in text
    assert "No response reports" in " ".join(caveats(breakdown(71, 62, 62, 56, 52, None, reported_ratio=0.0)))
