"""Traffic of the comparison: seeded traces, cut to a duration and scaled to a load, as prepared requests.

A trace with ``shrink`` K has lengths, caches and engine steps divided by K and its requests K times as often, so that a
run of 90 s has as many requests as one of 90 * K s with the same queues in proportion.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random

from routing.traffic.columns import Columns
from routing.traffic.mix import TOKEN_BYTES, passage
from routing.traffic.trace import read_columns
from tests.synthetic_traces import PrefixedRequests, agents, chat, coding, hot_prefix, poisson

ENGINES = 8
PREFILL_RATE = 8000.0  # tokens/s of an engine
CHUNK_TOKENS = 8192
STEP_S = 0.04
ENGINE_BLOCK_TOKENS = 16
MODEL = "tiny"


@dataclass(frozen=True)
class Workload:
    """A trace, its load, and what happens meanwhile."""

    title: str
    make: Callable[[int, int], Columns]  # of a number of requests and a seed
    load: float  # prompt tokens / what the engines can prefill without caches
    blocks: int  # of each engine's cache
    shrink: int = 4
    instances: int = 1  # of the router, behind round robin
    loses_engine: bool = False  # one engine is killed after a third of the time, and back with a cold cache after 7/12

    def engine_options(self) -> list[str]:
        """Options of a stand-in."""
        sizes = f"--blocks {self.blocks // self.shrink + 1} --chunk {CHUNK_TOKENS // self.shrink}"
        return f"{sizes} --prefill-rate {PREFILL_RATE} --step-s {STEP_S / self.shrink}".split()


@dataclass(frozen=True)
class Request:
    """One request, ready to be sent."""

    at_s: float
    session: str
    body: bytes


def prefix_repetition(requests: int, seed: int) -> Columns:
    """``vllm bench serve --dataset-name prefix_repetition``: prefixes as often as each other, in random order."""
    rng = Random(f"{seed} prefix repetition")
    prompts = PrefixedRequests()
    prefixes = [prompts.prefix(2048) for _ in range(200)]
    order = [prefixes[number % len(prefixes)] for number in range(requests)]
    rng.shuffle(order)
    for at_s, prefix in zip(poisson(rng, 20.0, requests), order, strict=False):
        prompts.add(at_s, prefix, own_tokens=256, output_tokens=64)
    return prompts.columns


_CHAT = Workload("Chat", chat, load=0.7, blocks=40_000)
_CODING = Workload("Coding agents", partial(coding, session_s=5.0), load=1.5, blocks=24_000)
WORKLOADS = {
    "chat": _CHAT,
    "tools": Workload("Tool agents", agents, load=3.0, blocks=24_000, shrink=2),
    "coding": _CODING,
    "hot": Workload("One hot prompt, with bursts", partial(hot_prefix, rate=25.0), load=0.9, blocks=22_000, shrink=1),
    "prefixes": Workload("Repeated prefixes", prefix_repetition, load=0.8, blocks=22_000, shrink=1),
    "killed": Workload("Chat, one engine is killed", chat, load=0.7, blocks=40_000, loses_engine=True),
    "two": Workload("Coding agents, two routers", _CODING.make, load=_CODING.load, blocks=_CODING.blocks, instances=2),
}


def requests_of(workload: Workload, seconds: float, seed: int, engines: int, trace: Path | None) -> list[Request]:
    """The requests of a run, the last of which is sent after ``seconds``."""
    budget, generated = workload.load * engines * PREFILL_RATE * seconds * workload.shrink, 250
    columns = read_columns(trace) if trace else workload.make(generated, seed)
    while not trace and sum(columns.prompt_tokens) < budget:
        generated *= 2
        columns = workload.make(generated, seed)
    sums = list(accumulate(columns.prompt_tokens))
    if sums[-1] < budget:
        raise ValueError(f"{trace} has only {len(columns)} requests, too few for {seconds:g} s")
    count = bisect_left(sums, budget) + 1
    pace = seconds / (columns.at_s[count - 1] - columns.at_s[0])
    block_tokens = columns.block_tokens
    prompts = [columns.ids[columns.starts[number] : columns.starts[number + 1]] for number in range(count)]
    fulls = [ids[: columns.prompt_tokens[number] // block_tokens] for number, ids in enumerate(prompts)]
    successors: dict[int, int] = {}
    pairs = (pair for full in fulls for pair in pairwise(full))
    shared = {block for block, successor in pairs if successors.setdefault(block, successor) != successor}
    sessions: dict[int, str] = {}  # by the last full block of a prompt
    requests = []
    for number, (ids, full) in enumerate(zip(prompts, fulls, strict=True)):
        prompt_tokens = columns.prompt_tokens[number]
        # A prompt with all full blocks of an earlier one continues its session.
        session = next((sessions[block] for block in reversed(full) if block in sessions), f"session-{number:06d}")
        if full and full[-1] not in shared:  # a system prompt or a tool list is no conversation
            sessions[full[-1]] = session
        tokens = block_tokens / workload.shrink, prompt_tokens / workload.shrink
        body = _body(ids, *tokens, columns.output_tokens[number])
        requests.append(Request(pace * (columns.at_s[number] - columns.at_s[0]), session, body))
    return requests


def _body(ids: array[int], block_tokens: float, prompt_tokens: float, output_tokens: int) -> bytes:
    size = int(block_tokens * TOKEN_BYTES)
    text = "".join(_block_text(block, size) for block in ids)[: max(8, int(prompt_tokens * TOKEN_BYTES))]
    fields = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max(1, min(128, output_tokens // 4)),
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(fields).encode()


@cache
def _block_text(block: int, size: int) -> str:
    return passage(f"block {block}", size)
