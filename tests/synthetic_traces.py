"""Seeded traces for replays: one with the statistics of a chat service, others that are difficult for placement.

``chat`` follows the first 30 minutes of Mooncake's conversation trace (FAST25-release): Poisson arrivals, 3.18/s;
every prompt starts with a one-block system prompt; 35 % of the requests continue a conversation, median 120 s after
its last turn, with the response and a new message; lengths are log-normal. ``hot_prefix`` and ``session_pool`` are
workloads from the literature on affinity. Each other trace has one property that misleads some strategy.
"""

from __future__ import annotations

import heapq
import math
import random
from array import array
from collections.abc import Iterator

from xxhash import xxh3_64_intdigest

from routing.traffic.columns import Columns
from routing.traffic.trace import BLOCK_TOKENS
from routing.types import PrefixHash

CHAT_RATE = 3.18  # requests/s
CHAT_NEW = 0.645  # share of the requests that start a conversation
CHAT_MAX_TOKENS = 123_192  # of a prompt
SMALL_BLOCK_TOKENS = 16  # of the workloads that are not chat


class _Blocks:
    """Generates unused block ids."""

    def __init__(self) -> None:
        self._next = 0

    def fresh(self, count: int) -> array[int]:
        self._next += count
        return array("Q", range(self._next - count, self._next))


# --- chat --------------------------------------------------------------------------------------------


