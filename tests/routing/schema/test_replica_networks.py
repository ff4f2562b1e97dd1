"""Address rules of replicas in a configuration."""

from __future__ import annotations

import json

import pytest

from routing.schema import AddressRules, ConfigError, ReplicaNetworks, RouterConfig, dump_snapshot, load_snapshot

SECRET = "ab" * 16


def dumped(networks: ReplicaNetworks | None) -> bytes:
    return dump_snapshot(RouterConfig(hash_secret=SECRET, pools=(), replica_networks=networks), 1).document


def test_replica_networks_round_trip_and_are_omitted_if_none() -> None:
    networks = ReplicaNetworks(allowed=("10.0.0.0/8",), forbidden=("10.1.0.0/16",))
    assert load_snapshot(dumped(networks)).config.replica_networks == networks
    assert b"replica_networks" not in dumped(None)


@pytest.mark.parametrize("field", ["allowed", "forbidden"])
@pytest.mark.parametrize("wrong", ["10.0.0.1/8", "here", "", "10.0.0.0/33"])
def test_an_invalid_network_is_rejected_with_its_path(field: str, wrong: str) -> None:
    document = json.loads(dumped(ReplicaNetworks()))
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
def test_forbidden_networks_take_precedence(address: str, is_permitted: bool) -> None:
    rules = AddressRules(ReplicaNetworks(allowed=("10.0.0.0/8",), forbidden=("10.1.0.0/16",)))
    assert (rules.rejection_reason(address) is None) is is_permitted


def test_metadata_services_and_link_local_addresses_are_forbidden_by_default() -> None:
    rules = AddressRules(ReplicaNetworks())
    for address in ("169.254.169.254", "fe80::1", "fd00:ec2::254", "100.100.100.200", "0.0.0.0", "224.0.0.1"):
        assert rules.rejection_reason(address) is not None
    assert rules.rejection_reason("8.8.8.8") is None
