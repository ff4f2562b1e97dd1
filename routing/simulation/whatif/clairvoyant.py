"""What no router can know: the measure that strategies are judged by. It exists in replays alone.

``Clairvoyant`` sees every engine's true cache and exact work, and sends each request to where its first token comes
soonest. It is greedy: it neither knows what comes next nor spares a cache for it, so a strategy may beat it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import ceil, inf

from routing.simulation.whatif.fast_engine import FastEngine, ModelledRequest
from routing.simulation.whatif.forest import Forest, Run, shared_path
from routing.simulation.whatif.run_pool import RunPool


class Clairvoyant:
    """Places requests with nothing hidden."""

    def __init__(self) -> None:
        self._promised: list[Counter[Run]] = []  # by engine: runs that requests without a first token will cache
        self._engine: dict[int, int] = {}  # by request: where it is, as long as it has no first token

    def place(self, request: ModelledRequest, engines: Sequence[FastEngine], now_s: float) -> int:
        """The engine with the earliest first token; of equals the one with fewer requests."""
        if not self._promised:
            self._promised = [Counter() for _ in engines]
        best, least = 0, (inf, 0)
        for index, engine in enumerate(engines):
            uncached = request.prompt_tokens - self._hit_tokens(request, index, engine)
            order = (_first_token_s(engine, uncached, now_s), engine.running + len(engine.waiting))
            if order < least:
                best, least, request.note = index, order, uncached
        self._engine[request.index] = best
        self._promised[best].update(request.path)
        return best

    def first_token(self, request: ModelledRequest, _now_s: float) -> None:
        """What the request promised is cached now."""
        self._promised[self._engine.pop(request.index)].subtract(request.path)

    def ended(self, request: ModelledRequest, _now_s: float) -> None:
        """Nothing that counts."""

    def _hit_tokens(self, request: ModelledRequest, index: int, engine: FastEngine) -> int:
        """Cached tokens that a request would find once all that is ahead of it has been prefilled."""
        promised, pool, blocks = self._promised[index], engine.pool, 0
        for run in request.path:
            cached = run.length if promised[run] > 0 else pool.cached(run)
            blocks += cached
            if cached < run.length:
                break
        block_tokens = engine.config.block_tokens
        return min(blocks, (request.prompt_tokens - 1) // block_tokens) * block_tokens


def _first_token_s(engine: FastEngine, uncached_tokens: int, now_s: float) -> float:
    """When an engine would give the first token of a request that leaves so many tokens to compute."""
    config = engine.config
    waiting_tokens: int = sum(request.note for request in engine.waiting)  # uncached, as ``place`` noted
    tokens = uncached_tokens + engine.left_tokens + waiting_tokens
    steps = ceil(tokens / config.chunk_tokens)
    overhead_s = steps * (config.step_s + config.decode_s * engine.decoding)
    return engine.next_step_s(now_s) + overhead_s + tokens / config.prefill_rate


def pooled_hit_rate(forest: Forest, capacity: int | None) -> float | None:
    """Token hit rate of one cache for all prompts, each served before the next; None: a cache without limit.

    Answers take no room in it, so no fleet with as many blocks can be expected to reach it.
    """
    columns = forest.columns
    block_tokens = columns.block_tokens
    if not len(columns):
        return None
    pool = RunPool(len(columns.ids) + len(columns) if capacity is None else capacity)
    hits = 0
    for prompt, last in zip(columns.prompt_tokens, forest.last, strict=True):
        again = last is not None and last.visits > 1 and not prompt % block_tokens
        admitted = pool.admit(shared_path(last), prompt // block_tokens + 1, recompute=again)
        if admitted is not None:
            hits += admitted[0]
            pool.release(admitted[1])
    return hits * block_tokens / columns.all_prompt_tokens
