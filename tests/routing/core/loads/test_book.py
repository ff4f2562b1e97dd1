from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from routing.core.loads.book import JOURNAL_ENTRIES, LoadBook, Ticket
from routing.core.loads.candidate import REQUEST_TOKENS
from routing.core.loads.candidates import Candidates
from routing.core.types import ReplicaId
from tests.routing.building import names

A, B = names(2)


def held(book: LoadBook, replica: ReplicaId) -> tuple[int, int]:
    load = book.load(replica)
    return load.running, load.waiting_tokens


def test_a_request_runs_from_dispatch_to_end_and_waits_until_its_first_byte() -> None:
    book = LoadBook()
    ticket = book.dispatch(A, 100)
    assert held(book, A) == (1, 100)

    ticket.first_byte()
    assert held(book, A) == (1, 0)

    ticket.end()
    assert held(book, A) == (0, 0)


def test_an_end_before_the_first_byte_gives_back_both() -> None:
    book = LoadBook()
    book.dispatch(A, 100).end()

    assert held(book, A) == (0, 0)


def test_a_ticket_may_be_told_twice() -> None:
    book = LoadBook()
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
    book = LoadBook()
    candidates = Candidates({A: 1.0, B: 1.0}, book)
    mine = book.dispatch(A, 10)
    book.tell_elsewhere(A, 3, 500)
    book.tell_elsewhere(B, 1, 0)

    assert held(book, A) == (4, 510)
    assert candidates.order.running == 5
    assert candidates.order.least_loaded() == B
    assert book.audit([mine]) == {}

    mine.end()
    assert book.load(A).remaining_tokens(book.clock()) == 500
    book.tell_elsewhere(A, 0, 0)
    book.tell_elsewhere(B, 0, 0)
    assert (held(book, A), held(book, B)) == ((0, 0), (0, 0))
    assert candidates.order.running == 0


def test_a_prompt_of_no_tokens_still_runs() -> None:
    book = LoadBook()
    ticket = book.dispatch(A, 0)

    assert held(book, A) == (1, 0)
    ticket.end()
    assert held(book, A) == (0, 0)


def test_a_replica_that_stays_configured_keeps_its_load() -> None:
    book = LoadBook()
    book.dispatch(A, 100)
    before = book.load(A)
    book.forget_all_but([A])

    assert book.load(A) is before


def test_a_replica_that_left_is_forgotten_once_nothing_runs_there() -> None:
    book = LoadBook()
    ticket = book.dispatch(A, 100)
    book.load(B)

    book.forget_all_but([])
    assert len(book) == 1
    ticket.end()
    book.forget_all_but([])
    assert len(book) == 0


def test_a_replica_that_comes_back_while_requests_run_finds_them() -> None:
    book = LoadBook()
    ticket = book.dispatch(A, 100)
    book.forget_all_but([B])
    book.forget_all_but([A, B])

    assert held(book, A) == (1, 100)
    ticket.end()
    assert held(book, A) == (0, 0)


def test_the_audit_names_what_is_off() -> None:
    book = LoadBook()
    ticket = book.dispatch(A, 100)
    assert book.audit([ticket]) == {}
    assert book.audit() == {A: (1, 100)}

    book.load(A).running += 1
    book.load(B).waiting_tokens -= 5
    assert book.audit([ticket]) == {A: (1, 0), B: (0, -5)}


def test_a_reader_that_is_too_far_behind_is_told_so() -> None:
    book = LoadBook()
    begin = book.position
    for _ in range(JOURNAL_ENTRIES):
        book.dispatch(A, 1).end()

    assert book.changes_since(begin) is None
    assert book.changes_since(book.position - 2) == [book.load(A), book.load(A)]
    assert book.position - begin == 2 * JOURNAL_ENTRIES


class BookAndReaders(RuleBasedStateMachine):
    """Requests come and go in any order; two readers of different replicas ask now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.book = LoadBook()
        self.fleet = names(3)
        self.tickets: list[Ticket] = []
        self.readers = [Candidates(dict.fromkeys(self.fleet, 1.0), self.book), Candidates({A: 2.0, B: 1.0}, self.book)]

    @rule(replica=st.sampled_from(names(3)), tokens=st.integers(0, 200))
    def dispatch(self, replica: ReplicaId, tokens: int) -> None:
        self.tickets.append(self.book.dispatch(replica, tokens))

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
    def nothing_is_negative(self) -> None:
        assert all(min(held(self.book, name)) >= 0 for name in self.fleet)


TestBookAndReaders = BookAndReaders.TestCase


@given(order=st.permutations(range(5)))
def test_any_order_of_endings_empties_the_book(order: list[int]) -> None:
    book = LoadBook()
    tickets = [book.dispatch(A, number) for number in range(5)]
    for number in order:
        tickets[number].end()

    assert held(book, A) == (0, 0)


@pytest.mark.parametrize("replica", [A, B])
def test_a_load_begins_at_zero(replica: ReplicaId) -> None:
    assert held(LoadBook(), replica) == (0, 0)


# --- what remains of the work that waits -------------------------------------------------------------


class Clock:
    """Seconds, set by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_what_waits_shrinks_with_time_by_the_replicas_rate_but_only_the_oldest_request() -> None:
    clock = Clock()
    book = LoadBook(clock)
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
    book = LoadBook(clock)
    first, _second = book.dispatch(A, 8000), book.dispatch(A, 8000)
    clock.now_s = 101.0
    first.first_byte()

    assert book.load(A).remaining_tokens(101.0) == 8000
    assert book.load(A).remaining_tokens(101.5) == 4000


def test_a_later_request_that_is_first_to_end_does_not_set_the_oldest_back() -> None:
    clock = Clock()
    book = LoadBook(clock)
    _first, second = book.dispatch(A, 8000), book.dispatch(A, 8000)
    clock.now_s = 100.5
    second.end()

    assert book.load(A).remaining_tokens(100.5) == 4000


def test_nothing_remains_where_nothing_waits() -> None:
    book = LoadBook(Clock())
    book.dispatch(A, 8000).first_byte()

    assert book.load(A).remaining_tokens(1e9) == 0


def test_a_rate_is_learnt_from_all_the_work_that_was_done_before_the_first_byte() -> None:
    clock = Clock()
    book = LoadBook(clock)
    book.dispatch(A, 8000)
    clock.now_s = 100.5
    book.dispatch(A, 6000).answered(2.5, 6000, 1000)

    assert book.load(A).prefill.tokens_per_s == pytest.approx((4000 + 5000) / 2.5)
