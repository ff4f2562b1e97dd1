"""The engine model in virtual time: replay a list of requests over N engines, without waiting.

This is the plain reading of the model, by which tests judge it against other simulators, and ``whatif/``, which is 50
times as fast, against it.

Theory of operation. Arrivals are sorted; each engine has at most one step in progress, and a heap holds when those
end. Between two arrivals nothing can change an engine but its own steps, so an engine may take equal decode steps in
one go up to the next arrival. Deterministic: the same requests and the same choices give the same figures.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from routing.simulation.blocks import BlockKey, BlockPool
from routing.simulation.engine import Engine, EngineConfig, Step
from routing.simulation.sequence import Sequence


class Request(Protocol):
    """What a replay needs to know of a request; a trace's row is one."""

    @property
    def at_s(self) -> float:
        """Arrival, seconds since the start."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt, >= 1."""
        ...

    @property
    def output_tokens(self) -> int:
        """Tokens to generate, >= 1."""
        ...

    @property
    def keys(self) -> SequenceOf[BlockKey]:
        """Of the prompt's full blocks, and of the output's where a later prompt may match them."""
        ...


R = TypeVar("R", bound=Request)


@dataclass(slots=True)
class Replay:
    """What a replay brought, in the order of arrival."""

    placed: list[int] = field(default_factory=list)  # index of the engine
    sequences: list[Sequence] = field(default_factory=list)

    @property
    def hit_rate(self) -> float | None:
        """Hit tokens / prompt tokens; None without any request."""
        prompt = sum(sequence.prompt_tokens for sequence in self.sequences)
        return sum(sequence.cached_tokens or 0 for sequence in self.sequences) / prompt if prompt else None

    def ttft_s(self) -> list[float]:
        """Seconds from arrival to the first token, ascending."""
        return sorted(s.first_token_s - s.arrived_s for s in self.sequences if s.first_token_s is not None)


def replay(
    requests: Iterable[R],
    config: EngineConfig,
    replicas: int,
    choose: Callable[[R, SequenceOf[Engine]], int],
    time_scale: float = 1.0,
) -> Replay:
    """Replay requests (ascending in time) over ``replicas`` engines; ``time_scale`` 2 plays twice as fast.

    ``choose`` is asked at each arrival, with every engine in the state of that moment.
    """
    return _Fleet(config, replicas).replay(list(requests), choose, time_scale)


class _Fleet:
    """Engines and the heap of steps in progress."""

    def __init__(self, config: EngineConfig, replicas: int) -> None:
        self.engines = [Engine(config) for _ in range(replicas)]
        self._steps: list[tuple[float, int, Step]] = []  # (end, engine, step)
        self._busy = [False] * replicas

    def replay(
        self, requests: SequenceOf[R], choose: Callable[[R, SequenceOf[Engine]], int], time_scale: float
    ) -> Replay:
        result = Replay()
        for index, request in enumerate(requests):
            now_s = request.at_s / time_scale
            self._advance(now_s)
            chosen = choose(request, self.engines)
            sequence = Sequence(request.keys, request.prompt_tokens, request.output_tokens, now_s)
            self.engines[chosen].submit(sequence)
            result.placed.append(chosen)
            result.sequences.append(sequence)
            if not self._busy[chosen]:
                following = requests[index + 1].at_s / time_scale if index + 1 < len(requests) else math.inf
                self._begin(chosen, now_s, following)
        self._advance(math.inf)
        return result

    def _advance(self, until_s: float) -> None:
        """Take every step that ends by ``until_s``."""
        steps = self._steps
        while steps and steps[0][0] <= until_s:
            end_s, index, step = heapq.heappop(steps)
            self.engines[index].finish(step)
            self._busy[index] = False
            self._begin(index, end_s, until_s)

    def _begin(self, index: int, now_s: float, until_s: float) -> None:
        step = self.engines[index].begin(now_s, until_s)
        if step is not None:
            self._busy[index] = True
            heapq.heappush(self._steps, (step.end_s, index, step))


def replay_in_order(requests: Iterable[R], block_tokens: int, capacity: int | None, replicas: int) -> float | None:
    """Hit rate without any timing: round robin, each request finished before the next arrives."""
    pools = [BlockPool(capacity) for _ in range(replicas)]
    hits = prompt = 0
    for index, request in enumerate(requests):
        hits += block_tokens * serve_at_once(pools[index % replicas], request, block_tokens)
        prompt += request.prompt_tokens
    return hits / prompt if prompt else None


def serve_at_once(pool: BlockPool, request: Request, block_tokens: int) -> int:
    """Take a request through a pool from admission to its end; the blocks that hit."""
    found = pool.lookup(request.keys, (request.prompt_tokens - 1) // block_tokens)
    pool.hold(found)
    tokens = request.prompt_tokens + request.output_tokens
    blocks = found + pool.take(-(-tokens // block_tokens) - len(found))
    for index in range(len(found), tokens // block_tokens):
        pool.cache(blocks[index], request.keys[index] if index < len(request.keys) else None)
    pool.release(blocks)
    return len(found)
