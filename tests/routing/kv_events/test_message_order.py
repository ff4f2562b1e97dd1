"""Gaps, restarts and replays of one engine's messages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from routing.balancing.block_index import ServedPrompt
from routing.balancing.residency import Residency
from routing.kv_events.followed_engine import MAX_UNREPORTED, MIN_UNREPORTED_TOKENS, UNREPORTED_S, FollowedEngine
from routing.kv_events.known_prompts import KnownPrompts
from routing.kv_events.message_order import (
    LOSSES_S,
    MAX_FAILURES,
    MAX_LOSSES,
    MAX_MALFORMED,
    MAX_WAITING_BYTES,
    PAUSE_S,
    MessageOrder,
    Snapshot,
    StreamState,
)
from routing.types import TargetId
from tests.fakes.kv_publisher import CLEARED, payload_of, removed_event, stored

TARGET = TargetId("a")


class Stream:
    """A message order, and the messages of an engine that stores one block with each."""

    def __init__(self, *, can_replay: bool = True, rank: int | None = None) -> None:
        self.now_s = 1000.0
        residency = Residency()
        residency.add_replica(TARGET)
        engine = FollowedEngine(TARGET, residency, KnownPrompts(), lambda: self.now_s, 1 << 16)
        self.order = MessageOrder(engine, lambda: self.now_s, can_replay=can_replay, rank=rank)

    def sees(self, *numbers: int, engine: int = 0) -> None:
        for number in numbers:
            self.take(self.order.on_message(number, message(number, engine)))

    def replays(self, *numbers: int, engine: int = 0, ends: bool = True) -> None:
        self.order.replay_from = None
        for number in numbers:
            self.take(self.order.on_replayed(number, message(number, engine)))
        if ends:
            self.take(self.order.on_replay_ended())

    def take(self, steps: Iterator[None]) -> None:
        for _ in steps:
            pass

    @property
    def blocks(self) -> int:
        return self.order.engine.blocks.blocks

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.order.gaps, self.order.lost, self.order.restarts


def message(number: int, engine: int = 0) -> bytes:
    """The message of this number; each ``engine`` has others."""
    return payload_of([stored([engine << 32 | number], [number] * 4)], at_s=float(number))


def connected(last: int, **options: bool) -> Stream:
    """A stream that has followed an engine from its start to this message."""
    stream = Stream(**options)
    stream.order.on_connected()
    stream.replays()
    stream.sees(*range(last + 1))
    assert (stream.order.state, stream.blocks) == (StreamState.FOLLOWING, last + 1)
    return stream


def test_messages_from_the_start_are_followed_one_by_one():
    stream = Stream(can_replay=False)
    assert (stream.order.state, stream.order.is_followed) == (StreamState.ESTIMATED, False)
    stream.order.on_connected()
    stream.sees(0, 1, 2)

    assert (stream.order.state, stream.blocks, stream.counts) == (StreamState.FOLLOWING, 3, (0, 0, 0))


def test_a_late_subscriber_gets_everything_by_a_replay():
    stream = Stream()
    stream.order.on_connected()
    assert (stream.order.replay_from, stream.order.state) == (0, StreamState.REPLAYING)
    stream.sees(5, 6)  # while the replay is in progress
    stream.replays(0, 1, 2, 3, 4, 5)

    assert (stream.order.state, stream.blocks, stream.counts) == (StreamState.FOLLOWING, 7, (0, 0, 0))


@pytest.mark.parametrize(
    ("replayed", "snapshot"),
    [((0, 1, 2, 3), Snapshot.COMPLETE), ((2, 3), Snapshot.PARTIAL), ((), Snapshot.COMPLETE), (None, Snapshot.MISSING)],
)
def test_the_snapshot_tells_what_was_obtained_of_the_time_before_the_connection(replayed, snapshot):
    stream = Stream()
    assert stream.order.snapshot is None
    stream.order.on_connected()
    stream.order.replay_from = None
    for number in replayed or ():
        stream.take(stream.order.on_replayed(number, message(number)))
        assert (stream.order.snapshot, stream.order.is_followed) == (None, False)  # it is being applied
    stream.take(stream.order.on_replay_failed() if replayed is None else stream.order.on_replay_ended())

    assert (stream.order.snapshot, stream.order.is_followed) == (snapshot, True)
    assert stream.blocks == len(replayed or ())
    stream.order.on_disconnected()
    assert stream.order.snapshot is None


def test_a_late_subscriber_whose_replay_starts_later_or_that_has_none_knows_a_part():
    with_buffer, without = Stream(), Stream(can_replay=False)
    for stream in (with_buffer, without):
        stream.order.on_connected()
    with_buffer.replays(40, 41)
    without.sees(41, 42)

    for stream in (with_buffer, without):
        assert (stream.order.state, stream.blocks) == (StreamState.PARTIAL, 2)


def test_a_gap_is_filled_by_a_replay():
    stream = connected(2)
    stream.sees(5)
    assert (stream.order.replay_from, stream.order.state, stream.blocks) == (3, StreamState.REPLAYING, 3)
    stream.sees(6)
    stream.replays(3, 4, 5)

    assert (stream.order.state, stream.blocks, stream.counts) == (StreamState.FOLLOWING, 7, (1, 0, 0))
    stream.sees(7)
    assert stream.blocks == 8


def test_a_gap_without_a_replay_makes_earlier_blocks_unknown_until_the_cache_is_cleared():
    stream = Stream(can_replay=False)
    stream.order.on_connected()
    stream.sees(0, 1, 2, 5)
    assert (stream.order.state, stream.blocks, stream.counts) == (StreamState.PARTIAL, 1, (1, 1, 0))

    stream.take(stream.order.on_message(6, payload_of([CLEARED])))
    assert (stream.order.state, stream.blocks) == (StreamState.FOLLOWING, 0)


def test_a_gap_that_the_replay_no_longer_has_is_lost():
    stream = connected(2)
    stream.sees(9)
    stream.replays(8, 9)

    assert (stream.order.state, stream.blocks, stream.counts) == (StreamState.PARTIAL, 2, (1, 1, 0))


def test_a_replay_without_a_response_is_given_up_and_after_three_there_is_none_for_a_while():
    stream = connected(0)
    for failure in range(MAX_FAILURES):
        stream.sees(10 * (failure + 1))
        assert stream.order.state is StreamState.REPLAYING
        stream.take(stream.order.on_replay_failed())
        assert (stream.order.state, stream.blocks) == (StreamState.PARTIAL, 1)
    stream.sees(100)
    assert (stream.order.state, stream.blocks) == (StreamState.PARTIAL, 1)

    stream.now_s += PAUSE_S
    stream.sees(200)
    assert stream.order.state is StreamState.REPLAYING


def test_a_message_between_replay_and_subscription_is_replayed_again():
    stream = connected(0)
    stream.sees(3)
    stream.replays(1, 2, ends=False)
    stream.order.on_disconnected()
    stream.order.on_connected()
    stream.sees(5)
    stream.replays(2, 3)
    assert stream.order.replay_from == 4
    stream.replays(4, 5)

    assert (stream.order.state, stream.blocks) == (StreamState.FOLLOWING, 6)


def test_what_waits_for_a_replay_is_bounded():
    stream, payload = connected(0), payload_of([CLEARED]) + b"\xc0" * 0
    large = payload_of([stored([1], [1] * 4, padding="x" * 1_000_000)])
    count = MAX_WAITING_BYTES // len(large) + 2
    stream.sees(10)
    for number in range(11, 11 + count):
        stream.take(stream.order.on_message(number, large))

    assert stream.order.lost == 1
    assert stream.order.state is StreamState.PARTIAL
    stream.take(stream.order.on_message(11 + count, payload))
    assert (stream.order.state, stream.blocks) == (StreamState.FOLLOWING, 0)


def test_numbers_that_go_back_show_a_restart():
    stream = connected(5)
    stream.sees(1, engine=1)  # subscribers miss the first message of a restarted engine
    assert (stream.order.replay_from, stream.blocks, stream.counts) == (0, 0, (0, 0, 1))
    stream.replays(0, 1, engine=1)
    assert (stream.order.state, stream.blocks) == (StreamState.FOLLOWING, 2)

    without = Stream(can_replay=False)
    without.order.on_connected()
    without.sees(0, 1, 2, 3)
    without.sees(1, engine=1)
    assert (without.order.state, without.blocks, without.counts) == (StreamState.PARTIAL, 1, (1, 1, 1))


@pytest.mark.parametrize("restarted", [[], [0, 1], [0, 1, 2, 3, 4, 5, 6]])
def test_after_a_reconnection_the_last_message_shows_whether_the_engine_is_another_one(restarted):
    stream = connected(5)
    stream.order.on_disconnected()
    assert (stream.order.state, stream.order.is_followed, stream.blocks) == (StreamState.ESTIMATED, False, 6)
    stream.order.on_connected()
    assert stream.order.replay_from == 5
    stream.replays(*(number for number in restarted if number >= 5), engine=1)
    assert (stream.order.replay_from, stream.counts[2], stream.blocks) == (0, 1, 0)
    stream.replays(*restarted, engine=1)

    assert (stream.order.state, stream.blocks) == (StreamState.FOLLOWING, len(restarted))


def test_after_a_reconnection_the_same_engine_is_followed_on():
    stream = connected(5)
    stream.order.on_disconnected()
    stream.order.on_connected()
    stream.replays(5, 6, 7)
    assert (stream.order.state, stream.blocks, stream.counts) == (StreamState.FOLLOWING, 8, (0, 0, 0))

    stream.order.on_disconnected()
    stream.order.on_connected()
    stream.replays(30, 31)  # the last known message is too old
    assert (stream.order.state, stream.blocks) == (StreamState.PARTIAL, 2)


def test_without_a_replay_a_reconnection_makes_earlier_blocks_unknown():
    for number, restarts, blocks in ((4, 0, 1), (9, 0, 1), (2, 1, 1)):
        stream = Stream(can_replay=False)
        stream.order.on_connected()
        stream.sees(0, 1, 2, 3)
        stream.order.on_disconnected()
        stream.order.on_connected()
        assert not stream.order.is_followed
        stream.sees(number, engine=1)
        assert (stream.order.state, stream.order.restarts, stream.blocks) == (StreamState.PARTIAL, restarts, blocks)


def test_a_payload_that_cannot_be_decoded_counts_as_lost_blocks():
    stream = connected(2)
    stream.take(stream.order.on_message(3, b"garbage"))
    assert (stream.order.state, stream.blocks, stream.order.malformed) == (StreamState.PARTIAL, 0, 1)
    stream.sees(4)
    assert (stream.blocks, stream.order.malformed) == (1, 1)


def test_events_of_another_rank_are_rejected():
    stream = Stream(can_replay=False, rank=1)
    stream.order.on_connected()
    stream.take(stream.order.on_message(0, payload_of([stored([1], [1] * 4)], rank=1)))
    assert (stream.blocks, stream.order.malformed) == (1, 0)
    stream.take(stream.order.on_message(1, payload_of([stored([2], [1] * 4)], rank=0)))
    assert (stream.blocks, stream.order.malformed) == (0, 1)


def test_a_late_replay_is_ignored():
    stream = connected(2)
    stream.replays(0, 1, 2)
    stream.take(stream.order.on_replay_failed())
    assert (stream.order.state, stream.blocks, stream.counts) == (StreamState.FOLLOWING, 3, (0, 0, 0))


def test_the_lag_is_measured_and_the_age_ignores_the_difference_of_clocks():
    stream = connected(2)
    assert stream.order.lag_s is not None
    assert stream.order.lag_s > 1e6  # messages of this test have their numbers as times
    stored_s = [run.stored_s for run, _ in stream.order.engine.blocks.remove(removed_event(0, 1, 2))]
    assert max(stored_s) == 1000.0


def test_gap_after_gap_is_a_fault_of_the_stream_until_it_is_opened_again():
    stream = connected(0, can_replay=False)
    for number in range(2, 2 * MAX_LOSSES, 2):
        stream.sees(number)
        assert not stream.order.fault
    stream.sees(2 * MAX_LOSSES)
    assert f"{MAX_LOSSES} gaps" in stream.order.fault
    stream.order.on_disconnected()
    stream.order.on_connected()
    assert not stream.order.fault


def test_rare_gaps_are_no_fault():
    stream = connected(0, can_replay=False)
    for number in range(2, 40, 2):
        stream.now_s += LOSSES_S / (MAX_LOSSES - 1) + 1
        stream.sees(number)
        assert not stream.order.fault


def test_an_engine_of_an_unsupported_release_is_a_fault_that_says_what_is_expected():
    """vLLM before 0.24 encodes an event as an array."""
    stream = connected(0, can_replay=False)
    for number in range(1, 1 + MAX_MALFORMED):
        assert not stream.order.fault
        stream.take(stream.order.on_message(number, payload_of([["BlockStored", [number], None, [1] * 4, 4]])))
    assert "vLLM 0.24 or later" in stream.order.fault
    assert "object" in stream.order.fault
    stream.sees(1 + MAX_MALFORMED)
    assert not stream.order.fault


def test_an_engine_that_serves_prompts_and_publishes_nothing_is_a_fault():
    stream = connected(0, can_replay=False)
    served = ServedPrompt([1], stream.now_s, 16.0, MIN_UNREPORTED_TOKENS + 100, 100, 5)
    cached = ServedPrompt([1], stream.now_s, 16.0, 5000, 4990, 5)
    for _ in range(MAX_UNREPORTED):
        stream.order.engine.on_response(served)
        stream.order.engine.on_response(cached)
    assert not stream.order.fault
    stream.now_s += UNREPORTED_S + 0.1
    assert f"no event for {MAX_UNREPORTED} responses" in stream.order.fault
    stream.sees(1)
    assert not stream.order.fault
