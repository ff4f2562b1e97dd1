"""Prompt structures as routers describe them, and stored decisions with them."""

from __future__ import annotations

import json
import random
from datetime import datetime, timedelta
from typing import Any

import msgspec

from controlplane.models import Router
from routing.prompt.hashing import PrefixHasher
from routing.prompt.structure import describe_structure
from telemetry.lint.structure import PromptStructure
from telemetry.models import DecisionCursor
from telemetry.scraping.decision_records import Progress, read_page, record_page
from tests.routing.building import CHAT, SECRET, canonical
from tests.telemetry.decisions import decision

_digest = PrefixHasher(SECRET).digest
_rng = random.Random(3)
_WORDS = ["".join(_rng.choices("abcdefghijklmnoprstuvwy", k=_rng.randint(2, 9))) for _ in range(500)]


def rules(seed: int = 1, lines: int = 40) -> str:
    """A system prompt of ``lines`` lines, about 80 bytes each."""
    rng = random.Random(seed)
    return "".join(f"- {' '.join(rng.choices(_WORDS, k=13))}.\n" for _ in range(lines))


DATED = "Today is 2031-03-04, 11:{n:02d}.\n"


def prompt_structure(system: str, *turns: str, tools: Any = None, session: str | None = None) -> PromptStructure:
    return structure_of([message("system", system), *alternating(*turns)], tools=tools, session=session)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def alternating(*turns: str) -> list[dict[str, str]]:
    """Messages of the user and the assistant in turn."""
    return [message(("user", "assistant")[n % 2], turn) for n, turn in enumerate(turns)]


def structure_of(
    messages: list[dict[str, str]], *, tools: Any = None, session: str | None = None, **engine: int
) -> PromptStructure:
    """As a router describes it; ``engine``: prompt_tokens and block_tokens that an engine reported."""
    body = {"model": "m", "messages": messages} | ({"tools": tools} if tools else {})
    structure = PromptStructure.read(structure_document(body, tools, session), **engine)
    assert structure is not None
    return structure


def prose(seed: int, sentences: int) -> str:
    """Sentences of 4 to 14 words, about 50 bytes each."""
    rng = random.Random(seed)
    return " ".join(f"{' '.join(rng.choices(_WORDS, k=rng.randint(4, 14)))}." for _ in range(sentences))


def structure_document(body: dict[str, Any], tools: Any = None, session: str | None = None) -> Any:
    """A router's description of a prompt, as parsed JSON."""
    return json.loads(msgspec.json.encode(describe_structure(canonical(CHAT, body), tools, session, _digest)))


def store_prompts(router: Router, now: datetime, beginnings: dict[tuple[str, str], tuple[str, int]]) -> None:
    """Store decisions of the minutes before ``now``: by (pool, task group) the prompts' beginning and number."""
    items = []
    for (pool, group), (beginning, count) in beginnings.items():
        for n in range(count):
            system = {"role": "system", "content": beginning.format(n=n) + rules()}
            document = structure_document({"messages": [system, {"role": "user", "content": f"Hi {n}"}]})
            at = now - timedelta(seconds=5 * (count - n))
            items.append(decision(len(items) + 1, at, pool=pool, group=group, prompt_structure=document))
    cursor, _ = DecisionCursor.objects.get_or_create(router=router)
    page = {"boot": "b1", "next": len(items), "dropped": 0, "decisions": items}
    progress = Progress(router, cursor, rows_left=len(items), candidates_left=0)
    record_page(progress, read_page(msgspec.json.encode(page)), ratio=1.0, now=now)
