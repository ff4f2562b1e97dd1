"""Outstanding work at each replica, as this router dispatched it.

Theory of operation. Dispatching a request hands out a ticket; its first byte and its end give back what it took.
Both are idempotent, and an end implies the first byte, so one ``finally: ticket.end()`` balances the book however a
request ends. A load outlives a change of configuration for as long as the replica's name is known or requests run at
it. Whoever keeps sums over loads reads the journal of changes from where it last stopped, instead of every load.
A ticket also carries the request's stay in the residency: whoever says ``answered`` confirms it, and a request that
ends without any answer takes it back.

Engines prefill in the order of arrival, so of what waits at a replica the oldest request is under way. How far it has
come follows from the time since then and from the rate that the replica's answers showed; of a long prompt that is
nearly done little remains. Scraped gauges play no part: they are too old to steer bursts.

The first byte of a plain response comes with its last token, so nothing says when its prompt is prefilled. Such a
request stops waiting at the earliest of three moments: a request that was sent later has its first token, or its whole
response; the request itself ends; or ``advance`` finds that at the learnt rate its prefill is over.

Where several processes share one port, each counts what it dispatched itself and is told now and then what the others
did (``set_remote_load``). A load then is of all of them, so that whoever chooses sees the whole replica.

``recent`` tells who had how many requests of late, where nothing waits anywhere: one counts half as much after
``RECENT_S`` more. Instead of all older ones losing weight, a new one is entered with more of it, ``weight_now``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import takewhile
from time import monotonic
from typing import Final

from routing.balancing.rates import PrefillRate, TokenRatio
from routing.balancing.residency import RequestResidency
from routing.types import TargetId

JOURNAL_ENTRIES: Final = 4096  # kept for readers at least; one that is further behind sums anew
ALMOST_DONE: Final = 0.95  # share of a prompt beyond which no estimate goes: its first byte has the last word
RECENT_S: Final = 120.0  # after which a request counts half in ``recent``
MAX_WEIGHT: Final = 1e100  # of a new request, above which all are counted anew
MAX_STALE: Final = 64  # entries of requests that are not the oldest any more, beside one or two for each replica
MAX_HALVINGS: Final = 1000.0  # nobody remembers longer, and no float holds more

Clock = Callable[[], float]  # seconds, never going back


@dataclass(slots=True, eq=False)
class Load:
    """Outstanding work at one target."""

    target: TargetId
    running: int = 0  # requests sent and not ended, from everywhere
    waiting_tokens: int = 0  # estimated uncached prompt tokens of requests whose first byte has not come
    waiting: dict[Ticket, int] = field(default_factory=dict)  # those tokens by request, the oldest first
    oldest: Ticket | None = None  # of those that wait
    oldest_tokens: float = 0.0  # of it, those that an estimate may take for done
    oldest_since_s: float = 0.0  # when it came to be the oldest
    plain: int = 0  # of those that wait, requests whose responses are not streamed
    prefill: PrefillRate = field(default_factory=PrefillRate)
    recent: float = 0.0  # requests sent of late, by this process; to be divided by the book's ``weight_now``
    remote_running: int = 0  # of ``running``, what other processes sent
    remote_tokens: int = 0  # of ``waiting_tokens``, what theirs still wait for

    def remaining_tokens(self, now_s: float) -> float:
        """``waiting_tokens`` less what is likely to be prefilled already of the oldest request."""
        prefill = self.prefill
        done, most = (now_s - self.oldest_since_s) * (prefill.shown or prefill.tokens_per_s), self.oldest_tokens
        return self.waiting_tokens - (done if done < most else most)  # noqa: FURB136 -- min is a call

    def line_up(self, now_s: float) -> Ticket | None:
        """Look who is the oldest of those that wait now, if anybody does."""
        if not self.waiting:
            self.oldest, self.oldest_tokens = None, 0.0
            return None
        oldest = self.oldest = next(iter(self.waiting))
        self.oldest_tokens = ALMOST_DONE * self.waiting[oldest]
        self.oldest_since_s = now_s
        return oldest


class Ticket:
    """One dispatched request's share of a replica's load."""

    __slots__ = (
        "_ahead",
        "_book",
        "_is_prefilled",
        "_load",
        "_ratio",
        "_residency_record",
        "_running",
        "_sample_bytes",
        "is_plain",
    )

    def __init__(
        self, book: LoadTracker, load: Load, stay: RequestResidency | None, ahead: float, *, is_plain: bool = False
    ) -> None:
        self._book = book
        self._load = load
        self._residency_record = stay
        self._ahead = ahead  # tokens of requests before it
        self._running = 1
        self._is_prefilled = False
        self.is_plain = is_plain  # its first byte comes with its last token
        self._ratio: TokenRatio | None = None
        self._sample_bytes = 0

    def teach(self, ratio: TokenRatio, sample_bytes: int) -> None:
        """Let the response's prompt tokens be a sample of this ratio: of so many bytes, 0 for no sample."""
        self._ratio, self._sample_bytes = ratio, sample_bytes

    def first_byte(self) -> None:
        """The prompt is prefilled: nothing of it waits any more."""
        self._is_prefilled = True
        if self._leave_line():
            self._book.changed(self._load)

    def answered(
        self,
        ttft_s: float | None = None,
        prompt_tokens: int | None = None,
        cached_tokens: int | None = None,
        generated_tokens: int | None = None,
    ) -> None:
        """The replica gave a whole answer that is no error; call before ``end``. None where it does not say.

        ``ttft_s`` is of this replica alone, without others that were tried; tokens are the engine's own counts.
        """
        self._is_prefilled = True
        if prompt_tokens is None:
            return
        if self._ratio is not None:
            self._ratio.learn(self._sample_bytes, prompt_tokens)
        if cached_tokens is None:
            return
        if ttft_s is not None:
            self._load.prefill.learn(self._ahead + prompt_tokens - cached_tokens, ttft_s)
        if self._residency_record is not None:
            self._residency_record.confirm(prompt_tokens, cached_tokens, generated_tokens)

    def end(self) -> None:
        """The request is over: answered, failed or cancelled."""
        if self._running:
            if self._residency_record is not None and not self._is_prefilled:
                self._residency_record.take_back()
            self._leave_line()
            self._running = 0
            self._load.running -= 1
            self._book.changed(self._load)

    @property
    def load(self) -> Load:
        """The load that this ticket is part of."""
        return self._load

    @property
    def running(self) -> int:
        """1 until the request is over, then 0."""
        return self._running

    @property
    def waiting_tokens(self) -> int:
        """Of its prompt, estimated tokens that the replica has to prefill before the first byte."""
        return self._load.waiting.get(self, 0)

    @property
    def ahead_tokens(self) -> float:
        """What waited there when this request was sent."""
        return self._ahead

    def _leave_line(self) -> bool:
        """Wait no longer for a first byte; False if that was so already."""
        load = self._load
        if self not in load.waiting:
            return False
        if load.plain and self._is_prefilled and load.oldest is not self:
            for earlier in [it for it in takewhile(lambda it: it is not self, load.waiting) if it.is_plain]:
                earlier.drop_tokens()
        self.drop_tokens()
        if load.oldest not in load.waiting:
            self._book.line_up(load, self._book.clock())
        return True

    def drop_tokens(self) -> None:
        """Take what it waits for out of its load; somebody lines up the others afterwards."""
        load = self._load
        load.waiting_tokens -= load.waiting.pop(self)
        load.plain -= self.is_plain


