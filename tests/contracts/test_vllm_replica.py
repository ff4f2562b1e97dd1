"""The stand-in replica against captures of vLLM 0.32.0: every metric family and HTTP exchange it supports."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.routing.standin.replica_process import ReplicaProcess, replica_process

DATA = Path(__file__).parents[1] / "data" / "vllm"
SIZE = ("--block-tokens", "32", "--blocks", "2049", "--max-model-len", "16384")

NOT_SUPPORTED = {
    "GET /kv_event_sources": "has its own test: it needs an option",
    "per-request-metrics": "captured with an option that the stand-in does not have",
    "per-request-metrics-chat-stream": "captured with an option that the stand-in does not have",
    "queue-full": "has its own test: it needs a full queue",
    "queue-full-stream": "has its own test: it needs a full queue",
    "during-drain-health": "captured with --shutdown-timeout",
    "during-drain-new-request": "captured with --shutdown-timeout",
}
OWN_MESSAGES = {
    "token-id-out-of-vocab": "the stand-in's vocabulary is all 4-byte words",
}


@pytest.fixture(scope="module")
def replica() -> Iterator[ReplicaProcess]:
    with replica_process(*SIZE) as process:
        yield process


@pytest.fixture(scope="module")
def with_api_key() -> Iterator[ReplicaProcess]:
    with replica_process(*SIZE, "--api-key", "sekret") as process:
        yield process


# --- HTTP --------------------------------------------------------------------------------------------


def captured(name: str) -> list[Any]:
    lines = (DATA / f"vllm-http-0.32.0-{name}.jsonl").read_text().splitlines()
    cases = [json.loads(line) for line in lines]
    return [pytest.param(case, id=case["case"]) for case in cases if case["case"] not in NOT_SUPPORTED]


def request_body(case: dict[str, Any]) -> Any:
    """The captured request body, with shortened prompts restored."""
    body = case["request"].get("body")
    text = json.dumps(body).replace("word word word ... (the word repeated, 200000 characters in all)", "word " * 40000)
    if case["case"] == "token-id-out-of-vocab":
        text = text.replace("999999", str(1 << 32))
    return json.loads(text)


def shape(value: Any) -> Any:
    """Keys and types of a JSON value, recursively; a list by its first item."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


def send(replica: ReplicaProcess, case: dict[str, Any]) -> Any:
    request = case["request"]
    return replica.send(request["method"], request["path"], request_body(case), request.get("headers"))


def check_head(case: dict[str, Any], response: Any) -> None:
    expected = case["response"]
    assert response.status == expected["status"]
    for name in ("content-type", "vary", "allow", "transfer-encoding", "server"):
        assert response.headers.get(name) == expected["headers"].get(name), name
    assert ("x-request-id" in response.headers) == ("x-request-id" in expected["headers"])


def events_of(case: dict[str, Any]) -> list[Any]:
    text = "".join(read[1] for read in case["response"]["reads"])
    data = [event.rpartition("data: ")[2] for event in text.split("\n\n") if event]
    return [event if event == "[DONE]" else json.loads(event) for event in data]


def check_body(case: dict[str, Any], response: Any) -> None:
    if "reads" in case["response"]:
        expected = [json.dumps(shape(event)) for event in events_of(case)]
        actual = [json.dumps(shape(event)) for event in response.events]
        if "n2" in case["case"]:  # the order of the tokens of two choices depends on timing
            expected, actual = sorted(expected), sorted(actual)
        assert actual == expected
        return
    body = case["response"]["body"]
    if not body or case["request"]["method"] == "HEAD":
        assert response.body == b""
        return
    document = json.loads(body)
    if response.status == 200:
        assert list(response.json) == list(document)
        assert shape(response.json) == shape(document)
    elif case["case"] in OWN_MESSAGES:
        assert shape(response.json) == shape(document)
    else:
        assert response.json == document


def check(replica: ReplicaProcess, case: dict[str, Any]) -> Any:
    response = send(replica, case)
    check_head(case, response)
    check_body(case, response)
    return response


@pytest.mark.parametrize("case", [*captured("ok"), *captured("errors"), *captured("sleep-hang-crash")])
def test_responses_and_errors_have_the_format_and_the_messages_of_vllm(replica: ReplicaProcess, case: Any) -> None:
    check(replica, case)


@pytest.mark.parametrize("case", captured("auth-queue-drain"))
def test_the_api_key_protects_the_same_paths_as_in_vllm(with_api_key: ReplicaProcess, case: Any) -> None:
    check(with_api_key, case)


def test_a_full_queue_is_a_503_with_the_message_of_vllm() -> None:
    with replica_process(*SIZE, "--max-num-queued-reqs", "1", "--step-s", "0.2") as replica:
        busy = threading.Thread(target=replica.chat, args=("a long response", 20))
        busy.start()
        replica.wait_for(lambda: replica.send("GET", "/load").json == {"server_load": 1}, "the first request")
        case = next(
            json.loads(line)
            for line in (DATA / "vllm-http-0.32.0-auth-queue-drain.jsonl").read_text().splitlines()
            if '"queue-full"' in line
        )

        response = check(replica, case)
        streamed = replica.chat("x", stream=True)
        assert (streamed.status, streamed.json) == (503, response.json)
        assert replica.metric("vllm:admission_rejections_total", reason="max_num_queued_reqs") == 2
        busy.join()


