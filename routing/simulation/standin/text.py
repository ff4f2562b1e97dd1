"""Text as the stand-in sees it: a tokenizer of short pieces of words, and answers of pseudo-words.

Theory of operation. A token is up to 4 bytes of the rendered prompt: a blank and three letters, four letters that go on
with a word, one character of any other script, one digit, blank or sign. A marker of the chat template is one token. So
English has about 3 bytes a token, words of 3 or 7 letters exactly 4, digits and code fewer, and other scripts 2 to 4.
A token's id is its bytes read little-endian, and a prompt is the ids of its tokens, 4 bytes each: a text and
its ids are the same prompt and share blocks, and ids that no text has are a prompt as well.

A response's tokens begin with a blank, so no token spans from the prompt into it: a next turn that carries the response
continues the very same tokens, and finds the generated blocks in the cache as it would in vLLM.
"""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from xxhash import xxh3_64_intdigest

TOKEN_BYTES = 4  # at most of a text, and of an id
VOCABULARY = 1 << 32
_MARKERS: Final = {b"<|im_start|>": b"\xff\xff\xff\x01", b"<|im_end|>": b"\xff\xff\xff\x02"}  # 0xFF is in no UTF-8 text
_OF_MARKER: Final = {packed: marker for marker, packed in _MARKERS.items()}
_tokens: Final = re.compile(
    rb"<\|im_start\|>|<\|im_end\|>| [A-Za-z]{1,3}|[A-Za-z]{1,4}|[\xc0-\xf7][\x80-\xbf]{1,3}|[\x00-\xff]"
).findall


@lru_cache(maxsize=64)
def encode(text: bytes) -> bytes:
    """The prompt that a rendered text is: the ids of its tokens, 4 bytes each."""
    packed = [_MARKERS.get(token) or token.ljust(TOKEN_BYTES, b"\0") for token in _tokens(text)]
    return b"".join(packed)


def decode(prompt: bytes) -> list[bytes]:
    """The texts of a prompt's tokens."""
    packed = [prompt[at : at + TOKEN_BYTES] for at in range(0, len(prompt), TOKEN_BYTES)]
    return [_OF_MARKER.get(token) or token.rstrip(b"\0") or b"\0" for token in packed]


def count_tokens(prompt: bytes) -> int:
    """Tokens of a prompt."""
    return len(prompt) // TOKEN_BYTES


def token_ids(prompt: bytes) -> list[int]:
    """The ids of a prompt's tokens."""
    return list(struct.unpack(f"<{len(prompt) // TOKEN_BYTES}I", prompt))


def bytes_of(ids: Sequence[int]) -> bytes:
    """The prompt of these ids; each must be in 0..2**32-1."""
    return struct.pack(f"<{len(ids)}I", *ids)


def block_keys(data: bytes, block_tokens: int, salt: str = "") -> list[int]:
    """Chained keys of a prompt's full blocks: a key stands for its block and all before it."""
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
    """Deterministic pseudo-words: a blank and three letters, which is a token."""

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
        return [text[i : i + TOKEN_BYTES] for i in range(0, tokens * TOKEN_BYTES, TOKEN_BYTES)]


def natural_length(prompt: bytes, variant: int = 0) -> int:
    """After how many tokens the model would stop by itself: 256 to 767."""
    return 256 + xxh3_64_intdigest(prompt, variant ^ 0x5EED) % 512
