"""Replay a trace over a fleet of modelled engines: who decides is asked at every arrival.

Theory of operation. A heap holds when each engine's present steps end; an engine that was cut short has an outdated
entry too, which no longer says its ``end_s`` and is passed over. All that ends by an arrival is taken first, so the
one who decides knows exactly what a router would know at that moment.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from math import inf
from typing import Protocol

from routing.simulation.whatif.fast_engine import FastEngine, FastEngineConfig, ModelledRequest, Watcher
from routing.simulation.whatif.forest import Forest, shared_path
from routing.workload.columns import Columns

PROGRESS_EVERY = 10_000  # requests


class DoesNotFitError(ValueError):
    """A request that is larger than an engine's whole cache."""


class Decider(Watcher, Protocol):
    """Who places requests, and is told what becomes of them."""

    def place(self, request: ModelledRequest, engines: Sequence[FastEngine], now_s: float) -> int:
        """The index of the engine that gets a request."""
        ...


@dataclass
class ReplayResult:
    """What a replay brought. Arrays are by request, in order of arrival, unless they are by replica."""

    replicas: int
    ttft_s: array[float]  # from arrival to first token
    cached_tokens: array[int]
    placed: array[int]  # index of the replica
    evicted_blocks: int = 0
    ended_s: float = 0.0  # when the last request had all its tokens


class _Notes:
    """Notes what became of requests, and passes on what happens to them."""

    def __init__(self, outcome: ReplayResult, decider: Decider) -> None:
        self._outcome = outcome
        self._ended = decider.ended
        self.first_token = decider.first_token

    def ended(self, request: ModelledRequest, now_s: float) -> None:
        outcome, index = self._outcome, request.index
        outcome.ttft_s[index] = request.first_token_s - request.arrived_s
        outcome.cached_tokens[index] = request.cached_tokens
        outcome.ended_s = now_s
        self._ended(request, now_s)


def replay(
    forest: Forest,
    config: FastEngineConfig,
    replicas: int,
    decider: Decider,
    time_scale: float = 1.0,
    *,
    progress: Callable[[int], None] | None = None,
) -> ReplayResult:
    """Replay a trace; ``time_scale`` 2 plays twice as fast. DoesNotFitError before anything is replayed."""
    columns = forest.columns
    check_that_all_fit(columns, config)
    nothing = bytes(8 * len(columns))
    outcome = ReplayResult(replicas, array("d", nothing), array("q", nothing), array("q", nothing))
    engines = [FastEngine(config, _Notes(outcome, decider)) for _ in range(replicas)]
    steps: list[tuple[float, int]] = []  # heap of (end, engine)
    place, placed, block_tokens = decider.place, outcome.placed, columns.block_tokens
    rows = zip(columns.at_s, columns.prompt_tokens, columns.output_tokens, forest.last, strict=True)
    for index, (at_s, prompt_tokens, output_tokens, last) in enumerate(rows):
        now_s = at_s / time_scale
        if steps and steps[0][0] <= now_s:
            _advance(engines, steps, now_s)
        request = ModelledRequest(index, now_s, prompt_tokens, output_tokens)
        request.path = shared_path(last)
        request.recompute = last is not None and last.visits > 1 and not prompt_tokens % block_tokens
        placed[index] = chosen = place(request, engines, now_s)
        engine = engines[chosen]
        if engine.submit(request, now_s):
            heappush(steps, (engine.end_s, chosen))
        if progress is not None and not index % PROGRESS_EVERY:
            progress(index)
    _advance(engines, steps, inf)
    outcome.evicted_blocks = sum(engine.pool.evicted for engine in engines)
    return outcome


def check_that_all_fit(columns: Columns, config: FastEngineConfig) -> None:
    """DoesNotFitError if a request's prompt and output need more blocks than an engine has."""
    most = config.blocks * config.block_tokens
    for index, (prompt, output) in enumerate(zip(columns.prompt_tokens, columns.output_tokens, strict=True)):
        if prompt + output > most:
            needed = -(-(prompt + output) // config.block_tokens)
            raise DoesNotFitError(
                f"request {index + 1} needs {needed} blocks of {config.block_tokens} tokens "
                f"({prompt} of prompt, {output} of output), and a replica has {config.blocks}"
            )


def _advance(engines: Sequence[FastEngine], steps: list[tuple[float, int]], until_s: float) -> None:
    """Take every step that ends by ``until_s``."""
    while steps and steps[0][0] <= until_s:
        end_s, index = steps[0]
        engine = engines[index]
        if engine.end_s != end_s:
            heappop(steps)
            continue
        engine.go_on()
        if engine.end_s == inf:
            heappop(steps)
        else:
            heapreplace(steps, (engine.end_s, index))