def test_every_unsupported_exchange_is_in_the_captures() -> None:
    names = {
        json.loads(line)["case"] for path in DATA.glob("vllm-http-*.jsonl") for line in path.read_text().splitlines()
    }

    assert names >= NOT_SUPPORTED.keys()


def test_usage_reports_cached_and_created_tokens_as_vllm_does() -> None:
    long = "the same beginning " * 60
    with replica_process(*SIZE) as replica:
        first, second = (replica.chat(long).json["usage"] for _ in range(2))
        completion = replica.send("POST", "/v1/completions", {"prompt": long, "max_tokens": 2}).json["usage"]

    blocks = first["prompt_tokens"] // 32 * 32
    assert first["prompt_tokens_details"] == {
        "cached_tokens": 0,
        "created_cache_tokens": blocks,
        "multimodal_tokens": None,
    }
    assert second["prompt_tokens_details"]["cached_tokens"] == blocks
    assert second["prompt_tokens_details"]["created_cache_tokens"] == 0
    assert completion["prompt_tokens_details"]["created_cache_tokens"] is None


# --- metrics -----------------------------------------------------------------------------------------


@dataclass
class Exposed:
    """A metric family of the text exposition."""

    kind: str
    help_text: str
    samples: dict[str, tuple[str, ...]] = field(default_factory=dict)  # sample name -> its label names, in order
    edges: list[str] = field(default_factory=list)  # of one label set, in order
    values: dict[str, set[str]] = field(default_factory=dict)  # label -> values


def exposed(text: str) -> dict[str, Exposed]:
    families: dict[str, Exposed] = {}
    help_text = name = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name, _, help_text = line.removeprefix("# HELP ").partition(" ")
        elif line.startswith("# TYPE "):
            families[name] = Exposed(line.rsplit(" ", 1)[1], help_text)
        else:
            add_sample(families[name], line)
    return families


def add_sample(family: Exposed, line: str) -> None:
    sample, _, text = line.rpartition(" ")[0].partition("{")
    pairs = re.findall(r'(\w+)="([^"]*)"', text)
    family.samples[sample] = tuple(name for name, _ in pairs)
    for name, value in pairs:
        family.values.setdefault(name, set()).add(value)
        if name == "le" and value not in family.edges:
            family.edges.append(value)


REAL = exposed((DATA / "vllm-metrics-0.32.0-busy.txt").read_text())


@pytest.fixture(scope="module")
def shown() -> Iterator[dict[str, Exposed]]:
    """Metric families of the stand-in after one request of each kind."""
    with replica_process(*SIZE) as replica:
        replica.send("GET", "/v1/models")
        replica.chat("hello")
        replica.send("GET", "/v1/nothing")
        response = replica.send("GET", "/metrics")
        assert response.headers["content-type"] == "text/plain; version=1.0.0; charset=utf-8"
        yield exposed(response.body.decode())


@pytest.mark.parametrize("name", REAL)
def test_each_metric_has_vllms_type_help_labels_and_buckets(shown: dict[str, Exposed], name: str) -> None:
    real, ours = REAL[name], shown[name]

    assert (ours.kind, ours.help_text) == (real.kind, real.help_text)
    assert ours.samples == real.samples
    if not name.startswith("http_request_duration_seconds"):  # vLLM omits buckets of it at random
        assert ours.edges == real.edges
    for label in real.values.keys() & {"engine", "reason", "source", "sleep_state", "finished_reason", "generation"}:
        assert ours.values[label] == real.values[label]


def test_the_metric_families_are_exactly_those_of_vllm_in_its_order(shown: dict[str, Exposed]) -> None:
    assert list(shown) == list(REAL)


BLOCKS = exposed((DATA / "vllm-metrics-0.32.0-blocks-lora.txt").read_text())


def test_with_kv_cache_metrics_the_lifetimes_of_sampled_blocks_are_reported() -> None:
    with replica_process(*SIZE, "--kv-cache-metrics", "--kv-cache-metrics-sample", "1") as replica:
        ours = exposed(replica.send("GET", "/metrics").body.decode())

    def own(families: dict[str, Exposed]) -> list[str]:
        return [name for name in families if name.startswith("vllm:") and "lora" not in name]

    assert own(ours) == own(BLOCKS)
    for name in own(BLOCKS):
        if "kv_block" in name:
            real, shown = BLOCKS[name], ours[name]
            assert (shown.kind, shown.help_text, shown.samples) == (real.kind, real.help_text, real.samples)
            assert shown.edges == real.edges


def test_cache_config_info_has_the_labels_of_vllm() -> None:
    with replica_process(*SIZE) as replica:
        page = replica.send("GET", "/metrics").body.decode()
    ours, real = (
        dict(re.findall(r'(\w+)="([^"]*)"', next(line for line in text.splitlines() if "cache_config_info{" in line)))
        for text in (page, (DATA / "vllm-metrics-0.32.0-busy.txt").read_text())
    )

    ignored = {
        "prefix_caching_hash_algo",
        "kv_cache_memory_bytes",
    }  # the first differs on purpose, the second has no meaning here
    assert {key: value for key, value in ours.items() if key not in ignored} == {
        key: value for key, value in real.items() if key not in ignored
    }
