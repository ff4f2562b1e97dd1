"""A stored secret is sent only to the address that it was given for.

Whoever may change an address, but was never shown the secret beside it, could otherwise have it sent to a server of
their own. Every service that keeps a sealed secret together with an address calls ``check_destination`` when the
address changes and the secret is not given anew. ``tests/controlplane/test_secret_destinations.py`` walks all sealed
fields and fails for one that has no such rule.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from controlplane.errors import InvalidError

_PORTS = {"http": 80, "https": 443}


def origin_of(url: str) -> str:
    """Scheme, user, host and port of a URL in one spelling (RFC 6454, with the user that URLs may name)."""
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    user = parts.netloc.rpartition("@")[0]
    host = (parts.hostname or "").rstrip(".")
    return f"{scheme}://{user}@[{host}]:{parts.port or _PORTS.get(scheme, 0)}"


def address_of(url: str) -> str:
    """The origin and the path: behind one gateway, each path may be another server."""
    return origin_of(url) + urlsplit(url).path.rstrip("/")


def check_destination(path: str, secret: str, *, before: str, after: str) -> None:
    """InvalidError at ``path`` when a secret that is kept would be sent to another address than until now.

    ``secret`` is what people call it; ``before`` and ``after`` are addresses in one spelling each.
    """
    if before != after:
        raise InvalidError(path, f"the address changed: give the {secret} for it, or take it away")
