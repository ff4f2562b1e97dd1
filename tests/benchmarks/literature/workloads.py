"""Seeded workloads of the tables on cache-aware routing. Blocks of 16 tokens; every generator is deterministic.

Functions return the trace; those named in ``MIXES`` are the seven workloads that one table compares.
"""

from __future__ import annotations

import heapq
import math
import random
from array import array
from collections.abc import Callable, Sequence

from routing.traffic.columns import Columns
from tests.synthetic_traces import SMALL_BLOCK_TOKENS, PrefixedRequests, agents, in_order, nothing_shared, poisson

Range = tuple[int, int]  # tokens, both ends included


def prefix_pool(requests: int, prefixes: int, rate: float, seed: int = 1) -> Columns:
    """One of ``prefixes`` equally frequent prefixes of 2,000 tokens, and 100 unique tokens."""
    rng = random.Random(f"{seed} prefix pool")
    prompts = PrefixedRequests()
    pool = [prompts.prefix() for _ in range(prefixes)]
    for at_s in poisson(rng, rate, requests):
        prompts.add(at_s, rng.choice(pool))
    return prompts.columns


def conversations(
    requests: int,
    turns: int,
    *,
    rate: float,
    system: int = 512,
    first: Range = (200, 600),
    message: Range = (100, 400),
    reply: int = 150,
    pause_s: float = 20.0,
    seed: int = 1,
) -> tuple[Columns, array[int]]:
    """Conversations of ``turns`` requests after one system prompt; also the turn of each request, from 1.

    ``rate``: requests/s; ``first`` and ``message``: tokens of the first and of later messages of the user.
    """
    rng = random.Random(f"{seed} conversations")
    prompts, turn_of = PrefixedRequests(), array("q")
    opening = prompts.prefix(system)
    pending: list[tuple[float, int, int, array[int]]] = []  # heap of (time, serial, turn, ids of the context)
    new_at_s = 0.0
    while len(turn_of) < requests:
        if not pending or new_at_s < pending[0][0]:
            at_s, turn, context, own = new_at_s, 1, opening, rng.randint(*first)
            new_at_s += rng.expovariate(rate / turns)
        else:
            at_s, _, turn, context = heapq.heappop(pending)
            own = reply + rng.randint(*message)
        prompts.add(at_s, context, own, reply)
        turn_of.append(turn)
        if turn < turns:
            context = last_context(prompts.columns)
            heapq.heappush(pending, (at_s + rng.expovariate(1 / pause_s) + 2.0, len(turn_of), turn + 1, context))
    return prompts.columns, turn_of


