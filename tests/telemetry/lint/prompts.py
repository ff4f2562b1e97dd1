"""Openings as routers describe them: prompts through the router's own description, as JSON and back, and stored."""

from __future__ import annotations

import json
import random
from datetime import datetime, timedelta
from typing import Any

import msgspec

from controlplane.models import Router
from routing.prompt.hashing import PrefixHasher
from routing.prompt.structure import describe_structure
from telemetry.lint import PromptStructure
from telemetry.models import DecisionCursor
from telemetry.scraping.decision_records import Progress, read_page, record_page
from tests.routing.building import CHAT, SECRET, canonical
from tests.telemetry.decisions import decision

_digest = PrefixHasher(SECRET).digest
_rng = random.Random(3)
_WORDS = ["".join(_rng.choices("abcdefghijklmnoprstuvwy", k=_rng.randint(2, 9))) for _ in range(500)]


def rules(seed: int = 1, lines: int = 40) -> str:
    """A system prompt of so many lines, about 80 bytes each."""
    rng = random.Random(seed)
    return "".join(f"- {' '.join(rng.choices(_WORDS, k=13))}.\n" for _ in range(lines))


DATED = "Today is 2031-03-04, 11:{n:02d}.\n"


def opening(system: str, *turns: str, tools: Any = None, session: str | None = None) -> PromptStructure:
    listed = [{"role": "system", "content": system}]
    listed += [{"role": ("user", "assistant")[n % 2], "content": turn} for n, turn in enumerate(turns)]
    body = {"model": "m", "messages": listed} | ({"tools": tools} if tools else {})
    read = PromptStructure.read(_told(body, tools, session))
    assert read is not None
    return read


def _told(body: dict[str, Any], tools: Any = None, session: str | None = None) -> Any:
    """What a router tells of a prompt."""
    return json.loads(msgspec.json.encode(describe_structure(canonical(CHAT, body), tools, session, _digest)))


def store_openings(router: Router, now: datetime, heads: dict[tuple[str, str], tuple[str, int]]) -> None:
    """Decisions of the minutes before ``now``, collected: for each (pool, task group) a head and how many."""
    listed = []
    for (pool, group), (head, count) in heads.items():
        for n in range(count):
            system = {"role": "system", "content": head.format(n=n) + rules()}
            told = _told({"messages": [system, {"role": "user", "content": f"Hi {n}"}]})
            at = now - timedelta(seconds=5 * (count - n))
            listed.append(decision(len(listed) + 1, at, pool=pool, group=group, opening=told))
    cursor, _ = DecisionCursor.objects.get_or_create(router=router)
    page = {"boot": "b1", "next": len(listed), "dropped": 0, "decisions": listed}
    progress = Progress(router, cursor, rows_left=len(listed), candidates_left=0)
    record_page(progress, read_page(msgspec.json.encode(page)), ratio=1.0, now=now)
