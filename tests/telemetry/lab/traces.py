"""Seeded traffic: sessions that open with a shared prompt and grow turn by turn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from telemetry.lab.chains import HASHES, Floats, Requests, coded

HASH_TOKENS = 64


class Request(NamedTuple):
    """One of ``Requests``. Tokens; None is what nobody said."""

    at_s: float
    group: str
    replica: str
    blocks: Sequence[int]
    positions: Sequence[int] | None  # None: all of the prompt's blocks are there
    block_count: int
    sample_ratio: float
    hash_tokens: int
    estimate_tokens: int
    prompt_tokens: int | None
    cached_tokens: int | None
    block_tokens: int | None


def columns(requests: Sequence[Request]) -> Requests:
    """As a replay takes them."""

    def numbers(name: str) -> Floats:
        return np.array([getattr(one, name) for one in requests], np.float64)

    blocks = [block for one in requests for block in one.blocks]
    places = [range(one.block_count) if one.positions is None else one.positions for one in requests]
    told = ("block_count", "sample_ratio", "hash_tokens", "estimate_tokens")
    said = ("prompt_tokens", "cached_tokens", "block_tokens")
    return Requests(
        numbers("at_s"),
        coded(one.group for one in requests),
        coded(one.replica for one in requests),
        np.array(blocks, np.uint64),
        np.array([at for positions in places for at in positions], np.int64),
        np.cumsum([len(one.blocks) for one in requests], dtype=np.int64),
        *map(numbers, told),
        *map(numbers, said),
    )


def traffic(
    count: int,
    *,
    seed: int = 1,
    replicas: int = 4,
    prompts: int = 12,
    sessions: int = 300,
    turn: tuple[int, int] = (2, 30),
    longest: int = 120,
    placed: str = "session",
) -> list[Request]:
    """Requests at 200 a second; ``placed`` is how: by ``session`` or at ``random``."""
    return list(_traffic(count, seed, replicas, prompts, sessions, turn, longest, placed))


@cache
def _traffic(
    count: int, seed: int, replicas: int, prompts: int, sessions: int, turn: tuple[int, int], longest: int, placed: str
) -> list[Request]:
    chance = random.Random(seed)
    openings = [_blocks(chance, chance.randint(4, 24)) for _ in range(prompts)]
    open_: dict[int, list[int]] = {}
    found = []
    for number in range(count):
        session = chance.randrange(sessions)
        blocks = open_.get(session)
        if blocks is None or len(blocks) > longest:
            blocks = list(openings[session % prompts])
        blocks = open_[session] = blocks + _blocks(chance, chance.randint(*turn))
        replica = session if placed == "session" else chance.randrange(replicas)
        found.append(request(number / 200, blocks, group=f"g{session % 3}", replica=f"r{replica % replicas}"))
    return found


def request(at_s: float, blocks: list[int], *, group: str = "", replica: str = "r0", **changes: object) -> Request:
    """One request whose prompt is these blocks and 20 tokens more, of which the engine had half."""
    tokens = HASH_TOKENS * len(blocks) + 20
    one = Request(at_s, group, replica, blocks, None, len(blocks), 1.0, HASH_TOKENS, tokens, tokens, tokens // 2, 16)
    return one._replace(**changes)


def sampled(requests: list[Request], ratio: float) -> list[Request]:
    """As a router tells them that is asked for this part of the blocks."""
    return [_sampled(one, ratio) for one in requests]


def _sampled(one: Request, ratio: float) -> Request:
    kept = [at for at, block in enumerate(one.blocks) if block < ratio * HASHES]
    return one._replace(blocks=[one.blocks[at] for at in kept], positions=kept, sample_ratio=ratio)


def _blocks(chance: random.Random, count: int) -> list[int]:
    return [chance.getrandbits(64) for _ in range(count)]
