from __future__ import annotations

import random
from itertools import accumulate, count
from math import inf

import pytest

from routing.balancing.block_index import ServedPrompt
from routing.balancing.residency import DEFAULT_TOKENS, MAX_MISSES, TTL_S, ZERO_HITS, ZERO_HITS_S, Residency
from tests.routing.building import names

A, B, C = names(3)
ROOMY = 1 << 20

Prompt = list[int]


def chain(prompt: Prompt) -> list[int]:
    """Hashes that identify a block and everything before it, like those of a prompt."""
    return list(accumulate(prompt, lambda before, letter: hash((before, letter)), initial=0))[1:]


def cached_blocks(residency: Residency, prompt: Prompt, *replicas: str) -> list[int]:
    """Cached blocks of a prompt at each of the replicas."""
    match = residency.match(chain(prompt))
    found = [residency.replica(replica) for replica in replicas]
    return [match.tokens(entry.bit, 1_000_000) // residency.block_tokens if entry else 0 for entry in found]


def residency_of(capacity: int = ROOMY, **bounds) -> Residency:
    residency = Residency(block_tokens=1, **{"run_tokens": 4, **bounds})
    for replica in (A, B, C):
        residency.add_replica(replica, capacity)
    return residency


def test_the_oldest_prompt_is_evicted_first_from_its_end():
    residency = residency_of(capacity=12)
    residency.insert(A, chain([1] * 8), 1.0)
    residency.insert(A, chain([2] * 8), 2.0)

    assert cached_blocks(residency, [1] * 8, A) == [4]
    assert cached_blocks(residency, [2] * 8, A) == [8]

    residency.insert(A, chain([1] * 4), 3.0)
    residency.insert(A, chain([3] * 4), 4.0)
    assert cached_blocks(residency, [1] * 8, A) == [4]
    assert cached_blocks(residency, [2] * 8, A) == [4]


def test_a_roll_back_counts_blocks_that_were_evicted_since():
    residency = residency_of(capacity=12)
    residency.insert(A, chain([1] * 4), 1.0)
    record = residency.insert(A, chain([1] * 4 + [2] * 8), 2.0)
    residency.insert(A, chain([3] * 4), 3.0)  # evicts the last 4 of the 8 new blocks
    assert cached_blocks(residency, [1] * 4 + [2] * 8, A) == [8]

    record.roll_back()

    assert cached_blocks(residency, [1] * 4 + [2] * 8, A) == [4]
    assert cached_blocks(residency, [3] * 4, A) == [4]


def test_the_totals_agree_while_running_prompts_fill_the_cache():
    """Eviction skips the blocks of running prompts, so a prompt may lose its first blocks and keep later ones."""
    generator, numbers = random.Random(7), count(1000)
    for blocks in (30, 45, 60) * 10:
        residency = Residency(block_tokens=16, run_tokens=512)
        residency.add_replica(A, 16 * blocks)
        chats, running = [[1], [2], [3], [4]], []
        for at in range(400):
            chat = generator.choice(chats)
            if generator.random() < 0.7:
                chat += [next(numbers) for _ in range(generator.randint(1, 3))]
            if len(chat) > 14:
                del chat[generator.randint(1, 6) :]
            sent = chat[: generator.randint(1, len(chat))] if generator.random() < 0.3 else list(chat)
            running.append(residency.insert(A, sent, float(at), 16 * len(sent)))
            running[-1].use.is_running = True
            if len(running) > 8 or generator.random() < 0.5:
                running.pop(generator.randrange(len(running))).use.is_running = False
        held = residency.replica(A)

        assert held is not None
        assert held.tokens == sum(run.tokens for run in held.runs)
        assert len(residency) == len(held.runs)


def test_a_prompt_larger_than_the_cache_keeps_its_head():
    residency = residency_of(capacity=8)
    residency.insert(A, chain([1] * 40), 1.0)

    assert cached_blocks(residency, [1] * 40, A) == [8]


def test_a_crowded_cache_has_a_reuse_ratio_above_0():
    crowded, passing, roomy = residency_of(capacity=100), residency_of(capacity=100), residency_of()
    rng = random.Random(1)
    for at in range(1000):
        crowded.insert(A, chain([1000 + rng.randrange(30)] * 4), float(at))
        roomy.insert(A, chain([1000 + rng.randrange(30)] * 4), float(at))
        passing.insert(A, chain([1000 + at] * 4), float(at))
        passing.insert(A, chain([1] * 4), float(at))

    assert crowded.reuse.ratio > 0.5
    assert passing.reuse.ratio == roomy.reuse.ratio == 0.0


def test_the_reuse_ratio_covers_recent_turnovers():
    residency, rng = residency_of(capacity=100), random.Random(1)
    for at in range(1000):
        residency.insert(A, chain([rng.randrange(30)] * 4), float(at))
    before = residency.reuse.ratio
    for at in range(1000, 2000):
        residency.insert(A, chain([1000 + at] * 4), float(at))

    assert residency.match([1]).reuse_ratio < 0.05 < before


def test_unused_blocks_expire_even_if_the_replica_gets_no_requests():
    residency = residency_of(ttl_s=10.0)
    residency.insert(A, chain([1] * 4), 0.0)
    for at in range(14):
        residency.insert(B, chain([2] * 4), float(at))

    assert cached_blocks(residency, [1] * 4, A) == [0]
    assert cached_blocks(residency, [2] * 4, B) == [4]


def test_new_prompts_never_exceed_the_bound():
    """State that grows with prompts; ``soak --only prefixes`` checks a whole router."""
    residency, rng = Residency(block_tokens=64, max_entries=1000), random.Random(7)
    for replica in (A, B, C):
        residency.add_replica(replica)
    for number in range(6000):
        residency.insert((A, B, C)[number % 3], [rng.getrandbits(64) for _ in range(17)], float(number) / 1000)

    assert len(residency) == residency.runs == 1000


@pytest.mark.parametrize("holders", [1, 3, 40])
def test_a_run_is_split_at_all_replicas_that_have_it(holders):
    residency, everybody = Residency(block_tokens=1, run_tokens=4), names(40)
    for replica in everybody:
        residency.add_replica(replica, ROOMY)
    for replica in everybody[:holders]:
        residency.insert(replica, chain([1] * 4), 1.0)
    residency.insert(everybody[-1], chain([1, 1, 2]), 2.0)

    assert cached_blocks(residency, [1] * 4, *everybody[: min(holders, 39)]) == [4] * min(holders, 39)
    assert len(residency) == sum(len(residency.replica(replica).runs) for replica in everybody)


def test_the_bit_of_a_removed_replica_is_reused():
    residency = residency_of()
    for replica in (A, B):
        residency.insert(replica, chain([1] * 4), 1.0)
    bit = residency.replica(A).bit
    residency.forget_all_but([B, C])

    assert cached_blocks(residency, [1] * 4, A, B) == [0, 4]
    residency.add_replica("new", ROOMY)
    assert residency.replica("new").bit == bit
    assert cached_blocks(residency, [1] * 4, "new", B) == [0, 4]


# --- feedback of responses ---------------------------------------------------------------------------


def send_repeatedly(residency: Residency, cached_tokens: int, times: int, first_at: float) -> None:
    """Send the prompt [1] * 1000 repeatedly, a minute apart; its responses report ``cached_tokens``."""
    for number in range(times):
        at = first_at + 60.0 * number
        residency.insert(A, chain([1] * 1000), at, prompt_tokens=1000).confirm(1000, cached_tokens)


@pytest.mark.parametrize(("cached_tokens", "is_kept"), [(1000, True), (600, True), (400, False), (0, False)])
def test_repeated_misses_evict_the_older_blocks_of_a_replica(cached_tokens, is_kept):
    residency = residency_of(ttl_s=1e9)
    residency.insert(A, chain([2] * 1000), 0.0)
    residency.insert(A, chain([1] * 1000), 1.0)
    send_repeatedly(residency, cached_tokens, MAX_MISSES, first_at=60.0)

    assert cached_blocks(residency, [2] * 1000, A) == [1000 if is_kept else 0]
    assert cached_blocks(residency, [1] * 1000, A) == [1000]  # it was prefilled just now


def test_a_hit_resets_the_number_of_misses():
    residency = residency_of(ttl_s=1e9)
    residency.insert(A, chain([2] * 1000), 0.0)
    residency.insert(A, chain([1] * 1000), 1.0)
    send_repeatedly(residency, 0, MAX_MISSES - 1, first_at=60.0)
    send_repeatedly(residency, 1000, 1, first_at=300.0)
    send_repeatedly(residency, 0, MAX_MISSES - 1, first_at=600.0)

    assert cached_blocks(residency, [2] * 1000, A) == [1000]


def overrated_after_a_reset(prompts: int, requests: int, rest: float, seed: int, between_s: float) -> int:
    """Wrong predictions after an engine's cache is cleared; ``rest``: share of a prompt that all prompts share."""
    chance, residency, at = random.Random(seed), residency_of(ttl_s=1e9), 0.0
    shared = [9] * int(1000 * rest)
    texts = [[*shared, *([10 + number] * (1000 - len(shared)))] for number in range(prompts)]
    cached: set[int] = set()
    overrated = 0
    for number in range(prompts + requests):
        if number == prompts:
            cached.clear()
        chosen = number if number < prompts else chance.randrange(prompts)
        at += between_s
        tokens = 1000 if chosen in cached else len(shared) if cached else 0
        overrated += serve(residency, texts[chosen], tokens, at) > tokens + 256
        cached.add(chosen)
    return overrated


@pytest.mark.parametrize("between_s", [0.02, 10.0])  # every prompt is requested again within a second, or a minute
@pytest.mark.parametrize("rest", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(4))
def test_a_cleared_cache_is_learned_from_the_first_misses(rest, seed, between_s):
    assert overrated_after_a_reset(40, requests=300, rest=rest, seed=seed, between_s=between_s) <= MAX_MISSES


def test_a_hit_of_an_older_prefix_shows_that_not_everything_was_lost():
    residency = residency_of(ttl_s=1e9)
    for number in range(10):
        residency.insert(A, chain([number] * 1000), float(number))
    for number, cached in enumerate((0, 1000, 0, 1000, 0, 1000)):
        serve(residency, [number] * 1000, cached, 60.0 + 10 * number)

    assert cached_blocks(residency, [9] * 1000, A) == [1000]


def serve(residency: Residency, prompt: Prompt, cached_tokens: int, at: float) -> int:
    """Send a prompt to A, and report its cached tokens; the blocks that were predicted."""
    predicted = cached_blocks(residency, prompt, A)[0]
    residency.insert(A, chain(prompt), at, prompt_tokens=len(prompt)).confirm(len(prompt), cached_tokens, 8)
    return predicted


@pytest.mark.parametrize("every_s", [0.1, 3.0, 60.0])
def test_nothing_is_expected_of_an_engine_without_prefix_caching(every_s):
    residency, shared, at = residency_of(ttl_s=1e9), [1] * 1000, 0.0
    residency.insert(B, chain(shared), 0.0)
    while not residency.replica(A).caches_nothing:
        serve(residency, shared, 0, at)
        at += every_s
    least_s = max(ZERO_HITS_S, (ZERO_HITS - 1) * every_s)
    predicted = [serve(residency, shared, 0, at + number) for number in range(5)]
    unsent = residency.insert(A, chain(shared), at + 6, prompt_tokens=1000)
    unsent.roll_back()
    found = cached_blocks(residency, shared, A, B)
    recovered = [serve(residency, shared, cached, at + 7 + cached) for cached in (0, 992, 992)]

    assert least_s <= at <= least_s + 4 * every_s
    assert predicted[1:] == [0] * 4
    assert found == [0, 1000]
    assert recovered == [0, 0, 0]
    assert cached_blocks(residency, shared, A) == [1000]


@pytest.mark.parametrize("cached_tokens", [0, 16])
def test_one_hit_shows_that_an_engine_caches(cached_tokens):
    residency, shared = residency_of(ttl_s=1e9), [1] * 1000
    for number in range(10 * ZERO_HITS):
        serve(residency, shared, cached_tokens if number % ZERO_HITS == 5 else 0, 60.0 * number)

    assert residency.replica(A).caches_nothing == (not cached_tokens)


def test_a_slow_prefill_of_a_burst_does_not_show_that_an_engine_caches_nothing():
    residency = residency_of(ttl_s=1e9)
    for number in range(200):
        serve(residency, [1] * 1000, 0, 0.1 * number)

    assert not residency.replica(A).caches_nothing


def test_misses_of_a_burst_are_not_counted():
    residency = residency_of()
    residency.insert(A, chain([2] * 1000), 0.0)
    burst = [residency.insert(A, chain([1] * 1000), 100.0 + number / 100, prompt_tokens=1000) for number in range(20)]
    for request in burst:
        request.confirm(1000, 0)

    assert cached_blocks(residency, [2] * 1000, A) == [1000]


# --- Corrections by what an engine reports ---


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
