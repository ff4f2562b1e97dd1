"""Admission queues: requests beyond the concurrency limit of a pool or task group wait in the router.

Theory of operation. A request first needs a permit of its task group and then one of its pool, so that a group beyond
its limit does not fill the pool's queue. Without limits there are no queues. A request that had to wait is placed
again when it is admitted, because loads have changed. It is notified in its own iteration of the event loop, so that
the end of one request cannot start a chain of ends.

A request belongs to the flow of its API key's tenant, else of its API key, else of its task group. All of these are in
the configuration, so that clients cannot make flows. The expected work is what the replica of the first decision has
not cached of the prompt, and the mean length of the flow's responses.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from routing.http.response import RejectedRequestError
from routing.http.usage import generated_tokens, prompt_and_cached
from routing.limits.concurrency import ConcurrencyLimiter, RejectionCause, SharedLimits
from routing.observability.metrics import PREFIX, Histogram, header, labels
from routing.schema import LEAST_URGENT, ConcurrencyConfig, ObjectiveMissed, RouterConfig

if TYPE_CHECKING:
    from routing.http.auth import Grant
    from routing.http.response_json import Usage

QueueKey = tuple[str, str]  # pool, and task group or "" for the pool's own
Queue = tuple[ConcurrencyLimiter, Histogram]

_MESSAGES: Final = {
    RejectionCause.FULL: "too many requests are waiting already",
    RejectionCause.TIMEOUT: "the request has waited for too long",
    RejectionCause.OBJECTIVE: "the objective for TTFT cannot be kept: the request would wait for too long",
}


class QueuePermit:
    """The permits of one request, acquired one queue after the other; ``release`` must follow.

    ``on_admitted`` or ``on_rejected`` is called only if ``acquire`` returned False.
    """

    def __init__(
        self,
        queues: list[Queue],
        priority: int,
        flow: str,
        weight: float,
        prompt_tokens: int,
        latest_start: float,
        on_admitted: Callable[[], None],
        on_rejected: Callable[[RejectedRequestError], None],
    ) -> None:
        self.priority = priority
        self.flow, self.weight = flow, weight
        self.prompt_tokens = prompt_tokens  # that are not cached
        self.latest_start = latest_start
        self._usage: tuple[int, int] | None = None  # uncached and generated tokens, once known
        self._queues: list[Queue] = queues
        self._on_admitted: Callable[[], None] | None = on_admitted  # None: released
        self._on_rejected: Callable[[RejectedRequestError], None] | None = on_rejected
        self._loop = asyncio.get_running_loop()
        self._acquired = 0  # permits, in the order of the queues
        self._started_at = self._loop.time()  # start of the wait in the present queue

    def acquire(self) -> bool:
        """Acquire the remaining permits; False if the request has to wait or is rejected."""
        while self._acquired < len(self._queues):
            if not self._queues[self._acquired][0].acquire(self):
                return False
            self._acquired += 1
        return True

    def admit(self) -> None:
        """Called by a queue: its permit is granted."""
        self._queues[self._acquired][1].observe(self._loop.time() - self._started_at)
        self._acquired += 1
        self._loop.call_soon(self._continue)

    def on_rejected(self, queue: ConcurrencyLimiter, cause: RejectionCause) -> None:
        """Called by a queue: its permit is denied."""
        status = 503 if cause is RejectionCause.TIMEOUT else 429
        rejection = RejectedRequestError(status, _MESSAGES[cause], retry_after_s=queue.retry_after_s)
        self._loop.call_soon(self._reject, rejection)

    def record_usage(self, usage: Usage | None) -> None:
        """Correct the expected work by the usage that a complete response reports."""
        prompt, cached = (None, None) if usage is None else prompt_and_cached(usage)
        if usage is not None and prompt is not None:
            uncached = min(prompt, self.prompt_tokens) if cached is None else prompt - cached
            self._usage = (uncached, generated_tokens(usage) or 0)

    def release(self) -> None:
        """Give all permits back, or leave the queue: the request has ended."""
        if self._on_admitted is None:
            return
        self._on_admitted = self._on_rejected = None  # a queue may keep the permit for longer, but not the exchange
        if self._acquired < len(self._queues):
            self._queues[self._acquired][0].cancel(self)
        for queue, _ in self._queues[: self._acquired]:
            queue.release(self, self._usage, was_sent=self._acquired == len(self._queues))

    def _continue(self) -> None:
        """Acquire the permits of the next queues, after a queue has admitted the request."""
        self._started_at = self._loop.time()
        if self._on_admitted is not None and self.acquire():
            self._on_admitted()

    def _reject(self, rejection: RejectedRequestError) -> None:
        if self._on_rejected is not None:
            self._on_rejected(rejection)


class AdmissionQueues:
    """All queues of one router. ``share``: this process's part of a limit, if several share a port."""

    def __init__(self) -> None:
        self.share = 1.0
        self._loop = asyncio.get_running_loop()
        self._queues: dict[QueueKey, Queue] = {}
        self._priorities: dict[QueueKey, int] = {}
        self._shedding: set[QueueKey] = set()

    def configure(self, config: RouterConfig, shared: SharedLimits | None = None) -> bool:
        """Apply a configuration; whether there are any queues. Admits all requests of a queue that was removed."""
        configured = dict(configured_queues(config))
        for key in self._queues.keys() - configured.keys():
            self._queues.pop(key)[0].remove_limit()
        for key, concurrency in configured.items():
            if key in self._queues:
                self._queues[key][0].configure(concurrency)
            else:
                permits = None if shared is None else shared.permits(queue_name(key))
                share = self.share if permits is None else 1.0
                self._queues[key] = ConcurrencyLimiter(concurrency, self._loop.time, share, permits), Histogram()
        self._shedding = {
            key for key, concurrency in configured.items() if concurrency.on_objective_missed is ObjectiveMissed.SHED
        }
        self._priorities = {(pool.name, group.name): group.priority for pool in config.pools for group in pool.groups}
        return bool(configured)

    def permit(
        self,
        pool: str,
        group: str,
        priority: int | None,
        grant: Grant | None,
        prompt_tokens: int,
        on_admitted: Callable[[], None],
        on_rejected: Callable[[RejectedRequestError], None],
        latest_start: float = math.inf,
    ) -> QueuePermit:
        """``priority``: from the client, which can lower the urgency of its task group and not raise it.

        ``prompt_tokens``: estimated tokens of the prompt that are not cached. ``latest_start``: when it has to be
        admitted for its objective.
        """
        keys = ((pool, group), (pool, "")) if group else ((pool, ""),)
        group_priority = self._priorities.get((pool, group), 0)
        effective = group_priority if priority is None else min(max(group_priority, priority), LEAST_URGENT)
        queues = [self._queues[key] for key in keys if key in self._queues]
        flow, weight = (group, 1.0) if grant is None else (grant.flow, grant.queue_weight)
        return QueuePermit(queues, effective, flow, weight, prompt_tokens, latest_start, on_admitted, on_rejected)

    def sheds(self, pool: str, group: str) -> bool:
        """Whether requests are rejected whose objective cannot be kept."""
        return (pool, "") in self._shedding or (pool, group) in self._shedding

    def admit(self) -> bool:
        """Admit requests to permits that another process has released; whether any still wait."""
        for queue, _ in self._queues.values():
            queue.admit()
        return any(queue.waiting for queue, _ in self._queues.values())

    def expire(self) -> None:
        """Reject requests that have waited for too long."""
        for queue, _ in self._queues.values():
            queue.expire()

    def waiting(self, pool: str) -> int:
        """Requests of a pool that wait in this process, for the limit of the pool or of a task group."""
        return sum(queue.waiting for (name, _), (queue, _) in self._queues.items() if name == pool)

    def lines(self, *, all_buckets: bool = False) -> Iterator[str]:
        """Prometheus text; ``all_buckets``: histograms with all buckets."""
        if not self._queues:
            return
        queues = [(labels(pool=pool, group=group), *queue) for (pool, group), queue in self._queues.items()]
        yield from header("queue_running", "gauge", "Requests that a limit has admitted and that have not ended.")
        yield from (f"{PREFIX}queue_running{{{label_pairs}}} {queue.running}" for label_pairs, queue, _ in queues)
        yield from header("queue_waiting", "gauge", "Requests that wait for a limit.")
        yield from (f"{PREFIX}queue_waiting{{{label_pairs}}} {queue.waiting}" for label_pairs, queue, _ in queues)
        yield from header("queue_seconds", "histogram", "How long admitted requests had waited.")
        for label_pairs, _, waits in queues:
            yield from waits.lines(f"{PREFIX}queue_seconds", label_pairs, all_buckets=all_buckets)
        yield from header("queue_rejected_total", "counter", "Requests that a limit rejected, by cause.")
        for label_pairs, queue, _ in queues:
            for cause, count in queue.rejected.items():
                yield f'{PREFIX}queue_rejected_total{{{label_pairs},cause="{cause}"}} {count}'


def queue_name(key: QueueKey) -> str:
    """Identifies a queue among the processes of a router."""
    return "/".join(key)


def configured_queues(config: RouterConfig) -> Iterator[tuple[QueueKey, ConcurrencyConfig]]:
    for pool in config.pools:
        if pool.concurrency is not None:
            yield (pool.name, ""), pool.concurrency
        for group in pool.groups:
            if group.concurrency is not None:
                yield (pool.name, group.name), group.concurrency
