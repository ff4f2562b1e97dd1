from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from routing.balancing.candidates import REQUEST_TOKENS, Candidates
from routing.balancing.load_tracker import JOURNAL_ENTRIES, MAX_STALE, LoadTracker, Ticket
from routing.types import ReplicaId
from tests.routing.building import names

A, B = names(2)


def held(book: LoadTracker, replica: ReplicaId) -> tuple[int, int]:
    load = book.load(replica)
    return load.running, load.waiting_tokens


def test_a_request_runs_from_dispatch_to_end_and_waits_until_its_first_byte() -> None:
    book = LoadTracker()
    ticket = book.dispatch(A, 100)
    assert held(book, A) == (1, 100)

    ticket.first_byte()
    assert held(book, A) == (1, 0)

    ticket.end()
    assert held(book, A) == (0, 0)


def test_an_end_before_the_first_byte_gives_back_both() -> None:
    book = LoadTracker()
    book.dispatch(A, 100).end()

    assert held(book, A) == (0, 0)


def test_a_ticket_may_be_told_twice() -> None:
    book = LoadTracker()
    other = book.dispatch(A, 7)
    ticket = book.dispatch(A, 100)
    for _ in range(2):
        ticket.first_byte()
    for _ in range(2):
        ticket.end()
    ticket.first_byte()

    assert held(book, A) == (1, 7)
    other.end()
    assert held(book, A) == (0, 0)


def test_a_load_holds_what_others_sent_and_the_books_still_balance() -> None:
    book = LoadTracker()
    candidates = Candidates({A: 1.0, B: 1.0}, book)
    mine = book.dispatch(A, 10)
    book.set_remote_load(A, 3, 500)
    book.set_remote_load(B, 1, 0)

    assert held(book, A) == (4, 510)
    assert candidates.order.running == 5
    assert candidates.order.least_loaded() == B
    assert book.audit([mine]) == {}

    mine.end()
    assert book.load(A).remaining_tokens(book.clock()) == 500
    book.set_remote_load(A, 0, 0)
    book.set_remote_load(B, 0, 0)
    assert (held(book, A), held(book, B)) == ((0, 0), (0, 0))
    assert candidates.order.running == 0


def test_a_prompt_of_no_tokens_still_runs() -> None:
    book = LoadTracker()
    ticket = book.dispatch(A, 0)

    assert held(book, A) == (1, 0)
    ticket.end()
    assert held(book, A) == (0, 0)


def test_a_replica_that_stays_configured_keeps_its_load() -> None:
    book = LoadTracker()
    book.dispatch(A, 100)
    before = book.load(A)
    book.forget_all_but([A])

    assert book.load(A) is before


def test_a_replica_that_left_is_forgotten_once_nothing_runs_there() -> None:
    book = LoadTracker()
    ticket = book.dispatch(A, 100)
    book.load(B)

    book.forget_all_but([])
    assert len(book) == 1
    ticket.end()
    book.forget_all_but([])
    assert len(book) == 0


def test_a_replica_that_comes_back_while_requests_run_finds_them() -> None:
    book = LoadTracker()
    ticket = book.dispatch(A, 100)
    book.forget_all_but([B])
    book.forget_all_but([A, B])

    assert held(book, A) == (1, 100)
    ticket.end()
    assert held(book, A) == (0, 0)


def test_the_audit_names_what_is_off() -> None:
    book = LoadTracker()
    ticket = book.dispatch(A, 100)
    assert book.audit([ticket]) == {}
    assert book.audit() == {A: (1, 100)}

    book.load(A).running += 1
    book.load(B).waiting_tokens -= 5
    assert book.audit([ticket]) == {A: (1, 0), B: (0, -5)}


def test_a_reader_that_is_too_far_behind_is_told_so() -> None:
    book = LoadTracker()
    begin = book.position
    for _ in range(JOURNAL_ENTRIES):
        book.dispatch(A, 1).end()

    assert book.changes_since(begin) is None
    assert book.changes_since(book.position - 2) == [book.load(A), book.load(A)]
    assert book.position - begin == 2 * JOURNAL_ENTRIES


