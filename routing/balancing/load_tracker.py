"""Load tracker: outstanding work at each replica, by the requests dispatched, and measured prefill and token rates.

Theory of operation. Each dispatched request has a ticket; its first byte and its end subtract what its dispatch added.
Both are idempotent, and the end implies the first byte, so ``finally: ticket.end()`` keeps the loads correct however a
request ends. A load is kept across configurations as long as the replica's name is configured or requests run there.
Code that keeps sums over loads reads the journal of changes since its last reading instead of every load. A ticket also
holds the request's residency record: a complete response confirms it, and a request that ends without a response rolls
it back.

Engines prefill in order of arrival, so the oldest waiting request at a replica is being prefilled. Its progress follows
from the time since it became the oldest and from the replica's measured rate, so that little remains of a long prompt
that is nearly done. Scraped gauges are not used: they are too old to steer bursts.

The first byte of a response that is not streamed (a plain response) comes with its last token, so it does not tell when
the prompt was prefilled. Such a request stops waiting at the earliest of three events: a later request gets its first
token or its whole response; the request ends; or ``advance`` finds that its prefill is over at the measured rate.

Where several routers or processes share replicas, each counts its own requests and regularly receives the sums of the
others (``set_remote_load``), so that a load covers the whole replica.

``Load.recent`` counts recent requests, for balance where no request ever waits: a request counts half after
``RECENT_S``. Instead of reducing all older ones, a new request is added with more weight, ``request_weight``.

Prefill rate. A request that found ``queued`` tokens at a replica and had ``uncached`` tokens of its own got its first
token after ``prefill_s``, so the replica prefilled ``queued + uncached`` tokens in that time. It counts from when the
request was sent there, because what it waited for in the router is no work of the replica. The rate is the tokens of
recent responses divided by their seconds, so that long work counts more than short work, whose time is mostly fixed
cost. Older responses fade: a sample counts half after ``HALF_LIFE`` more. The deviation of a sample is limited to a
factor of ``CLIP``, so a single stall or lucky hit changes the rate little, while a change of hardware does. A replica
with few samples is assumed to be as fast as the fleet: a fixed guess would starve or flood it.

Token ratio. The router sees bytes, but engines have capacity, work and limits in tokens. Each response reports the
tokens of its prompt (``usage.prompt_tokens``). The sum of tokens divided by the sum of bytes is the ratio of a
tokenizer, its chat template and the texts. Long prompts count more, up to ``MAX_RATIO_BYTES`` each. The sums start with
a prior of ``BLOCK_TOKENS`` in ``BLOCK_BYTES`` (4 bytes a token), which weighs as much as ``PRIOR_BYTES`` of prompts,
and fade by half every ``HALF_LIFE_BYTES``, so that a new tokenizer is learnt. Samples are clipped by ``CLIP`` as well.
Prompts whose tokens do not all come from their bytes are not used (``CanonicalPrompt.sample_bytes``). Other code uses
``block_tokens``, whole tokens for each ``BLOCK_BYTES``. It changes only when the ratio is off by more than
``HYSTERESIS`` tokens, because capacities in blocks are derived from it and must not change with each response.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import takewhile
from time import monotonic
from typing import Final

from routing.balancing.residency import SentPrompt
from routing.schema import PoolConfig
from routing.types import BLOCK_BYTES, BLOCK_TOKENS, TargetId

DEFAULT_RATE: Final = 8000.0  # tokens/s until any replica was measured; the rate of the simulated engines
FLEET_SAMPLES: Final = 24.0  # weight of the fleet's rate in each replica's own
MIN_TOKENS: Final = 512  # of a sample's work
HALF_LIFE: Final = 128  # samples
CLIP: Final = 2.0
MIN_RATE, MAX_RATE = 50.0, 5_000_000.0  # tokens/s; a rate outside this range is a clock error

_FADE: Final = 0.5 ** (1 / HALF_LIFE)


class PrefillRate:
    """Prefill rate of one replica; ``fleet`` is the rate of all replicas, the default."""

    def __init__(self, fleet: PrefillRate | None = None) -> None:
        self._fleet = fleet
        self.measured: float | None = None  # tokens/s by its own responses; read directly where a property is too slow
        self.samples = 0
        self._faded_samples = 0.0  # samples, faded
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens/s; without own samples, the fleet's rate."""
        return self.measured or (self._fleet and self._fleet.measured) or DEFAULT_RATE

    @property
    def is_measured(self) -> bool:
        """Whether this replica or any other has samples."""
        return bool(self.samples) or (self._fleet is not None and self._fleet.is_measured)

    def learn(self, tokens: float, ttft_s: float) -> None:
        """Add a sample: ``tokens`` were prefilled in ``ttft_s``."""
        if tokens < MIN_TOKENS or ttft_s <= 0:
            return
        fleet = self._fleet
        if fleet is not None:
            fleet.learn(tokens, ttft_s)
        if self.measured is not None:
            expected_s = tokens / self.measured
            if not expected_s / CLIP <= ttft_s <= expected_s * CLIP:
                ttft_s = min(max(ttft_s, expected_s / CLIP), expected_s * CLIP)
        if not MIN_RATE * ttft_s <= tokens <= MAX_RATE * ttft_s:
            ttft_s = min(max(ttft_s, tokens / MAX_RATE), tokens / MIN_RATE)
        self.samples += 1
        self._faded_samples = faded_samples = _FADE * self._faded_samples + 1.0
        self._tokens = total = _FADE * self._tokens + tokens
        self._seconds = total_s = _FADE * self._seconds + ttft_s
        if fleet is None:
            self.measured = total / total_s
        else:
            prior = FLEET_SAMPLES * total / faded_samples
            self.measured = (total + prior) / (total_s + prior / (fleet.measured or fleet.tokens_per_s))


