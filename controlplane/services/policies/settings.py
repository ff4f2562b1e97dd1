"""A policy's settings: checked, described and compared by what ``routing.schema`` says of them.

Nothing about a setting is written here twice: ranges, defaults, units and help all come from the schema's own
annotations, so that a new strategy or setting appears in forms, diffs and documents by itself.

What the routers' own documents say of a strategy, for whoever chooses one.
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
    """One difference between two versions. ``before`` or ``after`` is None where the setting does not exist there."""

    field: str
    before: Any
    after: Any
    meaning: str


@cache
def policy_catalogue() -> tuple[StrategyInfo, ...]:
    """Every strategy that routers know, with its settings."""
    return tuple(_strategy(kind) for kind in get_args(schema.Settings))


def canonical_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with every default written out; InvalidError names the path, ``$.settings...``, of what is wrong."""
    try:
        return dict(msgspec.to_builtins(schema.load_settings(json.dumps(settings).encode())))
    except schema.ConfigError as error:
        raise InvalidError(f"$.settings{error.path[1:]}", error.reason) from None
    except (TypeError, ValueError) as error:  # NaN, or nothing that JSON can say
        raise InvalidError("$.settings", str(error)) from None


def settings_digest(settings: dict[str, Any]) -> str:
    """SHA-256 in hex of the settings, whatever the order they are written in."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def diff_settings(old: dict[str, Any] | None, new: dict[str, Any] | None) -> list[SettingChange]:
    """What differs, strategy first and then in the schema's order; defaults that are not written out count as such."""
    before, after = (canonical_settings(side) if side else {} for side in (old, new))
    fields = dict.fromkeys(("strategy", *after, *before))
    return [
        SettingChange(field, before.get(field), after.get(field), _meaning(field, after or before))
        for field in fields
        if before.get(field) != after.get(field)
    ]


def changes_as_json(changes: Sequence[SettingChange]) -> list[dict[str, Any]]:
    """A diff for an event or an answer."""
    return [asdict(change) for change in changes]


def _meaning(field: str, settings: dict[str, Any]) -> str:
    strategies = {info.name: info for info in policy_catalogue()}
    if field == "strategy":
        return strategies[settings["strategy"]].help
    for info in (strategies[settings["strategy"]], *strategies.values()):
        for setting in info.settings:
            if setting.field == field:
                return setting.help
    return ""


def _strategy(kind: type[schema.PolicySettings]) -> StrategyInfo:
    return StrategyInfo(kind.name, inspect.cleandoc(kind.__doc__ or ""), settings_of(kind))


@dataclass(frozen=True, slots=True)
class StrategyDocument:
    """Paragraphs of text; ``names`` in backticks, tables and examples left out."""

    when: tuple[str, ...]
    what: tuple[str, ...]


@cache
def strategy_document(name: str) -> StrategyDocument | None:
    """The document beside a strategy; None for a strategy without one."""
    place = files("routing") / "balancing" / "strategies" / f"{name}.md"
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
