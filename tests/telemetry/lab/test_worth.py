"""Whether prefix routing is worth it: verdicts by reachable hit rate, by what round robin loses, and by cache size."""

from __future__ import annotations

import pytest

from telemetry.lab.breakdown import Sums
from telemetry.lab.cache_grid import Placements, WorkingSet
from telemetry.lab.worth import Caches, CacheVerdict, RoutingVerdict, assess_caches, assess_routing

PROMPT = 1000.0
PLAIN, BORDERLINE, WORTH = RoutingVerdict


def sums(reachable: float, requests: int = 2000, spread: float = 0.0) -> Sums:
    """Equal prompts, of which ``reachable`` (0 to 1) could be reused: of half of them ``spread`` more, else less."""
    low, high = (PROMPT * (reachable + sign * spread) for sign in (-1, 1))
    return Sums(
        requests=requests,
        prompt_tokens=requests * PROMPT,
        reachable=requests * PROMPT * reachable,
        prompt_squares=requests * PROMPT**2,
        reachable_squares=requests / 2 * (low**2 + high**2),
        reachable_products=requests * PROMPT**2 * reachable,
    )


def caches(round_robin: float, by_prefix: float, error: float = 0.005, replicas: int = 4) -> Caches:
    return Caches(Placements(1600, round_robin, by_prefix, error, by_prefix - round_robin), None, replicas, 100_000)


@pytest.mark.parametrize(
    ("reachable", "compared", "verdict", "summary", "page"),
    [
        (0.12, caches(0.05, 0.11), PLAIN, "at most 12 % of the prompt tokens could be reused", "prompts"),
        (0.199, caches(0.05, 0.19), PLAIN, "at most 20 %", "prompts"),
        (0.25, caches(0.1, 0.22), BORDERLINE, "would bring up to 12 points", "what-if"),
        (0.25, Caches(replicas=4, reason="r1"), BORDERLINE, "would bring is unknown", "what-if"),
        (0.30, caches(0.1, 0.29), WORTH, "round robin would lose up to 19 points", "what-if"),
        (0.71, caches(0.55, 0.68), WORTH, "lose up to 13 points", "what-if"),
        (0.71, Caches(replicas=4, reason="r1"), WORTH, "would lose is unknown", "what-if"),
        (0.71, caches(0.70, 0.705), PLAIN, "every replica caches it with round robin as well", "what-if"),
        (0.71, caches(0.69, 0.70, error=0.02), WORTH, "lose up to 1 point of", "what-if"),  # the error allows for more
        (0.71, caches(0.68, 0.68, replicas=1), PLAIN, "One replica gets every request", ""),
    ],
)
def test_the_verdict_on_routing(reachable, compared, verdict, summary, page):
    found = assess_routing(sums(reachable), compared)

    assert (found.verdict, found.page) == (verdict, page)
    assert summary in found.summary
    assert "2,000 requests" in found.reason
    assert found.needed_requests is None


@pytest.mark.parametrize(
    ("traffic", "needed", "count"),
    [(None, "100 requests", "0"), (sums(0.7, 37), "100 requests", "37"), (sums(0.5, 120, 0.9), "about 327", "120")],
)
def test_too_little_traffic_has_no_verdict_and_names_the_requests_that_it_needs(traffic, needed, count):
    found = assess_routing(traffic, caches(0.1, 0.6))

    assert found.verdict is None
    assert found.summary.startswith(f"Unknown: needs {needed}")
    assert f"{count} were replayed" in found.summary
    assert found.needed_requests >= 100


def test_the_reason_has_the_interval_and_says_if_it_includes_a_limit():
    clear, unclear = (assess_routing(sums(ratio, spread=0.3), caches(0.1, 0.2)) for ratio in (0.4, 0.31))

    assert "40 % ± 1.3 points (95 %" in clear.reason
    assert "a difference of 10 ± 1.0 points" in clear.reason
    assert "may change the verdict" not in clear.reason
    assert "includes 30 %" in unclear.reason
    assert "Placements were not compared: r1 unknown" in assess_routing(sums(0.4), Caches(reason="r1 unknown")).reason


def test_the_reason_says_if_round_robin_was_still_warming_up():
    warming = Caches(Placements(1600, 0.5, 0.7, 0.01, 0.13), None, 4, 100_000)

    assert "It was 13 points for the newer half" in assess_routing(sums(0.75), warming).reason
    assert "newer half" not in assess_routing(sums(0.75), caches(0.5, 0.7)).reason


@pytest.mark.parametrize(
    ("tokens", "verdict", "page", "is_clear"),
    [
        (80_000, CacheVerdict.ONE_REPLICA, "", True),
        (95_000, CacheVerdict.ONE_REPLICA, "", False),
        (200_000, CacheVerdict.FLEET, "what-if", True),
        (390_000, CacheVerdict.FLEET, "what-if", False),
        (900_000, CacheVerdict.THRASHING, "capacity", True),
    ],
)
def test_the_verdict_on_caches(tokens, verdict, page, is_clear):
    found = assess_caches(Caches(None, WorkingSet(tokens, 0.9 * tokens, 1.1 * tokens, 800), 4, 100_000))

    assert (found.verdict, found.page) == (verdict, page)
    assert ("may change the verdict" in found.reason) is not is_clear
    for figure in (f"{tokens:,}", "800 requests", "100,000", "400,000"):
        assert figure in found.reason
    if verdict is CacheVerdict.THRASHING:
        assert "2.2 times the cache of the whole fleet" in found.summary


def test_an_unknown_working_set_has_no_verdict_and_a_reason():
    assert assess_caches(Caches(replicas=2, replica_tokens=9)).needed_requests == 20
    found = assess_caches(Caches(replicas=2, reason="The cache size of r1 is unknown."))
    assert (found.verdict, found.reason) == (None, "The cache size of r1 is unknown.")
