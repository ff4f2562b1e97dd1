"""What a router accepts, how long it waits, and what a pool does about overload, failures and joining replicas.

``limits.md`` gives the reason for each default.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from routing.schema.fields import Frozen, matching, number, seconds

# Causes of a failed attempt, as the label ``cause`` of ``retries_total`` has them.
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
# Causes after which the engine may still be generating, so that a retry would generate the response twice.
UNSAFE_CAUSES = frozenset({"timeout", "status_504"})
RetryCause = Annotated[str, matching(f"({'|'.join(RETRY_CAUSES)})")]


class Limits(Frozen, frozen=True):
    """What a router accepts from clients, and how long it waits for clients and replicas."""

    max_body_bytes: Annotated[
        int, number("bytes", 1024, 1 << 30, "Size of a request body; a larger one is rejected with 413.")
    ] = 32 << 20
    max_unfinished_body_bytes: Annotated[
        int,
        number(
            "bytes", 1 << 20, 1 << 40, "Partly received bodies of all clients together; more are rejected with 503."
        ),
    ] = 256 << 20
    max_header_bytes: Annotated[
        int, number("bytes", 1024, 1 << 20, "Size of a request's headers; larger ones are rejected with 431.")
    ] = 32 << 10
    max_headers: Annotated[
        int, number("headers", 8, 1000, "Number of a request's headers; more are rejected with 431.")
    ] = 100
    max_in_flight: Annotated[
        int, number("requests", 1, 1_000_000, "Requests in this router at once; more are rejected with 503.")
    ] = 8192
    max_connections_per_address: (
        Annotated[
            int,
            number(
                "connections",
                1,
                1_000_000,
                "Connections from one client address, or one IPv6 /64, to each process of a router; null: no limit.",
            ),
        ]
        | None
    ) = None
    header_timeout_s: Annotated[float, seconds("Time in which a client must send all headers of a request.")] = 10.0
    body_idle_timeout_s: Annotated[float, seconds("Longest pause between two reads of a request body.")] = 30.0
    min_body_bytes_per_s: Annotated[
        int,
        number("bytes/s", 0, 1 << 30, "Average rate at which a request body must arrive after the grace time; 0: any."),
    ] = 1000
    body_grace_s: Annotated[float, seconds("Time during which a request body may be slower than the minimum rate.")] = (
        10.0
    )
    write_stall_timeout_s: Annotated[
        float, seconds("Longest time a client may leave response bytes unread before it is disconnected.")
    ] = 60.0
    keep_alive_timeout_s: Annotated[float, seconds("Time after which an idle client connection is closed.")] = 75.0
    connect_timeout_s: Annotated[float, seconds("Time in which a connection to a replica must open.")] = 3.0
    first_byte_timeout_s: Annotated[
        float,
        seconds(
            "From the dispatch of a streamed request, or of one without a prompt, to the first byte of the response "
            "body."
        ),
    ] = 120.0
    response_timeout_s: Annotated[
        float,
        seconds(
            "From the dispatch of a request that is not streamed to the first byte of the response body, which comes "
            "when the whole response is generated."
        ),
    ] = 1800.0
    idle_timeout_s: Annotated[float, seconds("Longest pause between two reads of a replica's response.")] = 60.0
    retries: Annotated[
        int, number("replicas", 0, 8, "Further replicas to which a request is sent before its first byte.")
    ] = 2
    retry_on: Annotated[
        tuple[RetryCause, ...],
        Meta(
            min_length=1,
            max_length=len(RETRY_CAUSES),
            description="Failures after which a request is retried on another replica: any of "
            + ", ".join(RETRY_CAUSES)
            + ".",
        ),
    ] = tuple(cause for cause in RETRY_CAUSES if cause not in UNSAFE_CAUSES)
    retry_ratio: Annotated[float, number("ratio", 0, 1, "Retry budget: retries for each request of the last 10 s.")] = (
        0.2
    )
    retry_floor_per_s: Annotated[
        float, number("retries/s", 0, 10_000, "Retry budget: retries that are allowed whatever the traffic.")
    ] = 10.0
    drain_timeout_s: Annotated[float, seconds("How long a router that shuts down lets running responses finish.")] = (
        30.0
    )


class HealthCheck(Frozen, frozen=True):
    """How a router checks whether a replica is up."""

    path: Annotated[
        str, matching(r"/[!-~]*", max_length=256, description="Path of the GET request; any 2xx status passes.")
    ] = "/health"
    interval_s: Annotated[float, seconds("Time between two checks.")] = 2.0
    timeout_s: Annotated[float, seconds("Time in which the whole response must arrive.")] = 2.0
    failures: Annotated[int, number("checks", 1, 100, "Failed checks in a row after which a replica is down.")] = 2
    successes: Annotated[int, number("checks", 1, 100, "Passed checks in a row after which a replica is up again.")] = 1


class BreakerConfig(Frozen, frozen=True):
    """When a replica that passes its health checks is ejected all the same, and how it is readmitted."""

    failures: Annotated[int, number("requests", 1, 1000, "Failed requests in a row that eject a replica.")] = 5
    open_s: Annotated[float, seconds("How long a replica stays ejected before a request probes it.", 3600)] = 30.0
    successes: Annotated[
        int, number("requests", 1, 100, "Probes in a row, one at a time, that must succeed to readmit it.")
    ] = 2
    max_out_ratio: Annotated[
        float,
        number("ratio", 0, 1, "Largest share of a pool's active replicas that may be ejected at once; 0: none."),
    ] = 0.5
    stall_s: (
        Annotated[
            float,
            number(
                "seconds",
                0.1,
                600,
                "Time without progress, beyond what prefill needs, after which a replica with waiting streams is "
                "ejected; null: never.",
            ),
        ]
        | None
    ) = 3.0
    slow_start_s: Annotated[
        float,
        number(
            "seconds",
            0,
            3600,
            "Time in which a replica that joins or returns grows from a quarter of its share to all; 0: all at once.",
        ),
    ] = 60.0


Host = Annotated[str, matching(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")]
Amount = Annotated[int, Meta(ge=0, le=1 << 31)]

Choices = Annotated[
    Amount | None, Meta(description="Choices for each prompt, best_of included.", extra={"unit": "choices"})
]
Length = Annotated[
    Amount | None,
    Meta(
        description="Generated tokens of each choice, whatever the parameter's name; set where a request sets none.",
        extra={"unit": "tokens"},
    ),
]
Alternatives = Annotated[
    Amount | None,
    Meta(
        description="Alternatives for each token: logprobs, top_logprobs, prompt_logprobs.",
        extra={"unit": "alternatives"},
    ),
]
Prompts = Annotated[
    Amount | None, Meta(description="Prompts in one completion or embedding request.", extra={"unit": "prompts"})
]
MediaHosts = Annotated[
    tuple[Host, ...] | None,
    Meta(description="Hosts from which the engine may load media; empty: data URLs only."),
]


class Caps(Frozen, frozen=True):
    """The most that one request may ask for, with an API key or without. None: whatever the engine allows."""

    n: Choices = 128  # OpenAI's own limit; vLLM would accept 16,384
    max_tokens: Length = None
    logprobs: Alternatives = None
    prompts: Prompts = None
    media_hosts: MediaHosts = None


class GroupCaps(Frozen, frozen=True):
    """A task group's own caps, above or below its pool's. None: the pool's cap."""

    n: Choices = None
    max_tokens: Length = None
    logprobs: Alternatives = None
    prompts: Prompts = None
    media_hosts: MediaHosts = None

    def over(self, pool: Caps) -> Caps:
        """The pool's caps with the group's own ones in their place."""
        own = {name: cap for name in self.__struct_fields__ if (cap := getattr(self, name)) is not None}
        return msgspec.structs.replace(pool, **own)


