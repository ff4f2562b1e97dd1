"""Roles of replicas: defaults that older routers can read, and which pools and task groups are valid."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from routing.schema import (
    ConfigError,
    Disaggregation,
    ReplicaConfig,
    ReplicaRole,
    RouterConfig,
    TaskGroupConfig,
    dump_snapshot,
    load_snapshot,
)
from tests.routing.building import config, pool


def with_roles(*roles: ReplicaRole, groups: tuple[TaskGroupConfig, ...] = ()) -> RouterConfig:
    members = tuple(
        ReplicaConfig(name=f"r{number}", url=f"http://gpu-{number}:8000", role=role)
        for number, role in enumerate(roles)
    )
    return config(pool(members=members, groups=groups))


PREFILL, DECODE, BOTH = ReplicaRole.PREFILL, ReplicaRole.DECODE, ReplicaRole.BOTH


def test_defaults_are_not_written_and_roles_are_read_back() -> None:
    assert b"role" not in dump_snapshot(with_roles(BOTH), 1).document
    assert b"disaggregation" not in dump_snapshot(with_roles(BOTH), 1).document
    whole = with_roles(PREFILL, DECODE)
    whole = replace(whole, pools=(replace(whole.pools[0], disaggregation=Disaggregation(min_uncached_tokens=7)),))

    assert load_snapshot(dump_snapshot(whole, 1).document).config == whole


@pytest.mark.parametrize("roles", [(PREFILL, DECODE), (PREFILL, BOTH), (DECODE,), (BOTH,), ()])
def test_a_pool_needs_a_replica_that_can_decode(roles: tuple[ReplicaRole, ...]) -> None:
    dump_snapshot(with_roles(*roles), 1)


@pytest.mark.parametrize("count", [1, 2])
def test_a_pool_of_prefill_replicas_is_rejected(count: int) -> None:
    with pytest.raises(ConfigError, match=r"\$\.pools\[0\]\.replicas: all replicas .* have the role prefill"):
        dump_snapshot(with_roles(*[PREFILL] * count), 1)


def test_a_task_group_needs_a_replica_that_can_decode() -> None:
    group = TaskGroupConfig(name="coding", replicas=("r0",))
    dump_snapshot(with_roles(DECODE, PREFILL, groups=(group,)), 1)

    with pytest.raises(ConfigError, match="task group 'coding' have the role prefill"):
        dump_snapshot(with_roles(PREFILL, DECODE, groups=(group,)), 1)


def test_unknown_roles_and_negative_minima_are_rejected() -> None:
    document = dump_snapshot(with_roles(PREFILL, DECODE), 1).document.replace(b'"sha256"', b'"unread"')
    with pytest.raises(ConfigError, match=r"replicas\[0\]\.role"):
        load_snapshot(document.replace(b'"prefill"', b'"encode"'))
    whole = with_roles(DECODE)
    bad = replace(whole, pools=(replace(whole.pools[0], disaggregation=Disaggregation(min_uncached_tokens=-1)),))
    with pytest.raises(ConfigError, match="min_uncached_tokens"):
        dump_snapshot(bad, 1)
