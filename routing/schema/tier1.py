"""Where the tier-1 prefix of a prompt ends: one rule for pools, task groups and policies."""

from __future__ import annotations

from enum import StrEnum
from inspect import cleandoc
from typing import Annotated

from msgspec import Meta

from routing.schema.base import Frozen


class Boundary(StrEnum):
    """Where the tier-1 prefix ends: the part of the prompt whose hash names a home."""

    AUTO = "auto"  # the end of tools and system prompt if that is at least one block, else the first boundary_bytes
    SYSTEM = "system"  # the end of tools and system prompt
    BYTES = "bytes"  # the first boundary_bytes of the canonical prompt
    MESSAGES = "messages"  # the end of message number boundary_messages
    MARKER = "marker"  # where boundary_marker first stands; as auto in a prompt without it


BoundaryKind = Annotated[Boundary, Meta(description=cleandoc(Boundary.__doc__ or ""))]
BoundaryBytes = Annotated[
    int,
    Meta(ge=64, le=524_288, description="Length of the opening, for bytes and auto.", extra={"unit": "bytes"}),
]  # of the canonical prompt
BoundaryMessages = Annotated[
    int,
    Meta(
        ge=1,
        le=64,
        description="Length of the opening, for messages; the system message counts.",
        extra={"unit": "messages"},
    ),
]
BoundaryMarker = Annotated[
    str, Meta(max_length=256, description="Text that ends the opening, for marker; it is no part of it.")
]


class Tier1(Frozen, frozen=True):
    """The boundary of a pool or a task group, in the words of a policy's settings."""

    boundary: BoundaryKind = Boundary.AUTO
    boundary_bytes: BoundaryBytes = 1024
    boundary_messages: BoundaryMessages = 1
    boundary_marker: BoundaryMarker = ""

    def __post_init__(self) -> None:
        if self.boundary is Boundary.MARKER and not self.boundary_marker:
            raise ValueError("boundary marker: say which text in boundary_marker")
