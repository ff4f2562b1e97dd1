"""A real Envoy with the documented configuration in front of a picker: the cases of the endpoint picker protocol."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml

from routing.schema import HealthCheck
from tests.fakes.envoy import address, envoy, program
from tests.fakes.replica import FakeReplica, Held, answering, fake_replicas, sse, streaming
from tests.routing.picker.streams import ENDPOINT, picking
from tests.routing.proxy.harness import BODY, CHAT, Harness, chat_body, config, samples

DOCUMENTED = Path(__file__).parents[3] / "deploy" / "envoy" / "envoy.yaml"


def documented(replicas: Sequence[FakeReplica], picker_port: int) -> dict[str, Any]:
    """The documented configuration, with the ports of the test."""
    config = yaml.safe_load(DOCUMENTED.read_text())
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


# --- A real Envoy with the documented configuration in front of a picker: the cases of the endpoint picker protocol ---


pytestmark = pytest.mark.asyncio(loop_scope="module")

USAGE = {"prompt_tokens": 4310, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4096}}
PLAIN = json.dumps({"choices": [{"finish_reason": "stop"}], "usage": USAGE}).encode()
TOKEN, DONE = sse({"choices": [{"delta": {"content": "word"}}]}), sse("[DONE]")
USAGE_EVENT = sse({"choices": [], "usage": USAGE})
STREAM = json.dumps({**json.loads(BODY), "stream": True}).encode()
RARELY = HealthCheck(interval_s=600, failures=100)


@dataclass
class Gateway:
    """Envoy, the picker, three replicas, and a client."""

    replicas: list[FakeReplica]
    harness: Harness
    ports: dict[str, int]
    http: aiohttp.ClientSession

    def post(self, body: bytes = BODY, listener: str = "clients", **options: Any) -> Any:
        url = f"http://127.0.0.1:{self.ports[listener]}{CHAT.decode()}"
        return self.http.post(url, data=io.BytesIO(body), **options)

    async def chat(self, body: bytes = BODY, listener: str = "clients", **options: Any) -> tuple[int, Any, bytes]:
        async with self.post(body, listener, **options) as response:
            return response.status, response.headers, await response.read()

    async def decisions(self, count: int) -> list[dict[str, Any]]:
        """The latest decisions, once no request is in flight."""
        await self.harness.at_rest()
        _, page = await self.harness.admin("GET", "/admin/decisions")
        return page["decisions"][-count:]

    async def metric(self, name: str, labels: dict[str, str]) -> float:
        """The value of a sample; 0 if there is none."""
        _, text = await self.harness.admin("GET", "/metrics")
        found = [value for own, value in samples(text).get(f"warmpath_router_{name}", []) if own == labels]
        return sum(found)

    def endpoint(self, replica: FakeReplica) -> str:
        return f"127.0.0.1:{replica.port}"


def configured(replicas: list[FakeReplica], picker_port: int) -> dict[str, Any]:
    """The documented listener, and one for each other case."""
    whole = documented(replicas, picker_port)
    add_cluster(whole, "picker", "nobody", [1])
    by_metadata = add_cluster(whole, "replicas", "by_metadata", [replica.port for replica in replicas])
    override = by_metadata["load_balancing_policy"]["policies"][0]["typed_extension_config"]["typed_config"]
    override["override_host_sources"] = [{"metadata": {"key": "envoy.lb", "path": [{"key": ENDPOINT}]}}]
    header = {"use_http_header": True, "http_header_name": ENDPOINT}
    original = {
        "name": "any",
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "original_dst_lb_config": header,
    }
    whole["static_resources"]["clusters"].append(original)
    Listener(whole, "hinted").hint([f"127.0.0.1:{replicas[1].port}"])
    Listener(whole, "by_metadata").route["cluster"] = "by_metadata"
    original_destination = Listener(whole, "original_destination")
    original_destination.hint([f"127.0.0.1:{replicas[2].port}"])  # so that there are no fallbacks
    original_destination.route["cluster"] = "any"
    by_attribute = Listener(whole, "by_attribute")
    by_attribute.ext_proc["response_attributes"] = ["upstream.address"]
    del by_attribute.filters[1:3]  # those that set the metadata
    modes = {"request_body_mode": "BUFFERED", "response_body_mode": "STREAMED"}
    for name in ("buffered", "open", "closed"):
        listener = Listener(whole, name)
        listener.ext_proc["processing_mode"] |= modes
        if name != "buffered":
            listener.ext_proc["failure_mode_allow"] = name == "open"
            listener.ext_proc["grpc_service"]["envoy_grpc"]["cluster_name"] = "nobody"
    return whole


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def started() -> AsyncIterator[Gateway]:
    program()
    async with fake_replicas(3) as replicas:
        whole = config(replicas, models=("tiny",), health=RARELY)
        async with (
            picking(whole, fallbacks=2) as (harness, _),
            envoy(configured(replicas, harness.port)) as ports,
            aiohttp.ClientSession() as http,
        ):
            yield Gateway(replicas, harness, ports, http)


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(started: Gateway) -> Gateway:
    for replica in started.replicas:
        replica.script = answering(PLAIN)
        replica.calls.clear()
    return started


async def test_the_first_endpoint_serves_and_the_others_follow_in_the_header(gateway):
    status, headers, body = await gateway.chat()

    (served,) = [replica for replica in gateway.replicas if replica.calls]
    assert (status, headers["x-warmpath-replica"], body) == (200, served.name, PLAIN)
    endpoints = served.calls[0].header(ENDPOINT.encode())[0].decode().split(",")
    assert endpoints[0] == gateway.endpoint(served)
    assert sorted(endpoints) == sorted(map(gateway.endpoint, gateway.replicas))
    assert "x-gateway-destination-endpoint-served" not in headers


async def test_envoy_finds_the_endpoint_in_the_dynamic_metadata(gateway):
    for _ in range(3):
        status, headers, _ = await gateway.chat(listener="by_metadata")
        assert status == 200
        (served,) = [replica for replica in gateway.replicas if replica.calls]
        assert headers["x-warmpath-replica"] == served.name
        served.calls.clear()


async def test_only_endpoints_of_the_subset_hint_are_chosen(gateway):
    for _ in range(3):
        _, headers, _ = await gateway.chat(listener="hinted")
        assert headers["x-warmpath-replica"] == gateway.replicas[1].name

    assert [len(replica.calls) for replica in gateway.replicas] == [0, 3, 0]


async def test_a_cluster_of_original_destinations_gets_one_endpoint(gateway):
    status, headers, _ = await gateway.chat(listener="original_destination")

    assert (status, headers["x-warmpath-replica"]) == (200, gateway.replicas[2].name)


@pytest.mark.parametrize("listener", ["clients", "by_attribute"])
async def test_the_next_endpoint_serves_while_the_first_is_down_and_gets_the_request_counted(gateway, listener):
    down = gateway.replicas[0]
    down.kill()
    retries = {"pool": "chat", "replica": down.name, "cause": "proxy"}
    before = await gateway.metric("retries_total", retries)
    try:
        responses = [await gateway.chat(listener=listener) for _ in range(3)]  # in turn
        decisions = await gateway.decisions(3)
    finally:
        await down.start()

    assert [status for status, _, _ in responses] == [200, 200, 200]
    assert [headers["x-warmpath-replica"] for _, headers, _ in responses] == [row["replica"] for row in decisions]
    (retried,) = [row for row in decisions if row["retries"]]
    assert retried["replica"] != down.name
    assert (retried["retries"], retried["prompt_tokens"], retried["cached_tokens"]) == (1, 4310, 4096)
    assert await gateway.metric("retries_total", retries) == before + 1


async def test_a_large_body_arrives_unchanged(gateway):
    body = chat_body(text="0123456789" * 200_000)

    status, _, _ = await gateway.chat(body)

    (call,) = [call for replica in gateway.replicas for call in replica.calls]
    assert (status, call.body) == (200, body)


@pytest.mark.parametrize("listener", ["clients", "buffered"])
async def test_usage_of_a_stream_is_known_though_the_client_did_not_ask(gateway, listener):
    for replica in gateway.replicas:
        replica.script = streaming(TOKEN, TOKEN + USAGE_EVENT, DONE)

    status, _, body = await gateway.chat(STREAM, listener)

    (call,) = [call for replica in gateway.replicas for call in replica.calls]
    assert json.loads(call.body)["stream_options"] == {"include_usage": True}
    assert (status, body) == (200, TOKEN + TOKEN + DONE)
    (decision,) = await gateway.decisions(1)
    assert (decision["prompt_tokens"], decision["cached_tokens"], decision["generated_tokens"]) == (4310, 4096, 3)
    assert 0 < decision["ttft_s"] <= decision["latency_s"]


async def test_a_buffered_body_is_sent_by_envoy_itself(gateway):
    status, _, body = await gateway.chat(listener="buffered")

    (call,) = [call for replica in gateway.replicas for call in replica.calls]
    assert (status, body, call.body) == (200, PLAIN, BODY)
    assert call.header(b"content-length") == [b"%d" % len(BODY)]


async def test_without_a_picker_envoy_fails_open_or_closed_as_configured(gateway):
    open_status, _, body = await gateway.chat(listener="open")
    closed_status, _, _ = await gateway.chat(listener="closed")

    assert (open_status, body, closed_status) == (200, PLAIN, 500)
    assert len([call for replica in gateway.replicas for call in replica.calls]) == 1


async def test_a_client_that_disconnects_releases_its_load(gateway):
    held = Held()
    for replica in gateway.replicas:
        replica.script = held
    async with gateway.post(STREAM) as response:
        await response.content.readany()
        assert gateway.harness.router.services.in_flight == 1
        response.close()

    await gateway.harness.at_rest()
    held.go.set()


async def test_the_picker_responds_itself_where_no_replica_is_needed(gateway):
    base = f"http://127.0.0.1:{gateway.ports['clients']}"
    async with gateway.http.get(f"{base}/v1/models") as models, gateway.http.get(f"{base}/nothing") as missing:
        listed = await models.json()
        assert (models.status, [card["id"] for card in listed["data"]], missing.status) == (200, ["tiny"], 404)
