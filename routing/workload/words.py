"""Deterministic filler text: any amount, cheap, and different from its first bytes on for different keys.

Its words have 3, 7 or 11 letters and each has a blank before it, so every 4 bytes are a token to the stand-in replica's
tokenizer: what is asked for in tokens has as many there.
"""

from __future__ import annotations

import random
from functools import cache

from xxhash import xxh3_64_intdigest

TOKEN_BYTES = 4  # of this text, as the stand-in replica counts; about what a real tokenizer makes of it
_POOL_BYTES = 1 << 18
_VOCABULARY = """
the and for are can has not its may one two any all out off own set get put run key map log job row bit tag new old low
top end day few due per via yet but nor who how why now day
request problem measure records systems reports indexes ordered changes results pointed grouped listing current numbers
stating checked queries storage readers entries between because without another through several exactly already
written started finally holding merging sorting counted matched parsing printed returns smaller largest seconds
necessarily description development application information environment performance requirement possibility
"""
_LETTERS = str.maketrans("0123456789", "ghijklmnop")


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
    return "".join(f" {word}" for word in words)


def passage(key: str, size: int) -> str:
    """``size`` ASCII characters that name ``key`` and go on with words; equal keys give equal beginnings."""
    digest = xxh3_64_intdigest(key)
    pool = _pool()
    start = digest % _POOL_BYTES & -TOKEN_BYTES
    text = f"{digest:016x}".translate(_LETTERS) + pool[start:]
    while len(text) < size:
        text += pool
    return text[:size]


def text_of_tokens(key: str, tokens: int) -> str:
    """A passage of so many tokens."""
    return passage(key, max(1, tokens) * TOKEN_BYTES)
