"""A sentence for whatever no rule explains, from what the schema says of the field. Nothing stays unsaid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import msgspec

from routing import schema
from routing.schema import HIDDEN, SECRET_FIELDS

from .effect import Effect, Impact, Path, shown

_REFUSING = frozenset({"caps", "concurrency", "access"})  # branches that say which requests are taken
_STEPS = {"pools": "pool", "groups": "task group", "replicas": "replica", "keys": "API key"}


def plain_effects(left: Mapping[Path, tuple[Any, Any]]) -> Iterator[Effect]:
    """One effect for each leaf."""
    for path, (before, after) in left.items():
        place, field, unit, meaning = described(path)
        old, new = (shown(_safe(value, path), path[-1]) for value in (before, after))
        text = f"{place}: {field} is {new} instead of {old}{f' {unit}' if unit else ''}."
        text = f"{text} {meaning}".strip() if meaning else text
        impact = Impact.REFUSE if _refuses(path) else Impact.STEER
        yield Effect("field", impact, (_who(path),), text, _safe(before, path), _safe(after, path), None, (path,))


def _refuses(path: Path) -> bool:
    return bool(_REFUSING & set(path)) or (path[0] == "limits" and path[-1].startswith("max_"))


def described(path: Path) -> tuple[str, str, str, str]:
    """Where a leaf stands, what it is called, its unit, and what it means; "" where the schema does not say."""
    meta = _meta(path)
    steps = _readable(path)
    place = " of ".join(reversed(steps)) if steps else "Every router"
    section = "" if not (rest := _rest(path)) else f"{rest} "
    return place[0].upper() + place[1:], f"{section}{path[-1].replace('_', ' ')}", *meta


def _readable(path: Path) -> list[str]:
    """pools.chat.groups.a as "pool chat", "task group a"."""
    return [f"{_STEPS[step]} {name}" for step, name in pairwise(path) if step in _STEPS]


def _rest(path: Path) -> str:
    """The branches between the last named thing and the leaf."""
    after = max((at + 2 for at, step in enumerate(path[:-1]) if step in _STEPS), default=0)
    return ", ".join(step.replace("_", " ") for step in path[after:-1])


def _who(path: Path) -> str:
    return (_readable(path) or ["every request"])[-1]


def _safe(value: Any, path: Path) -> Any:
    """The value without what is secret in it."""
    if path[-1] in SECRET_FIELDS and value:
        return HIDDEN
    if isinstance(value, dict):
        return {name: _safe(inner, tuple(name.split("."))) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_safe(inner, path) for inner in value]
    return value


@cache
def _meta(path: Path) -> tuple[str, str]:
    """Unit and description of a leaf."""
    kinds: list[Any] = [msgspec.inspect.type_info(schema.RouterConfig)]
    unit, text = "", ""
    for step in path:
        kinds, unit, text = _step(kinds, step)
    return unit, text


def _step(kinds: list[Any], step: str) -> tuple[list[Any], str, str]:
    """The types one step further in, and what the annotation there says."""
    found: list[Any] = []
    unit = text = ""
    for kind in kinds:
        if isinstance(kind, msgspec.inspect.VarTupleType):
            found += _structs(kind.item_type)  # the step is the name of one of them
        elif isinstance(kind, msgspec.inspect.StructType):
            for field in kind.fields:
                if field.encode_name == step:
                    found += _structs(field.type)
                    unit, text = _said(field.type) if not text else (unit, text)
    return found, unit, text


def _structs(kind: Any) -> list[Any]:
    """What a type may be, without annotations and unions."""
    if isinstance(kind, msgspec.inspect.Metadata):
        return _structs(kind.type)
    if isinstance(kind, msgspec.inspect.UnionType):
        return [one for part in kind.types for one in _structs(part)]
    return [kind]


def _said(kind: Any) -> tuple[str, str]:
    """Unit and description in a type's annotations, those of a union's parts included."""
    if isinstance(kind, msgspec.inspect.Metadata):
        inner = _said(kind.type)
        return (kind.extra or {}).get("unit", inner[0]), (kind.extra_json_schema or {}).get("description", inner[1])
    if isinstance(kind, msgspec.inspect.UnionType):
        return next((said for part in kind.types if any(said := _said(part))), ("", ""))
    return "", ""
