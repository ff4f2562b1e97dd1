"""Openings as routers describe them: prompts through the router's own description, as JSON and back."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec

from routing.core.prefix import PrefixHasher
from routing.core.shape import shape_of
from telemetry.lint.openings import Opening
from tests.routing.building import CHAT, SECRET, canonical

_digest = PrefixHasher(SECRET).digest
_rng = random.Random(3)
_WORDS = ["".join(_rng.choices("abcdefghijklmnoprstuvwy", k=_rng.randint(2, 9))) for _ in range(500)]


def rules(seed: int = 1, lines: int = 40) -> str:
    """A system prompt of so many lines, about 80 bytes each."""
    rng = random.Random(seed)
    return "".join(f"- {' '.join(rng.choices(_WORDS, k=13))}.\n" for _ in range(lines))


def opening(system: str, *turns: str, tools: Any = None, session: str | None = None) -> Opening:
    listed = [{"role": "system", "content": system}]
    listed += [{"role": ("user", "assistant")[n % 2], "content": turn} for n, turn in enumerate(turns)]
    body = {"model": "m", "messages": listed} | ({"tools": tools} if tools else {})
    shape = shape_of(canonical(CHAT, body), tools, session, _digest)
    read = Opening.read(json.loads(msgspec.json.encode(shape)))
    assert read is not None
    return read