class LoadTracker:
    """The loads of all replicas, by one clock."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self.clock = clock
        self.weight_now = 1.0  # what the latest request counts in ``recent``
        self._weighed_since_s = clock()  # when a request counted 1
        self._weighed_until_s = self._weighed_since_s  # until when it counts what it does now
        self._prefill = PrefillRate()  # of all replicas together
        self._due: list[tuple[float, int, Ticket]] = []  # a heap: when plain requests that are the oldest are prefilled
        self._entered = 0  # in the heap, ever: of equal times the earlier entry is first
        self.next_due_s = math.inf  # when ``advance`` has something to do
        self._loads: dict[TargetId, Load] = {}
        self._journal: list[Load] = []
        self._journal_start = 0  # changes that were dropped from the journal's front
        self.position = 0  # how many changes there have been: where a reader that is up to date stands

    def __len__(self) -> int:
        return len(self._loads)

    def load(self, target: TargetId) -> Load:
        """A replica's load, which begins at zero."""
        load = self._loads.get(target)
        if load is None:
            load = self._loads[target] = Load(target, prefill=PrefillRate(self._prefill))
        return load

    def dispatch(
        self, target: TargetId, uncached_tokens: int, stay: RequestResidency | None = None, *, is_plain: bool = False
    ) -> Ticket:
        """Count a request that is about to be sent; ``uncached_tokens`` (>= 0) of it wait for their prefill.

        ``is_plain``: its response is not streamed, so that no first byte will tell when they are prefilled.
        """
        load = self.load(target)
        now_s = self.clock()
        ahead = load.remaining_tokens(now_s) if load.waiting_tokens else 0.0
        ticket = Ticket(self, load, stay, ahead, is_plain=is_plain)
        load.waiting[ticket] = uncached_tokens
        load.plain += is_plain
        if load.oldest is None:
            self.line_up(load, now_s)
        load.running += 1
        load.waiting_tokens += uncached_tokens
        if now_s > self._weighed_until_s:
            self._weigh(now_s)
        load.recent += self.weight_now
        self.changed(load)
        return ticket

    def line_up(self, load: Load, now_s: float) -> None:
        """Look who is the oldest at a replica, and when its prefill will be over if nothing will tell."""
        oldest = load.line_up(now_s)
        if oldest is None or not oldest.is_plain:
            return
        due_s = now_s + load.waiting[oldest] / load.prefill.tokens_per_s
        self._entered += 1
        heappush(self._due, (due_s, self._entered, oldest))
        if len(self._due) > 2 * len(self._loads) + MAX_STALE:
            self._due = [it for it in self._due if it[2].load.oldest is it[2]]
            heapify(self._due)
        self.next_due_s = self._due[0][0]

    def advance(self, now_s: float) -> None:
        """Count plain requests as prefilled that are so at the learnt rate; call it before a choice, once it is due."""
        due = self._due
        while due and due[0][0] <= now_s:
            due_s, _, ticket = heappop(due)
            load = ticket.load
            if load.oldest is ticket:
                ticket.drop_tokens()
                self.line_up(load, due_s)
                self.changed(load)
                due = self._due
        self.next_due_s = due[0][0] if due else math.inf

    def set_remote_load(self, target: TargetId, running: int, waiting_tokens: int) -> None:
        """What other processes have at a replica now: requests, and tokens of theirs that still wait."""
        load = self.load(target)
        load.running += running - load.remote_running
        load.waiting_tokens += waiting_tokens - load.remote_tokens
        load.remote_running, load.remote_tokens = running, waiting_tokens
        self.changed(load)

    def forget_all_but(self, targets: Iterable[TargetId]) -> None:
        """Drop the loads of other replicas, once nothing runs at them."""
        kept = set(targets)
        self._loads = {name: load for name, load in self._loads.items() if name in kept or load.running}

    def audit(self, tickets: Iterable[Ticket] = ()) -> dict[TargetId, tuple[int, int]]:
        """Replicas whose load differs from the sum of these tickets, by how much; empty when all is well.

        ``tickets`` are those of all requests under way; the book itself keeps none.
        """
        off = {
            load.target: [load.running - load.remote_running, load.waiting_tokens - load.remote_tokens]
            for load in self._loads.values()
        }
        for ticket in tickets:
            difference = off.setdefault(ticket.load.target, [0, 0])
            difference[0] -= ticket.running
            difference[1] -= ticket.waiting_tokens
        return {name: (running, tokens) for name, (running, tokens) in off.items() if running or tokens}

    def _weigh(self, now_s: float) -> None:
        """Let a request count what it does at this time, and for a second more."""
        self.weight_now = 2.0 ** min(MAX_HALVINGS, (now_s - self._weighed_since_s) / RECENT_S)
        self._weighed_until_s = now_s + 1.0
        if self.weight_now > MAX_WEIGHT:
            for load in self._loads.values():
                load.recent /= self.weight_now
            self.weight_now, self._weighed_since_s = 1.0, now_s

    # --- the journal ---------------------------------------------------------------------------------

    def changes_since(self, position: int) -> list[Load] | None:
        """Loads that changed after ``position``, with repetitions; None if the journal no longer reaches back."""
        behind = position - self._journal_start
        return self._journal[behind:] if behind >= 0 else None

    def changed(self, load: Load) -> None:
        """Note that a load changed."""
        journal = self._journal
        journal.append(load)
        self.position += 1
        if len(journal) >= 2 * JOURNAL_ENTRIES:
            del journal[:JOURNAL_ENTRIES]
            self._journal_start += JOURNAL_ENTRIES
