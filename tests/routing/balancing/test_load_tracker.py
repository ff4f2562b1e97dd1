from __future__ import annotations

import math

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from routing.balancing.candidates import REQUEST_TOKENS, Candidates
from routing.balancing.load_tracker import JOURNAL_ENTRIES, MAX_STALE_ENTRIES, LoadTracker, Ticket
from routing.types import ReplicaId
from tests.routing.building import names

A, B = names(2)


def load_of(tracker: LoadTracker, replica: ReplicaId) -> tuple[int, int]:
    load = tracker.load(replica)
    return load.running, load.waiting_tokens


def test_a_load_includes_requests_of_other_processes():
    tracker = LoadTracker()
    candidates = Candidates({A: 1.0, B: 1.0}, tracker)
    own_ticket = tracker.dispatch(A, 10)
    tracker.set_remote_load(A, 3, 500)
    tracker.set_remote_load(B, 1, 0)

    assert load_of(tracker, A) == (4, 510)
    assert load_of(tracker, B) == (1, 0)
    assert candidates.order.least_loaded() == B
    assert tracker.audit([own_ticket]) == {}

    own_ticket.end()
    assert tracker.load(A).remaining_tokens(tracker.clock()) == 500
    tracker.set_remote_load(A, 0, 0)
    tracker.set_remote_load(B, 0, 0)
    assert (load_of(tracker, A), load_of(tracker, B)) == ((0, 0), (0, 0))


def test_a_removed_replica_is_forgotten_once_no_request_runs_there():
    tracker = LoadTracker()
    ticket = tracker.dispatch(A, 100)
    tracker.load(B)

    tracker.forget_all_but([])
    assert len(tracker) == 1
    ticket.end()
    tracker.forget_all_but([])
    assert len(tracker) == 0


def test_a_replica_that_returns_while_requests_run_keeps_its_load():
    tracker = LoadTracker()
    ticket = tracker.dispatch(A, 100)
    tracker.forget_all_but([B])
    tracker.forget_all_but([A, B])

    assert load_of(tracker, A) == (1, 100)
    ticket.end()
    assert load_of(tracker, A) == (0, 0)


def test_the_audit_reports_differences():
    tracker = LoadTracker()
    ticket = tracker.dispatch(A, 100)
    assert tracker.audit([ticket]) == {}
    assert tracker.audit() == {A: (1, 100)}

    tracker.load(A).running += 1
    tracker.load(B).waiting_tokens -= 5
    assert tracker.audit([ticket]) == {A: (1, 0), B: (0, -5)}