class Clock:
    """Seconds, set by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class BookAndReaders(RuleBasedStateMachine):
    """Requests come and go in any order; two readers of different replicas ask now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.book = LoadTracker(self.clock)
        self.fleet = names(3)
        self.tickets: list[Ticket] = []
        self.readers = [Candidates(dict.fromkeys(self.fleet, 1.0), self.book), Candidates({A: 2.0, B: 1.0}, self.book)]

    @rule(replica=st.sampled_from(names(3)), tokens=st.integers(0, 200), is_plain=st.booleans())
    def dispatch(self, replica: ReplicaId, tokens: int, is_plain: bool) -> None:
        self.tickets.append(self.book.dispatch(replica, tokens, is_plain=is_plain))

    @rule(seconds=st.floats(0, 0.05))
    def time_passes(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.book.advance(self.clock.now_s)

    @rule(data=st.data())
    def first_byte(self, data: st.DataObject) -> None:
        if self.tickets:
            data.draw(st.sampled_from(self.tickets)).first_byte()

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.tickets:
            data.draw(st.sampled_from(self.tickets)).end()

    @rule(kept=st.sets(st.sampled_from(names(3))))
    def reconfigure(self, kept: set[ReplicaId]) -> None:
        self.book.forget_all_but(kept | {A, B, self.fleet[2]})

    @rule(number=st.integers(0, 1))
    def total(self, number: int) -> None:
        reader = self.readers[number]
        assert reader.order.running == sum(load.running for load in reader.loads.values())

    @rule(number=st.integers(0, 1))
    def least(self, number: int) -> None:
        reader = self.readers[number]
        works = {
            name: (load.waiting_tokens + REQUEST_TOKENS * load.running) / reader.weights[name]
            for name, load in reader.loads.items()
        }
        assert works[reader.order.least_loaded()] == min(works.values())

    @invariant()
    def the_book_balances(self) -> None:
        assert self.book.audit(self.tickets) == {}

    @invariant()
    def no_plain_request_waits_once_its_prefill_is_over(self) -> None:
        for load in map(self.book.load, self.fleet):
            assert load.plain == sum(ticket.is_plain for ticket in load.waiting)
            assert (load.oldest is None) == (not load.waiting)
            if load.oldest is not None and load.oldest.is_plain:
                over_s = load.oldest_since_s + load.waiting[load.oldest] / load.prefill.tokens_per_s
                assert over_s >= self.book.next_due_s

    @invariant()
    def nothing_is_negative(self) -> None:
        assert all(min(held(self.book, name)) >= 0 for name in self.fleet)


TestBookAndReaders = BookAndReaders.TestCase


@given(order=st.permutations(range(5)))
def test_any_order_of_endings_empties_the_book(order: list[int]) -> None:
    book = LoadTracker()
    tickets = [book.dispatch(A, number) for number in range(5)]
    for number in order:
        tickets[number].end()

    assert held(book, A) == (0, 0)


@pytest.mark.parametrize("replica", [A, B])
def test_a_load_begins_at_zero(replica: ReplicaId) -> None:
    assert held(LoadTracker(), replica) == (0, 0)


# --- what remains of the work that waits -------------------------------------------------------------


def test_what_waits_shrinks_with_time_by_the_replicas_rate_but_only_the_oldest_request() -> None:
    clock = Clock()
    book = LoadTracker(clock)
    book.dispatch(A, 8000)
    book.dispatch(A, 5000)
    load = book.load(A)
    load.prefill.learn(10_000, 1.0)

    assert load.remaining_tokens(100.0) == 13_000
    assert load.remaining_tokens(100.5) == pytest.approx(8000)
    assert load.remaining_tokens(200.0) == pytest.approx(13_000 - 0.95 * 8000)
    assert load.waiting_tokens == 13_000


def test_the_next_oldest_begins_when_the_oldest_had_its_first_byte() -> None:
    clock = Clock()
    book = LoadTracker(clock)
    first, _second = book.dispatch(A, 8000), book.dispatch(A, 8000)
    clock.now_s = 101.0
    first.first_byte()

    assert book.load(A).remaining_tokens(101.0) == 8000
    assert book.load(A).remaining_tokens(101.5) == 4000


def test_a_later_request_that_is_first_to_end_does_not_set_the_oldest_back() -> None:
    clock = Clock()
    book = LoadTracker(clock)
    _first, second = book.dispatch(A, 8000), book.dispatch(A, 8000)
    clock.now_s = 100.5
    second.end()

    assert book.load(A).remaining_tokens(100.5) == 4000


def test_nothing_remains_where_nothing_waits() -> None:
    book = LoadTracker(Clock())
    book.dispatch(A, 8000).first_byte()

    assert book.load(A).remaining_tokens(1e9) == 0


def test_a_rate_is_learnt_from_all_the_work_that_was_done_before_the_first_byte() -> None:
    clock = Clock()
    book = LoadTracker(clock)
    book.dispatch(A, 8000)
    clock.now_s = 100.5
    book.dispatch(A, 6000).record_response(2.5, 6000, 1000)

    assert book.load(A).prefill.tokens_per_s == pytest.approx((4000 + 5000) / 2.5)


# --- requests whose responses are not streamed ---------------------------------------------------------


def test_a_plain_request_waits_for_as_long_as_its_prefill_takes_and_not_until_its_last_token() -> None:
    clock = Clock()
    book = LoadTracker(clock)
    book.load(A).prefill.learn(8000, 1.0)
    book.dispatch(A, 4000, is_plain=True)
    book.dispatch(A, 2000, is_plain=True)
    book.dispatch(A, 1000)
    assert book.next_due_s == pytest.approx(100.5)

    book.advance(100.4)
    assert held(book, A) == (3, 7000)
    book.advance(100.6)
    assert held(book, A) == (3, 3000)
    assert book.load(A).remaining_tokens(100.6) == pytest.approx(3000 - 800)  # the next one began at 100.5, not now
    book.advance(150.0)
    assert held(book, A) == (3, 1000)  # of the streamed one the first byte will tell
    assert book.next_due_s == math.inf


def test_the_first_token_of_a_later_request_tells_that_earlier_plain_ones_are_prefilled() -> None:
    book = LoadTracker(Clock())
    book.dispatch(A, 4000, is_plain=True)
    streamed = book.dispatch(A, 2000)
    later, last = book.dispatch(A, 1000), book.dispatch(A, 500, is_plain=True)

    later.first_byte()
    assert held(book, A) == (4, 2500)  # of another stream its own first byte will tell
    assert (streamed.waiting_tokens, last.waiting_tokens) == (2000, 500)
    last.record_response()
    last.end()
    assert held(book, A) == (3, 2000)


def test_a_request_that_is_cancelled_says_nothing_of_earlier_ones() -> None:
    book = LoadTracker(Clock())
    book.dispatch(A, 4000, is_plain=True)
    book.dispatch(A, 2000).end()

    assert held(book, A) == (1, 4000)


def test_what_is_remembered_of_plain_requests_is_bounded() -> None:
    book = LoadTracker(Clock())
    for _ in range(10_000):
        ticket = book.dispatch(A, 1_000_000, is_plain=True)
        ticket.first_byte()
        ticket.end()

    assert len(book._due) <= 2 * len(book) + MAX_STALE