def last_context(columns: Columns) -> array[int]:
    """Ids of the whole blocks of the last prompt."""
    start = columns.starts[-2]
    return columns.ids[start : start + columns.prompt_tokens[-1] // columns.block_tokens]


def zipf(rng: random.Random, values: Sequence[array[int]], exponent: float, count: int) -> list[array[int]]:
    """``count`` values, number n with a probability proportional to ``n ** -exponent``."""
    return rng.choices(values, [number**-exponent for number in range(1, len(values) + 1)], k=count)


def questions(
    requests: int,
    name: str,
    pool: Callable[[PrefixedRequests, random.Random], list[array[int]]],
    exponent: float,
    own: Range,
    output: Range,
) -> Columns:
    """Unique ``own`` tokens after one of the prefixes of ``pool``, by Zipf's law; 10 requests/s."""
    rng = random.Random(name)
    prompts = PrefixedRequests()
    chosen = zipf(rng, pool(prompts, rng), exponent, requests)
    for at_s, prefix in zip(poisson(rng, 10.0, requests), chosen, strict=True):
        prompts.add(at_s, prefix, rng.randint(*own), rng.randint(*output))
    return prompts.columns


# --- the seven workloads ------------------------------------------------------------------------------


def chat(requests: int) -> Columns:
    """Chat, 8 turns"""
    return conversations(requests, 8, rate=10.0)[0]


def shared_documents(requests: int) -> Columns:
    """Retrieval: one of 400 documents"""

    def documents(prompts: PrefixedRequests, rng: random.Random) -> list[array[int]]:
        system = prompts.prefix(256)
        return [system + prompts.prefix(rng.randint(1500, 4000)) for _ in range(400)]

    return questions(requests, "shared documents", documents, 0.9, (30, 150), (50, 200))


def few_shot(requests: int) -> Columns:
    """Few-shot, 30 sets of examples"""

    def examples(prompts: PrefixedRequests, rng: random.Random) -> list[array[int]]:
        return [prompts.prefix(rng.randint(1500, 3000)) for _ in range(30)]

    return questions(requests, "few shot", examples, 0.8, (50, 300), (10, 40))


def tool_agents(requests: int) -> Columns:
    """Agents, 20 turns"""
    return agents(requests, 1)


def code_completion(requests: int) -> Columns:
    """Code completion: 60 editors, each in a file that it edits"""
    rng = random.Random("code completion")
    prompts = PrefixedRequests()
    repository = prompts.prefix(1000)
    for _ in range(60):
        file, at_s = prompts.prefix(rng.randint(500, 3000)), rng.random() * 10
        for _ in range(requests // 60):
            prompts.add(at_s, repository + file, rng.randint(20, 120), rng.randint(10, 40))
            kept = len(file) if rng.random() < 0.6 else rng.randint(len(file) // 4, len(file))  # an edit further up
            file = file[:kept] + prompts.prefix(rng.randint(0, 60) + SMALL_BLOCK_TOKENS * (len(file) - kept))
            at_s += rng.expovariate(0.5)
    return in_order(prompts.columns)


def tenants(requests: int) -> Columns:
    """200 tenants, each with its system prompt and LoRA adapter"""

    def system_prompts(prompts: PrefixedRequests, rng: random.Random) -> list[array[int]]:
        return [prompts.prefix(rng.randint(500, 2000)) for _ in range(200)]

    return questions(requests, "tenants", system_prompts, 0.8, (100, 600), (50, 200))


def batch_summaries(requests: int) -> Columns:
    """Batch summarisation of unique documents"""
    return nothing_shared(requests, 1)


MIXES = (chat, shared_documents, few_shot, tool_agents, code_completion, tenants, batch_summaries)


# --- structures of prefixes ----------------------------------------------------------------------------


def one_prompt_each(requests: int) -> Columns:
    """100 system prompts of 1,500 tokens"""
    return questions(
        requests, "flat", lambda prompts, _: [prompts.prefix(1500) for _ in range(100)], 0.7, (50, 300), (50, 50)
    )


def common_opening(requests: int) -> Columns:
    """one opening of 600 tokens, then 100 documents of 2,000"""

    def documents(prompts: PrefixedRequests, _: random.Random) -> list[array[int]]:
        opening = prompts.prefix(600)
        return [opening + prompts.prefix() for _ in range(100)]

    return questions(requests, "opening", documents, 0.7, (50, 300), (50, 50))


def tree(requests: int) -> Columns:
    """20 openings of 500 tokens, each with 12 continuations of 1,000 to 4,000"""

    def continuations(prompts: PrefixedRequests, rng: random.Random) -> list[array[int]]:
        openings = [prompts.prefix(512) for _ in range(20)]
        return [opening + prompts.prefix(rng.randint(1000, 4000)) for _ in range(12) for opening in openings]

    return questions(requests, "tree", continuations, 0.7, (50, 300), (50, 50))


def mixed_depths(requests: int) -> Columns:
    """prefixes of 100 to 10,000 tokens"""

    def prefixes(prompts: PrefixedRequests, rng: random.Random) -> list[array[int]]:
        return [prompts.prefix(int(math.exp(rng.uniform(math.log(100), math.log(10_000))))) for _ in range(200)]

    return questions(requests, "depths", prefixes, 0.5, (50, 300), (50, 50))


STRUCTURES = (one_prompt_each, common_opening, tree, mixed_depths, chat)
