"""Valid and invalid parts of a configuration: canaries, KV event sources, networks of replicas, roles."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from routing.schema import (
    AddressRules,
    Canary,
    ConfigError,
    Disaggregation,
    KvEvents,
    LowestCostSettings,
    PolicyConfig,
    RandomSettings,
    ReplicaConfig,
    ReplicaNetworks,
    ReplicaRole,
    RouterConfig,
    TaskGroupConfig,
    dump_snapshot,
    load_snapshot,
)
from tests.routing.building import config, pool

OWN = PolicyConfig(name="own", revision=2, settings=RandomSettings())
GROUPS = (TaskGroupConfig(name="coding"), TaskGroupConfig(name="batch", policy=OWN))


def canary(**fields: Any) -> Canary:
    return Canary(**{"revision": 9, "settings": LowestCostSettings(), **fields})


def in_pool(tested: Canary) -> RouterConfig:
    whole = pool(groups=GROUPS)
    return config(replace(whole, policy=replace(whole.policy, canary=tested)))


def in_group(tested: Canary) -> RouterConfig:
    return config(pool(groups=(GROUPS[0], replace(GROUPS[1], policy=replace(OWN, canary=tested)))))


@pytest.mark.parametrize(
    ("snapshot", "path", "reason"),
    [
        (in_pool(canary(revision=3)), "$.pools[0].policy.canary.revision", "revision 3 is active"),
        (in_group(canary(revision=2)), "$.pools[0].groups[1].policy.canary.revision", "revision 2 is active"),
        (in_pool(canary(revision=0)), "$.pools[0].policy.canary.revision", ">= 1"),
        (in_pool(canary(share=0.0)), "$.pools[0].policy.canary.share", "> 0"),
        (in_pool(canary(share=1.01)), "$.pools[0].policy.canary.share", "<= 1"),
        (in_pool(canary(routers=())), "$.pools[0].policy.canary.routers", "null for all"),
        (in_pool(canary(routers=("Router 1",))), "$.pools[0].policy.canary.routers[0]", "regex"),
        (in_pool(canary(groups=())), "$.pools[0].policy.canary.groups", "null for all"),
        (in_pool(canary(groups=("coding", "nobody"))), "$.pools[0].policy.canary.groups[1]", "'nobody'"),
        (in_pool(canary(groups=("batch",))), "$.pools[0].policy.canary.groups[0]", "its own policy"),
        (in_group(canary(groups=("batch",))), "$.pools[0].groups[1].policy.canary.groups", "only a pool's policy"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_invalid_canary_is_rejected_with_its_path(snapshot, path, reason):
    with pytest.raises(ConfigError) as rejection:
        dump_snapshot(snapshot, 1)

    assert rejection.value.path.replace("[...]", "[0]") == path
    assert reason in rejection.value.reason


@pytest.mark.parametrize(
    "name",
    [
        "allowed_origins",
        "disaggregation",
        "kv_events",
        "replica_networks",
        "response_timeout_s",
        "retry_on",
        "role",
    ],
)
def test_a_later_field_is_written_only_if_it_is_set_so_that_older_routers_read_the_rest(name):
    assert f'"{name}"'.encode() not in dump_snapshot(config(pool()), 1).document


# --- Where replicas publish KV events ---


EVENTS = KvEvents(endpoint="tcp://gpu-1:5557", replay_endpoint="tcp://[::1]:5657", topic="kv@")


def loaded(**fields: Any) -> RouterConfig:
    """The configuration with other fields in ``kv_events`` or in the replica."""
    members = (ReplicaConfig(name="a", url="http://gpu-1:8000", kv_events=EVENTS),)
    document = json.loads(dump_snapshot(config(pool(members=members)), 1).document)
    del document["sha256"]
    replica = document["config"]["pools"][0]["replicas"][0]
    for name, value in fields.items():
        (replica["kv_events"] if name in replica["kv_events"] else replica)[name] = value
    return load_snapshot(json.dumps(document).encode()).config


@pytest.mark.parametrize("field", ["endpoint", "replay_endpoint"])
@pytest.mark.parametrize(
    "wrong",
    [
        "tcp://*:5557",
        "tcp://gpu-1",
        "tcp://gpu-1:0",
        "tcp://gpu-1:65536",
        "tcp://gpu-1:5557/x",
        "tcp://user@gpu-1:5557",
        "tcp://gpu 1:5557",
        "tcp://gpu-1:5557\n",
        "ipc:///tmp/events",
        "http://gpu-1:5557",
        "",
        7,
    ],
)
def test_a_wrong_endpoint_is_rejected_with_its_path(field, wrong):
    with pytest.raises(ConfigError) as error:
        loaded(**{field: wrong})
    assert error.value.path.endswith(f"kv_events.{field}")


def test_the_ports_of_all_ranks_exist():
    assert loaded(endpoint="tcp://gpu-1:65534", data_parallel_size=2)
    with pytest.raises(ConfigError, match="last of 3 ranks") as error:
        loaded(endpoint="tcp://gpu-1:65534", data_parallel_size=3)
    assert error.value.path == "$.pools[0].replicas[0].kv_events.endpoint"


def test_a_topic_is_bounded_and_unknown_fields_are_rejected():
    for fields in ({"topic": "x" * 257}, {"kv_events": {"endpoint": "tcp://a:1", "port": 1}}):
        with pytest.raises(ConfigError):
            loaded(**fields)


# --- Address rules of replicas in a configuration ---


@pytest.mark.parametrize("field", ["allowed", "forbidden"])
@pytest.mark.parametrize("wrong", ["10.0.0.1/8", "here", "", "10.0.0.0/33"])
def test_an_invalid_network_is_rejected_with_its_path(field, wrong):
    document = json.loads(dump_snapshot(replace(config(), replica_networks=ReplicaNetworks()), 1).document)
    document["config"]["replica_networks"][field] = ["10.0.0.0/8", wrong]
    del document["sha256"]
    with pytest.raises(ConfigError) as rejection:
        load_snapshot(json.dumps(document).encode())
    assert rejection.value.path == f"$.replica_networks.{field}[1]"
    assert "10.0.0.0/8" in rejection.value.reason


@pytest.mark.parametrize(
    ("address", "is_permitted"),
    [
        ("10.2.3.4", True),
        ("10.1.3.4", False),
        ("11.2.3.4", False),
        ("::ffff:10.2.3.4", True),
        ("::ffff:10.1.3.4", False),
        ("64:ff9b::a01:304", False),
        ("no address", False),
    ],
)
def test_forbidden_networks_take_precedence(address, is_permitted):
    rules = AddressRules(ReplicaNetworks(allowed=("10.0.0.0/8",), forbidden=("10.1.0.0/16",)))
    assert (rules.rejection_reason(address) is None) is is_permitted


def test_metadata_services_and_link_local_addresses_are_forbidden_by_default():
    rules = AddressRules(ReplicaNetworks())
    for address in ("169.254.169.254", "fe80::1", "fd00:ec2::254", "100.100.100.200", "0.0.0.0", "224.0.0.1"):
        assert rules.rejection_reason(address) is not None
    assert rules.rejection_reason("8.8.8.8") is None


# --- Roles of replicas: defaults that older routers can read, and which pools and task groups are valid ---


def with_roles(*roles: ReplicaRole, groups: tuple[TaskGroupConfig, ...] = ()) -> RouterConfig:
    members = tuple(
        ReplicaConfig(name=f"r{number}", url=f"http://gpu-{number}:8000", role=role)
        for number, role in enumerate(roles)
    )
    return config(pool(members=members, groups=groups))


PREFILL, DECODE, BOTH = ReplicaRole.PREFILL, ReplicaRole.DECODE, ReplicaRole.BOTH


@pytest.mark.parametrize("roles", [(PREFILL, DECODE), (PREFILL, BOTH), (DECODE,), (BOTH,), ()])
def test_a_pool_needs_a_replica_that_can_decode(roles):
    dump_snapshot(with_roles(*roles), 1)


@pytest.mark.parametrize("count", [1, 2])
def test_a_pool_of_prefill_replicas_is_rejected(count):
    with pytest.raises(ConfigError, match=r"\$\.pools\[0\]\.replicas: all replicas .* have the role prefill"):
        dump_snapshot(with_roles(*[PREFILL] * count), 1)


def test_a_task_group_needs_a_replica_that_can_decode():
    group = TaskGroupConfig(name="coding", replicas=("r0",))
    dump_snapshot(with_roles(DECODE, PREFILL, groups=(group,)), 1)

    with pytest.raises(ConfigError, match="task group 'coding' have the role prefill"):
        dump_snapshot(with_roles(PREFILL, DECODE, groups=(group,)), 1)


def test_unknown_roles_and_negative_minima_are_rejected():
    document = dump_snapshot(with_roles(PREFILL, DECODE), 1).document.replace(b'"sha256"', b'"unread"')
    with pytest.raises(ConfigError, match=r"replicas\[0\]\.role"):
        load_snapshot(document.replace(b'"prefill"', b'"encode"'))
    whole = with_roles(DECODE)
    bad = replace(whole, pools=(replace(whole.pools[0], disaggregation=Disaggregation(min_uncached_tokens=-1)),))
    with pytest.raises(ConfigError, match="min_uncached_tokens"):
        dump_snapshot(bad, 1)
