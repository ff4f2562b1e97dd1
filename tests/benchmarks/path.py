"""Cost of the router's own code, without the kernel: ``python -m tests.benchmarks path``.

Real connections and exchanges with realistic bytes, on transports that only keep the last write. A row is the minimum
of many short rounds, in microseconds of one core, so that other load hardly affects it.
"""

from __future__ import annotations

import time
from functools import partial
from itertools import count, cycle
from typing import Any, cast

import uvloop

from routing.observability.tracing import Tracer
from routing.process import tune_garbage_collector
from routing.proxy.client_connection import ClientConnection
from routing.proxy.router import Router
from routing.schema import (
    LowestCostSettings,
    PolicyConfig,
    PoolConfig,
    PrefixHashSettings,
    ReplicaConfig,
    ResponseCache,
    RouterConfig,
    Settings,
    TaskGroupConfig,
    dump_snapshot,
)
from routing.upstream.connection import UpstreamConnection
from tests.benchmarks.decision import timed_s
from tests.benchmarks.load import SESSIONS, request, request_parts, trace_id
from tests.benchmarks.mock_upstream import EVENT_CHUNK, EVENTS, PLAIN_RESPONSE, STREAM_END, STREAM_HEAD

POLICIES: tuple[Settings, ...] = (LowestCostSettings(), PrefixHashSettings())
REPLICAS = 4
CLIENTS = 32
ROUNDS = 150
CALLS = 200  # per round: about 10 ms


class Wire:
    """A transport that records which transport was written to last; implements asyncio's interface as far as the router
    uses it.
    """

    last_written: Wire

    def __init__(self, protocol: Any) -> None:
        self.protocol = protocol
        protocol.connection_made(self)

    def write(self, _: bytes) -> None:
        Wire.last_written = self

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass

    abort = resume_reading = pause_reading

    def get_extra_info(self, _: str) -> None:
        return None


class Bench:
    """A router with idle clients and idle upstream connections, in this process."""

    def __init__(self, router: Router) -> None:
        self.clients = [Wire(ClientConnection(router)).protocol for _ in range(CLIENTS)]
        for pool in router.active.connection_pools.values() if router.active else ():
            for _ in range(CLIENTS):
                pool.return_idle(cast("UpstreamConnection", Wire(pool.new_upstream()).protocol))
        self._run_turns = router.turns._run
        self._flush = router.write_buffer._end_turn  # each request has the time of an iteration
        self._flush()
        self._turns = cycle([(self.clients[turn % CLIENTS], request_parts(turn)) for turn in range(SESSIONS)])
        self._numbers = count()

    def next_request(self) -> tuple[Any, bytes]:
        """A unique request and its client connection."""
        client, (before, between, after) = next(self._turns)
        request_id = trace_id(next(self._numbers))
        return client, before + request_id + between + request_id + after

    def send(self, client: Any, data: bytes) -> UpstreamConnection:
        """Feed a request until it is written to a replica; that upstream connection."""
        client.data_received(data)
        while client.is_deferred:  # a slow machine spent the time of an iteration
            self._run_turns()
        self._flush()
        return cast("UpstreamConnection", Wire.last_written.protocol)

    def request_us(self) -> tuple[float, float]:
        """(microseconds until the request is written to the replica, microseconds from the response to the end)."""
        best = float("inf"), 0.0, 0.0
        for _ in range(ROUNDS):
            request_s = response_s = 0.0
            for _ in range(CALLS):
                client, data = self.next_request()
                started = time.perf_counter()
                upstream = self.send(client, data)
                arrived = time.perf_counter()
                upstream.data_received(PLAIN_RESPONSE)
                self._flush()
                response_s += time.perf_counter() - arrived
                request_s += arrived - started
            best = min(best, (request_s + response_s, request_s, response_s))
        return best[1] / CALLS * 1e6, best[2] / CALLS * 1e6

    def exchange(self) -> None:
        """One request and its response."""
        client, data = self.next_request()
        self.send(client, data).data_received(PLAIN_RESPONSE)
        self._flush()

    def hit_us(self) -> float:
        """Microseconds of a request that the response cache of its task group answers."""
        data = cacheable(request(0))
        self.send(self.clients[0], data).data_received(PLAIN_RESPONSE)
        self._flush()

        def hit() -> None:
            self.clients[0].data_received(data)
            self._flush()

        return min(timed_s(hit, CALLS) for _ in range(ROUNDS)) / CALLS * 1e6

    def event_us(self) -> float:
        """Microseconds per stream event, each in its own read."""
        best = float("inf")
        for _ in range(ROUNDS):
            upstream = self.send(self.clients[0], request(0, stream=True))
            upstream.data_received(STREAM_HEAD + EVENT_CHUNK)
            best = min(best, timed_s(partial(upstream.data_received, EVENT_CHUNK), EVENTS))
            self._flush()
            upstream.data_received(STREAM_END)
        return best / EVENTS * 1e6


