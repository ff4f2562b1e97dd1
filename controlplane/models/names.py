"""The forms that names take. They become metric labels, header values and ring identities, so they never change."""

from __future__ import annotations

from django.db.models import CharField, CheckConstraint, Q

# A policy's name is its pool's, or ``pool.group``: pools and groups hold no dot, and both fit in 63 characters.
SHORT_NAME = r"^[a-z0-9]([a-z0-9_-]{0,28}[a-z0-9])?$"
LONG_NAME = r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$"  # routing.schema.Name


def short_name(*, unique: bool = False) -> CharField[str, str]:
    """1 to 30 characters of a-z, 0-9, ``-`` and ``_``."""
    return CharField(max_length=30, unique=unique)


def long_name(*, unique: bool = False) -> CharField[str, str]:
    """1 to 63 characters; dots too."""
    return CharField(max_length=63, unique=unique)


def well_formed(name: str, pattern: str) -> CheckConstraint:
    """Hold the column ``name`` to its form in the database itself."""
    return CheckConstraint(
        condition=Q(name__regex=pattern),
        name=name,
        violation_error_message="Expected lower-case letters, digits and -, a letter or digit at either end.",
    )
