"""Replicas, the pools and task groups that use them, and ``RouterConfig``, the root of a configuration.

A request belongs to the first task group that one of these rules names, in this order: the header ``X-Task-Group``, the
API key, the session key, the tier-1 prefix, the model. The order goes from what a client states on purpose to what many
requests have in common. Two groups of a pool with the same claim are an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from routing.schema.access import Access
from routing.schema.fields import ConfigError, Frozen, Hex, Model, Name, ReplicaNetworks, number, of_form
from routing.schema.limits import (
    LEAST_URGENT,
    BreakerConfig,
    Caps,
    ConcurrencyConfig,
    GroupCaps,
    HealthCheck,
    Limits,
    WarmUp,
)
from routing.schema.strategies import PolicyConfig, Tier1

Tier1Hash = Annotated[str, of_form(r"[0-9a-f]{16}")]  # as decisions and /admin/explain show it
NamePrefix = Annotated[str, of_form(r"[a-z0-9][a-z0-9._-]{0,62}")]
SessionPrefix = Annotated[str, Meta(min_length=1, max_length=256)]


class GroupMatch(Frozen, frozen=True):
    """Rules that put a request into a task group without ``X-Task-Group``. Any one of them is enough."""

    api_keys: Annotated[tuple[Name, ...], Meta(description="The name of its API key.")] = ()
    api_key_prefixes: Annotated[
        tuple[NamePrefix, ...], Meta(description="A prefix of its API key's name; the longest match wins.")
    ] = ()
    session_prefixes: Annotated[
        tuple[SessionPrefix, ...], Meta(description="A prefix of its session key; the longest match wins.")
    ] = ()
    tier1_hashes: Annotated[
        tuple[Tier1Hash, ...],
        Meta(description="The hash of its tier-1 prefix at this group's boundary, as decisions show it."),
    ] = ()
    models: Annotated[tuple[Model, ...], Meta(description="The model, alias or adapter that it names.")] = ()


class AutoReplicas(Frozen, frozen=True):
    """Gives a task group a number of replicas that follows its share of the pool's requests.

    Sets of different groups are disjoint while there are enough replicas.
    """

    reserved: Annotated[int, number("replicas", 0, 10_000, "Replicas that the group has even without traffic.")] = 0
    max: Annotated[int, number("replicas", 1, 10_000, "Most replicas that the group has; null: no limit.")] | None = (
        None
    )

    def __post_init__(self) -> None:
        if self.max is not None and self.max < self.reserved:
            raise ValueError(f"max {self.max} is less than reserved {self.reserved}")


class TaskGroupConfig(Frozen, frozen=True):
    """Requests with one purpose. Requests of no group use the pool's own policy."""

    name: Name
    policy: PolicyConfig | None = None  # None: the pool's
    replicas: tuple[Name, ...] | None = None  # the pool's replicas that the group may use; None: all
    caps: GroupCaps | None = None  # None: the pool's
    concurrency: ConcurrencyConfig | None = None  # in addition to the pool's; None: no limit
    priority: Annotated[
        int,
        Meta(
            ge=0,
            le=LEAST_URGENT,
            description="Priority in the queue, 0 first; X-Priority may only lower a request's priority.",
        ),
    ] = 0
    match: GroupMatch = GroupMatch()
    auto_replicas: AutoReplicas | None = None  # instead of ``replicas``
    tier1: Tier1 | None = None  # boundary of its tier-1 prefix; None: the pool's, else the policy's


class Alias(Frozen, frozen=True):
    """Another name for a model or an adapter of the same pool; engines receive the name that it stands for."""

    name: Model
    model: Model


class Adapter(Frozen, frozen=True):
    """A LoRA adapter that clients name as their model. Its KV blocks are not shared with its model's."""

    name: Model
    model: Model  # the model that it adapts


