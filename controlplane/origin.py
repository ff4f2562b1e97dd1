"""Where the present request came from, for the audit log: known at the door, needed by the services."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Origin:
    """Each is "" where there is none, as in a worker's task."""

    address: str = ""  # of the client, as far as it can be known
    request_id: str = ""
    token: str = ""  # the key_id of the API token that was used


_origin: ContextVar[Origin] = ContextVar("origin", default=Origin())  # noqa: B039 - it is frozen


def set_origin(origin: Origin) -> None:
    """Remember where this request came from."""
    _origin.set(origin)


def present_origin() -> Origin:
    """Where this request came from."""
    return _origin.get()
