"""Replays requests over N modelled engines in virtual time, step by step.

Tests compare this plain replay with other simulators, and the fast replay of ``routing/replay`` with this one.

Theory of operation. Arrivals are sorted; each engine has at most one step in progress, and a heap holds the ends of
those steps. Between two arrivals only its own steps change an engine, so it may take equal decode steps at once up to
the next arrival. Deterministic: the same requests and placements give the same results.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from routing.simulation.blocks import BlockKey
from routing.simulation.engine import Engine, EngineConfig, Sequence, Step


@dataclass(frozen=True)
class TimedPrompt:
    """A minimal ``Request``."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    keys: tuple[int, ...] = ()


class Request(Protocol):
    """One request of a trace."""

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
        """Keys of the prompt's full blocks, and of the output's if a later prompt may match them."""
        ...


R = TypeVar("R", bound=Request)


@dataclass(slots=True)
class Replay:
    """Results of a replay, in the order of arrival."""

    placed: list[int] = field(default_factory=list)  # index of the engine
    sequences: list[Sequence] = field(default_factory=list)


class _Fleet:
    """Engines and their steps in progress."""

    def __init__(self, engines: SequenceOf[Engine]) -> None:
        self.steps: dict[int, Step] = {}  # by engine
        self._engines = engines
        self._ends: list[tuple[float, int]] = []  # heap of (end of a step, engine)

    def plan_step(self, index: int, now_s: float, until_s: float) -> None:
        """Plan the next step of an engine."""
        engine = self._engines[index]
        step = engine.plan_step(now_s, until_s)
        if step is not None:
            self.steps[index] = step
            heapq.heappush(self._ends, (step.end_s, index))

    def advance(self, until_s: float) -> None:
        """Take every step that ends by ``until_s``."""
        while self._ends and self._ends[0][0] <= until_s:
            end_s, index = heapq.heappop(self._ends)
            self._engines[index].finish(self.steps.pop(index))
            self.plan_step(index, end_s, until_s)


def replay(
    requests: Iterable[R],
    config: EngineConfig,
    replicas: int,
    choose: Callable[[R, SequenceOf[Engine]], int],
    observe: Callable[[SequenceOf[Sequence], float], None] | None = None,
) -> Replay:
    """Replay requests (ascending in time) over ``replicas`` engines.

    ``choose`` is called at each arrival, with every engine in its state of that time; before it ``observe``, with all
    earlier sequences and the time.
    """
    rows, result = list(requests), Replay()
    engines = [Engine(config) for _ in range(replicas)]
    fleet = _Fleet(engines)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        fleet.advance(row.at_s)
        if observe is not None:
            observe(result.sequences, row.at_s)
        chosen = choose(row, engines)
        sequence = Sequence(row.keys, row.prompt_tokens, row.output_tokens, row.at_s)
        engines[chosen].submit(sequence)
        result.placed.append(chosen)
        result.sequences.append(sequence)
        if chosen not in fleet.steps:
            fleet.plan_step(chosen, row.at_s, math.inf if following is None else following.at_s)
    fleet.advance(math.inf)
    return result
