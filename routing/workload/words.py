"""Deterministic filler text: any amount, cheap, and different from its first bytes on for different keys."""

from __future__ import annotations

import random
from functools import cache

from xxhash import xxh3_64_intdigest

TOKEN_BYTES = 4  # what the stand-in replica calls a token; about what a real tokenizer makes of this text
_POOL_BYTES = 1 << 18
_VOCABULARY = """
the of and to in is for that with as on by from this be are an or which can when each will has not its after
request answer table value record system report index order field change result file point group list line time
number state check input output query store reader entry path level rule note part call step case key open close
read write start finish move keep send hold merge split sort count match build parse print return small large
first second last new old common single empty current previous following possible necessary
"""


@cache
def _pool() -> str:
    rng = random.Random(20_260)  # noqa: S311 -- filler, not secrets
    vocabulary = _VOCABULARY.split()
    words: list[str] = []
    size = 0
    while size < _POOL_BYTES:
        word = rng.choice(vocabulary)
        words.append(word)
        size += len(word) + 1
    return " ".join(words)


def passage(key: str, size: int) -> str:
    """``size`` ASCII characters that name ``key`` and go on with words; equal keys give equal beginnings."""
    digest = xxh3_64_intdigest(key)
    pool = _pool()
    start = digest % _POOL_BYTES
    text = f"{digest:016x} {pool[start:]}"
    while len(text) < size:
        text = f"{text} {pool}"
    return text[:size]


def text_of_tokens(key: str, tokens: int) -> str:
    """A passage of about so many tokens."""
    return passage(key, max(1, tokens) * TOKEN_BYTES)
