"""One look at one source."""

from __future__ import annotations

import logging

import msgspec

from controlplane.egress import fleet_rules
from controlplane.errors import ControlPlaneError
from controlplane.models import ReplicaSource
from controlplane.sealing import unseal

from .kinds import kind_named
from .targets import Bounds, Found, LookError

log = logging.getLogger(__name__)


def look_at(source: ReplicaSource) -> Found | LookError:
    """What is there now, or why that could not be found out; touches no database, so it may run in any thread."""
    try:
        kind = kind_named(source.kind)
        settings = msgspec.convert(source.settings, kind.settings)
        secret = unseal(source.sealed).decode() if source.sealed else ""
        return kind.look(settings, secret, Bounds(fleet_rules(), source.deadline_s, source.max_targets))
    except LookError as error:
        return error
    except (ControlPlaneError, msgspec.ValidationError) as error:
        return LookError(str(error))
    except Exception as error:  # what a hostile answer may still break is this look, never the others
        log.exception("looking at source %s failed", source.name)
        return LookError(f"The look failed: {type(error).__name__}. The worker's log says more.")
