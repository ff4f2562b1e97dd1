"""What there is: replicas, the pools that they stand in, and everything that a router needs to place requests."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from routing.schema.access import Access
from routing.schema.addresses import ReplicaNetworks
from routing.schema.base import Frozen, Hex, Model, Name, of_form
from routing.schema.caps import Caps
from routing.schema.concurrency import ConcurrencyConfig
from routing.schema.failures import BreakerConfig, HealthCheck
from routing.schema.groups import TaskGroupConfig
from routing.schema.limits import Limits
from routing.schema.models import Adapter, Alias, ModelNames
from routing.schema.policies import PolicyConfig
from routing.schema.tier1 import Tier1
from routing.schema.warm_up import WarmUp


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