def cacheable(data: bytes) -> bytes:
    """A request with temperature 0, to the task group that has a response cache."""
    head, _, body = data.partition(b"\r\n\r\n")
    body = b'{"temperature": 0, "max_tokens": 64, ' + body[1:]
    lines = [line for line in head.split(b"\r\n") if not line.startswith(b"Content-Length")]
    lines += [b"X-Task-Group: cached", b"Content-Length: %d" % len(body)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def started_router(settings: Settings, *groups: TaskGroupConfig) -> Router:
    members = tuple(ReplicaConfig(name=f"replica-{n}", url=f"http://127.0.0.1:{n + 1}") for n in range(REPLICAS))
    policy = PolicyConfig(name="bench", revision=1, settings=settings)
    pool = PoolConfig(name="bench", policy=policy, replicas=members, groups=groups)
    config = RouterConfig(hash_secret="0" * 32, pools=(pool,))
    router = Router("bench")
    await router.store.start(dump_snapshot(config, 1).document)
    router.services.checks.close()  # the replicas do not exist
    return router


async def measure(settings: Settings) -> None:
    router = await started_router(settings, TaskGroupConfig(name="cached", response_cache=ResponseCache()))
    bench = Bench(router)
    tune_garbage_collector()
    request_us, response_us = bench.request_us()
    print(f"{settings.name}")
    print(f"  8 KiB chat request, to the replica        {request_us:7.2f} us")
    print(f"  its response, to the end of accounting    {response_us:7.2f} us")
    print(f"  both                                      {request_us + response_us:7.2f} us")
    print(f"  a hit of a response cache                 {bench.hit_us():7.2f} us")
    print(f"  one event of a stream                     {bench.event_us():7.2f} us")
    off_us, unsampled_us, sampled_us = traced_us(router, bench)
    ratio = (0.99 * unsampled_us + 0.01 * sampled_us) / off_us
    print(f"  both, traced and not sampled              {unsampled_us - off_us:+7.2f} us")
    print(f"  both, traced and sampled                  {sampled_us - off_us:+7.2f} us")
    print(f"  1 % sampled / no traces                   {ratio:7.3f}")
    router.deadlines.close()


def traced_us(router: Router, bench: Bench) -> list[float]:
    """Microseconds of a request and its response: without traces, not sampled, sampled. Rounds alternate."""
    tracers = (None, Tracer(0.0, is_parent_based=False), Tracer(1.0, is_parent_based=False))
    best = [float("inf")] * len(tracers)
    for _ in range(ROUNDS):
        for number, tracer in enumerate(tracers):
            router.services.tracer = tracer
            best[number] = min(best[number], timed_s(bench.exchange, CALLS))
            if tracer is not None:
                tracer.queue.clear()  # as the exporter does
    router.services.tracer = None
    return [seconds / CALLS * 1e6 for seconds in best]


def main() -> None:
    for settings in POLICIES:
        uvloop.run(measure(settings))
