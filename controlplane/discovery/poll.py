"""The kinds of sources that there are.

One look at one source.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from controlplane.discovery.dns import DnsKind
from controlplane.discovery.file import FileKind
from controlplane.discovery.kubernetes import KubernetesKind
from controlplane.discovery.targets import Bounds, Found, PollError, SourceSettings
from controlplane.egress import fleet_rules
from controlplane.encryption import decrypt
from controlplane.errors import ControlPlaneError, InvalidError
from controlplane.models import ReplicaSource
from controlplane.schema_fields import settings_of


class SourceKind(Protocol):
    """One way to find replicas."""

    name: str
    label: str
    help: str
    settings: type[SourceSettings]
    secret: str  # what its secret is called; "" where it has none

    def look(self, settings: Any, secret: str, bounds: Bounds) -> Found:
        """Find out what is there now, within the bounds; PollError. ``settings`` is the kind's own struct."""


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


log = logging.getLogger(__name__)


def look_at(source: ReplicaSource) -> Found | PollError:
    """What is there now, or why that could not be found out; touches no database, so it may run in any thread."""
    try:
        kind = kind_named(source.kind)
        settings = msgspec.convert(source.settings, kind.settings)
        secret = decrypt(source.encrypted).decode() if source.encrypted else ""
        return kind.look(settings, secret, Bounds(fleet_rules(), source.deadline_s, source.max_targets))
    except PollError as error:
        return error
    except (ControlPlaneError, msgspec.ValidationError) as error:
        return PollError(str(error))
    except Exception as error:  # what a hostile answer may still break is this look, never the others
        log.exception("looking at source %s failed", source.name)
        return PollError(f"The look failed: {type(error).__name__}. The worker's log says more.")
