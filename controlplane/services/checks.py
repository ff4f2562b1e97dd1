"""Checks that several services share; each refuses with the JSON path of what is wrong."""

import re

from controlplane.errors import InvalidError


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
