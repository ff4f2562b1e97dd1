"""What holds for a task group: its own where it says something, else its pool's."""

from __future__ import annotations

from routing.core.prompt.prefix import DEFAULT_TIER1
from routing.schema import PolicyConfig, PoolConfig, Settings, TaskGroupConfig, Tier1, Tier1Settings


def policy_of(pool: PoolConfig, group: TaskGroupConfig | None) -> PolicyConfig:
    """The policy that places the requests of a task group, or of the pool itself."""
    return group.policy if group and group.policy else pool.policy


def said_tier1(pool: PoolConfig, group: TaskGroupConfig | None) -> Tier1 | None:
    """Where the group says that tier 1 ends, else the pool; None where it is for the policy to say."""
    return (group.tier1 if group else None) or pool.tier1


def tier1_rule(pool: PoolConfig, group: TaskGroupConfig | None, settings: Settings) -> Tier1:
    """Where tier 1 ends: where the group says, else the pool, else the policy's settings, else the default."""
    of_policy = settings.tier1 if isinstance(settings, Tier1Settings) else DEFAULT_TIER1
    return said_tier1(pool, group) or of_policy
