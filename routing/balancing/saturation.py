"""Saturation of pools: the share of its replicas' prefill rate that a pool's traffic needs, and the work that waits.

Theory of operation. Saturation is the utilisation of a queue, work / service rate: the uncached prompt tokens that
waited at the replicas when the window began and those that were sent since, divided by what the serving replicas can
prefill in that time. Their rates are measured as (queued + own tokens) / TTFT (``load_tracker``). By Little's law the
tokens that wait are arrivals x TTFT, so while requests queue, for KV blocks or a batch slot as well as for prefill, the
measured rate falls to the arrival rate and the quotient is 1. Without queues it is below 1 and proportional to the
traffic, which a number of queued requests is not: that is 0 until it is too late. More than 1 is shown as 1; how far
behind the replicas are is the waiting work, in seconds of all serving replicas together.

Both figures are of the requests of this process, divided by the rate of all serving replicas, so those of several
processes and routers add up. A pool whose prefill and decode are separated has the figures of the fuller side.

Work is counted when a request is dispatched; everything else is computed when the metrics are read. The traffic is that
of at least ``WINDOW_S`` before, or since the previous reading if that is longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from routing.balancing.load_tracker import LoadTracker
from routing.balancing.replicas import HealthRegistry, targets_of
from routing.schema import PoolConfig, ReplicaConfig, ReplicaState
from routing.types import ReplicaId, TargetId

WINDOW_S: Final = 30.0  # averages bursts out, and is two scrapes of 15 s
MIN_WINDOW_S: Final = 5.0  # of a process that has just started
SPACING_S: Final = 1.0  # minimum time between two readings in the history


class Saturation:
    """Figures of a pool; None: no replica serves, no rate was measured for its requests, or the process is too young.

    Without requests there is nothing to prefill: both are 0, whatever the rate.
    """

    def __init__(self, ratio: float | None, waiting_s: float | None, tokens_per_s: float | None) -> None:
        self.ratio = ratio  # 0 to 1
        self.waiting_s = waiting_s
        self.tokens_per_s = tokens_per_s  # prefill rate of all serving replicas


class _Side:
    """The replicas of a pool with the same role."""

    def __init__(self) -> None:
        self.requests = 0  # dispatched since the process started, also to replicas that have left
        self.tokens = 0
        self.tokens_per_s: float | None = None  # None: not measured
        self.is_serving = False
        self.waiting_tokens = 0.0
        self._dispatched: dict[TargetId, tuple[int, int]] = {}  # requests and tokens at the last reading
        self._history: deque[tuple[float, float]] = deque()  # time; tokens that had been sent and did not wait

    def read(self, replicas: list[ReplicaConfig], loads: LoadTracker, health: HealthRegistry) -> None:
        """Add what was dispatched since the last reading, and add up the rates of the serving replicas."""
        now_s, rate, is_measured = loads.clock(), 0.0, False
        dispatched: dict[TargetId, tuple[int, int]] = {}
        self.waiting_tokens = 0.0
        for replica in replicas:
            name = ReplicaId(replica.name)
            is_serving = replica.state is ReplicaState.ACTIVE and health.is_up(name)
            for target in targets_of(replica):
                load = loads.load(target.id)
                dispatched[target.id] = (load.dispatched, load.dispatched_tokens)
                self._count(target.id, load.dispatched, load.dispatched_tokens)
                is_measured = is_measured or load.prefill.samples > 0
                if is_serving:
                    rate += load.prefill.tokens_per_s * health.share(name)
                    self.waiting_tokens += max(0.0, load.remaining_tokens(now_s) - load.remote_tokens)
        self._dispatched, self.is_serving = dispatched, rate > 0
        self.tokens_per_s = rate if is_measured and rate > 0 else None
        self._remember(now_s)

    def saturation(self, queued: int, now_s: float) -> Saturation:
        """Figures as of the reading; ``queued`` requests wait in the router."""
        rate = self.tokens_per_s
        if rate is None:
            is_idle = self.is_serving and not self.requests and not queued
            return Saturation(0.0, 0.0, None) if is_idle else Saturation(None, None, None)
        mean_tokens = self.tokens / self.requests if self.requests else 0.0
        waiting_s = (self.waiting_tokens + queued * mean_tokens) / rate
        since_s, done_tokens = self._history[0]
        span_s = now_s - since_s
        if span_s < MIN_WINDOW_S:
            return Saturation(None, waiting_s, rate)
        return Saturation(min(1.0, (self.tokens - done_tokens) / (span_s * rate)), waiting_s, rate)

    def _count(self, target: TargetId, requests: int, tokens: int) -> None:
        counted_requests, counted_tokens = self._dispatched.get(target, (0, 0))
        if requests < counted_requests:  # the load was dropped in between, and started again at 0
            counted_requests, counted_tokens = 0, 0
        self.requests += requests - counted_requests
        self.tokens += tokens - counted_tokens

    def _remember(self, now_s: float) -> None:
        history = self._history
        if not history or now_s - history[-1][0] >= SPACING_S:
            history.append((now_s, self.tokens - self.waiting_tokens))
        while len(history) > 1 and now_s - history[1][0] >= WINDOW_S:
            history.popleft()


class SaturationMeter:
    """Measures the pools of one process whenever its metrics are read."""

    def __init__(self, loads: LoadTracker, health: HealthRegistry) -> None:
        self._loads = loads
        self._health = health
        self._sides: dict[tuple[str, bool], _Side] = {}  # by pool, and whether its replicas serve clients

    def read(self, pool: PoolConfig, queued: int) -> Saturation:
        """The figures of a pool; ``queued``: its requests that wait in this process's admission queues."""
        figures: list[Saturation] = []
        for can_decode in (True, False):
            replicas = [replica for replica in pool.replicas if replica.can_decode is can_decode]
            if not replicas:
                continue
            side = self._sides.setdefault((pool.name, can_decode), _Side())
            side.read(replicas, self._loads, self._health)
            figures.append(side.saturation(queued if can_decode else 0, self._loads.clock()))
        return _fuller(figures)

    def forget_all_but(self, pools: Iterable[str]) -> None:
        """Forget the pools that left the configuration."""
        retained = set(pools)
        self._sides = {key: side for key, side in self._sides.items() if key[0] in retained}


def _fuller(sides: list[Saturation]) -> Saturation:
    """The highest known figures, with the sum of the rates."""
    ratios = [side.ratio for side in sides if side.ratio is not None]
    waits = [side.waiting_s for side in sides if side.waiting_s is not None]
    rates = [side.tokens_per_s for side in sides if side.tokens_per_s is not None]
    return Saturation(max(ratios, default=None), max(waits, default=None), sum(rates) if rates else None)
