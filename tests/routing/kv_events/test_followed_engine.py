"""What the events of engines change in the residency index, and which prompts are recognised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from routing.balancing.block_index import ServedPrompt
from routing.balancing.residency import Residency
from routing.kv_events.decoding import CLEARED, MAX_EVENT_BLOCKS, STORED, KvEvent
from routing.kv_events.engine_blocks import StoredRun
from routing.kv_events.followed_engine import MAX_PIECE_BLOCKS, MAX_SERVED, SETTLE_S, FollowedEngine
from routing.kv_events.known_prompts import MAX_RUNS, KnownPrompt, KnownPrompts, NewKey, RecentRuns
from routing.types import TargetId
from tests.fakes.kv_publisher import removed_event

A, B = TargetId("a"), TargetId("b")
BLOCK = 4  # tokens of an engine's block; a block of the router has as many
Text = Sequence[int]  # one number for each block


class Fleet:
    """Two engines with one index and other hashes for the same blocks, driven by their events.

    A prompt is a list of numbers, one for each block.
    """

    def __init__(self) -> None:
        self.now_s = 100.0
        self.residency = Residency(block_tokens=BLOCK, run_tokens=BLOCK)
        self.known = KnownPrompts()
        self.engines = {}
        for name in (A, B):
            self.residency.add_replica(name, 1 << 20)
            engine = self.engines[name] = FollowedEngine(name, self.residency, self.known, lambda: self.now_s, 1000)
            engine.restart()
            entry = self.residency.replica(name)
            assert entry is not None
            entry.on_response = engine.on_response

    def chain(self, text: Text) -> list[int]:
        return [hash(("router", *text[: end + 1])) for end in range(len(text))]

    def hashes(self, name: TargetId, text: Text) -> list[int]:
        return [hash((name, *text[: end + 1])) & (1 << 63) - 1 for end in range(len(text))]

    def stored(self, name: TargetId, text: Text, first: int = 0, **fields: Any) -> KvEvent:
        """The event of the blocks of a text from the first one on."""
        hashes, tokens = self.hashes(name, text), [letter for letter in text[first:] for _ in range(BLOCK)]
        parent, encoded = hashes[first - 1] if first else None, msgspec.Raw(msgspec.msgpack.encode(tokens))
        return KvEvent(STORED, hashes[first:], parent, BLOCK, encoded, medium="GPU", **fields)

    def store(self, name: TargetId, text: Text, first: int = 0, **fields: Any) -> None:
        """The engine stores the blocks of a text from the first one on."""
        self.apply(name, self.stored(name, text, first, **fields))

    def remove(self, name: TargetId, text: Text, first: int) -> None:
        """The engine evicts the blocks of a text from its end to the first one."""
        for hash_ in reversed(self.hashes(name, text)[first:]):
            self.apply(name, removed_event(hash_))

    def apply(self, name: TargetId, *events: Any) -> None:
        for _ in self.engines[name].apply(events):
            pass

    def serve(self, name: TargetId, text: Text, cached: int = 0, generated: int = 1) -> None:
        """This router sends a prompt, and the engine stores what was not cached."""
        self.now_s += 1.0
        record = self.residency.insert(name, self.chain(text), self.now_s, len(text) * BLOCK + 1)
        self.now_s += 0.1
        if cached < len(text):
            self.store(name, text, cached)
        record.confirm(len(text) * BLOCK + 1, cached * BLOCK, generated)

    def learn(self) -> list[list[NewKey]]:
        """Let time pass, so that responses are looked at; other engines hear of it."""
        self.now_s += SETTLE_S
        learnt = []
        for name, engine in self.engines.items():
            for keys in engine.learn():
                learnt.append(keys)
                for other in self.engines.keys() - {name}:
                    self.engines[other].add_longest_cached(keys)
        return learnt

    def cached(self, text: Text, *names: TargetId) -> list[int]:
        """Blocks of a text that the index believes to be cached."""
        match = self.residency.match(self.chain(text))
        return [match.tokens(self.residency.replica(name).bit, 1 << 20) // BLOCK for name in names]  # type: ignore[union-attr]


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


TEXT = [1, 2, 3, 4, 5, 6]


def test_what_a_lower_tier_has_stays_cached_and_is_part_of_the_capacity(fleet):
    fleet.serve(A, TEXT)
    fleet.serve(A, [9, 8])
    fleet.learn()
    engine, other = fleet.engines[A], fleet.hashes(A, [9, 8])
    fleet.apply(A, KvEvent(STORED, fleet.hashes(A, TEXT), medium="CPU"))
    assert engine.capacity_ratio == 1.0

    fleet.remove(A, TEXT, 0)
    assert fleet.cached(TEXT, A) == [6]
    assert engine.capacity_ratio == pytest.approx((8 + 6) / 8)
    fleet.apply(A, removed_event(other[1]))  # without a copy; older blocks with a copy stay
    assert (fleet.cached(TEXT, A), fleet.cached([9, 8], A)) == ([6], [1])

    fleet.apply(A, removed_event(*fleet.hashes(A, TEXT)[4:], medium="CPU"))
    assert fleet.cached(TEXT, A) == [4]
    engine.restart()
    assert engine.capacity_ratio == 1.0


def test_a_prompt_that_another_router_sends_elsewhere_is_recognised(fleet):
    fleet.serve(A, TEXT)
    assert fleet.cached(TEXT, A, B) == [6, 0]

    fleet.learn()
    fleet.store(B, [*TEXT[:4], 77])
    assert fleet.cached(TEXT, A, B) == [6, 4]


@pytest.mark.parametrize(
    "fields", [{"adapter": "sql"}, {"extra_keys": [["cache_salt", "a"], None, None, None, None, None]}]
)
def test_the_same_tokens_with_a_salt_or_an_adapter_are_another_prompt(fleet, fields):
    fleet.serve(A, TEXT)
    fleet.learn()
    fleet.store(B, TEXT, **fields)
    assert fleet.cached(TEXT, A, B) == [6, 0]
    fleet.store(B, TEXT, extra_keys=[None] * len(TEXT))
    assert fleet.cached(TEXT, A, B) == [6, 6]


def test_blocks_that_another_router_stored_before_are_recognised_when_the_prompt_becomes_known(fleet):
    fleet.store(B, [*TEXT[:4], 77])
    fleet.serve(A, TEXT)
    assert fleet.cached(TEXT, A, B) == [6, 0]

    fleet.learn()
    assert fleet.cached(TEXT, A, B) == [6, 4]


def test_a_prompt_that_this_router_never_sent_stays_unknown(fleet):
    fleet.store(B, TEXT)
    fleet.learn()
    assert fleet.cached(TEXT, A, B) == [0, 0]


def test_the_next_turn_teaches_the_rest_of_a_conversation(fleet):
    fleet.serve(A, TEXT)
    fleet.learn()
    fleet.serve(A, [*TEXT, 7, 8], cached=6)
    assert [len(keys) for keys in fleet.learn()] == [2]

    fleet.store(B, [*TEXT, 7, 8])
    assert fleet.cached([*TEXT, 7, 8], A, B) == [8, 8]


def test_a_prompt_whose_prefill_comes_in_chunks_is_recognised(fleet):
    fleet.now_s += 1.0
    record = fleet.residency.insert(A, fleet.chain(TEXT), fleet.now_s, 25)
    for end in (2, 4, 6, 8):  # the last two blocks are generated
        fleet.now_s += 0.1
        fleet.store(A, [*TEXT, 50, 51][:end], end - 2)
    record.confirm(25, 0, 8)

    assert [[depth for _, depth in keys] for keys in fleet.learn()] == [[6, 5, 4, 3, 2, 1]]


def test_requests_of_the_same_lengths_at_the_same_time_teach_nothing(fleet):
    fleet.now_s += 1.0
    texts = [TEXT, [9] * 6]
    records = [fleet.residency.insert(A, fleet.chain(text), fleet.now_s, 25) for text in texts]
    for text in texts:
        fleet.store(A, text)
    for record in records:
        record.confirm(25, 0, 1)

    assert fleet.learn() == [[], []]
    assert len(fleet.known) == 0
    assert fleet.engines[A].matched == 0


def test_requests_of_other_lengths_at_the_same_time_are_told_apart(fleet):
    fleet.now_s += 1.0
    record = fleet.residency.insert(A, fleet.chain(TEXT), fleet.now_s, 25)
    fleet.store(A, [9] * 5)
    fleet.store(A, TEXT)
    record.confirm(25, 0, 1)

    assert [len(keys) for keys in fleet.learn()] == [6]
    fleet.store(B, [9] * 5)
    assert fleet.cached(TEXT, B) == [0]
    fleet.store(B, TEXT)
    assert fleet.cached(TEXT, B) == [6]


def test_a_contradiction_forgets_both_matches(fleet):
    fleet.now_s += 1.0
    wrong = fleet.residency.insert(A, fleet.chain([9] * 6), fleet.now_s, 25)
    fleet.store(A, TEXT)  # another router's; this router's own events are late
    wrong.confirm(25, 0, 1)
    assert [len(keys) for keys in fleet.learn()] == [6]

    fleet.serve(A, TEXT)
    assert fleet.learn() == [[]]
    fleet.serve(A, TEXT)
    assert [len(keys) for keys in fleet.learn()] == [5]  # the first block is within the tolerance


def test_evicted_blocks_of_a_known_prompt_are_no_longer_cached(fleet):
    for name in (A, B):
        fleet.serve(name, TEXT)
        fleet.learn()
    fleet.remove(A, TEXT, 4)
    assert fleet.cached(TEXT, A, B) == [4, 6]
    fleet.remove(A, TEXT, 0)
    assert fleet.cached(TEXT, A, B) == [0, 6]


def test_a_flood_of_another_router_evicts_what_was_used_before_it(fleet):
    """None of the flood's prompts is known, and neither is this router's: their responses were not matched."""
    old = fleet.residency.insert(A, fleet.chain(TEXT), 100.0, 25)
    old.confirm(25, 0, None)
    fleet.learn()
    flood = [[letter] * 6 for letter in range(50, 60)]
    for text in flood:
        fleet.now_s += 1.0
        fleet.store(A, text)
    fleet.serve(A, [7] * 6)
    assert fleet.cached(TEXT, A) == [6]

    fleet.remove(A, flood[0], 0)

    assert fleet.cached(TEXT, A) == [0]
    assert fleet.cached([7] * 6, A) == [6]


def test_a_long_request_is_used_until_its_end(fleet):
    fleet.now_s += 1.0
    record = fleet.residency.insert(A, fleet.chain(TEXT), fleet.now_s, 25)
    fleet.store(A, TEXT)
    fleet.now_s += 10.0
    fleet.store(A, [9] * 6)
    fleet.now_s += 10.0
    record.confirm(25, 0, 1)
    fleet.learn()

    fleet.remove(A, [9] * 6, 0)
    assert fleet.cached(TEXT, A) == [6]


def test_blocks_that_are_evicted_right_after_a_response_do_not_return(fleet):
    fleet.serve(A, TEXT)
    fleet.now_s += 0.01
    fleet.store(A, [9] * 5)
    fleet.now_s += 0.01
    fleet.remove(A, TEXT, 0)
    fleet.remove(A, [9] * 5, 0)
    assert fleet.cached(TEXT, A) == [0]

    assert [len(keys) for keys in fleet.learn()] == [6]
    assert fleet.cached(TEXT, A) == [0]


@pytest.mark.parametrize("how", ["cleared", "restarted"])
def test_a_cleared_cache_and_a_restart_empty_the_index_at_once(fleet, how):
    for name in (A, B):
        fleet.serve(name, TEXT)
    if how == "cleared":
        fleet.apply(A, KvEvent(CLEARED))
    else:
        fleet.engines[A].restart()

    assert fleet.cached(TEXT, A, B) == [0, 6]
    assert fleet.engines[A].blocks.is_complete
    assert fleet.engines[A].blocks.blocks == 0
    fleet.store(A, TEXT)
    assert fleet.cached(TEXT, A, B) == [0, 6]  # its response was forgotten too


def test_after_lost_events_the_index_keeps_its_estimate(fleet):
    fleet.serve(A, TEXT)
    fleet.learn()
    fleet.engines[A].forget()

    assert fleet.cached(TEXT, A) == [6]
    assert not fleet.engines[A].blocks.is_complete
    fleet.remove(A, TEXT, 0)
    assert fleet.cached(TEXT, A) == [6]


def test_the_most_that_was_cached_is_the_capacity_if_all_events_are_known(fleet):
    for name in (A, B):
        fleet.store(name, TEXT)
        fleet.store(name, [9] * 4)
    fleet.engines[B].forget()
    for name in (A, B):
        assert fleet.engines[name].capacity_tokens is None
        fleet.remove(name, TEXT, 4)
        fleet.store(name, [9] * 8)
        fleet.remove(name, TEXT, 0)

    assert fleet.engines[A].capacity_tokens == 16 * BLOCK  # also what was stored after the first eviction
    assert fleet.engines[B].capacity_tokens is None
    fleet.engines[A].restart()
    assert fleet.engines[A].capacity_tokens is None


def test_an_evicted_block_whose_place_in_the_text_is_between_two_blocks_leaves_the_first_of_them():
    prompt = KnownPrompt(list(range(10)), 7.5)  # the engine's tokens for each block of the router

    assert [prompt.blocks_from(tokens) for tokens in (0, 15, 16, 22, 23, 1000)] == [0, 2, 3, 3, 4, 10]


def test_what_waits_and_what_is_known_is_bounded(fleet):
    engine, served = fleet.engines[A], ServedPrompt([1], 0.0, 4.0, 5, 0, 1)
    for _ in range(3 * MAX_SERVED):
        engine.on_response(served)
    assert len(fleet.learn()) == MAX_SERVED

    known, recent = KnownPrompts(max_keys=10), RecentRuns(max_runs=20)
    for letter in range(100):
        fleet.store(A, [letter] * 3)
        run = engine.blocks.store(KvEvent(STORED, [letter << 20], None, BLOCK), 0.0)
        assert run is not None
        recent.add(run)
        known.learn(run, 0, KnownPrompt([letter], 4.0), BLOCK)
        assert len(known) <= 20
        assert len(recent) <= 20
    assert MAX_RUNS > 20

    recent = RecentRuns(max_blocks=100)
    for number in range(20):
        recent.add(StoredRun([number * 30 + at for at in range(30)], None, 0, list(range(30)), 0.0))
        assert len(recent) <= 3


def test_an_event_of_many_blocks_is_applied_in_pieces_as_small_ones_are(fleet):
    """Other work may run between two pieces."""
    text = list(range(1000, 1000 + MAX_PIECE_BLOCKS + 400))
    record = fleet.residency.insert(A, fleet.chain(text), fleet.now_s, len(text) * BLOCK + 1)
    fleet.now_s += 0.1
    hashes = fleet.hashes(A, text)
    assert sum(1 for _ in fleet.engines[A].apply([fleet.stored(A, text)])) >= 2
    assert len(fleet.engines[A].blocks) == len(text)
    record.confirm(len(text) * BLOCK + 1, 0, 1)
    fleet.learn()
    assert fleet.cached(text, A) == [len(text)]
    removed = removed_event(*hashes[:2:-1])
    assert sum(1 for _ in fleet.engines[A].apply([removed])) >= 2
    assert fleet.cached(text, A) == [3]


def test_the_largest_event_gives_the_keys_of_small_ones_and_lets_requests_go_first():
    tokens = [number * 97 for number in range(MAX_EVENT_BLOCKS * BLOCK)]  # encoded in 1, 2, 3 and 5 bytes
    encoded = [msgspec.Raw(msgspec.msgpack.encode(part)) for part in (tokens, tokens[:BLOCK])]
    large = KvEvent(STORED, list(range(MAX_EVENT_BLOCKS)), None, BLOCK, encoded[0])
    keys = large.keys(None)
    assert len({*keys, *large.hashes}) == 2 * MAX_EVENT_BLOCKS
    assert KvEvent(STORED, [5], None, BLOCK, encoded[1]).keys(None) == keys[:1]

    residency = Residency(block_tokens=BLOCK, run_tokens=BLOCK)
    engine, known = FollowedEngine(A, residency, KnownPrompts(), lambda: 1.0, 2 * MAX_EVENT_BLOCKS), 0
    for _ in engine.apply([large]):
        assert len(engine.blocks) - known <= MAX_PIECE_BLOCKS
        known = len(engine.blocks)
    assert known == MAX_EVENT_BLOCKS
    assert all(key in engine.blocks for key in keys)


def test_a_later_prompts_evicted_block_leaves_the_blocks_of_a_running_request(fleet):
    """An engine cannot evict what a running request uses, however long ago that was sent."""
    fleet.serve(A, [50, 51])
    running, sent = list(range(100, 140)), fleet.residency
    record = sent.insert(A, fleet.chain(running), fleet.now_s, len(running) * BLOCK + 1)
    record.use.is_running = True
    fleet.store(A, running)
    fleet.now_s += 5.0
    fleet.serve(A, [60, 61, 62])
    fleet.remove(A, [60, 61, 62], 0)
    assert fleet.cached(running, A) == [40]
    assert fleet.cached([50, 51], A) == [0]

    record.use.is_running = False
    fleet.now_s += 5.0
    fleet.serve(A, [70, 71])
    fleet.remove(A, [70, 71], 0)
    assert fleet.cached(running, A) == [0]


def test_a_running_request_is_not_forgotten_where_the_capacity_is_estimated():
    residency = Residency(block_tokens=BLOCK, run_tokens=BLOCK)
    residency.add_replica(A, 20 * BLOCK)
    running = residency.insert(A, list(range(10)), 1.0, 10 * BLOCK)
    running.use.is_running = True
    for number in range(1, 20):
        residency.insert(A, [1000 * number + block for block in range(5)], 1.0 + number, 5 * BLOCK)
    replica = residency.replica(A)
    assert replica is not None
    assert residency.match(list(range(10))).tokens(replica.bit, 1000) == 10 * BLOCK
    residency.clear(A)
    assert residency.match(list(range(10))).tokens(replica.bit, 1000) == 0