PRIORITIES = 10  # 0 is the most urgent
LEAST_URGENT = PRIORITIES - 1
MAX_OBJECTIVE_MS = 3_600_000


class ObjectiveMissed(StrEnum):
    """What a router does with a request whose objective for TTFT cannot be kept."""

    SERVE = "serve"  # late
    SHED = "shed"  # reject it early, with 429


class ConcurrencyConfig(Frozen, frozen=True):
    """How many requests of a pool or task group run at once; further ones wait in a bounded queue in the router."""

    max_running: Annotated[int, number("requests", 1, 1_000_000, "Requests at replicas at once.")]
    max_waiting: Annotated[
        int, number("requests", 0, 1_000_000, "Requests in the queue; 0: a further request is rejected at once.")
    ] = 256
    max_wait_s: Annotated[float, seconds("How long a request may wait in the queue.", 3600)] = 10.0
    on_objective_missed: Annotated[
        ObjectiveMissed,
        Meta(
            description="A request whose TTFT objective cannot be kept. serve: is served late; shed: gets 429 and "
            "Retry-After as soon as that is known."
        ),
    ] = ObjectiveMissed.SERVE


class WarmUp(Frozen, frozen=True):
    """Send a joining replica the prefixes that it will be preferred for, once each, before it takes traffic."""

    max_prefixes: Annotated[int, number("prefixes", 1, 10_000, "Most prefixes that one replica is sent.")] = 64
    max_tokens: Annotated[
        int, number("tokens", 1024, 1_000_000_000, "Most tokens that one replica is sent, of all prefixes together.")
    ] = 200_000
    concurrency: Annotated[int, number("requests", 1, 64, "Prefixes that one replica prefills at once.")] = 2
    time_limit_s: Annotated[
        float, seconds("Time after which a replica takes traffic even if its warm-up is not finished.", 3600)
    ] = 30.0
    min_tokens: Annotated[int, number("tokens", 16, 1_000_000, "Shorter prefixes are not worth a warm-up request.")] = (
        128
    )
    half_life_s: Annotated[
        float, seconds("Time after which a request counts half in how often its prefix is used.")
    ] = 600.0
    memory_bytes: Annotated[
        int, number("bytes", 1 << 16, 1 << 34, "Memory for the prefixes that a router keeps for the pool.")
    ] = 16 << 20
    priority: (
        Annotated[
            int,
            number(
                "-",
                1,
                2**31 - 1,
                "vLLM's priority of warm-up requests, where a higher number is served later. If an engine rejects "
                "it, warm-up requests are sent without a priority; null: none is sent.",
            ),
        ]
        | None
    ) = 1000
