"""Kinds of discovery sources, and one poll of one source."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from controlplane.discovery.dns import DnsKind
from controlplane.discovery.file import FileKind
from controlplane.discovery.kubernetes import InferencePoolKind, KubernetesKind
from controlplane.discovery.targets import PollError, PollLimits, PollResult, SourceSettings
from controlplane.egress import fleet_rules
from controlplane.encryption import decrypt
from controlplane.errors import ControlPlaneError, InvalidError
from controlplane.models import ReplicaSource
from controlplane.schema_fields import settings_of
from routing.schema import ConfigError


class SourceKind(Protocol):
    """A discovery mechanism."""

    name: str
    label: str
    help: str
    settings: type[SourceSettings]
    secret: str  # name of its secret setting; "": none

    def poll(self, settings: Any, secret: str, limits: PollLimits) -> PollResult:
        """The current targets; PollError. ``settings`` is of the kind's own struct."""


KINDS: Mapping[str, SourceKind] = {
    kind.name: kind for kind in (DnsKind(), KubernetesKind(), InferencePoolKind(), FileKind())
}


def kind_named(name: str) -> SourceKind:
    """The kind with this name; InvalidError if there is none."""
    if name not in KINDS:
        raise InvalidError("$.kind", f"expected one of {', '.join(KINDS)}")
    return KINDS[name]


def canonical_settings(kind: SourceKind, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with every default written out; InvalidError names the path (``$.settings...``) of the problem."""
    try:
        return dict(msgspec.to_builtins(msgspec.convert(dict(settings), kind.settings).checked(fleet_rules())))
    except ConfigError as error:
        raise InvalidError(f"$.settings.{error.path}", error.reason) from None
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        if "field `" in reason:  # a missing or unknown field is named in the text only
            path = "." + reason.split("`")[1]
        path = path.rstrip("`")
        raise InvalidError(f"$.settings{path}", _readable(kind, path, reason)) from None


def _readable(kind: SourceKind, path: str, reason: str) -> str:
    """The reason, with the setting's help text in place of a regular expression."""
    if "missing required field" in reason:
        return "this field is required"
    if "matching regex" not in reason:
        return reason
    help_text = next((info.help for info in settings_of(kind.settings) if f".{info.field}" == path), "")
    return f"invalid format. Expected: {help_text}"


log = logging.getLogger(__name__)


def poll(source: ReplicaSource) -> PollResult | PollError:
    """Poll a source; the error if that fails. Uses no database, so it may run in any thread."""
    try:
        kind = kind_named(source.kind)
        settings = msgspec.convert(source.settings, kind.settings)
        secret = decrypt(source.encrypted).decode() if source.encrypted else ""
        return kind.poll(settings, secret, PollLimits(fleet_rules(), source.deadline_s, source.max_targets))
    except PollError as error:
        return error
    except (ControlPlaneError, msgspec.ValidationError) as error:
        return PollError(str(error))
    except Exception as error:  # a malicious response fails this poll, not those of other sources
        log.exception("polling source %s failed", source.name)
        return PollError(f"The poll failed: {type(error).__name__}. The worker's log has details.")
