"""Cost of placing one request, by part: ``python -m tests.benchmarks decision``.

``full`` is everything between the last byte of a request and the choice of its replica: parsing, canonical prompt,
hashes and choice, with loads that change with every request, plus dispatch, first byte and end. Keys are spread over
512 prefixes, or all equal in the ``one hot key`` rows. ``blocks``, for decision records, is extra. Times are the
minimum of several rounds, in microseconds of one core.
"""

from __future__ import annotations

import json
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import get_args

from routing.balancing.load_tracker import LoadTracker, Ticket
from routing.balancing.placement import Decision, Placement
from routing.balancing.replicas import HealthRegistry
from routing.balancing.request import PlacementRequest
from routing.process import tune_garbage_collector
from routing.prompt.canonical import canonical_prompt
from routing.prompt.hashing import PrefixHasher
from routing.prompt.parsing import parse_body, session_key
from routing.schema import (
    PolicyConfig,
    PoolConfig,
    PrefixHashSettings,
    ReplicaConfig,
    RouterConfig,
    Settings,
)

PATH = "/v1/chat/completions"
SECRET = "5ec2e7" * 8
PREFIXES = 512
IN_FLIGHT = 8  # requests at each replica
ROUNDS = 7
SETTINGS: tuple[Settings, ...] = tuple(kind() for kind in reversed(get_args(Settings)))
LIMITS_US = {8: 20.0, 128: 200.0}  # of a full decision, by the prompt's KiB


def main() -> None:
    print_parts()
    print(f"\n{'prompt':>8} {'replicas':>8}  {'strategy':<32} {'choose us':>10} {'full us':>10} {'limit us':>9}")
    for kib, limit_us in LIMITS_US.items():
        for replicas in (4, 1000):
            for settings in SETTINGS:
                print_row(kib, replicas, settings, limit_us)
            print_row(kib, replicas, PrefixHashSettings(), limit_us, prefixes=1)


def print_parts() -> None:
    hasher = PrefixHasher(SECRET)
    print(f"{'prompt':>8} {'parse us':>10} {'canonical us':>13} {'tier 1 us':>10} {'blocks us':>10}")
    for kib in LIMITS_US:
        body = chat_body(kib, 0)
        parsed = parse_body(PATH, body)
        prompt = canonical_prompt(parsed)
        parts: Sequence[Callable[[], object]] = (
            lambda body=body: parse_body(PATH, body),
            lambda parsed=parsed: canonical_prompt(parsed),
            lambda prompt=prompt: hasher.tier1(prompt, "llama"),
            lambda prompt=prompt: array("Q", b"".join(hasher.chunks(prompt, "llama"))),
        )
        parse_us, canonical_us, tier1_us, blocks_us = map(min_us, parts)
        print(f"{kib:>4} KiB {parse_us:>10.1f} {canonical_us:>13.1f} {tier1_us:>10.2f} {blocks_us:>10.1f}")


def print_row(kib: int, replicas: int, settings: Settings, limit_us: float, prefixes: int = PREFIXES) -> None:
    """One strategy with a number of replicas."""
    router = Router(settings, replicas)
    bodies = cycle([chat_body(kib, number) for number in range(prefixes)])
    for _ in range(replicas * IN_FLIGHT * 2):
        router.place(next(bodies))
    tune_garbage_collector()  # as a router does
    requests = cycle([router.request(chat_body(kib, number)) for number in range(prefixes)])
    choose_us = min_us(lambda: router.placement.decide(next(requests), router.health))
    full_us = min_us(lambda: router.place(next(bodies)))
    if router.book.audit(router.running):
        raise AssertionError("the load tracker does not match the running requests")
    name = f"{settings.name}, one hot key" if prefixes == 1 else settings.name
    print(f"{kib:>4} KiB {replicas:>8}  {name:<32} {choose_us:>10.1f} {full_us:>10.1f} {limit_us:>9.0f}", flush=True)


class Router:
    """A router without connections: places requests and keeps a number of them in progress."""

    def __init__(self, settings: Settings, replicas: int) -> None:
        members = tuple(ReplicaConfig(name=f"gpu-{number}", url="http://replica:8000") for number in range(replicas))
        policy = PolicyConfig(name="measured", revision=1, settings=settings)
        config = RouterConfig(hash_secret=SECRET, pools=(PoolConfig(name="chat", policy=policy, replicas=members),))
        self.book = LoadTracker()
        self.health = HealthRegistry()
        self.placement = Placement(config, self.book)
        self.running: deque[Ticket] = deque()
        self._limit = replicas * IN_FLIGHT

    def request(self, body: bytes) -> PlacementRequest:
        """Parse a body as far as placement needs it."""
        parsed = parse_body(PATH, body)
        return PlacementRequest(parsed.model, None, session_key(parsed), canonical_prompt(parsed))

    def place(self, body: bytes) -> Decision:
        """Place one request, and complete the oldest."""
        request = self.request(body)
        decision = self.placement.decide(request, self.health)
        ticket = self.placement.dispatch(decision)
        ticket.record_first_byte()
        self.running.append(ticket)
        if len(self.running) > self._limit:
            self.running.popleft().end()
        return decision


def chat_body(kib: int, number: int) -> bytes:
    """A chat of six messages with a unique system prompt and session."""
    size = kib * 1024 // 6
    line = f"Line of conversation number {number}, of the kind that people write.\n"
    text = (line * (size // len(line) + 1))[:size]
    messages = [
        {"role": role, "content": text} for role in ("system", "user", "assistant", "user", "assistant", "user")
    ]
    return json.dumps({"model": "llama", "messages": messages, "stream": True, "user": f"user-{number}"}).encode()


def min_us(step: Callable[[], object]) -> float:
    """Microseconds per call: the minimum of several rounds of about 50 ms."""
    calls = 1
    while (round_s := timed_s(step, calls)) < 0.05:
        calls = max(2 * calls, int(calls * 0.06 / max(round_s, 1e-6)))
    return min(timed_s(step, calls) for _ in range(ROUNDS)) / calls * 1e6


def timed_s(step: Callable[[], object], calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        step()
    return time.perf_counter() - started