def test_a_reader_that_is_too_far_behind_gets_none():
    tracker = LoadTracker()
    begin = tracker.position
    for _ in range(JOURNAL_ENTRIES):
        tracker.dispatch(A, 1).end()

    assert tracker.changes_since(begin) is None
    assert tracker.changes_since(tracker.position - 2) == [tracker.load(A), tracker.load(A)]
    assert tracker.position - begin == 2 * JOURNAL_ENTRIES


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class TrackerAndReaders(RuleBasedStateMachine):
    """Requests start and end in any order, and two readers of different replicas query at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.tracker = LoadTracker(self.clock)
        self.fleet = names(3)
        self.tickets: list[Ticket] = []
        self.readers = [
            Candidates(dict.fromkeys(self.fleet, 1.0), self.tracker),
            Candidates({A: 2.0, B: 1.0}, self.tracker),
        ]

    @rule(replica=st.sampled_from(names(3)), tokens=st.integers(0, 200), is_plain=st.booleans())
    def dispatch(self, replica: ReplicaId, tokens: int, is_plain: bool) -> None:
        self.tickets.append(self.tracker.dispatch(replica, tokens, is_plain=is_plain))

    @rule(seconds=st.floats(0, 0.05))
    def time_passes(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.tracker.advance(self.clock.now_s)

    @rule(data=st.data())
    def first_byte(self, data: st.DataObject) -> None:
        if self.tickets:
            data.draw(st.sampled_from(self.tickets)).record_first_byte()

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.tickets:
            data.draw(st.sampled_from(self.tickets)).end()

    @rule(retained=st.sets(st.sampled_from(names(3))))
    def reconfigure(self, retained: set[ReplicaId]) -> None:
        self.tracker.forget_all_but(retained | {A, B, self.fleet[2]})

    @rule(number=st.integers(0, 1))
    def total(self, number: int) -> None:
        reader = self.readers[number]
        busy = sum(load.waiting_tokens > 0 for load in reader.loads.values())
        assert reader.order.busy_ratio == busy / len(reader)

    @rule(number=st.integers(0, 1))
    def least(self, number: int) -> None:
        reader = self.readers[number]
        works = {
            name: (load.waiting_tokens + REQUEST_TOKENS * load.running) / reader.weights[name]
            for name, load in reader.loads.items()
        }
        assert works[reader.order.least_loaded()] == min(works.values())

    @invariant()
    def the_audit_is_clean(self) -> None:
        assert self.tracker.audit(self.tickets) == {}

    @invariant()
    def no_plain_request_waits_once_its_prefill_is_over(self) -> None:
        for load in map(self.tracker.load, self.fleet):
            assert load.plain_waiting == sum(ticket.is_plain for ticket in load.waiting)
            assert (load.oldest is None) == (not load.waiting)
            if load.oldest is not None and load.oldest.is_plain:
                over_s = load.oldest_since_s + load.waiting[load.oldest] / load.prefill.tokens_per_s
                assert over_s >= self.tracker.next_due_s

    @invariant()
    def nothing_is_negative(self) -> None:
        assert all(min(load_of(self.tracker, name)) >= 0 for name in self.fleet)


TestTrackerAndReaders = TrackerAndReaders.TestCase


# --- remaining tokens --------------------------------------------------------------------------------


def test_remaining_tokens_of_the_oldest_request_shrink_at_the_measured_rate():
    clock = Clock()
    tracker = LoadTracker(clock)
    tracker.dispatch(A, 8000)
    tracker.dispatch(A, 5000)
    load = tracker.load(A)
    load.prefill.learn(10_000, 1.0)

    assert load.remaining_tokens(100.0) == 13_000
    assert load.remaining_tokens(100.5) == pytest.approx(8000)
    assert load.remaining_tokens(200.0) == pytest.approx(13_000 - 0.95 * 8000)
    assert load.waiting_tokens == 13_000


def test_the_next_prefill_starts_at_the_first_byte_of_the_oldest_request():
    clock = Clock()
    tracker = LoadTracker(clock)
    first, _second = tracker.dispatch(A, 8000), tracker.dispatch(A, 8000)
    clock.now_s = 101.0
    first.record_first_byte()

    assert tracker.load(A).remaining_tokens(101.0) == 8000
    assert tracker.load(A).remaining_tokens(101.5) == 4000


def test_the_end_of_a_later_request_keeps_the_progress_of_the_oldest():
    clock = Clock()
    tracker = LoadTracker(clock)
    _first, second = tracker.dispatch(A, 8000), tracker.dispatch(A, 8000)
    clock.now_s = 100.5
    second.end()

    assert tracker.load(A).remaining_tokens(100.5) == 4000


def test_a_rate_includes_the_work_queued_before_the_request():
    clock = Clock()
    tracker = LoadTracker(clock)
    tracker.dispatch(A, 8000)
    clock.now_s = 100.5
    tracker.dispatch(A, 6000).record_response(2.5, 6000, 1000)

    assert tracker.load(A).prefill.tokens_per_s == pytest.approx((4000 + 5000) / 2.5)


# --- requests whose responses are not streamed ---------------------------------------------------------


def test_a_plain_request_waits_until_its_estimated_prefill_is_over():
    clock = Clock()
    tracker = LoadTracker(clock)
    tracker.load(A).prefill.learn(8000, 1.0)
    tracker.dispatch(A, 4000, is_plain=True)
    tracker.dispatch(A, 2000, is_plain=True)
    tracker.dispatch(A, 1000)
    assert tracker.next_due_s == pytest.approx(100.5)

    tracker.advance(100.4)
    assert load_of(tracker, A) == (3, 7000)
    tracker.advance(100.6)
    assert load_of(tracker, A) == (3, 3000)
    assert tracker.load(A).remaining_tokens(100.6) == pytest.approx(
        3000 - 800
    )  # the next prefill started at 100.5, not now
    tracker.advance(150.0)
    assert load_of(tracker, A) == (3, 1000)  # the streamed request waits for its first byte
    assert tracker.next_due_s == math.inf


def test_the_first_token_of_a_later_request_ends_the_wait_of_earlier_plain_ones():
    tracker = LoadTracker(Clock())
    tracker.dispatch(A, 4000, is_plain=True)
    streamed = tracker.dispatch(A, 2000)
    later, last = tracker.dispatch(A, 1000), tracker.dispatch(A, 500, is_plain=True)

    later.record_first_byte()
    assert load_of(tracker, A) == (4, 2500)  # another stream waits for its own first byte
    assert (streamed.waiting_tokens, last.waiting_tokens) == (2000, 500)
    last.record_response()
    last.end()
    assert load_of(tracker, A) == (3, 2000)


def test_a_cancelled_request_does_not_end_the_wait_of_earlier_ones():
    tracker = LoadTracker(Clock())
    tracker.dispatch(A, 4000, is_plain=True)
    tracker.dispatch(A, 2000).end()

    assert load_of(tracker, A) == (1, 4000)


def test_the_schedule_of_plain_requests_is_bounded():
    tracker = LoadTracker(Clock())
    for _ in range(10_000):
        ticket = tracker.dispatch(A, 1_000_000, is_plain=True)
        ticket.record_first_byte()
        ticket.end()

    assert len(tracker._prefill_ends) <= 2 * len(tracker) + MAX_STALE_ENTRIES
