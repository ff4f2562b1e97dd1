"""Checks that several services share; each refuses with the JSON path of what is wrong."""

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from controlplane.egress import fleet_rules, written_addresses
from controlplane.errors import InvalidError
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
