"""A ladder, said in one sentence."""

import pytest

from telemetry.lab.ladder import LOSS_TEXTS, LOSSES, Ladder, doubts, sentence


def ladder(*terms: float | None, **known: object) -> Ladder:
    """One of 100 tokens and many requests."""
    return Ladder(100.0, *terms, requests=1000, sample_ratio=1.0, **{"reported_ratio": 1.0, **known})


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        ((71, 62, 62, 56, 52, 52), "Of 71 points reachable you get 52: 9 lost to capacity, 6 to spreading, 4 to place"),
        ((71, 71, 71, 71, 71, 60), "Of 71 points reachable you get 60: 11 lost to stale caches."),
        ((71, 71, 71, 71, 71, 71), "Of 71 points reachable you get 71: nothing to speak of is lost on the way."),
        ((71, 60, 60, 60, 50, None), "Of 71 points reachable you should get 50, though no answer says how much"),
        ((71, None, None, None, None, 50), "Of 71 points reachable you get 50; what the rest is lost to is not known."),
        ((71, None, None, None, None, None), "Of 71 points reachable, how much you get is not known"),
    ],
)
def test_a_ladder_in_a_sentence(terms, said):
    reason = "" if terms[1] else "r1 has not told"
    assert sentence(ladder(*terms, reason=reason)).startswith(said)


def test_every_loss_has_its_words():
    assert set(LOSS_TEXTS) == set(LOSSES.values())


def test_what_makes_it_inexact_is_said():
    assert doubts(ladder(71, 62, 62, 56, 52, 52)) == []
    few = Ladder(100.0, 71, 62, 62, 56, 52, 60, 12, 0.25, 0.5, 1.0)
    told = " ".join(doubts(few))
    for words in ("Only 12 requests", "One block hash in 4", "2.0 points", "50 %", "8 points more"):
        assert words in told
    assert "No answer reported" in " ".join(doubts(ladder(71, 62, 62, 56, 52, None, reported_ratio=0.0)))
