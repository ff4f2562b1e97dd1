"""Who may send requests, and how many.

Without ``access`` a router takes requests from anybody and passes ``Authorization`` on; with it, only those that carry
a key named here.

The most that one request may ask for. It holds for everybody, with keys or without.

What a pool or a task group does about more requests than its replicas can do.

Why each default is what it is stands in ``limits.md``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

import msgspec
from msgspec import Meta

from routing.schema.fields import ConfigError, Frozen, Model, Name, of_form

# The key itself is never in a snapshot. Keys are 256 random bits, so nobody can search for the key of a digest, and a
# fast hash without salt is enough; slow hashes are for what people make up.
Digest = Annotated[str, of_form(r"[0-9a-f]{64}")]  # SHA-256 of the key's bytes


class ApiKey(Frozen, frozen=True):
    """A client's key. What it does not limit is unlimited. Rates hold for a router with all its workers."""

    name: Name
    digest: Digest
    models: Annotated[
        tuple[Model, ...] | None, Meta(description="A request must name one of them; null: it may name any.")
    ] = None
    groups: Annotated[
        tuple[Name, ...] | None,
        Meta(description="Task groups; the first is of requests that name none. null: all, and none of its own."),
    ] = None
    tenant: Annotated[
        Name | None,
        Meta(description="Keys of one tenant share cached prefixes among themselves, and with nobody else."),
    ] = None
    requests_per_s: (
        Annotated[
            float,
            Meta(
                gt=0,
                le=1_000_000,
                description="Counted by each router.",
                extra={"unit": "requests/s"},
            ),
        ]
        | None
    ) = None
    burst: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=1_000_000,
                description="Requests at once; null: a second's worth.",
                extra={"unit": "requests"},
            ),
        ]
        | None
    ) = None
    tokens_per_min: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=1 << 40,
                description="Of prompts and of what is generated, counted by each router.",
                extra={"unit": "tokens/min"},
            ),
        ]
        | None
    ) = None
    expires_at: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=1 << 40,
                description="When it ceases to work by itself, in seconds since 1970, by each router's clock.",
                extra={"unit": "s"},
            ),
        ]
        | None
    ) = None


class Access(Frozen, frozen=True):
    """The keys that are taken. None at all: nobody is let in."""

    keys: tuple[ApiKey, ...] = ()


def check_access(access: Access, groups: Collection[str], models: Collection[str] | None) -> None:
    """Unique names and digests, known task groups and ``models`` (None: any); ConfigError otherwise."""
    names: set[str] = set()
    digests: dict[str, str] = {}
    for index, key in enumerate(access.keys):
        path = f"$.access.keys[{index}]"
        if key.name in names:
            raise ConfigError(f"{path}.name", f"two keys are named {key.name!r}")
        if key.digest in digests:
            raise ConfigError(f"{path}.digest", f"the same as of key {digests[key.digest]!r}")
        names.add(key.name)
        digests[key.digest] = key.name
        _check_scope(key.groups, groups, f"{path}.groups", "task group")
        _check_scope(key.models, models, f"{path}.models", "model")
        if key.burst is not None and key.requests_per_s is None:
            raise ConfigError(f"{path}.burst", "a burst of what rate? set requests_per_s")


def _check_scope(scope: tuple[str, ...] | None, known: Collection[str] | None, path: str, noun: str) -> None:
    if scope == ():
        raise ConfigError(path, "a key for nothing; use null for all")
    for position, name in enumerate(scope or ()):
        if known is not None and name not in known:
            raise ConfigError(f"{path}[{position}]", f"no pool has a {noun} {name!r}")


Host = Annotated[str, of_form(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")]
Amount = Annotated[int, Meta(ge=0, le=1 << 31)]

Choices = Annotated[Amount | None, Meta(description="Choices a prompt, best_of included.", extra={"unit": "choices"})]
Length = Annotated[
    Amount | None,
    Meta(
        description="Generated a choice, under every name that says so; put in where a request says none.",
        extra={"unit": "tokens"},
    ),
]
Alternatives = Annotated[
    Amount | None,
    Meta(description="Alternatives a token: logprobs, top_logprobs, prompt_logprobs.", extra={"unit": "alternatives"}),
]
Prompts = Annotated[Amount | None, Meta(description="In one completion or embedding.", extra={"unit": "prompts"})]
MediaHosts = Annotated[
    tuple[Host, ...] | None,
    Meta(description="Hosts that the engine may load media from; none of them: data URLs alone."),
]


class Caps(Frozen, frozen=True):
    """The most that one request may ask for. None: whatever the engine allows."""

    n: Choices = 128  # OpenAI's own limit, where vLLM would take 16,384
    max_tokens: Length = None
    logprobs: Alternatives = None
    prompts: Prompts = None
    media_hosts: MediaHosts = None


class GroupCaps(Frozen, frozen=True):
    """A task group's own caps, be they less or more than its pool's. None: what the pool says."""

    n: Choices = None
    max_tokens: Length = None
    logprobs: Alternatives = None
    prompts: Prompts = None
    media_hosts: MediaHosts = None

    def over(self, pool: Caps) -> Caps:
        """What holds for the group's requests: each cap its own where it has one, else the pool's."""
        own = {name: cap for name in self.__struct_fields__ if (cap := getattr(self, name)) is not None}
        return msgspec.structs.replace(pool, **own)


PRIORITIES = 10  # 0 is the most urgent
LEAST_URGENT = PRIORITIES - 1


class ConcurrencyConfig(Frozen, frozen=True):
    """How many requests may run at once; the others wait in the router, for a while and up to a number."""

    max_running: Annotated[
        int, Meta(ge=1, le=1_000_000, description="Requests at replicas at once.", extra={"unit": "requests"})
    ]
    max_waiting: Annotated[
        int, Meta(ge=0, le=1_000_000, description="Requests in line; 0 refuses at once.", extra={"unit": "requests"})
    ] = 256
    max_wait_s: Annotated[
        float, Meta(gt=0, le=3600, description="How long a request waits in line.", extra={"unit": "seconds"})
    ] = 10.0
