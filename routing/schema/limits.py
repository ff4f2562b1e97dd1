"""What a router accepts from clients, and how long it waits for anybody.

Why each default is what it is stands in ``limits.md``.

What a pool does about replicas that fail.

Why each default is what it is stands in ``limits.md``.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from routing.schema.fields import Frozen, of_form

# Causes of a failed attempt, by the names that ``retries_total{cause}`` has for them.
RETRY_CAUSES = (
    "connect",
    "reset",
    "timeout",
    "stalled",
    "aborted",
    "draining",
    "busy",
    "status_429",
    "status_502",
    "status_503",
    "status_504",
)
# Those after which the engine may still be generating, so that a retry would generate the response twice.
UNSAFE_CAUSES = frozenset({"timeout", "status_504"})
RetryCause = Annotated[str, of_form(f"({'|'.join(RETRY_CAUSES)})")]


class Limits(Frozen, frozen=True):
    """What a router accepts and how long it waits."""

    max_body_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            le=1 << 30,
            description="A request's body; a longer one is refused with 413.",
            extra={"unit": "bytes"},
        ),
    ] = 8 << 20
    max_unfinished_body_bytes: Annotated[
        int,
        Meta(
            ge=1 << 20,
            le=1 << 40,
            description="Bodies that are still coming, of all clients together; beyond it 503.",
            extra={"unit": "bytes"},
        ),
    ] = 256 << 20
    max_header_bytes: Annotated[
        int, Meta(ge=1024, le=1 << 20, description="A request's head; beyond it 431.", extra={"unit": "bytes"})
    ] = 32 << 10
    max_headers: Annotated[
        int, Meta(ge=8, le=1000, description="Of one request; beyond it 431.", extra={"unit": "headers"})
    ] = 100
    max_in_flight: Annotated[
        int, Meta(ge=1, le=1_000_000, description="In this router at once; beyond it 503.", extra={"unit": "requests"})
    ] = 8192
    max_connections_per_address: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=1_000_000,
                description="From one client address, or one IPv6 /64, at each process of a router; null: no limit.",
                extra={"unit": "connections"},
            ),
        ]
        | None
    ) = None
    header_timeout_s: Annotated[
        float, Meta(gt=0, le=86_400, description="For a client's whole request head.", extra={"unit": "seconds"})
    ] = 10.0
    body_idle_timeout_s: Annotated[
        float, Meta(gt=0, le=86_400, description="Between two reads of a client's body.", extra={"unit": "seconds"})
    ] = 30.0
    min_body_bytes_per_s: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 30,
            description="A client's body on average, once the grace is over; 0: any pace will do.",
            extra={"unit": "bytes/s"},
        ),
    ] = 1000
    body_grace_s: Annotated[
        float,
        Meta(
            gt=0, le=86_400, description="How long a body may be slower than that at first.", extra={"unit": "seconds"}
        ),
    ] = 10.0
    write_stall_timeout_s: Annotated[
        float,
        Meta(
            gt=0, le=86_400, description="For a client that does not take what was written.", extra={"unit": "seconds"}
        ),
    ] = 60.0
    keep_alive_timeout_s: Annotated[
        float, Meta(gt=0, le=86_400, description="For an idle client connection.", extra={"unit": "seconds"})
    ] = 75.0
    connect_timeout_s: Annotated[
        float, Meta(gt=0, le=86_400, description="For a new connection to a replica.", extra={"unit": "seconds"})
    ] = 3.0
    first_byte_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400,
            description="From the dispatch of a streamed request, or of one without a prompt, to the first byte of the "
            "response's body.",
            extra={"unit": "seconds"},
        ),
    ] = 120.0
    response_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400,
            description="From the dispatch of a request that is not streamed to the first byte of the response's body, "
            "which comes when the whole of it is generated.",
            extra={"unit": "seconds"},
        ),
    ] = 1800.0
    idle_timeout_s: Annotated[
        float, Meta(gt=0, le=86_400, description="Between two reads of a replica's answer.", extra={"unit": "seconds"})
    ] = 60.0
    retries: Annotated[
        int,
        Meta(
            ge=0, le=8, description="Further replicas that are tried before the first byte.", extra={"unit": "replicas"}
        ),
    ] = 2
    retry_on: Annotated[
        tuple[RetryCause, ...],
        Meta(
            min_length=1,
            max_length=len(RETRY_CAUSES),
            description="Failures after which another replica is tried: any of " + ", ".join(RETRY_CAUSES) + ".",
        ),
    ] = tuple(cause for cause in RETRY_CAUSES if cause not in UNSAFE_CAUSES)
    retry_ratio: Annotated[
        float,
        Meta(ge=0, le=1, description="Further tries that requests of the last 10 s allow.", extra={"unit": "ratio"}),
    ] = 0.2
    retry_floor_per_s: Annotated[
        float,
        Meta(ge=0, le=10_000, description="Further tries allowed whatever the traffic.", extra={"unit": "tries/s"}),
    ] = 10.0
    drain_timeout_s: Annotated[
        float,
        Meta(gt=0, le=86_400, description="How long a stopping router lets answers finish.", extra={"unit": "seconds"}),
    ] = 30.0


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
