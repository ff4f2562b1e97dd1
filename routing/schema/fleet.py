"""What there is: replicas, the pools that they stand in, and everything that a router needs to place requests.

The names that clients use for models: served names, aliases of them, and LoRA adapters.

What a pool does for a replica that joins with an empty cache, before it takes traffic.

Why each default is what it is stands in ``limits.md``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from routing.schema.access import Access, Caps, ConcurrencyConfig
from routing.schema.fields import ConfigError, Frozen, Hex, Model, Name, ReplicaNetworks, of_form
from routing.schema.groups import TaskGroupConfig
from routing.schema.limits import BreakerConfig, HealthCheck, Limits
from routing.schema.strategies import PolicyConfig, Tier1


class Alias(Frozen, frozen=True):
    """Another name for a model or an adapter of the same pool; engines are sent the name that it stands for."""

    name: Model
    model: Model


class Adapter(Frozen, frozen=True):
    """A LoRA adapter that clients name as their model. Its KV blocks are its own, not its model's."""

    name: Model
    model: Model  # that it adapts


class ModelNames(Frozen, frozen=True):
    """Every name that one pool answers to."""

    models: tuple[Model, ...]
    aliases: tuple[Alias, ...]
    adapters: tuple[Adapter, ...]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Each name, and the path where it stands in its pool."""
        for index, model in enumerate(self.models):
            yield model, f"models[{index}]"
        for index, alias in enumerate(self.aliases):
            yield alias.name, f"aliases[{index}].name"
        for index, adapter in enumerate(self.adapters):
            yield adapter.name, f"adapters[{index}].name"


def check_names(names: ModelNames, pool: str, path: str, owners: dict[str, str]) -> None:
    """Names that nobody has yet, and that stand for something there; ConfigError otherwise. Adds them to ``owners``."""
    for name, where in names:
        if name in owners:
            raise ConfigError(f"{path}.{where}", f"model {name!r} is already served by pool {owners[name]!r}")
        owners[name] = pool
    adapters = {adapter.name for adapter in names.adapters}
    for index, adapter in enumerate(names.adapters):
        _check_known(adapter.model, names.models, f"{path}.adapters[{index}].model")
    for index, alias in enumerate(names.aliases):
        if alias.model not in adapters:
            _check_known(alias.model, names.models, f"{path}.aliases[{index}].model")


def check_held(held: tuple[str, ...] | None, adapters: Collection[str], path: str) -> None:
    """A replica holds adapters of its pool, or nobody says which (None); ConfigError otherwise."""
    for position, name in enumerate(held or ()):
        if name not in adapters:
            raise ConfigError(f"{path}[{position}]", f"the pool has no adapter {name!r}")


def _check_known(model: str, models: Collection[str], path: str) -> None:
    """A pool without models takes any, so any may be meant."""
    if models and model not in models:
        raise ConfigError(path, f"the pool has no model {model!r}")


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


class ReplicaState(StrEnum):
    """What an operator wants of a replica; whether it answers is for the router's health checks to say."""

    ACTIVE = "active"
    DRAINING = "draining"  # running requests finish, new ones go elsewhere
    DISABLED = "disabled"  # not even health-checked


class StreamUsage(StrEnum):
    """Whether a router asks engines for the token usage of streamed responses whose clients did not ask."""

    REQUEST = "request"  # with ``stream_options.include_usage``; the extra chunk is removed from the stream
    AS_SENT = "as_sent"  # requests and streams pass unchanged


class ReplicaConfig(Frozen, frozen=True):
    """One vLLM engine behind a base URL. ``name`` is its identity on every ring; the URL may change."""

    name: Name
    url: Annotated[str, Meta(max_length=2048)]  # http(s)://host[:port][/base], no query
    state: ReplicaState = ReplicaState.ACTIVE
    weight: Annotated[float, Meta(gt=0, le=1000)] = 1.0  # relative capacity, of each data-parallel rank
    block_tokens: Annotated[int, Meta(ge=1)] | None = None  # tokens a KV block holds; None until the engine told us
    capacity_blocks: Annotated[int, Meta(ge=1)] | None = None  # KV blocks of each rank; None until the engine told us
    api_key: Annotated[str, of_form(r"[!-~]{1,1024}")] | None = None  # sent instead of the client's; a secret
    adapters: tuple[Model, ...] | None = None  # of its pool's, those it holds; None: those that its /v1/models lists
    data_parallel_size: Annotated[int, Meta(ge=1, le=1024)] = 1  # ranks behind the URL, each with a cache of its own

    @property
    def capacity(self) -> float:
        """Relative capacity of all its ranks."""
        return self.weight * self.data_parallel_size


class PoolConfig(Frozen, frozen=True):
    """Replicas that serve the same models, and how requests are placed among them."""

    name: Name
    policy: PolicyConfig  # for requests of no task group, and of groups without a policy of their own
    models: tuple[Model, ...] = ()  # served names; () takes any model
    aliases: tuple[Alias, ...] = ()  # other names for these
    adapters: tuple[Adapter, ...] = ()  # LoRA adapters that its replicas may hold
    replicas: tuple[ReplicaConfig, ...] = ()
    groups: tuple[TaskGroupConfig, ...] = ()
    health: HealthCheck = HealthCheck()
    breaker: BreakerConfig = BreakerConfig()
    caps: Caps = Caps()
    concurrency: ConcurrencyConfig | None = None  # for all of its requests; None: no limit
    tier1: Tier1 | None = None  # where tier 1 ends; None: where the policy says
    share_half_life: Annotated[
        int,
        Meta(
            ge=100,
            le=1_000_000,
            description="After how many of its requests one counts half in what groups with auto_replicas get.",
            extra={"unit": "requests"},
        ),
    ] = 500
    stream_usage: Annotated[
        StreamUsage,
        Meta(
            description="request: routers ask for the token usage of every stream and remove the extra chunk where the "
            "client did not ask; as_sent: streams whose clients do not ask go unaccounted."
        ),
    ] = StreamUsage.REQUEST
    warm_up: WarmUp | None = None  # of replicas that join; None: they take traffic cold

    @property
    def names(self) -> ModelNames:
        """Every name of a model, alias or adapter that it answers to."""
        return ModelNames(self.models, self.aliases, self.adapters)


class RouterConfig(Frozen, frozen=True):
    """Everything that a router needs to place requests."""

    hash_secret: Hex  # mixed into every prefix hash; the same on all routers of a fleet; never shown
    pools: tuple[PoolConfig, ...]
    limits: Limits = Limits()
    access: Access | None = None  # None: requests are taken from anybody
    replica_networks: ReplicaNetworks | None = None  # None: replicas may have any address