def chat(requests: int, seed: int, rate: float = CHAT_RATE) -> Columns:
    """A chat service; 10 us per request."""
    rng = random.Random(f"{seed} chat")
    columns, blocks = Columns(BLOCK_TOKENS), _Blocks()
    system = blocks.fresh(1)
    # A heap of (time, number, tokens so far, ids of their whole blocks).
    pending: list[tuple[float, int, int, array[int]]] = []
    new_at_s = 0.0
    for number in range(requests):
        if not pending or new_at_s < pending[0][0]:
            at_s, cached_tokens, ids = new_at_s, 0, system
            message = int(rng.lognormvariate(math.log(6900), 1.02))
            new_at_s += rng.expovariate(rate * CHAT_NEW)
        else:
            at_s, _, cached_tokens, ids = heapq.heappop(pending)
            message = _message(rng)
        prompt_tokens = min(CHAT_MAX_TOKENS, cached_tokens + max(8, message))
        output_tokens = max(1, int(min(2000.0, rng.lognormvariate(math.log(270), 0.75))))
        whole_blocks = prompt_tokens // BLOCK_TOKENS
        shared = ids[:whole_blocks]
        ids = shared + blocks.fresh(-(-prompt_tokens // BLOCK_TOKENS) - len(shared))
        columns.append(at_s, prompt_tokens, output_tokens, ids)
        if rng.random() >= CHAT_NEW and prompt_tokens < CHAT_MAX_TOKENS:
            pause_s = rng.lognormvariate(math.log(120), 0.95)
            heapq.heappush(
                pending, (at_s + pause_s, number, prompt_tokens + output_tokens, ids[:whole_blocks] or system)
            )
    return columns


def _message(rng: random.Random) -> int:
    """Tokens of a user's next message."""
    median = 9000 if rng.random() < 0.25 else 450
    return int(min(40_000.0, rng.lognormvariate(math.log(median), 0.6)))


# --- coding agents -----------------------------------------------------------------------------------


def coding(requests: int, seed: int, session_s: float = 25.0) -> Columns:
    """Coding agents: one of 4 tool lists of 12,288 to 20,480 tokens, then turns of about 1,800 more, up to 125,000.

    A new session begins every ``session_s`` on average, and has about 9 turns, about 14 s apart.
    """
    rng = random.Random(f"{seed} coding")
    columns, blocks = Columns(BLOCK_TOKENS), _Blocks()
    tools = [(tokens, blocks.fresh(tokens // BLOCK_TOKENS)) for tokens in (12_288, 14_336, 18_432, 20_480)]
    rows: list[tuple[float, int, int, array[int]]] = []
    for start_s in poisson(rng, 1 / session_s, requests):
        if len(rows) >= 2 * requests:
            break
        at_s, (tokens, ids) = start_s, rng.choice(tools)
        for _ in range(int(min(40.0, max(2.0, rng.lognormvariate(math.log(9), 0.8))))):
            new = int(min(20_000.0, max(200.0, rng.lognormvariate(math.log(1800), 1.0))))
            shared, tokens = ids[: tokens // BLOCK_TOKENS], tokens + new
            if tokens > 125_000:
                break
            ids = shared + blocks.fresh(-(-tokens // BLOCK_TOKENS) - len(shared))
            rows.append((at_s, tokens, int(min(2000.0, max(20.0, rng.lognormvariate(math.log(200), 0.9)))), ids))
            at_s += 4 + rng.lognormvariate(math.log(10), 0.9)
    for row in sorted(rows, key=lambda row: row[0])[:requests]:
        columns.append(*row)
    return columns


# --- the literature's two workloads ------------------------------------------------------------------


def hot_prefix(requests: int, seed: int, rate: float = 80.0) -> Columns:
    """80 requests/s: 80 % share one prefix, 15 % one of 320 rare ones, 5 % are unique; with bursts of 40."""
    rng = random.Random(f"{seed} hot prefix")
    prompts = PrefixedRequests()
    hot, *rare = (prompts.prefix() for _ in range(321))
    burst_s, at_s = 15.0, 0.0
    while len(prompts.columns) < requests:
        at_s += rng.expovariate(rate)
        while burst_s < at_s:
            for _ in range(40):
                prompts.add(burst_s, hot)
            burst_s += 15.0
        kind = rng.random()
        prompts.add(at_s, hot if kind < 0.8 else rng.choice(rare) if kind < 0.95 else prompts.prefix())
    return prompts.columns


def session_pool(requests: int, seed: int) -> Columns:
    """137 requests/s: 98 % have one of 1,600 equally frequent prefixes, 2 % are unique."""
    rng = random.Random(f"{seed} session pool")
    prompts = PrefixedRequests()
    pool = [prompts.prefix() for _ in range(1600)]
    for at_s in poisson(rng, 137.0, requests):
        prompts.add(at_s, rng.choice(pool) if rng.random() < 0.98 else prompts.prefix())
    return prompts.columns


class PrefixedRequests:
    """Requests that consist of a prefix and a unique rest, in small blocks."""

    def __init__(self) -> None:
        self.columns = Columns(SMALL_BLOCK_TOKENS)
        self._blocks = _Blocks()

    def prefix(self, tokens: int = 2000) -> array[int]:
        return self._blocks.fresh(tokens // SMALL_BLOCK_TOKENS)

    def add(self, at_s: float, prefix: array[int], own_tokens: int = 100, output_tokens: int = 16) -> None:
        own = self._blocks.fresh(-(-own_tokens // SMALL_BLOCK_TOKENS))
        self.columns.append(at_s, len(prefix) * SMALL_BLOCK_TOKENS + own_tokens, output_tokens, prefix + own)


# --- traces that mislead strategies -----------------------------------------------------------------------------------


def nothing_shared(requests: int, seed: int) -> Columns:
    """Unique prompts of very different lengths."""
    rng = random.Random(f"{seed} nothing shared")
    prompts = PrefixedRequests()
    for at_s in poisson(rng, 10.0, requests):
        prompts.add(at_s, prompts.prefix(0), int(min(60_000.0, rng.lognormvariate(math.log(1500), 1.2))), 100)
    return prompts.columns


def bursts(requests: int, seed: int) -> Columns:
    """Every few seconds an agent sends 5 to 40 requests at once that share 8,000 new tokens."""
    rng = random.Random(f"{seed} bursts")
    prompts = PrefixedRequests()
    at_s = 0.0
    while len(prompts.columns) < requests:
        at_s += rng.expovariate(1.0)
        context = prompts.prefix(8000)
        for _ in range(rng.randint(5, 40)):
            prompts.add(at_s + rng.random() * 0.1, context, rng.randint(20, 400), 60)
    return in_order(prompts.columns)


def agents(requests: int, seed: int) -> Columns:
    """Sessions of 20 quick turns, each 200 to 1,500 tokens longer, after one of 12 tool lists of 6,000 tokens."""
    rng = random.Random(f"{seed} agents")
    prompts = PrefixedRequests()
    tools = [prompts.prefix(6000) for _ in range(12)]
    for start_s in poisson(rng, 1.0, -(-requests // 20)):
        at_s, context = start_s, rng.choice(tools)
        for _ in range(20):
            own = rng.randint(200, 1500)
            prompts.add(at_s, context, own, 80)
            ids = prompts.columns.ids[prompts.columns.starts[-2] :]
            context = ids[: (len(context) * SMALL_BLOCK_TOKENS + own) // SMALL_BLOCK_TOKENS]
            at_s += rng.expovariate(0.2) + 2.0
    return in_order(prompts.columns)


def mixed_lengths(requests: int, seed: int) -> Columns:
    """Short questions about 200 shared documents of 3,000 tokens; every tenth request has 50,000 unique tokens."""
    rng = random.Random(f"{seed} mixed lengths")
    prompts = PrefixedRequests()
    documents = [prompts.prefix(3000) for _ in range(200)]
    for at_s in poisson(rng, 10.0, requests):
        if rng.random() < 0.1:
            prompts.add(at_s, prompts.prefix(0), rng.randint(20_000, 80_000), 100)
        else:
            prompts.add(at_s, documents[int(200 * rng.random() ** 3)], rng.randint(50, 300), 100)
    return prompts.columns


def jobs(requests: int, seed: int) -> Columns:
    """Every 2 s a job sends 2 to 60 requests about a new document of 500 to 30,000 tokens, at once or within 5 s."""
    rng = random.Random(f"{seed} jobs")
    prompts = PrefixedRequests()
    at_s = 0.0
    while len(prompts.columns) < requests:
        at_s += rng.expovariate(0.5)
        document, span_s = prompts.prefix(rng.randint(500, 30_000)), rng.choice((0.0, 0.5, 5.0))
        for _ in range(rng.randint(2, 60)):
            prompts.add(at_s + rng.random() * span_s, document, rng.randint(20, 600), rng.randint(10, 200))
    return in_order(prompts.columns)


def tides(requests: int, seed: int) -> Columns:
    """300 documents of 2,000 to 10,000 tokens, by popularity; for 10 s of every 40 at eighteen times the rate."""
    rng = random.Random(f"{seed} tides")
    prompts = PrefixedRequests()
    documents = [prompts.prefix(rng.randint(2000, 10_000)) for _ in range(300)]
    at_s = 0.0
    for _ in range(requests):
        at_s += rng.expovariate(36.0 if at_s % 40 < 10 else 2.0)
        prompts.add(at_s, documents[int(300 * rng.random() ** 2)], rng.randint(50, 1500), 100)
    return prompts.columns


def drifting(requests: int, seed: int) -> Columns:
    """Documents of 1,000 to 8,000 tokens, a new one every 20 requests, requested by a power law of their age."""
    rng = random.Random(f"{seed} drifting")
    prompts = PrefixedRequests()
    documents = [prompts.prefix(rng.randint(1000, 8000)) for _ in range(200 + requests // 20)]
    for number, at_s in enumerate(poisson(rng, 10.0, requests)):
        age = min(200, int(rng.paretovariate(0.8)))
        prompts.add(at_s, documents[200 + number // 20 - age], rng.randint(50, 500), 100)
    return prompts.columns


def small_groups(requests: int, seed: int) -> Columns:
    """3,000 groups with prefixes of 200 to 3,000 tokens, by Zipf's law."""
    rng = random.Random(f"{seed} small groups")
    prompts = PrefixedRequests()
    prefixes = [prompts.prefix(rng.randint(200, 3000)) for _ in range(3000)]
    chosen = rng.choices(prefixes, [number**-0.9 for number in range(1, 3001)], k=requests)
    for at_s, prefix in zip(poisson(rng, 10.0, requests), chosen, strict=True):
        prompts.add(at_s, prefix, rng.randint(20, 1500), 100)
    return prompts.columns


def giant_group(requests: int, seed: int) -> Columns:
    """All requests share one prefix of 6,000 tokens, with up to 30,000 unique tokens."""
    rng = random.Random(f"{seed} giant group")
    prompts = PrefixedRequests()
    prefix = prompts.prefix(6000)
    for at_s in poisson(rng, 10.0, requests):
        prompts.add(at_s, prefix, min(30_000, 20 + int(rng.lognormvariate(math.log(400), 1.3))), 150)
    return prompts.columns


def families(requests: int, seed: int) -> Columns:
    """Short questions after 20 prefixes, each with 12 continuations of 1,000 to 4,000 tokens, by Zipf's law."""
    rng = random.Random(f"{seed} families")
    prompts = PrefixedRequests()
    shared = [prompts.prefix(512) for _ in range(20)]
    variants = [[prefix + prompts.prefix(rng.randint(1000, 4000)) for _ in range(12)] for prefix in shared]
    family_weights, variant_weights = (
        [number**-1.0 for number in range(1, 21)],
        [number**-1.2 for number in range(1, 13)],
    )
    for at_s in poisson(rng, 10.0, requests):
        (family,) = rng.choices(variants, family_weights)
        prompts.add(at_s, rng.choices(family, variant_weights)[0], rng.randint(20, 400), 60)
    return prompts.columns


def heavy_tails(requests: int, seed: int) -> Columns:
    """600 documents and questions about them, lengths from a Pareto distribution (1.1)."""
    rng = random.Random(f"{seed} heavy tails")
    prompts = PrefixedRequests()
    documents = [prompts.prefix(min(60_000, int(500 * rng.paretovariate(1.1)))) for _ in range(600)]
    for at_s in poisson(rng, 10.0, requests):
        question = min(40_000, int(100 * rng.paretovariate(1.1)))
        prompts.add(at_s, documents[int(600 * rng.random() ** 2)], question, 100)
    return prompts.columns


def sessions_of(columns: Columns) -> list[PrefixHash]:
    """A session key for each request: that of the last request whose whole prompt it begins with, else a new one."""
    ends: dict[int, int] = {}  # last whole block of a prompt that nobody continued -> session
    sessions = []
    for number, (start, prompt_tokens) in enumerate(zip(columns.starts[:-1], columns.prompt_tokens, strict=True)):
        whole = columns.ids[start : start + prompt_tokens // columns.block_tokens]
        earlier = (ends.pop(block) for block in reversed(whole) if block in ends)
        session = next(earlier, number)
        sessions.append(PrefixHash(xxh3_64_intdigest(session.to_bytes(8))))
        if whole:
            ends[whole[-1]] = session
    return sessions


def poisson(rng: random.Random, rate: float, count: int) -> Iterator[float]:
    """Arrival times in seconds."""
    at_s = 0.0
    for _ in range(count):
        at_s += rng.expovariate(rate)
        yield at_s


def in_order(columns: Columns) -> Columns:
    """Requests in ascending time order."""
    ordered = Columns(columns.block_tokens)
    for index in sorted(range(len(columns)), key=columns.at_s.__getitem__):
        ids = columns.ids[columns.starts[index] : columns.starts[index + 1]]
        ordered.append(columns.at_s[index], columns.prompt_tokens[index], columns.output_tokens[index], ids)
    return ordered
