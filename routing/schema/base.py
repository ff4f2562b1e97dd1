"""What every part of a configuration shares: its words, its base, its error, and which of its fields are secret."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct


def of_form(pattern: str, **facts: Any) -> Meta:
    """A text of this form from end to end; Python's ``$`` would let a line's end follow."""
    return Meta(pattern=rf"^{pattern}\Z", **facts)


NAME = r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?"
Name = Annotated[str, of_form(NAME)]
Model = Annotated[str, Meta(min_length=1, max_length=256)]  # as clients name it
Hex = Annotated[str, of_form(r"[0-9a-f]{32,128}")]

HIDDEN = "***"
SECRET_FIELDS = frozenset({"hash_secret", "api_key", "digest", "document"})  # never in a log, an answer or a repr


class ConfigError(ValueError):
    """A snapshot that cannot be run. ``path`` is a JSON path from the config's root, such as ``$.pools[0].name``."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class Frozen(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of everything in a config: immutable, and a field nobody knows is an error rather than a silent no-op."""

    def __repr__(self) -> str:
        fields = ((name, getattr(self, name)) for name in self.__struct_fields__)
        shown = (f"{name}={HIDDEN if name in SECRET_FIELDS and value else repr(value)}" for name, value in fields)
        return f"{type(self).__name__}({', '.join(shown)})"


def without_secrets(config: Frozen) -> dict[str, Any]:
    """A config, or a part of it, as JSON for people: every secret in it is ``***``."""
    hidden: dict[str, Any] = _hide(msgspec.to_builtins(config))
    return hidden


def _hide(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: HIDDEN if name in SECRET_FIELDS and it else _hide(it) for name, it in value.items()}
    if isinstance(value, list | tuple):
        return [_hide(it) for it in value]
    return value
