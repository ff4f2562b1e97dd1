"""The configuration that a router runs: one immutable, versioned snapshot.

The control plane builds it, a file may hold it, the router checks and runs it. This is the one package of ``routing``
that others import, so it depends on msgspec alone and does no I/O. README.md says what stands in which file.
"""

from routing.schema.access import Access, ApiKey, check_access
from routing.schema.addresses import (
    FORBIDDEN_NETWORKS,
    AddressRules,
    IpAddress,
    IpNetwork,
    ReplicaNetworks,
    all_faces,
    is_within,
)
from routing.schema.base import HIDDEN, NAME, SECRET_FIELDS, ConfigError, Frozen, Hex, Model, Name, without_secrets
from routing.schema.caps import Caps, GroupCaps
from routing.schema.checks import check_config
from routing.schema.concurrency import LEAST_URGENT, PRIORITIES, ConcurrencyConfig
from routing.schema.failures import BreakerConfig, HealthCheck
from routing.schema.fleet import PoolConfig, ReplicaConfig, ReplicaState, RouterConfig, StreamUsage
from routing.schema.groups import AutoReplicas, GroupMatch, TaskGroupConfig
from routing.schema.limits import RETRY_CAUSES, UNSAFE_CAUSES, Limits
from routing.schema.models import Adapter, Alias, ModelNames
from routing.schema.policies import PolicyConfig, Trial
from routing.schema.ring import moved_by_chance, moved_ratio, points_of
from routing.schema.signatures import KEY_HEX, Signature, key_id, signed_text
from routing.schema.snapshot import (
    OLDEST_SCHEMA,
    SCHEMA_VERSION,
    LoadedSnapshot,
    Snapshot,
    dump_snapshot,
    encode_config,
    load_snapshot,
    sign_document,
)
from routing.schema.strategies import (
    AffinityGroupsSettings,
    BoundedLoad,
    CacheAwareSettings,
    CostSettings,
    LeastLoadSettings,
    LeastTtftSettings,
    LowestCostSettings,
    PolicySettings,
    PowerOfTwoSettings,
    PrefixHashSettings,
    RandomSettings,
    ResidencySettings,
    RoundRobinSettings,
    SessionAffinitySettings,
    Settings,
    Tier1Settings,
    TieredSettings,
    load_settings,
)
from routing.schema.tier1 import Boundary, Tier1
from routing.schema.urls import check_base_url
from routing.schema.warm_up import WarmUp

__all__ = [
    "FORBIDDEN_NETWORKS",
    "HIDDEN",
    "KEY_HEX",
    "LEAST_URGENT",
    "NAME",
    "OLDEST_SCHEMA",
    "PRIORITIES",
    "RETRY_CAUSES",
    "SCHEMA_VERSION",
    "SECRET_FIELDS",
    "UNSAFE_CAUSES",
    "Access",
    "Adapter",
    "AddressRules",
    "AffinityGroupsSettings",
    "Alias",
    "ApiKey",
    "AutoReplicas",
    "Boundary",
    "BoundedLoad",
    "BreakerConfig",
    "CacheAwareSettings",
    "Caps",
    "ConcurrencyConfig",
    "ConfigError",
    "CostSettings",
    "Frozen",
    "GroupCaps",
    "GroupMatch",
    "HealthCheck",
    "Hex",
    "IpAddress",
    "IpNetwork",
    "LeastLoadSettings",
    "LeastTtftSettings",
    "Limits",
    "LoadedSnapshot",
    "LowestCostSettings",
    "Model",
    "ModelNames",
    "Name",
    "PolicyConfig",
    "PolicySettings",
    "PoolConfig",
    "PowerOfTwoSettings",
    "PrefixHashSettings",
    "RandomSettings",
    "ReplicaConfig",
    "ReplicaNetworks",
    "ReplicaState",
    "ResidencySettings",
    "RoundRobinSettings",
    "RouterConfig",
    "SessionAffinitySettings",
    "Settings",
    "Signature",
    "Snapshot",
    "StreamUsage",
    "TaskGroupConfig",
    "Tier1",
    "Tier1Settings",
    "TieredSettings",
    "Trial",
    "WarmUp",
    "all_faces",
    "check_access",
    "check_base_url",
    "check_config",
    "dump_snapshot",
    "encode_config",
    "is_within",
    "key_id",
    "load_settings",
    "load_snapshot",
    "moved_by_chance",
    "moved_ratio",
    "points_of",
    "sign_document",
    "signed_text",
    "without_secrets",
]
