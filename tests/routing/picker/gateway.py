"""The Envoy of the picker's README, in front of a picker and fake replicas of a test."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.fakes.envoy import address
from tests.fakes.replica import FakeReplica

README = Path(__file__).parents[3] / "routing" / "picker" / "README.md"


def documented(replicas: Sequence[FakeReplica], picker_port: int) -> dict[str, Any]:
    """The configuration of the README, with the ports of the test."""
    (block,) = re.findall(r"```yaml\n(.*?)```", README.read_text(), re.DOTALL)
    config = yaml.safe_load(block)
    resources = config["static_resources"]
    resources["listeners"][0]["address"] = address(0)
    set_endpoints(cluster(config, "replicas"), [replica.port for replica in replicas])
    set_endpoints(cluster(config, "picker"), [picker_port])
    return config


def cluster(config: dict[str, Any], name: str) -> dict[str, Any]:
    return next(item for item in config["static_resources"]["clusters"] if item["name"] == name)


def set_endpoints(item: dict[str, Any], ports: Sequence[int]) -> None:
    endpoints = [{"endpoint": {"address": address(port)}} for port in ports]
    item["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]


def add_cluster(config: dict[str, Any], like: str, name: str, ports: Sequence[int]) -> dict[str, Any]:
    """Add a cluster like another one."""
    added = copy.deepcopy(cluster(config, like))
    added["name"] = added["load_assignment"]["cluster_name"] = name
    set_endpoints(added, ports)
    config["static_resources"]["clusters"].append(added)
    return added


class Listener:
    """A further listener, like the documented one."""

    def __init__(self, config: dict[str, Any], name: str) -> None:
        listeners = config["static_resources"]["listeners"]
        listener = copy.deepcopy(listeners[0])
        listener["name"] = name
        listeners.append(listener)
        self.manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        self.filters = self.manager["http_filters"]
        self.ext_proc = self.filters[0]["typed_config"]
        self.route = self.manager["route_config"]["virtual_hosts"][0]["routes"][0]["route"]

    def hint(self, endpoints: Sequence[str]) -> None:
        """Set the subset hint that the picker gets."""
        value = {"x-gateway-destination-endpoint-subset": list(endpoints)}
        config = {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config",
            "metadata": [{"metadata_namespace": "envoy.lb.subset_hint", "value": value}],
        }
        self.filters.insert(0, {"name": "envoy.filters.http.set_metadata", "typed_config": config})
