"""Losses by overflow and by eviction, told apart without a hit-rate breakdown."""

from datetime import timedelta

import pytest

from telemetry.causes import policies, replicas, workload
from telemetry.causes.evidence import EngineSums, Evidence, Period, Prefix, RelatedEvent, Route, Sums
from tests.telemetry.conftest import T0

HOUR = timedelta(hours=1)
TOKENS = 1_000_000.0


def side(start, spilled, *parts):
    """1,000 requests of one prompt: (replica, tokens, hit rate), of which some spilled."""
    prefixes = [Prefix("chat", 1, name, Sums(tokens / 1000, tokens, rate * tokens)) for name, tokens, rate in parts]
    cached = sum(part.sums.cached for part in prefixes)
    route = Route("chat", "r1", "p", 1, Sums(1000, TOKENS, cached, spilled=spilled))
    return Period(start, start + HOUR, routes=[route], prefixes=prefixes)


def evidence(spilled, *happenings):
    """It hit 80 % at r1; now 40 % of it goes to r2, and hits nothing there."""
    before = side(T0 - HOUR, 0, ("r1", TOKENS, 0.8))
    now = side(T0, spilled, ("r1", 600_000.0, 0.8), ("r2", 400_000.0, 0.0))
    return Evidence(now, before, happenings, T0)


def tokens(judge, seen):
    finding = judge(seen)
    return finding.tokens if finding else 0.0


@pytest.mark.parametrize(
    ("spilled", "overflow", "evicted"),
    [
        pytest.param(400, 320_000, 0, id="all of it spilled"),
        pytest.param(100, 120_000, 200_000, id="a part did, and may have been longer than most"),
        pytest.param(0, 0, 320_000, id="none did: nobody held it any more"),
    ],
)
def test_losses_at_other_replicas_are_overflow_or_eviction(spilled, overflow, evicted):
    seen = evidence(spilled)

    assert tokens(policies.check_overflow, seen) == pytest.approx(overflow)
    assert tokens(workload.check_capacity, seen) == pytest.approx(evicted)


def test_prompts_moved_by_a_restart_do_not_count_as_evicted():
    restarted = RelatedEvent(T0 - timedelta(seconds=60), "replica_restarted", "r1 restarted.", replica="r1")

    assert tokens(workload.check_capacity, evidence(0, restarted)) == 0


@pytest.mark.parametrize("expected_cached", [0.2, 0.8])
def test_what_routers_expected_to_be_cached_was_lost_at_once_and_not_evicted(expected_cached: float) -> None:
    """The hit rate of a prompt at its replica falls from 80 to 20 %."""

    def period(start, rate, predicted):
        sums = Sums(1000, TOKENS, rate * TOKENS, 0, TOKENS, predicted * TOKENS, rate * TOKENS)
        prefixes = [Prefix("chat", 1, "r1", Sums(1000, TOKENS, rate * TOKENS))]
        return Period(start, start + HOUR, routes=[Route("chat", "r1", "p", 1, sums)], prefixes=prefixes)

    seen = Evidence(period(T0, 0.2, expected_cached), period(T0 - HOUR, 0.8, 0.8), (), T0)
    was_expected = expected_cached > 0.2
    assert tokens(policies.check_stale_index, seen) == pytest.approx(600_000 if was_expected else 0)
    assert tokens(workload.check_capacity, seen) == pytest.approx(0 if was_expected else 600_000)


@pytest.mark.parametrize(("kinds", "lost"), [(["replica_restarted"], 0), (["replica_down", "replica_restarted"], 1)])
def test_a_restart_explains_what_other_replicas_lost_if_its_prompts_went_there(kinds: list[str], lost: int) -> None:
    """Only engines report. The replica hits as before, and the others hit less."""

    def period(start, of_others):
        rates = {"r1": 0.8, "r2": of_others, "r3": of_others, "r4": of_others}
        return Period(
            start, start + HOUR, engines=[EngineSums(name, TOKENS, rate * TOKENS) for name, rate in rates.items()]
        )

    events = [RelatedEvent(T0 - timedelta(seconds=60), kind, f"r1: {kind}.", replica="r1") for kind in kinds]
    explained = tokens(replicas.check_restart, Evidence(period(T0, 0.6), period(T0 - HOUR, 0.8), events, T0))

    assert (explained > 0) == bool(lost)
