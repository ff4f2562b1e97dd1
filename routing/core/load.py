"""Outstanding work at each replica, as this router dispatched it.

Theory of operation. Dispatching a request hands out a ticket; its first byte and its end give back what it took.
Both are idempotent, and an end implies the first byte, so one ``finally: ticket.end()`` balances the book however a
request ends. A load outlives a change of configuration for as long as the replica's name is known or requests run at
it. Whoever keeps sums over loads reads the journal of changes from where it last stopped, instead of every load.
A ticket also carries the request's stay in the residency: whoever says ``answered`` confirms it, and a request that
ends without any answer takes it back.
Scraped gauges play no part: they are too old to steer bursts. The book also learns how fast replicas prefill.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from routing.core.rates import PrefillRates
from routing.core.residency import Stay
from routing.core.types import ReplicaId

JOURNAL_ENTRIES = 4096  # kept for readers at least; one that is further behind sums anew


@dataclass(slots=True, eq=False)
class Load:
    """Outstanding work at one replica."""

    replica: ReplicaId
    running: int = 0  # requests sent and not ended
    waiting_tokens: int = 0  # estimated prompt tokens of requests whose first byte has not come


class Ticket:
    """One dispatched request's share of a replica's load."""

    __slots__ = ("_ahead", "_book", "_is_prefilled", "_load", "_running", "_stay", "_waiting_tokens")

    def __init__(self, book: LoadBook, load: Load, waiting_tokens: int, stay: Stay | None) -> None:
        self._book = book
        self._load = load
        self._running = 1
        self._ahead = load.waiting_tokens  # of requests that were there before
        self._waiting_tokens = waiting_tokens
        self._stay = stay
        self._is_prefilled = False

    def first_byte(self) -> None:
        """The prompt is prefilled: nothing of it waits any more."""
        self._is_prefilled = True
        if self._waiting_tokens:
            self._load.waiting_tokens -= self._waiting_tokens
            self._waiting_tokens = 0
            self._book.changed(self._load)

    def answered(
        self, ttft_s: float | None = None, prompt_tokens: int | None = None, cached_tokens: int | None = None
    ) -> None:
        """The replica gave a whole answer that is no error; call before ``end``. None where it does not say.

        ``ttft_s`` is of this replica alone, without others that were tried; tokens are the engine's own counts.
        """
        self._is_prefilled = True
        if prompt_tokens is None or cached_tokens is None:
            return
        if ttft_s is not None:
            self._book.rates.learn(self._load.replica, self._ahead + prompt_tokens - cached_tokens, ttft_s)
        if self._stay is not None:
            self._stay.confirm(prompt_tokens, cached_tokens)

    def end(self) -> None:
        """The request is over: answered, failed or cancelled."""
        if self._running:
            if self._stay is not None and not self._is_prefilled:
                self._stay.take_back()
            self._load.waiting_tokens -= self._waiting_tokens
            self._load.running -= 1
            self._waiting_tokens = self._running = 0
            self._book.ended(self)

    @property
    def load(self) -> Load:
        """The load that this ticket is part of."""
        return self._load

    @property
    def share(self) -> tuple[int, int]:
        """Requests (0 or 1) and waiting tokens that this ticket still holds."""
        return self._running, self._waiting_tokens


class LoadBook:
    """The loads of all replicas."""

    def __init__(self) -> None:
        self._loads: dict[ReplicaId, Load] = {}
        self._tickets: set[Ticket] = set()
        self.rates = PrefillRates()
        self._journal: list[Load] = []
        self._journal_start = 0  # changes that were dropped from the journal's front

    def __len__(self) -> int:
        return len(self._loads)

    def load(self, replica: ReplicaId) -> Load:
        """A replica's load, which begins at zero."""
        load = self._loads.get(replica)
        if load is None:
            load = self._loads[replica] = Load(replica)
        return load

    def dispatch(self, replica: ReplicaId, uncached_tokens: int, stay: Stay | None = None) -> Ticket:
        """Count a request that is about to be sent; ``uncached_tokens`` (>= 0) of it wait for their prefill."""
        load = self.load(replica)
        ticket = Ticket(self, load, uncached_tokens, stay)
        load.running += 1
        load.waiting_tokens += uncached_tokens
        self._tickets.add(ticket)
        self.changed(load)
        return ticket

    def forget_all_but(self, replicas: Iterable[ReplicaId]) -> None:
        """Drop the loads of other replicas, once nothing runs at them."""
        kept = set(replicas)
        self._loads = {name: load for name, load in self._loads.items() if name in kept or load.running}
        self.rates.forget_all_but(kept)

    def audit(self) -> dict[ReplicaId, tuple[int, int]]:
        """Replicas whose load differs from the sum of their live tickets, by how much; empty when all is well."""
        off = {load.replica: [load.running, load.waiting_tokens] for load in self._loads.values()}
        for ticket in self._tickets:
            running, waiting_tokens = ticket.share
            difference = off.setdefault(ticket.load.replica, [0, 0])
            difference[0] -= running
            difference[1] -= waiting_tokens
        return {name: (running, tokens) for name, (running, tokens) in off.items() if running or tokens}

    # --- the journal ---------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """How many changes there have been: where a reader that is up to date stands."""
        return self._journal_start + len(self._journal)

    def changes_since(self, position: int) -> list[Load] | None:
        """Loads that changed after ``position``, with repetitions; None if the journal no longer reaches back."""
        behind = position - self._journal_start
        return self._journal[behind:] if behind >= 0 else None

    def changed(self, load: Load) -> None:
        """Note that a load changed."""
        journal = self._journal
        journal.append(load)
        if len(journal) >= 2 * JOURNAL_ENTRIES:
            del journal[:JOURNAL_ENTRIES]
            self._journal_start += JOURNAL_ENTRIES

    def ended(self, ticket: Ticket) -> None:
        """Note that a ticket's request is over."""
        self._tickets.discard(ticket)
        self.changed(ticket.load)