class ModelNames(Frozen, frozen=True):
    """Every model name that one pool serves."""

    models: tuple[Model, ...]
    aliases: tuple[Alias, ...]
    adapters: tuple[Adapter, ...]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Each name, with its JSON path in the pool."""
        for index, model in enumerate(self.models):
            yield model, f"models[{index}]"
        for index, alias in enumerate(self.aliases):
            yield alias.name, f"aliases[{index}].name"
        for index, adapter in enumerate(self.adapters):
            yield adapter.name, f"adapters[{index}].name"


class ReplicaState(StrEnum):
    """The state that an operator wants for a replica; whether it responds is for the health checks to find out."""

    ACTIVE = "active"
    DRAINING = "draining"  # running requests finish, new ones go to other replicas
    DISABLED = "disabled"  # not even health-checked


class StreamUsage(StrEnum):
    """Whether a router asks engines for the token usage of streamed responses whose clients did not ask."""

    REQUEST = "request"  # with ``stream_options.include_usage``; the extra chunk is removed from the stream
    AS_SENT = "as_sent"  # requests and streams pass unchanged


class ReplicaConfig(Frozen, frozen=True):
    """One vLLM engine behind a base URL. ``name`` is its identity on every hash ring; the URL may change."""

    name: Name
    url: Annotated[str, Meta(max_length=2048)]  # http(s)://host[:port][/base], no query
    state: ReplicaState = ReplicaState.ACTIVE
    weight: Annotated[float, Meta(gt=0, le=1000)] = 1.0  # relative capacity of each data-parallel rank
    block_tokens: Annotated[int, Meta(ge=1)] | None = None  # tokens of a KV block; None until the engine reported it
    capacity_blocks: Annotated[int, Meta(ge=1)] | None = None  # KV blocks of each rank; None until reported
    api_key: Annotated[str, of_form(r"[!-~]{1,1024}")] | None = None  # sent instead of the client's; a secret
    adapters: tuple[Model, ...] | None = None  # adapters that it has loaded; None: those that its /v1/models lists
    data_parallel_size: Annotated[int, Meta(ge=1, le=1024)] = 1  # ranks behind the URL, each with its own cache

    @property
    def capacity(self) -> float:
        """Relative capacity of all its ranks."""
        return self.weight * self.data_parallel_size


class PoolConfig(Frozen, frozen=True):
    """Replicas that serve the same models, and how requests are placed among them."""

    name: Name
    policy: PolicyConfig  # for requests of no task group, and of groups without a policy of their own
    models: tuple[Model, ...] = ()  # served names; (): any model
    aliases: tuple[Alias, ...] = ()
    adapters: tuple[Adapter, ...] = ()  # LoRA adapters that its replicas may have loaded
    replicas: tuple[ReplicaConfig, ...] = ()
    groups: tuple[TaskGroupConfig, ...] = ()
    health: HealthCheck = HealthCheck()
    breaker: BreakerConfig = BreakerConfig()
    caps: Caps = Caps()
    concurrency: ConcurrencyConfig | None = None  # for all of its requests; None: no limit
    tier1: Tier1 | None = None  # boundary of the tier-1 prefix; None: the policy's
    share_half_life: Annotated[
        int,
        number(
            "requests",
            100,
            1_000_000,
            "Number of the pool's requests after which a request counts half in the traffic shares of auto_replicas.",
        ),
    ] = 500
    stream_usage: Annotated[
        StreamUsage,
        Meta(
            description="request: routers ask for the token usage of every stream and remove the extra chunk where the "
            "client did not ask; as_sent: streams whose clients do not ask are not accounted for."
        ),
    ] = StreamUsage.REQUEST
    warm_up: WarmUp | None = None  # of joining replicas; None: they take traffic with an empty cache

    @property
    def names(self) -> ModelNames:
        """Every model, alias and adapter name that it serves."""
        return ModelNames(self.models, self.aliases, self.adapters)


class RouterConfig(Frozen, frozen=True):
    """Everything that a router needs to place requests."""

    hash_secret: Hex  # mixed into every prefix hash; the same on all routers of a fleet; never shown
    pools: tuple[PoolConfig, ...]
    limits: Limits = Limits()
    access: Access | None = None  # None: no API key is needed
    replica_networks: ReplicaNetworks | None = None  # None: replicas may have any address


def check_model_names(pools: Iterable[PoolConfig]) -> None:
    """Check that each name belongs to one pool, that at most one pool serves any model, and that references are known.

    Raises ConfigError.
    """
    owners: dict[str, str] = {}
    any_model: str | None = None
    for index, pool in enumerate(pools):
        path = f"$.pools[{index}]"
        for name, where in pool.names:
            if name in owners:
                raise ConfigError(f"{path}.{where}", f"model {name!r} is already served by pool {owners[name]!r}")
            owners[name] = pool.name
        adapters = {adapter.name for adapter in pool.adapters}
        references = [(f"adapters[{at}]", adapter.model) for at, adapter in enumerate(pool.adapters)]
        references += [(f"aliases[{at}]", it.model) for at, it in enumerate(pool.aliases) if it.model not in adapters]
        for where, model in references:
            if pool.models and model not in pool.models:
                raise ConfigError(f"{path}.{where}.model", f"the pool has no model {model!r}")
        if not pool.models:
            if any_model is not None:
                raise ConfigError(f"{path}.models", f"every model is already served by pool {any_model!r}")
            any_model = pool.name


def check_groups(pool: PoolConfig, keys: Collection[str], path: str) -> None:
    """Check references to replicas, models and API ``keys``, unique claims and reserved replicas; ConfigError."""
    replicas = {replica.name for replica in pool.replicas}
    models = {name for name, _ in pool.names} if pool.models else None
    claims: dict[tuple[str, str], str] = {}
    reserved = 0
    for index, group in enumerate(pool.groups):
        where = f"{path}[{index}]"
        _check_replicas(group, replicas, pool.name, where)
        reserved += group.auto_replicas.reserved if group.auto_replicas else 0
        if reserved > max(1, len(replicas)):
            reason = f"up to here {reserved} replicas are reserved, and pool {pool.name!r} has {len(replicas)}"
            raise ConfigError(f"{where}.auto_replicas.reserved", reason)
        for field in group.match.__struct_fields__:
            for at, value in enumerate(getattr(group.match, field)):
                owner = claims.setdefault((field, value), group.name)
                if owner != group.name:
                    reason = f"{value!r} is claimed by task groups {owner!r} and {group.name!r}; only one may claim it"
                elif field == "models" and models is not None and value not in models:
                    reason = f"pool {pool.name!r} has no model {value!r}"
                elif field == "api_keys" and value not in keys:
                    reason = f"no API key is named {value!r}"
                else:
                    continue
                raise ConfigError(f"{where}.match.{field}[{at}]", reason)


def _check_replicas(group: TaskGroupConfig, known: Collection[str], pool: str, where: str) -> None:
    for position, name in enumerate(group.replicas or ()):
        if name not in known:
            raise ConfigError(f"{where}.replicas[{position}]", f"pool {pool!r} has no replica {name!r}")
    if group.replicas is not None and group.auto_replicas is not None:
        raise ConfigError(f"{where}.auto_replicas", f"task group {group.name!r} also has replicas; set only one")
    if group.replicas == ():
        raise ConfigError(f"{where}.replicas", "a group without replicas serves nothing; use null for all")
