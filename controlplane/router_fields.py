"""Which parts of the routers' schema each row keeps, under the schema's own names and by its types."""

from __future__ import annotations

from controlplane.schema_fields import kinds_of
from routing.schema import ApiKey, GroupMatch, PoolConfig, ReplicaConfig, RouterConfig, TaskGroupConfig

POOL = kinds_of(
    PoolConfig,
    "models",
    "aliases",
    "adapters",
    "health",
    "breaker",
    "caps",
    "concurrency",
    "tier1",
    "share_half_life",
    "stream_usage",
    "warm_up",
)
GROUP = kinds_of(TaskGroupConfig, "match", "tier1", "auto_replicas", "priority", "concurrency", "caps")
REPLICA = kinds_of(ReplicaConfig, "adapters", "data_parallel_size")
CLIENT_KEY = kinds_of(ApiKey, "models", "groups", "tenant", "requests_per_s", "burst", "tokens_per_min")
FLEET = kinds_of(RouterConfig, "limits")
API_KEY = kinds_of(ReplicaConfig, "api_key")["api_key"]
TIER1_HASHES = kinds_of(GroupMatch, "tier1_hashes")["tier1_hashes"]
