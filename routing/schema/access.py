"""API keys: who may send requests to a router, for which models and task groups, and how many.

Without ``access`` a router accepts every request and passes ``Authorization`` on; with it, only requests that carry one
of its keys.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

from msgspec import Meta

from routing.schema.fields import ConfigError, Frozen, Model, Name, matching, number

# The key itself is never in a snapshot. Keys are 256 random bits, so the key of a digest cannot be found by search, and
# a fast hash without salt is enough; slow hashes are for passwords that people choose.
Digest = Annotated[str, matching(r"[0-9a-f]{64}")]  # SHA-256 of the key's bytes


class ApiKey(Frozen, frozen=True):
    """A client's key. A missing limit means unlimited. Rates hold for a router with all its workers."""

    name: Name
    digest: Digest
    models: Annotated[tuple[Model, ...] | None, Meta(description="Models that a request may name; null: any.")] = None
    groups: Annotated[
        tuple[Name, ...] | None,
        Meta(description="Task groups that a request may use; the first is the default. null: all, no default."),
    ] = None
    tenant: Annotated[
        Name | None,
        Meta(description="Keys of one tenant share cached prefixes with each other, and with no other key."),
    ] = None
    requests_per_s: (
        Annotated[float, Meta(gt=0, le=1_000_000, description="Counted by each router.", extra={"unit": "requests/s"})]
        | None
    ) = None
    burst: (
        Annotated[int, number("requests", 1, 1_000_000, "Requests at once; null: requests_per_s of one second.")] | None
    ) = None
    tokens_per_min: (
        Annotated[int, number("tokens/min", 1, 1 << 40, "Prompt tokens and generated tokens, counted by each router.")]
        | None
    ) = None
    queue_weight: Annotated[
        float,
        Meta(
            ge=0.001,
            le=1000,
            description="Share of a pool or task group at its concurrency limit, relative to other keys: with 2, twice "
            "as many tokens of its requests are admitted as of a key with 1. Keys of a tenant have one share together, "
            "of which a request uses its tokens divided by the weight of its own key.",
        ),
    ] = 1.0
    expires_at: (
        Annotated[
            int, number("s", 0, 1 << 40, "When the key stops working, in seconds since 1970, by each router's clock.")
        ]
        | None
    ) = None


class Access(Frozen, frozen=True):
    """The accepted API keys; without any key every request is rejected."""

    keys: tuple[ApiKey, ...] = ()


def check_access(access: Access, groups: Collection[str], models: Collection[str] | None) -> None:
    """Check for unique names and digests, known task groups and known ``models`` (None: any); ConfigError otherwise."""
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
            raise ConfigError(f"{path}.burst", "a burst needs a rate: set requests_per_s")


def _check_scope(scope: tuple[str, ...] | None, allowed: Collection[str] | None, path: str, kind: str) -> None:
    if scope == ():
        raise ConfigError(path, "an empty list allows nothing; use null for all")
    for position, name in enumerate(scope or ()):
        if allowed is not None and name not in allowed:
            raise ConfigError(f"{path}[{position}]", f"no pool has a {kind} {name!r}")
