"""What the routers' own documents say of a strategy, for whoever chooses one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class StrategyDocument:
    """Paragraphs of text; ``names`` in backticks, tables and examples left out."""

    when: tuple[str, ...]
    what: tuple[str, ...]


@cache
def strategy_document(name: str) -> StrategyDocument | None:
    """The document beside a strategy; None for a strategy without one."""
    place = files("routing") / "strategies" / f"{name}.md"
    if not re.fullmatch(r"[a-z_]+", name) or not place.is_file():
        return None
    sections = re.split(r"^## (.+)$", place.read_text(encoding="utf-8"), flags=re.MULTILINE)
    texts = dict(zip(sections[1::2], sections[2::2], strict=True))
    return StrategyDocument(_paragraphs(texts.get("When to use it", "")), _paragraphs(texts.get("What it does", "")))


def _paragraphs(text: str) -> tuple[str, ...]:
    blocks = (" ".join(block.split()) for block in text.split("\n\n"))
    return tuple(_plain(block) for block in blocks if block and not block.startswith(("|", "```", "#")))


def _plain(text: str) -> str:
    """Without links, whose words stay."""
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text)
