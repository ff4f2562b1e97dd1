"""Checks and row operations that several services share. Errors name the JSON path of the invalid field.

A stored secret is sent only to the address it was entered for. Otherwise a user who may change an address, but was
never shown its secret, could have the secret sent to a server of their own. Every service that stores a
secret together with an address calls ``check_destination`` when the address changes and the secret is not entered
again; ``tests/controlplane/test_secret_destinations.py`` fails for an encrypted field without such a rule.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

from django.contrib.auth.models import User
from django.db import IntegrityError, transaction
from django.db.models import Model, QuerySet

from controlplane.access.actor import roles_of, visible
from controlplane.egress import fleet_rules, literal_denial
from controlplane.errors import ConflictError, GoneError, InvalidError, NameTakenError, NotUsableError
from controlplane.models.fleet import SHORT_NAME
from routing.schema import ConfigError, check_base_url

MAX_LABELS = 32
LABEL_KEY = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?")  # Kubernetes' syntax
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
_PORTS = {"http": 80, "https": 443}

Row = TypeVar("Row", bound=Model)


def check_name(name: str, pattern: str, path: str) -> None:
    """InvalidError unless the name matches ``SHORT_NAME`` or ``LONG_NAME`` (``models.fleet``)."""
    if not re.fullmatch(pattern, name):
        max_chars = 30 if pattern == SHORT_NAME else 63
        allowed = (
            f"expected up to {max_chars} lower-case letters, digits and -, beginning and ending with a letter or digit"
        )
        raise InvalidError(path, allowed)


def check_labels(labels: Mapping[str, str]) -> None:
    """InvalidError unless labels are few and short."""
    if len(labels) > MAX_LABELS:
        raise InvalidError("$.labels", f"expected at most {MAX_LABELS} labels")
    for key, value in labels.items():
        if not LABEL_KEY.fullmatch(key):
            reason = f"{key[:63]!r}: expected a key of up to 63 letters, digits, ., _, - and /"
            raise InvalidError("$.labels", reason)
        if not LABEL_VALUE.fullmatch(value):
            raise InvalidError("$.labels", f"{key}: expected a value of up to 63 letters, digits, ., _ and -")


def check_url(url: str, path: str) -> str:
    """The normal form of a base URL (``http(s)://host[:port][/path]``); InvalidError."""
    try:
        return check_base_url(url, path)
    except ConfigError as error:
        raise InvalidError(error.path, error.reason) from None


def check_replica_url(url: str, path: str) -> str:
    """The normal form of a base URL in a network that replicas may be in; InvalidError.

    Checks only an address written in the URL. A host name is checked by what it resolves to at each connection.
    """
    url = check_url(url, path)
    if reason := literal_denial(url, fleet_rules()):
        raise InvalidError(path, f"{reason}; WARMPATH_FLEET_NETWORKS lists the networks that replicas may be in")
    return url


def lock_row(rows: QuerySet[Row], pk: int) -> Row:
    """The row ``pk`` of a locking query; GoneError if it was removed meanwhile."""
    row = rows.filter(pk=pk).first()
    if row is None:
        raise GoneError(str(rows.model._meta.verbose_name))  # noqa: SLF001 - Django's documented name
    return row


@contextmanager
def unique_or(conflict: Callable[[IntegrityError], ConflictError]) -> Iterator[None]:
    """Turn a violated unique constraint of the block into a ConflictError; the transaction around it stays usable."""
    try:
        with transaction.atomic():
            yield
    except IntegrityError as error:
        raise conflict(error) from None


def change_fields(
    row: Row, values: Mapping[str, Any], event_fields: Callable[[Row], dict[str, Any]]
) -> dict[str, Any] | None:
    """Set and save fields of a locked row; ``{"before", "after"}`` for the event, None if nothing changed.

    ``event_fields`` returns the part of the row that events show.
    """
    before = event_fields(row)
    for name, value in values.items():
        setattr(row, name, value)
    after = event_fields(row)
    if after == before:
        return None
    row.save()
    return {"before": before, "after": after}


def name_conflict(kind: str, value: str, owners: QuerySet[Model], by: User | None) -> ConflictError:
    """Error for a name or URL that one of ``owners`` has; says so only to users who may see an owner.

    ``by`` is None where the system acts by itself.
    """
    is_visible = by is None or not owners.exists() or visible(roles_of(by), owners).exists()
    return NameTakenError(kind, value) if is_visible else NotUsableError(value)


def origin_of(url: str) -> str:
    """Normalized scheme, user, host and port of a URL (RFC 6454, plus the user)."""
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    user = parts.netloc.rpartition("@")[0]
    host = (parts.hostname or "").rstrip(".")
    return f"{scheme}://{user}@[{host}]:{parts.port or _PORTS.get(scheme, 0)}"


def address_of(url: str) -> str:
    """Origin and path: behind one gateway each path may be a different server."""
    return origin_of(url) + urlsplit(url).path.rstrip("/")


def check_destination(path: str, secret: str, *, before: str, after: str) -> None:
    """InvalidError at ``path`` if a stored secret would be sent to a different address than before.

    ``secret`` is its name for users; ``before`` and ``after`` are normalized addresses.
    """
    if before != after:
        raise InvalidError(path, f"the address changed: enter the {secret} for the new address, or remove it")


def checked_text(path: str, text: str, expected: str = "", *, at_most: int) -> str:
    """A text without spaces around it; InvalidError if it is empty or too long."""
    if not text.strip() or len(text) > at_most:
        raise InvalidError(path, f"expected {expected}1 to {at_most} characters")
    return text.strip()
