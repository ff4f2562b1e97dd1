"""Text as the stand-in sees it: a token is 4 UTF-8 bytes of the rendered prompt, and answers are pseudo-words.

A token's id is its 4 bytes read little-endian, so ids and text are two forms of the same prompt and share blocks.
An answer's tokens are 4 bytes each too, the first one longer where the prompt ended inside a token: a next turn that
carries the answer continues the very same bytes, and finds the generated blocks in the cache as it would in vLLM.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from xxhash import xxh3_64_intdigest

TOKEN_BYTES = 4
VOCABULARY = 1 << 32


def count_tokens(data: bytes) -> int:
    """Tokens of a rendered prompt; a last one may be partial."""
    return -(-len(data) // TOKEN_BYTES)


def token_ids(data: bytes) -> list[int]:
    """The ids of a prompt's tokens."""
    padded = data + b"\0" * (-len(data) % TOKEN_BYTES)
    return list(struct.unpack(f"<{len(padded) // TOKEN_BYTES}I", padded))


def bytes_of(ids: Sequence[int]) -> bytes:
    """The prompt that ids stand for; each must be in 0..2**32-1."""
    return struct.pack(f"<{len(ids)}I", *ids)


def block_keys(data: bytes, block_tokens: int, salt: str = "") -> list[int]:
    """Chained keys of the full blocks of ``data``: a key stands for its block and all before it."""
    size = block_tokens * TOKEN_BYTES
    digest = xxh3_64_intdigest
    key = digest(salt.encode()) if salt else 0
    keys = []
    for start in range(0, len(data) - size + 1, size):
        key = digest(data[start : start + size], key)
        keys.append(key)
    return keys


def render_chat(messages: Iterable[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> bytes:
    """A conversation in ChatML, open for the assistant's answer; tools come first, in the system message."""
    parts = [f"<|im_start|>{message['role']}\n{_content(message)}<|im_end|>\n" for message in messages]
    if tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        opening = f"# Tools\n\n<tools>\n{listed}\n</tools>\n\n"
        system = "<|im_start|>system\n"
        if parts[0].startswith(system):
            parts[0] = f"{system}{opening}{parts[0][len(system) :]}"
        else:
            parts.insert(0, f"{system}{opening}<|im_end|>\n")
    parts.append("<|im_start|>assistant\n")
    return "".join(parts).encode(errors="replace")


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part if isinstance(part, str) else str(part.get("text", "")) for part in content)
    calls = message.get("tool_calls")
    return f"{content or ''}{json.dumps(calls, ensure_ascii=False) if calls else ''}"


class Babble:
    """Deterministic pseudo-words: a blank and three letters to a token."""

    WORDS = 16_384

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)  # noqa: S311 -- text, not secrets
        consonants, vowels = "bcdfghjklmnprstvwz", "aeiou"
        syllables = [f" {a}{b}{c}" for a in consonants for b in vowels for c in consonants]
        words = rng.choices(syllables, k=self.WORDS)
        self._text = "".join(words)

    def answer(self, prompt: bytes, tokens: int, variant: int = 0) -> list[str]:
        """The tokens of the answer to a prompt; ``variant`` tells the choices of one request apart."""
        start = xxh3_64_intdigest(prompt, variant) % self.WORDS
        text = self._text[start * TOKEN_BYTES :]
        missing = tokens * TOKEN_BYTES - len(text)
        if missing > 0:
            text += self._text * (missing // len(self._text) + 1)
        pieces = [text[i : i + TOKEN_BYTES] for i in range(0, tokens * TOKEN_BYTES, TOKEN_BYTES)]
        pieces[0] = "o" * (-len(prompt) % TOKEN_BYTES) + pieces[0]
        return pieces


def natural_length(prompt: bytes, variant: int = 0) -> int:
    """After how many tokens the model would stop by itself: 256 to 767."""
    return 256 + xxh3_64_intdigest(prompt, variant ^ 0x5EED) % 512
