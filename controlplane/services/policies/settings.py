"""A policy's settings: validated, described and compared with the schema's own annotations.

Ranges, defaults, units and help texts come from ``routing.schema``, so a new strategy or setting appears in forms,
diffs and documents by itself. The description of each strategy comes from the routers' documents.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any, get_args

import msgspec

from controlplane.errors import InvalidError
from controlplane.schema_fields import SettingInfo, settings_of
from routing import schema


@dataclass(frozen=True, slots=True)
class StrategyInfo:
    """A strategy and its settings, in the schema's order."""

    name: str
    help: str
    settings: tuple[SettingInfo, ...]


@dataclass(frozen=True, slots=True)
class SettingChange:
    """One difference between two versions; ``before`` or ``after`` is None where the setting does not exist."""

    field: str
    before: Any
    after: Any
    meaning: str


@dataclass(frozen=True, slots=True)
class StrategyDocument:
    """Paragraphs of a strategy's document, without tables, examples and links."""

    when_to_use: tuple[str, ...]
    what_it_does: tuple[str, ...]


@cache
def policy_catalogue() -> tuple[StrategyInfo, ...]:
    """Every strategy with its settings."""
    return tuple(
        StrategyInfo(kind.name, inspect.cleandoc(kind.__doc__ or ""), settings_of(kind))
        for kind in get_args(schema.Settings)
    )


def canonical_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with defaults filled in; InvalidError names the path, ``$.settings...``."""
    try:
        return dict(msgspec.to_builtins(schema.load_settings(json.dumps(settings).encode())))
    except schema.ConfigError as error:
        raise InvalidError(f"$.settings{error.path[1:]}", error.reason) from None
    except (TypeError, ValueError) as error:  # not JSON, such as NaN
        raise InvalidError("$.settings", str(error)) from None


def are_equal_settings(settings: Any, other: dict[str, Any]) -> bool:
    """Whether two settings mean the same; an earlier release stored them without settings that are new since."""
    if not isinstance(settings, dict) or settings.get("strategy") != other["strategy"]:
        return False
    try:
        return canonical_settings(settings) == canonical_settings(other)
    except InvalidError:
        return False


def settings_digest(settings: dict[str, Any]) -> str:
    """SHA-256 of the settings, hex, independent of key order."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def diff_settings(old: dict[str, Any] | None, new: dict[str, Any] | None) -> list[SettingChange]:
    """Differences, the strategy first and then in the schema's order, with defaults filled in."""
    before, after = (canonical_settings(side) if side else {} for side in (old, new))
    fields = dict.fromkeys(("strategy", *after, *before))
    return [
        SettingChange(field, before.get(field), after.get(field), _help_of(field, after or before))
        for field in fields
        if before.get(field) != after.get(field)
    ]


def changes_as_json(changes: Sequence[SettingChange]) -> list[dict[str, Any]]:
    return [asdict(change) for change in changes]


def _help_of(field: str, settings: dict[str, Any]) -> str:
    strategies = {info.name: info for info in policy_catalogue()}
    strategy = strategies[settings["strategy"]]
    if field == "strategy":
        return strategy.help
    candidates = (setting for info in (strategy, *strategies.values()) for setting in info.settings)
    return next((setting.help for setting in candidates if setting.field == field), "")


@cache
def strategy_document(name: str) -> StrategyDocument | None:
    """The document of a strategy; None if there is none."""
    path = files("routing") / "balancing" / "strategies" / f"{name}.md"
    if not re.fullmatch(r"[a-z_]+", name) or not path.is_file():
        return None
    sections = re.split(r"^## (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    texts = dict(zip(sections[1::2], sections[2::2], strict=True))
    return StrategyDocument(_paragraphs(texts.get("When to use it", "")), _paragraphs(texts.get("What it does", "")))


def _paragraphs(text: str) -> tuple[str, ...]:
    """Paragraphs with links replaced by their text."""
    blocks = (" ".join(block.split()) for block in text.split("\n\n"))
    prose = (block for block in blocks if block and not block.startswith(("|", "```", "#")))
    return tuple(re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", block) for block in prose)
