"""Task groups: which requests are theirs, where their tier-1 prefix ends, and which replicas they use.

A request belongs to the first group that one of these rules names, tried in this order: the header ``X-Task-Group``,
the API key, the session key, the tier-1 prefix, the model. They go from what a client says on purpose to what many
requests have in common. Where two groups claim the same thing a request could be of either: that is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Annotated

from msgspec import Meta

from routing.schema.access import LEAST_URGENT, ConcurrencyConfig, GroupCaps
from routing.schema.fields import ConfigError, Frozen, Model, Name, of_form
from routing.schema.strategies import PolicyConfig, Tier1

Tier1Hash = Annotated[str, of_form(r"[0-9a-f]{16}")]  # as decisions and /admin/explain show it
NamePrefix = Annotated[str, of_form(r"[a-z0-9][a-z0-9._-]{0,62}")]
SessionPrefix = Annotated[str, Meta(min_length=1, max_length=256)]


class GroupMatch(Frozen, frozen=True):
    """What makes a request a task group's, beside naming it in ``X-Task-Group``. Any one of these is enough."""

    api_keys: Annotated[tuple[Name, ...], Meta(description="The name of its API key.")] = ()
    api_key_prefixes: Annotated[
        tuple[NamePrefix, ...], Meta(description="What the name of its API key begins with; of several the longest.")
    ] = ()
    session_prefixes: Annotated[
        tuple[SessionPrefix, ...], Meta(description="What its session key begins with; of several the longest.")
    ] = ()
    tier1_hashes: Annotated[
        tuple[Tier1Hash, ...],
        Meta(description="The hash of its tier-1 prefix at this group's boundary, as decisions show it."),
    ] = ()
    models: Annotated[tuple[Model, ...], Meta(description="The model, alias or adapter that it names.")] = ()


class AutoReplicas(Frozen, frozen=True):
    """As many replicas as the group's part of the pool's requests, and none that another has while there are enough."""

    reserved: Annotated[
        int, Meta(ge=0, le=10_000, description="Its own however little it sends.", extra={"unit": "replicas"})
    ] = 0
    max: (
        Annotated[
            int, Meta(ge=1, le=10_000, description="The most it has; null: no limit.", extra={"unit": "replicas"})
        ]
        | None
    ) = None

    def __post_init__(self) -> None:
        if self.max is not None and self.max < self.reserved:
            raise ValueError(f"max {self.max} is less than reserved {self.reserved}")


class TaskGroupConfig(Frozen, frozen=True):
    """Requests with one purpose. Those of no group are the pool's own."""

    name: Name
    policy: PolicyConfig | None = None  # None: the pool's
    replicas: tuple[Name, ...] | None = None  # the subset of the pool it may use; None: all
    caps: GroupCaps | None = None  # None: the pool's
    concurrency: ConcurrencyConfig | None = None  # beside the pool's own; None: no limit
    priority: Annotated[
        int,
        Meta(
            ge=0, le=LEAST_URGENT, description="Place in line, 0 first; X-Priority may only put a request further back."
        ),
    ] = 0
    match: GroupMatch = GroupMatch()
    auto_replicas: AutoReplicas | None = None  # instead of replicas: a set that follows its traffic
    tier1: Tier1 | None = None  # None: the pool's, else the policy's


def check_groups(
    groups: Iterable[TaskGroupConfig], replicas: Collection[str], models: Collection[str] | None, pool: str, path: str
) -> None:
    """Known replicas and ``models`` (None: any), nothing claimed twice, no more reserved than there is; ConfigError."""
    claims: dict[tuple[str, str], str] = {}
    reserved = 0
    for index, group in enumerate(groups):
        where = f"{path}[{index}]"
        _check_replicas(group, replicas, pool, where)
        reserved += group.auto_replicas.reserved if group.auto_replicas else 0
        if reserved > max(1, len(replicas)):
            reason = f"up to here {reserved} replicas are reserved, and pool {pool!r} has {len(replicas)}"
            raise ConfigError(f"{where}.auto_replicas.reserved", reason)
        for field, at, value in _claims(group):
            owner = claims.setdefault((field, value), group.name)
            if owner != group.name:
                reason = f"{value!r} is claimed by task group {owner!r} and by {group.name!r}; leave it to one of them"
                raise ConfigError(f"{where}.match.{field}[{at}]", reason)
            if field == "models" and models is not None and value not in models:
                raise ConfigError(f"{where}.match.models[{at}]", f"pool {pool!r} has no model {value!r}")


def check_claimed_keys(groups: Iterable[TaskGroupConfig], keys: Collection[str], path: str) -> None:
    """Every API key that a group claims must be one of ``keys``; ConfigError otherwise."""
    for index, group in enumerate(groups):
        for at, name in enumerate(group.match.api_keys):
            if name not in keys:
                raise ConfigError(f"{path}[{index}].match.api_keys[{at}]", f"no API key is named {name!r}")


def _check_replicas(group: TaskGroupConfig, known: Collection[str], pool: str, where: str) -> None:
    for position, name in enumerate(group.replicas or ()):
        if name not in known:
            raise ConfigError(f"{where}.replicas[{position}]", f"pool {pool!r} has no replica {name!r}")
    if group.replicas is not None and group.auto_replicas is not None:
        raise ConfigError(f"{where}.auto_replicas", f"task group {group.name!r} has replicas too; leave one of both")
    if group.replicas == ():
        raise ConfigError(f"{where}.replicas", "a group without replicas serves nothing; use null for all")


def _claims(group: TaskGroupConfig) -> Iterator[tuple[str, int, str]]:
    """What a group claims: the field, the place there, the value."""
    for field in group.match.__struct_fields__:
        for at, value in enumerate(getattr(group.match, field)):
            yield field, at, value
