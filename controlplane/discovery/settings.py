"""What the settings of every kind share."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

Port = Annotated[int, Meta(ge=1, le=65_535, description="The port at which every engine listens.")]


class Scheme(StrEnum):
    """How engines are spoken to."""

    HTTP = "http"
    HTTPS = "https"


SchemeChoice = Annotated[Scheme, Meta(description="How engines are spoken to.")]


class SourceSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of a kind's settings: a field nobody knows is an error rather than a silent no-op."""