PRIOR_BYTES: Final = 16_384.0  # about four prompts of 4 KiB
HALF_LIFE_BYTES: Final = 4_194_304.0  # about a thousand prompts of 4 KiB
MIN_RATIO_BYTES: Final = 512  # of a sample: a shorter prompt consists mostly of the template's own tokens
MAX_RATIO_BYTES: Final = 16_384.0  # highest weight of one sample
HYSTERESIS: Final = 0.75  # tokens of a block
MIN_BLOCK_TOKENS, MAX_BLOCK_TOKENS = 8, 512  # 32 bytes a token to two tokens a byte: covers every tokenizer

_RATIO_FADE: Final = 0.6931471805599453 / HALF_LIFE_BYTES  # ln 2


class TokenRatio:
    """Tokens per byte of one model's prompts in one pool."""

    def __init__(self) -> None:
        self.block_tokens = BLOCK_TOKENS  # for each BLOCK_BYTES
        self.samples = 0
        self._bytes = PRIOR_BYTES  # of all samples and the prior, faded
        self._tokens = PRIOR_BYTES * BLOCK_TOKENS / BLOCK_BYTES

    @property
    def tokens_per_byte(self) -> float:
        """The learnt ratio, without the rounding of ``block_tokens``."""
        return self._tokens / self._bytes

    def tokens(self, size: int) -> int:
        """Estimated tokens of ``size`` bytes of a prompt."""
        return -(-size * self.block_tokens // BLOCK_BYTES)

    def learn(self, size: int, tokens: int) -> None:
        """Add a sample: a prompt of ``size`` bytes had ``tokens``. Ignores prompts below ``MIN_RATIO_BYTES``."""
        if size < MIN_RATIO_BYTES or tokens <= 0:
            return
        ratio = self._tokens / self._bytes
        weight = size if size < MAX_RATIO_BYTES else MAX_RATIO_BYTES  # noqa: FURB136 -- min is a call
        sample = min(max(tokens / size, ratio / CLIP), ratio * CLIP)
        retained = 1.0 - _RATIO_FADE * weight
        self._bytes = retained * self._bytes + weight
        self._tokens = retained * self._tokens + weight * sample
        self.samples += 1
        learnt = BLOCK_BYTES * self._tokens / self._bytes
        if not -HYSTERESIS <= learnt - self.block_tokens <= HYSTERESIS:
            self.block_tokens = min(max(round(learnt), MIN_BLOCK_TOKENS), MAX_BLOCK_TOKENS)


class TokenRatios:
    """The token ratios of all pools and models; they outlive configurations."""

    def __init__(self) -> None:
        self._ratios: dict[tuple[str, str], TokenRatio] = {}

    def for_model(self, pool: str, model: str) -> TokenRatio:
        """The ratio of a pool's model, which starts with the prior."""
        return self._ratios.setdefault((pool, model), TokenRatio())

    def items(self) -> Iterator[tuple[tuple[str, str], TokenRatio]]:
        """``((pool, model), ratio)`` of each."""
        return iter(list(self._ratios.items()))

    def forget_all_but(self, names: Iterable[tuple[str, str]]) -> None:
        """Drop the ratios of all other pools and models."""
        retained = set(names)
        self._ratios = {name: ratio for name, ratio in self._ratios.items() if name in retained}


def models_of(pool: PoolConfig) -> tuple[str, ...]:
    """The models of a pool with a ratio of their own; "" is any other. Adapters use the model that they adapt."""
    return (*pool.models, "")


JOURNAL_ENTRIES: Final = 4096  # minimum length; a reader that is further behind recounts everything
MAX_PROGRESS: Final = 0.95  # share of a prompt that an estimate may assume to be prefilled before its first byte
RECENT_S: Final = 120.0  # half-life of a request in ``recent``
MAX_WEIGHT: Final = 1e100  # of a new request; above it all counts are scaled down
MAX_STALE_ENTRIES: Final = 64  # entries of requests that are no longer the oldest, besides two for each replica
MAX_HALVINGS: Final = 1000.0  # the exponent range of a float

Clock = Callable[[], float]  # seconds, never going back


@dataclass(slots=True, eq=False)
class Load:
    """Outstanding work at one target."""

    target: TargetId
    running: int = 0  # requests sent and not ended, of all processes
    waiting_tokens: int = 0  # estimated uncached prompt tokens of requests without a first byte
    waiting: dict[Ticket, int] = field(default_factory=dict)  # these tokens by request, the oldest first
    oldest: Ticket | None = None  # of the waiting requests
    oldest_tokens: float = 0.0  # tokens of the oldest that an estimate may assume to be prefilled
    oldest_since_s: float = 0.0  # when it became the oldest
    plain_waiting: int = 0  # waiting requests whose responses are not streamed
    prefill: PrefillRate = field(default_factory=PrefillRate)
    recent: float = 0.0  # known recent requests, multiplied by the tracker's ``request_weight``
    dispatched: int = 0  # requests that this process has sent
    dispatched_tokens: int = 0  # estimated uncached prompt tokens of these
    remote_running: int = 0  # part of ``running`` that other routers or processes sent
    remote_tokens: int = 0  # part of ``waiting_tokens`` that they sent
    reports_details: bool = (
        False  # ``prompt_tokens_details`` have come from the engine: without them, nothing was cached
    )

    def remaining_tokens(self, now_s: float) -> float:
        """``waiting_tokens`` less the estimated progress of the oldest request."""
        prefill = self.prefill
        prefilled, limit = (
            (now_s - self.oldest_since_s) * (prefill.measured or prefill.tokens_per_s),
            self.oldest_tokens,
        )
        return self.waiting_tokens - (prefilled if prefilled < limit else limit)  # noqa: FURB136 -- min is a call


class Ticket:
    """One dispatched request's share of a replica's load."""

    def __init__(
        self,
        tracker: LoadTracker,
        load: Load,
        residency_record: SentPrompt | None,
        queued_tokens: float,
        *,
        is_plain: bool = False,
    ) -> None:
        self._tracker = tracker
        self.load = load
        self._residency_record = residency_record
        if residency_record is not None:
            residency_record.use.is_running = True
        self.queued_tokens = queued_tokens  # tokens that waited at the replica when this request was sent
        self.running = 1  # until the request is over, then 0
        self._is_prefilled = False
        self.is_plain = is_plain  # its first byte comes with its last token
        self.ratio: TokenRatio | None = None  # learns from the response
        self.sample_bytes = 0  # of the prompt; 0 if it is not a usable sample

    def record_first_byte(self) -> None:
        """Record that the prompt is prefilled: none of its tokens wait any more."""
        self._is_prefilled = True
        if self._stop_waiting():
            self._tracker.record_change(self.load)

    def record_response(
        self,
        prefill_s: float | None = None,
        prompt_tokens: int | None = None,
        cached_tokens: int | None = None,
        generated_tokens: int | None = None,
    ) -> None:
        """Learn from a complete response without an error; call it before ``end``. None: not reported.

        ``prefill_s``: from sending the request to this replica to its first token. Tokens are the engine's own counts.
        """
        self._is_prefilled = True
        if prompt_tokens is None:
            return
        if self.ratio is not None:
            self.ratio.learn(self.sample_bytes, prompt_tokens)
        if cached_tokens is None:
            return
        if prefill_s is not None:
            self.load.prefill.learn(self.queued_tokens + prompt_tokens - cached_tokens, prefill_s)
        if self._residency_record is not None:
            self._residency_record.confirm(prompt_tokens, cached_tokens, generated_tokens)

    def record_prefilled_response(self, prompt_tokens: int | None, generated_tokens: int | None) -> None:
        """Learn from a complete response whose prompt another replica prefilled; None: not reported.

        Its cached tokens and its time to the first token tell nothing about this replica.
        """
        self._is_prefilled = True
        if prompt_tokens is None:
            return
        if self.ratio is not None:
            self.ratio.learn(self.sample_bytes, prompt_tokens)
        if self._residency_record is not None:
            self._residency_record.set_tail(prompt_tokens, generated_tokens)

    def end(self) -> None:
        """Subtract the request from the load: it is complete, failed or cancelled."""
        if self.running:
            if self._residency_record is not None:
                self._residency_record.use.is_running = False
                if not self._is_prefilled:
                    self._residency_record.roll_back()
            self._stop_waiting()
            self.running = 0
            self.load.running -= 1
            self._tracker.record_change(self.load)

    @property
    def waiting_tokens(self) -> int:
        """Estimated tokens of its prompt that the replica has to prefill before the first byte."""
        return self.load.waiting.get(self, 0)

    def _stop_waiting(self) -> bool:
        """Subtract the waiting tokens; False if that was done before."""
        load = self.load
        if self not in load.waiting:
            return False
        if load.plain_waiting and self._is_prefilled and load.oldest is not self:
            earlier = takewhile(lambda ticket: ticket is not self, load.waiting)
            for ticket in [ticket for ticket in earlier if ticket.is_plain]:
                ticket.subtract_waiting_tokens()
        self.subtract_waiting_tokens()
        if load.oldest not in load.waiting:
            self._tracker.update_oldest(load, self._tracker.clock())
        return True

    def subtract_waiting_tokens(self) -> None:
        """Subtract the waiting tokens; the caller updates the oldest request afterwards."""
        load = self.load
        load.waiting_tokens -= load.waiting.pop(self)
        load.plain_waiting -= self.is_plain


class LoadTracker:
    """The loads of all replicas, by one clock."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self.clock = clock
        self.request_weight = 1.0  # of the latest request in ``recent``
        self._weight_base_s = clock()  # when a request's weight was 1
        self._weight_valid_s = self._weight_base_s  # until when ``request_weight`` is used
        self._prefill = PrefillRate()  # of all replicas together
        self._prefill_ends: list[tuple[float, int, Ticket]] = []  # heap: estimates for the oldest plain requests
        self._prefill_end_entries = 0  # ever added; of equal times the earlier entry is first
        self.next_due_s = math.inf  # when ``advance`` has something to do
        self._loads: dict[TargetId, Load] = {}
        self._journal: list[Load] = []
        self._journal_start = 0  # changes that were dropped from the journal's front
        self.position = 0  # number of changes so far: the position of an up-to-date reader

    def __len__(self) -> int:
        return len(self._loads)

    def load(self, target: TargetId) -> Load:
        """A replica's load, which starts at zero."""
        load = self._loads.get(target)
        if load is None:
            load = self._loads[target] = Load(target, prefill=PrefillRate(self._prefill))
        return load

    def dispatch(
        self,
        target: TargetId,
        uncached_tokens: int,
        residency_record: SentPrompt | None = None,
        *,
        is_plain: bool = False,
    ) -> Ticket:
        """Count a request that is about to be sent, with ``uncached_tokens`` (>= 0) to prefill.

        ``is_plain``: its response is not streamed, so no first byte shows when its prompt is prefilled.
        """
        load, now_s = self._loads.get(target) or self.load(target), self.clock()
        queued_tokens = load.remaining_tokens(now_s) if load.waiting_tokens else 0.0
        ticket = Ticket(self, load, residency_record, queued_tokens, is_plain=is_plain)
        load.waiting[ticket] = uncached_tokens
        load.plain_waiting += is_plain
        if load.oldest is None:
            self.update_oldest(load, now_s)
        load.running += 1
        load.waiting_tokens += uncached_tokens
        load.dispatched += 1
        load.dispatched_tokens += uncached_tokens
        if now_s > self._weight_valid_s:
            self._update_weight(now_s)
        load.recent += self.request_weight
        self.record_change(load)
        return ticket

    def reserve(self, target: TargetId) -> Ticket:
        """Count a request as running at a replica that will decode it; it adds no queued tokens there."""
        load = self.load(target)
        load.running += 1
        self.record_change(load)
        return Ticket(self, load, None, 0.0)

    def update_oldest(self, load: Load, now_s: float) -> None:
        """Determine a replica's oldest waiting request again; if it is plain, schedule the end of its prefill."""
        if not load.waiting:
            load.oldest, load.oldest_tokens = None, 0.0
            return
        oldest = load.oldest = next(iter(load.waiting))
        load.oldest_tokens, load.oldest_since_s = MAX_PROGRESS * load.waiting[oldest], now_s
        if not oldest.is_plain:
            return
        due_s = now_s + load.waiting[oldest] / (load.prefill.measured or load.prefill.tokens_per_s)
        self._prefill_end_entries += 1
        heappush(self._prefill_ends, (due_s, self._prefill_end_entries, oldest))
        if len(self._prefill_ends) > 2 * len(self._loads) + MAX_STALE_ENTRIES:
            self._prefill_ends = [entry for entry in self._prefill_ends if entry[2].load.oldest is entry[2]]
            heapify(self._prefill_ends)
        self.next_due_s = self._prefill_ends[0][0]

    def advance(self, now_s: float) -> None:
        """Stop counting the prompts of plain requests whose estimated prefill is over.

        Call it before a choice, once ``next_due_s`` has passed.
        """
        prefill_ends = self._prefill_ends
        while prefill_ends and prefill_ends[0][0] <= now_s:
            due_s, _, ticket = heappop(prefill_ends)
            load = ticket.load
            if load.oldest is ticket:
                ticket.subtract_waiting_tokens()
                self.update_oldest(load, due_s)
                self.record_change(load)
                prefill_ends = self._prefill_ends
        self.next_due_s = prefill_ends[0][0] if prefill_ends else math.inf

    def set_remote_load(self, target: TargetId, running: int, waiting_tokens: int) -> None:
        """Set the running requests and waiting tokens of other routers or processes at a replica."""
        load = self.load(target)
        load.running += running - load.remote_running
        load.waiting_tokens += waiting_tokens - load.remote_tokens
        load.remote_running, load.remote_tokens = running, waiting_tokens
        self.record_change(load)

    def count_remote_request(self, target: TargetId) -> None:
        """Count a request that another router has sent to a replica as a recent one."""
        now_s = self.clock()
        if now_s > self._weight_valid_s:
            self._update_weight(now_s)
        self.load(target).recent += self.request_weight

    def forget_all_but(self, targets: Iterable[TargetId]) -> None:
        """Drop the loads of all other replicas at which no request runs."""
        retained = set(targets)
        self._loads = {name: load for name, load in self._loads.items() if name in retained or load.running}

    def audit(self, tickets: Iterable[Ticket] = ()) -> dict[TargetId, tuple[int, int]]:
        """Replicas whose load differs from the sum of these tickets, with the differences; empty if all agree.

        ``tickets`` are those of all requests in flight; the tracker keeps no list of them.
        """
        differences = {
            load.target: [load.running - load.remote_running, load.waiting_tokens - load.remote_tokens]
            for load in self._loads.values()
        }
        for ticket in tickets:
            difference = differences.setdefault(ticket.load.target, [0, 0])
            difference[0] -= ticket.running
            difference[1] -= ticket.waiting_tokens
        return {name: (running, tokens) for name, (running, tokens) in differences.items() if running or tokens}

    def _update_weight(self, now_s: float) -> None:
        """Compute the weight of requests at this time, used for the next second."""
        self.request_weight = 2.0 ** min(MAX_HALVINGS, (now_s - self._weight_base_s) / RECENT_S)
        self._weight_valid_s = now_s + 1.0
        if self.request_weight > MAX_WEIGHT:
            for load in self._loads.values():
                load.recent /= self.request_weight
            self.request_weight, self._weight_base_s = 1.0, now_s

    # --- the journal ---------------------------------------------------------------------------------

    def changes_since(self, position: int) -> list[Load] | None:
        """Loads that changed after ``position``, with repetitions; None if the journal starts later."""
        start = position - self._journal_start
        return self._journal[start:] if start >= 0 else None

    def record_change(self, load: Load) -> None:
        """Record that a load changed."""
        journal = self._journal
        journal.append(load)
        self.position += 1
        if len(journal) >= 2 * JOURNAL_ENTRIES:
            del journal[:JOURNAL_ENTRIES]
            self._journal_start += JOURNAL_ENTRIES
