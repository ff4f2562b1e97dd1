"""Checks that several services share; each refuses with the JSON path of what is wrong.

Rows that a change is about, held until it is done.

Refusing a name that is taken, without telling of what somebody may not see.

A stored secret is sent only to the address that it was given for.

Whoever may change an address, but was never shown the secret beside it, could otherwise have it sent to a server of
their own. Every service that keeps a encrypted secret together with an address calls ``check_destination`` when the
address changes and the secret is not given anew. ``tests/controlplane/test_secret_destinations.py`` walks all encrypted
fields and fails for one that has no such rule.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar
from urllib.parse import urlsplit

from django.contrib.auth.models import User
from django.db.models import Model, QuerySet

from controlplane.access.actor import roles_of, visible
from controlplane.egress import fleet_rules, written_addresses
from controlplane.errors import ConflictError, GoneError, InvalidError, NameTakenError, NotUsableError
from routing.schema import ConfigError, check_base_url

MAX_LABELS = 32
LABEL_KEY = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?")  # as orchestrators have them
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")


def check_name(name: str, pattern: str, path: str) -> None:
    """InvalidError unless the name has its form (``models.names``)."""
    if not re.fullmatch(pattern, name):
        longest = 30 if "28" in pattern else 63
        raise InvalidError(
            path,
            f"expected up to {longest} lower-case letters, digits and -, beginning and ending with a letter or digit",
        )


def check_weight(weight: float) -> None:
    """InvalidError unless 0 < weight <= 1000."""
    if not 0 < weight <= 1000:
        raise InvalidError("$.weight", "expected more than 0 and at most 1000")


def check_labels(labels: Mapping[str, str]) -> None:
    """InvalidError unless they are few and short: what selects replicas, no place for notes."""
    if len(labels) > MAX_LABELS:
        raise InvalidError("$.labels", f"expected at most {MAX_LABELS} labels")
    for key, value in labels.items():
        if not LABEL_KEY.fullmatch(key):
            raise InvalidError(
                "$.labels", f"{key[:63]!r}: expected up to 63 letters, digits, ., _, - and / as a label's key"
            )
        if not LABEL_VALUE.fullmatch(value):
            raise InvalidError("$.labels", f"{key}: expected up to 63 letters, digits, ., _ and - as its value")


def check_replica_url(url: str, path: str) -> None:
    """InvalidError unless the URL is a base URL, and its host a name or an address that a replica may have.

    A name is judged by what it resolves to whenever the control plane connects; here only what is written is.
    """
    try:
        check_base_url(url, path)
    except ConfigError as error:
        raise InvalidError(error.path, error.reason) from None
    for address in written_addresses(urlsplit(url).hostname or ""):
        if refusal := fleet_rules().refusal(address):
            raise InvalidError(path, f"{refusal}; WARMPATH_FLEET_NETWORKS says where replicas may be")


Row = TypeVar("Row", bound=Model)


def hold(rows: QuerySet[Row], pk: int) -> Row:
    """One of the rows, which the query locks; GoneError where somebody removed it since it was looked at."""
    found = rows.filter(pk=pk).first()
    if found is None:
        raise GoneError(str(rows.model._meta.verbose_name))  # noqa: SLF001 - Django's name
    return found


def taken(noun: str, value: str, holders: QuerySet[Model], by: User | None) -> ConflictError:
    """The refusal of a name or URL that one of ``holders`` has: who may see none of them is told only that it cannot
    be used.

    ``by`` is None where the system acts by itself.
    """
    shown = by is None or not holders.exists() or visible(roles_of(by), holders).exists()
    return NameTakenError(noun, value) if shown else NotUsableError(value)


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
