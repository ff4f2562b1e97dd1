"""Corrections of the residency index by what an engine reports."""

from __future__ import annotations

import random
from math import inf

import pytest

from routing.balancing.block_index import ServedPrompt
from routing.balancing.residency import DEFAULT_TOKENS, TTL_S
from tests.routing.balancing.test_residency import A, B, cached_blocks, chain, residency_of

LONG = list(range(12))  # three runs


def test_stored_blocks_are_found_at_their_replica_only():
    residency = residency_of()
    residency.add_stored(A, chain(LONG[:6]), 1.0)

    assert cached_blocks(residency, LONG, A, B) == [6, 0]
    residency.add_stored(B, chain(LONG), 2.0)
    assert cached_blocks(residency, LONG, A, B) == [6, 12]
    residency.add_stored("unknown", chain(LONG), 3.0)
    assert residency.replica("unknown") is None


def test_stored_blocks_are_the_most_recently_used():
    residency = residency_of(capacity=8)
    residency.insert(A, chain([1] * 4), 1.0)
    residency.insert(A, chain([2] * 4), 2.0)
    residency.add_stored(A, chain([1] * 4), 3.0)
    residency.insert(A, chain([3] * 4), 4.0)

    assert [cached_blocks(residency, [letter] * 4, A) for letter in (1, 2, 3)] == [[4], [0], [4]]


def test_a_cleared_replica_has_nothing_and_others_keep_theirs():
    residency = residency_of()
    for replica in (A, B):
        residency.insert(replica, chain(LONG), 1.0)
    residency.clear(A)

    assert cached_blocks(residency, LONG, A, B) == [0, 12]


def test_what_was_last_used_before_a_time_is_evicted():
    residency = residency_of()
    for at in (1, 2, 3):
        residency.insert(A, chain([at] * 4), float(at))
    residency.evict_before(A, 2.5)

    assert [cached_blocks(residency, [at] * 4, A) for at in (1, 2, 3)] == [[0], [0], [4]]


@pytest.mark.parametrize("blocks", [11, 8, 7, 1, 0])
def test_a_truncated_prompt_keeps_the_blocks_before(blocks):
    residency = residency_of()
    for replica in (A, B):
        residency.insert(replica, chain(LONG), 1.0)
    residency.truncate(A, chain(LONG), blocks)

    assert cached_blocks(residency, LONG, A, B) == [blocks, 12]


def test_truncating_at_the_end_or_an_unknown_block_changes_nothing():
    residency = residency_of()
    residency.insert(A, chain(LONG), 1.0)
    for prompt, blocks in ((LONG, 12), (LONG, 99), ([5] * 4, 0), (LONG[:4] + [99] * 4, 5)):
        residency.truncate(A, chain(prompt), blocks)
        residency.truncate(B, chain(prompt), blocks)

    assert cached_blocks(residency, LONG, A) == [12]


def test_older_prompts_lose_what_follows_a_truncated_block():
    residency = residency_of()
    residency.insert(A, chain(LONG), 1.0)
    residency.insert(A, chain(LONG[:8] + [50] * 4), 2.0)
    residency.truncate(A, chain(LONG), 4)

    assert cached_blocks(residency, LONG, A) == [4]
    assert cached_blocks(residency, LONG[:8] + [50] * 4, A) == [4]


def test_what_follows_a_truncated_block_goes_with_it_if_its_run_was_split_since():
    residency = residency_of()
    residency.insert(A, chain(LONG), 1.0)
    residency.insert(A, chain(LONG[:4]), 2.0)
    residency.insert(A, chain(LONG[:2]), 3.0)  # splits the first run
    residency.truncate(A, chain(LONG), 0)
    entry = residency.replica(A)

    assert entry is not None
    assert entry.tokens == len(residency) == 0


@pytest.mark.parametrize(
    ("reported", "seen", "was_full", "capacity"),
    [(100, 90, True, 100), (100, 120, False, 120), (None, 90, True, 90), (None, 90, False, DEFAULT_TOKENS)],
)
def test_a_capacity_is_what_is_reported_or_what_events_have_shown(reported, seen, was_full, capacity):
    residency = residency_of()
    entry = residency.add_replica(A, reported)
    residency.set_seen_tokens(A, seen, was_full=was_full)
    assert (entry.capacity_tokens, entry.capacity) == (capacity, capacity)

    residency.set_seen_tokens(A, 0, was_full=False)  # the events are lost
    assert entry.capacity_tokens == (reported or DEFAULT_TOKENS)


def test_an_engine_that_evicts_is_full_even_if_few_of_its_blocks_are_known():
    residency = residency_of()
    entry = residency.add_replica(A, 100)
    residency.insert(A, chain([1] * 4), 1.0)
    assert entry.stale_before_s(21.0) == -inf

    residency.set_seen_tokens(A, 90, was_full=True)
    assert entry.stale_before_s(21.0) == 11.0


def test_any_sequence_of_corrections_leaves_a_consistent_index():
    rng = random.Random(1)
    residency = residency_of(capacity=60, max_entries=64)
    for at in range(3000):
        prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 12))]
        replica = rng.choice([A, B])
        match rng.randrange(5):
            case 0 | 1:
                record = residency.insert(replica, chain(prompt), float(at), prompt_tokens=len(prompt))
                assert residency.replica(replica).tokens <= 60  # type: ignore[union-attr]
                record.confirm(len(prompt), 0, rng.randrange(4))  # with a tail
            case 2:
                residency.add_stored(replica, chain(prompt), float(at))
            case 3:
                residency.truncate(replica, chain(prompt), rng.randrange(12))
            case _:
                residency.evict_before(replica, at - 40.0)
        for name in (A, B):
            entry = residency.replica(name)
            assert entry is not None
            assert entry.tokens == sum(run.tokens for run in entry.runs)
            assert all(run.mask & entry.bit for run in entry.runs)
            assert set(entry.uses) == set(entry.runs.values())
            left = [run for use in entry.uses for run in use.path[use.first :]]
            assert len(left) == len(entry.runs)
            held = {run.last for run in entry.runs} | {block for run in entry.runs for block in run.hashes}
            assert all(run.before is None or run.before.last in held for run in entry.runs)
    for name in (A, B):
        residency.clear(name)
    assert len(residency) == residency.runs == 0


def test_blocks_of_a_replica_whose_events_are_all_known_do_not_expire():
    residency = residency_of()
    entry = residency.replica(A)
    assert entry is not None
    for expires, left in ((False, 4), (True, 0)):
        residency.insert(A, chain([1] * 4), 0.0)
        entry.expires = expires
        for at in range(6):  # each insertion looks at one replica
            residency.insert(B, chain([2] * 4), TTL_S + 1.0 + at)
        assert cached_blocks(residency, [1] * 4, A) == [left]


def test_responses_are_reported_while_somebody_listens():
    residency, reported = residency_of(), list[ServedPrompt]()
    entry = residency.replica(A)
    assert entry is not None
    residency.insert(A, chain(LONG), 1.0, prompt_tokens=12).confirm(24, 0, 5)
    entry.on_response = reported.append
    residency.insert(A, chain(LONG), 2.0, prompt_tokens=12).confirm(24, 16, 5)

    (served,) = reported
    assert (served.chain, served.sent_s) == (chain(LONG), 2.0)
    assert (served.prompt_tokens, served.cached_tokens, served.generated_tokens) == (24, 16, 5)
    assert served.tokens_per_block == 2.0  # the engine counts two for each estimated one
