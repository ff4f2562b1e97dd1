"""What a pool does about replicas that fail.

Why each default is what it is stands in ``limits.md``.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from routing.schema.base import Frozen, of_form


class HealthCheck(Frozen, frozen=True):
    """How a router finds out whether a replica answers."""

    path: Annotated[
        str, of_form(r"/[!-~]*", max_length=256, description="Asked with GET; any 2xx means that it is up.")
    ] = "/health"
    interval_s: Annotated[
        float, Meta(gt=0, le=86_400, description="Between two questions.", extra={"unit": "seconds"})
    ] = 2.0
    timeout_s: Annotated[
        float, Meta(gt=0, le=86_400, description="For the whole answer.", extra={"unit": "seconds"})
    ] = 2.0
    failures: Annotated[
        int, Meta(ge=1, le=100, description="In a row, until it counts as down.", extra={"unit": "answers"})
    ] = 2
    successes: Annotated[
        int, Meta(ge=1, le=100, description="In a row, until it counts as up again.", extra={"unit": "answers"})
    ] = 1


class BreakerConfig(Frozen, frozen=True):
    """When a replica that answers its health checks is taken out all the same, and how it comes back."""

    failures: Annotated[
        int,
        Meta(
            ge=1, le=1000, description="Failed requests in a row that take a replica out.", extra={"unit": "requests"}
        ),
    ] = 5
    open_s: Annotated[
        float,
        Meta(gt=0, le=3600, description="How long it stays out before a request tries it.", extra={"unit": "seconds"}),
    ] = 30.0
    successes: Annotated[
        int,
        Meta(ge=1, le=100, description="Tries in a row that must succeed, one at a time.", extra={"unit": "requests"}),
    ] = 2
    max_out_ratio: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Share of a pool's active replicas that may be out once one is taken out; 0 takes none.",
            extra={"unit": "ratio"},
        ),
    ] = 0.5
    stall_s: (
        Annotated[
            float,
            Meta(
                ge=0.1,
                le=600,
                description="Silence or crawling that takes out a replica at which streams wait, beyond what their "
                "prefill needs; null: none does.",
                extra={"unit": "seconds"},
            ),
        ]
        | None
    ) = 3.0
    slow_start_s: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description="How long a replica that joins or comes back takes from a quarter of its share to all of it; 0 "
            "gives it all at once.",
            extra={"unit": "seconds"},
        ),
    ] = 60.0
