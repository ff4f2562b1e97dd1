"""Where replicas publish KV events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from routing.schema import ConfigError, KvEvents, ReplicaConfig, RouterConfig, dump_snapshot, load_snapshot
from tests.routing.building import config, pool

EVENTS = KvEvents(endpoint="tcp://gpu-1:5557", replay_endpoint="tcp://[::1]:5657", topic="kv@")


def with_events(events: KvEvents | None) -> RouterConfig:
    return config(pool(members=(ReplicaConfig(name="a", url="http://gpu-1:8000", kv_events=events),)))


def loaded(**fields: Any) -> RouterConfig:
    """The configuration with other fields in ``kv_events`` or in the replica."""
    document = json.loads(dump_snapshot(with_events(EVENTS), 1).document)
    del document["sha256"]
    replica = document["config"]["pools"][0]["replicas"][0]
    for name, value in fields.items():
        (replica["kv_events"] if name in replica["kv_events"] else replica)[name] = value
    return load_snapshot(json.dumps(document).encode()).config


def test_sources_round_trip_and_older_routers_do_not_see_the_field_without_one() -> None:
    assert load_snapshot(dump_snapshot(with_events(EVENTS), 1).document).config == with_events(EVENTS)
    assert b"kv_events" not in dump_snapshot(with_events(None), 1).document
    assert loaded() == with_events(EVENTS)


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
def test_a_wrong_endpoint_is_rejected_with_its_path(field: str, wrong: object) -> None:
    with pytest.raises(ConfigError) as error:
        loaded(**{field: wrong})
    assert error.value.path.endswith(f"kv_events.{field}")


def test_the_ports_of_all_ranks_exist() -> None:
    assert loaded(endpoint="tcp://gpu-1:65534", data_parallel_size=2)
    with pytest.raises(ConfigError, match="last of 3 ranks") as error:
        loaded(endpoint="tcp://gpu-1:65534", data_parallel_size=3)
    assert error.value.path == "$.pools[0].replicas[0].kv_events.endpoint"


def test_a_topic_is_bounded_and_unknown_fields_are_rejected() -> None:
    for fields in ({"topic": "x" * 257}, {"kv_events": {"endpoint": "tcp://a:1", "port": 1}}):
        with pytest.raises(ConfigError):
            loaded(**fields)
