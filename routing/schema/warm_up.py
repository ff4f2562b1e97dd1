"""What a pool does for a replica that joins with an empty cache, before it takes traffic.

Why each default is what it is stands in ``limits.md``.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from routing.schema.base import Frozen


class WarmUp(Frozen, frozen=True):
    """Send a joining replica the openings that it will own, once each, before it takes traffic."""

    max_prefixes: Annotated[
        int,
        Meta(ge=1, le=10_000, description="Openings that one replica is sent at most.", extra={"unit": "prefixes"}),
    ] = 64
    max_tokens: Annotated[
        int,
        Meta(
            ge=1024,
            le=1_000_000_000,
            description="Tokens of all openings together that one replica is sent at most.",
            extra={"unit": "tokens"},
        ),
    ] = 200_000
    concurrency: Annotated[
        int, Meta(ge=1, le=64, description="Openings that one replica prefills at once.", extra={"unit": "requests"})
    ] = 2
    time_limit_s: Annotated[
        float,
        Meta(
            gt=0,
            le=3600,
            description="After this a replica takes traffic, however far its warm-up is.",
            extra={"unit": "seconds"},
        ),
    ] = 30.0
    min_tokens: Annotated[
        int,
        Meta(
            ge=16,
            le=1_000_000,
            description="Length from which on an opening is worth a request of its own.",
            extra={"unit": "tokens"},
        ),
    ] = 128
    half_life_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400,
            description="After which a request counts half in how often an opening comes.",
            extra={"unit": "seconds"},
        ),
    ] = 600.0
    memory_bytes: Annotated[
        int,
        Meta(
            ge=1 << 16,
            le=1 << 34,
            description="Openings that a router keeps in memory for the pool.",
            extra={"unit": "bytes"},
        ),
    ] = 16 << 20
    priority: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=2**31 - 1,
                description="vLLM's priority of these requests, where a higher number is served later; an engine that "
                "refuses it is asked without; null: none is sent.",
                extra={"unit": "-"},
            ),
        ]
        | None
    ) = 1000
