"""The kinds of sources that there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from controlplane.errors import InvalidError
from controlplane.schema_fields import settings_of

from .dns import DnsKind
from .file import FileKind
from .kubernetes import KubernetesKind
from .settings import SourceSettings
from .targets import Bounds, Found


class SourceKind(Protocol):
    """One way to find replicas."""

    name: str
    label: str
    help: str
    settings: type[SourceSettings]
    secret: str  # what its secret is called; "" where it has none

    def look(self, settings: Any, secret: str, bounds: Bounds) -> Found:
        """Find out what is there now, within the bounds; LookError. ``settings`` is the kind's own struct."""


KINDS: Mapping[str, SourceKind] = {kind.name: kind for kind in (DnsKind(), KubernetesKind(), FileKind())}


def kind_named(name: str) -> SourceKind:
    """The kind of that name; InvalidError where there is none."""
    if name not in KINDS:
        raise InvalidError("$.kind", f"expected one of {', '.join(KINDS)}")
    return KINDS[name]


def canonical_settings(kind: SourceKind, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with every default written out; InvalidError names the path, ``$.settings...``, of what is wrong."""
    try:
        return dict(msgspec.to_builtins(msgspec.convert(dict(settings), kind.settings)))
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$")
        path = place.rstrip("`") or _missing(reason)
        raise InvalidError(f"$.settings{path}", _meant(kind, path, reason)) from None


def _missing(reason: str) -> str:
    """The field that msgspec misses, or does not know: it names those in words only."""
    return "." + reason.split("`")[1] if "field `" in reason else ""


def _meant(kind: SourceKind, path: str, reason: str) -> str:
    """A reason in words: nobody reads a pattern."""
    if "missing required field" in reason:
        return "this is needed"
    if "matching regex" not in reason:
        return reason
    help_text = next((info.help for info in settings_of(kind.settings) if f".{info.field}" == path), "")
    return f"this has another form. Expected: {help_text}"
