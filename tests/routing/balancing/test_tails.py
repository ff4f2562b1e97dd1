"""Tails: tokens after a prompt's last whole block take capacity, are found by the next turn and are evicted."""

from __future__ import annotations

import pytest

from routing.balancing.residency import Residency, SentPrompt
from tests.routing.building import names

A, B = names(2)
BLOCK = 10  # tokens


def chain(blocks: int, salt: int = 0) -> list[int]:
    return [hash((salt, at)) for at in range(blocks)]


def residency_of(tokens: int) -> Residency:
    residency = Residency(block_tokens=BLOCK, run_tokens=4 * BLOCK)
    for replica in (A, B):
        residency.add_replica(replica, tokens)
    return residency


def turn(residency: Residency, blocks: int, at_s: float, *, cached: int, generated: int, salt: int = 0) -> None:
    """Send a prompt of ``blocks`` and half a block more, and record its response."""
    sent(residency, blocks, at_s, salt).confirm(BLOCK * blocks + BLOCK // 2, cached, generated)


def sent(residency: Residency, blocks: int, at_s: float, salt: int = 0) -> SentPrompt:
    return residency.insert(A, chain(blocks, salt), at_s, BLOCK * blocks + BLOCK // 2)


def predicted(residency: Residency, blocks: int, salt: int = 0, replica: str = A) -> int:
    match = residency.match(chain(blocks, salt))
    return match.tokens(residency.replica(replica).bit, BLOCK * blocks)


def counts_agree(residency: Residency) -> bool:
    entries = [residency.replica(replica) for replica in (A, B)]
    in_runs = all(entry.tokens == sum(run.tokens for run in entry.runs) for entry in entries)
    return in_runs and len(residency) == sum(len(entry.runs) for entry in entries)


def run_conversations(residency: Residency, turns: int, *, finds: bool) -> None:
    """Run conversations of two turns; with ``finds`` the second turn finds the first response cached."""
    for number in range(turns):
        turn(residency, 4, 10.0 * number, cached=0, generated=35, salt=100 + number)
        turn(residency, 10, 10.0 * number + 5, cached=80 if finds else 40, generated=35, salt=100 + number)


def test_generated_tokens_take_cache_capacity():
    residency = residency_of(400)
    turn(residency, 4, 0.0, cached=0, generated=0, salt=7)
    for number in range(5):
        turn(residency, 4, 1.0 + number, cached=0, generated=60, salt=number)

    assert predicted(residency, 4, salt=7) == 0
    assert [predicted(residency, 4, salt=number) for number in range(1, 5)] == [40] * 4
    assert counts_agree(residency)


def test_generated_tokens_are_predicted_once_next_turns_found_them():
    residency = residency_of(100_000)
    run_conversations(residency, 8, finds=True)
    turn(residency, 4, 1000.0, cached=0, generated=35)

    assert predicted(residency, 12) == 80  # four blocks, half a block of the prompt, and 35 generated tokens
    assert predicted(residency, 12, replica=B) == 0


def test_generated_tokens_are_not_predicted_if_next_turns_do_not_find_them():
    residency = residency_of(100_000)
    run_conversations(residency, 8, finds=False)
    turn(residency, 4, 1000.0, cached=0, generated=35)

    assert predicted(residency, 12) == 40


def test_a_tail_is_dropped_when_a_longer_prompt_includes_it():
    reused, not_reused = residency_of(100_000), residency_of(100_000)
    run_conversations(reused, 8, finds=True)
    run_conversations(not_reused, 8, finds=False)

    assert not_reused.replica(A).tokens - reused.replica(A).tokens >= 7 * 35
    assert counts_agree(reused)
    assert counts_agree(not_reused)


def test_a_rolled_back_request_leaves_no_tail():
    residency = residency_of(100_000)
    turn(residency, 4, 0.0, cached=0, generated=35)
    before = len(residency)
    sent(residency, 6, 1.0, salt=9).roll_back()

    assert len(residency) == before
    assert counts_agree(residency)


def test_two_replicas_may_have_the_same_tail():
    residency = residency_of(100_000)
    for replica in (A, B):
        for at_s in (0.0, 1.0):
            residency.insert(replica, chain(4), at_s, 45).confirm(45, 0, 35)
    assert counts_agree(residency)
    residency.forget_all_but([B])
    residency.add_replica(A, 100_000)

    assert predicted(residency, 6) == 0
    assert counts_agree(residency)


def test_shared_tokens_after_a_branch_are_predicted_for_the_next_prompt():
    residency = residency_of(100_000)
    residency.insert(A, [*chain(4), 1, 2], 0.0, 65).confirm(65, 0)
    assert residency.match([*chain(4), 3, 4]).tokens(residency.replica(A).bit, 65) == 40
    residency.insert(A, [*chain(4), 3, 4], 1.0, 65).confirm(65, 48)

    assert residency.match([*chain(4), 5, 6]).tokens(residency.replica(A).bit, 65) == 48


def test_shared_tokens_after_a_branch_fall_faster_than_they_rise():
    residency = residency_of(100_000)
    residency.insert(A, [*chain(4), 1, 2], 0.0, 65).confirm(65, 0)
    predicted_tokens = []
    for number, cached in enumerate((50, 55, 45)):
        residency.insert(A, [*chain(4), 10 + number, 3], 1.0 + number, 65).confirm(65, cached)
        predicted_tokens.append(residency.match([*chain(4), 5, 6]).tokens(residency.replica(A).bit, 65))

    assert predicted_tokens == [50, 50, 48]


@pytest.mark.parametrize("cached", [0, 65])
def test_unexpected_cached_tokens_teach_nothing_about_a_branch(cached):
    residency = residency_of(100_000)
    residency.insert(A, [*chain(1), 1, 2], 0.0, 65).confirm(65, 0)
    residency.insert(A, [*chain(1), 3, 4], 1.0, 65).confirm(65, cached)

    assert residency.match([*chain(1), 5, 6]).tokens(residency.replica(A).bit, 65) == 10


def test_shared_tokens_are_predicted_at_a_replica_with_a_shorter_cached_prefix_too():
    residency = residency_of(2000)
    turn(residency, 4, 0.0, cached=0, generated=0)
    residency.insert(A, [*chain(2), *chain(3, salt=1)], 1.0, 55).confirm(55, 27, 0)  # 7 tokens after the second block
    residency.insert(B, [*chain(2), *chain(3, salt=2)], 2.0, 55)

    match = residency.match(chain(4))
    assert match.tokens(residency.replica(A).bit, 40) == 40
    assert match.tokens(residency.replica(B).bit, 40) == 27


def test_a_tail_whose_prefix_was_evicted_with_a_later_prompt_belongs_to_the_prompt_that_brings_it_back():
    residency = residency_of(10_000)
    turn(residency, 2, 1.0, cached=0, generated=0, salt=1)  # shows that the engine reports generated tokens
    running = sent(residency, 11, 2.0)
    running.use.is_running = True
    later = [*chain(10), 99]
    residency.insert(A, later, 3.0)
    residency.evict_before(A, 4.0)
    assert predicted(residency, 11) == 0
    residency.add_stored(A, chain(11), 5.0)

    assert counts_agree(residency)
    assert predicted(residency, 11) == 110
    running.use.is_running = False
    residency.clear(A)
    assert counts_agree(residency)
    assert residency.replica(A).tokens == 0
