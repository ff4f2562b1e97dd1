from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from routing.balancing.residency import MISSES, Residency
from tests.routing.building import names

A, B, C = names(3)
ROOMY = 1 << 20

Prompt = list[int]
prompts = st.lists(st.integers(0, 2), max_size=12)  # of two letters, so that they share openings and part anywhere


def chain(prompt: Prompt) -> list[int]:
    """Hashes that stand for a block and all before it, as a prompt's do."""
    return [hash(tuple(prompt[: end + 1])) for end in range(len(prompt))]


def held(residency: Residency, prompt: Prompt, *replicas: str) -> list[int]:
    """Blocks of a prompt that each of the replicas holds."""
    match = residency.match(chain(prompt))
    found = [residency.replica(replica) for replica in replicas]
    return [match.tokens(holding.bit, 1_000_000) // residency.block_tokens if holding else 0 for holding in found]


def filled(capacity: int = ROOMY, **bounds) -> Residency:
    residency = Residency(block_tokens=1, **{"run_tokens": 4, **bounds})
    for replica in (A, B, C):
        residency.add_replica(replica, capacity)
    return residency


def common(one: Prompt, other: Prompt) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@given(st.lists(st.tuples(st.sampled_from([A, B, C]), prompts), max_size=30), prompts)
def test_with_room_for_all_every_replica_holds_the_longest_opening_it_was_sent(sent, asked: Prompt) -> None:
    residency = filled()
    for at, (replica, prompt) in enumerate(sent):
        residency.insert(replica, chain(prompt), float(at))

    for replica in (A, B, C):
        longest = max((common(asked, prompt) for name, prompt in sent if name == replica), default=0)
        assert held(residency, asked, replica) == [longest]


@given(st.lists(st.tuples(st.sampled_from([A, B]), prompts), max_size=40), st.integers(1, 20))
def test_no_replica_holds_more_than_its_capacity_and_the_books_balance(sent, capacity: int) -> None:
    residency = filled(capacity)
    for at, (replica, prompt) in enumerate(sent):
        residency.insert(replica, chain(prompt), float(at))

        holdings = [residency.replica(name) for name in (A, B, C)]
        assert all(holding.blocks <= capacity for holding in holdings)
        assert all(holding.blocks == sum(run.length for run in holding.runs) for holding in holdings)
        assert len(residency) == sum(len(holding.runs) for holding in holdings)
        assert all(run.mask & holding.bit for holding in holdings for run in holding.runs)

    residency.forget_all_but(())
    assert (len(residency), residency.runs) == (0, 0)


@given(
    st.lists(st.tuples(st.sampled_from(["ask", "send", "send the asked"]), st.sampled_from([A, B]), prompts)),
    st.integers(2, 20),
)
@example([("send", A, [1] * 4), ("ask", A, [1] * 4), ("send", B, [1, 1]), ("send the asked", A, [])], 20)
@example([("send", A, [1] * 4), ("ask", A, [1] * 4), ("send", A, [2] * 4), ("send the asked", A, [])], 4)
def test_what_was_asked_before_changes_nothing_about_what_is_entered(steps, capacity: int) -> None:
    asked, quiet = filled(capacity, max_entries=12), filled(capacity, max_entries=12)
    latest = chain([])
    for at, (what, replica, prompt) in enumerate(steps):
        if what == "ask":
            latest = chain(prompt)
            asked.match(latest)
        else:
            entered = latest if what == "send the asked" else chain(prompt)
            asked.insert(replica, entered, float(at))
            quiet.insert(replica, list(entered), float(at))

    assert (len(asked), asked.runs) == (len(quiet), quiet.runs)
    for name in (A, B):
        one, other = asked.replica(name), quiet.replica(name)
        assert [(list(run.hashes), use.used_s) for run, use in one.runs.items()] == [
            (list(run.hashes), use.used_s) for run, use in other.runs.items()
        ]


def test_the_prompt_used_longest_ago_goes_first_and_its_tail_before_its_head() -> None:
    residency = filled(capacity=12)
    residency.insert(A, chain([1] * 8), 1.0)
    residency.insert(A, chain([2] * 8), 2.0)

    assert held(residency, [1] * 8, A) == [4]
    assert held(residency, [2] * 8, A) == [8]

    residency.insert(A, chain([1] * 4), 3.0)
    residency.insert(A, chain([3] * 4), 4.0)
    assert held(residency, [1] * 8, A) == [4]
    assert held(residency, [2] * 8, A) == [4]


def test_a_prompt_that_never_fits_leaves_its_head() -> None:
    residency = filled(capacity=8)
    residency.insert(A, chain([1] * 40), 1.0)

    assert held(residency, [1] * 40, A) == [8]


def test_a_crowded_cache_is_told_from_one_that_drops_what_nobody_asks_for_again() -> None:
    crowded, passing, roomy = filled(capacity=100), filled(capacity=100), filled()
    rng = random.Random(1)
    for at in range(1000):
        crowded.insert(A, chain([1000 + rng.randrange(30)] * 4), float(at))
        roomy.insert(A, chain([1000 + rng.randrange(30)] * 4), float(at))
        passing.insert(A, chain([1000 + at] * 4), float(at))
        passing.insert(A, chain([1] * 4), float(at))

    assert crowded.reuse.ratio > 0.5
    assert passing.reuse.ratio == roomy.reuse.ratio == 0.0


def test_whether_caches_are_crowded_is_judged_by_their_latest_turnovers() -> None:
    residency, rng = filled(capacity=100), random.Random(1)
    for at in range(1000):
        residency.insert(A, chain([rng.randrange(30)] * 4), float(at))
    before = residency.reuse.ratio
    for at in range(1000, 2000):
        residency.insert(A, chain([1000 + at] * 4), float(at))

    assert residency.match([1]).reuse_ratio < 0.05 < before


def test_what_is_not_used_is_forgotten_in_time_though_the_replica_gets_nothing_new() -> None:
    residency = filled(ttl_s=10.0)
    residency.insert(A, chain([1] * 4), 0.0)
    for at in range(14):
        residency.insert(B, chain([2] * 4), float(at))

    assert held(residency, [1] * 4, A) == [0]
    assert held(residency, [2] * 4, B) == [4]


def test_all_replicas_together_are_bounded() -> None:
    residency = filled(max_entries=50)
    for number in range(1000):
        residency.insert((A, B, C)[number % 3], chain([number] * 8), float(number))
        assert len(residency) <= 50
        assert residency.runs <= 50

    assert all(residency.replica(replica).runs for replica in (A, B, C))


def test_ever_new_prompts_leave_no_more_behind_than_the_bound() -> None:
    """R21 in short, of what grows with prompts."""
    residency, rng = Residency(block_tokens=64, max_entries=1000), random.Random(7)
    for replica in (A, B, C):
        residency.add_replica(replica)
    for number in range(60_000):
        residency.insert((A, B, C)[number % 3], [rng.getrandbits(64) for _ in range(17)], float(number) / 1000)

    assert len(residency) == residency.runs == 1000


def test_a_request_that_came_to_nothing_takes_back_what_it_brought() -> None:
    residency = filled()
    residency.insert(A, chain([1] * 4), 1.0)
    stay = residency.insert(A, chain([1] * 4 + [2] * 4), 2.0)
    assert held(residency, [1] * 4 + [2] * 4, A) == [8]

    stay.roll_back()
    assert held(residency, [1] * 4 + [2] * 4, A) == [4]


def test_what_others_prompts_parted_meanwhile_is_taken_back_whole() -> None:
    residency = filled()
    stay = residency.insert(A, chain([1] * 4), 1.0)
    residency.insert(B, chain([1, 1]), 2.0)
    stay.roll_back()

    assert held(residency, [1] * 4, A, B) == [0, 2]


def test_a_head_that_was_parted_from_what_proved_cold_goes_with_it() -> None:
    residency = filled()
    residency.insert(A, chain([1] * 4), 1.0)
    residency.insert(A, chain([2] * 4), 2.0)
    residency.insert(B, chain([1, 1]), 3.0)
    residency.replica(A).evict_until(1.0)

    assert held(residency, [1] * 4, A, B) == [0, 2]
    assert held(residency, [2] * 4, A) == [4]


def test_a_run_that_others_split_is_evicted_before_the_runs_in_front_of_it() -> None:
    """A head that was split off behind its own ancestors outlived them, and a later prompt met it: KeyError."""
    residency = filled(capacity=12)
    residency.insert(A, chain([1] * 8), 1.0)
    residency.insert(B, chain([1] * 6 + [2]), 2.0)
    for number in (3, 4):
        residency.insert(A, chain([number] * 4), float(number))

    assert held(residency, [1] * 8, A) == [4]
    assert {run.length for run in residency.replica(A).runs} == {4}


@pytest.mark.parametrize("holders", [1, 3, 40])
def test_a_run_parts_at_all_who_hold_it_whether_few_or_many(holders: int) -> None:
    residency, everybody = Residency(block_tokens=1, run_tokens=4), names(40)
    for replica in everybody:
        residency.add_replica(replica, ROOMY)
    for replica in everybody[:holders]:
        residency.insert(replica, chain([1] * 4), 1.0)
    residency.insert(everybody[-1], chain([1, 1, 2]), 2.0)

    assert held(residency, [1] * 4, *everybody[: min(holders, 39)]) == [4] * min(holders, 39)
    assert len(residency) == sum(len(residency.replica(replica).runs) for replica in everybody)


def test_what_another_request_used_since_is_not_taken_back() -> None:
    residency = filled()
    stay = residency.insert(A, chain([1] * 4), 1.0)
    residency.insert(A, chain([1] * 4), 2.0)
    stay.roll_back()

    assert held(residency, [1] * 4, A) == [4]


def test_a_replica_that_leaves_takes_only_its_own_along_and_its_bit_is_given_anew() -> None:
    residency = filled()
    for replica in (A, B):
        residency.insert(replica, chain([1] * 4), 1.0)
    bit = residency.replica(A).bit
    residency.forget_all_but([B, C])

    assert held(residency, [1] * 4, A, B) == [0, 4]
    residency.add_replica("new", ROOMY)
    assert residency.replica("new").bit == bit
    assert held(residency, [1] * 4, "new", B) == [0, 4]


# --- what answers say --------------------------------------------------------------------------------


def asked_again(residency: Residency, cached_tokens: int, times: int, first_at: float) -> None:
    """The prompt [1] * 1000 again and again, a minute apart, answered with so many cached tokens."""
    for number in range(times):
        at = first_at + 60.0 * number
        residency.insert(A, chain([1] * 1000), at, prompt_tokens=1000).confirm(1000, cached_tokens)


@pytest.mark.parametrize(("cached_tokens", "is_believed"), [(1000, True), (600, True), (400, False), (0, False)])
def test_a_replica_whose_answers_prove_it_cold_loses_what_it_was_believed_to_hold(
    cached_tokens: int, is_believed: bool
) -> None:
    residency = filled(ttl_s=1e9)
    residency.insert(A, chain([2] * 1000), 0.0)
    residency.insert(A, chain([1] * 1000), 1.0)
    asked_again(residency, cached_tokens, MISSES, first_at=60.0)

    assert held(residency, [2] * 1000, A) == [1000 if is_believed else 0]
    assert held(residency, [1] * 1000, A) == [1000]  # that one was prefilled just now


def test_a_hit_in_between_restores_the_belief() -> None:
    residency = filled(ttl_s=1e9)
    residency.insert(A, chain([2] * 1000), 0.0)
    residency.insert(A, chain([1] * 1000), 1.0)
    asked_again(residency, 0, MISSES - 1, first_at=60.0)
    asked_again(residency, 1000, 1, first_at=300.0)
    asked_again(residency, 0, MISSES - 1, first_at=600.0)

    assert held(residency, [2] * 1000, A) == [1000]


def test_a_burst_of_one_cold_prompt_proves_nothing() -> None:
    residency = filled()
    residency.insert(A, chain([2] * 1000), 0.0)
    for number in range(20):
        residency.insert(A, chain([1] * 1000), 100.0 + number / 100, prompt_tokens=1000).confirm(1000, 0)

    assert held(residency, [2] * 1000, A) == [1000]
