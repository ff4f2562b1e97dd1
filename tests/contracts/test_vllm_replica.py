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
    "GET /is_sleeping": "the stand-in does not sleep",
    "sleep /sleep?level=1": "the stand-in does not sleep",
    "sleep /is_sleeping": "the stand-in does not sleep",
    "wake /wake_up": "the stand-in does not sleep",
    "wake /is_sleeping": "the stand-in does not sleep",
    "tokenize-strs": "no client of the stand-in reads the texts of tokens",
    "detokenize": "no client of the stand-in reads the texts of tokens",
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
    samples: dict[str, set[str]] = field(default_factory=dict)  # sample name -> its label names
    edges: list[str] = field(default_factory=list)  # of one label set, in order
    values: dict[str, set[str]] = field(default_factory=dict)  # label -> values


def exposed(text: str) -> dict[str, Exposed]:
    """The engine's families and the start time; those of the web framework and of Python are not modelled."""
    families: dict[str, Exposed] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.removeprefix("# TYPE ").split()
            families[name] = Exposed(kind)
        elif not line.startswith("# HELP "):
            add_sample(families[name], line)
    return {name: it for name, it in families.items() if name.startswith(("vllm:", "process_start"))}


def add_sample(family: Exposed, line: str) -> None:
    sample, _, text = line.rpartition(" ")[0].partition("{")
    pairs = re.findall(r'(\w+)="([^"]*)"', text)
    family.samples[sample] = {name for name, _ in pairs}
    for name, value in pairs:
        family.values.setdefault(name, set()).add(value)
        if name == "le" and value not in family.edges:
            family.edges.append(value)


REAL = exposed((DATA / "vllm-metrics-0.32.0-busy.txt").read_text())


@pytest.fixture(scope="module")
def page(replica: ReplicaProcess) -> str:
    """Metrics of the stand-in after a request."""
    replica.chat("hello")
    response = replica.send("GET", "/metrics")
    assert response.headers["content-type"] == "text/plain; version=1.0.0; charset=utf-8"
    return response.body.decode()


def check_families(ours: dict[str, Exposed], real: dict[str, Exposed]) -> None:
    """Type, labels and buckets are vLLM's; ``cache_config_info`` has labels that readers use."""
    assert ours.keys() == real.keys()
    for name in real.keys() - {"vllm:cache_config_info"}:
        assert (ours[name].kind, ours[name].samples, ours[name].edges) == (
            real[name].kind,
            real[name].samples,
            real[name].edges,
        ), name
        for label in real[name].values.keys() & {"engine", "reason", "source", "sleep_state", "finished_reason"}:
            assert ours[name].values[label] == real[name].values[label]


def test_the_metrics_have_the_types_labels_and_buckets_of_vllm(page: str) -> None:
    check_families(exposed(page), REAL)


BLOCKS = exposed((DATA / "vllm-metrics-0.32.0-blocks-lora.txt").read_text())


def test_with_kv_cache_metrics_the_lifetimes_of_sampled_blocks_are_reported() -> None:
    with replica_process(*SIZE, "--kv-cache-metrics", "--kv-cache-metrics-sample", "1") as replica:
        ours = exposed(replica.send("GET", "/metrics").body.decode())

    check_families(ours, {name: it for name, it in BLOCKS.items() if "lora" not in name})


def test_cache_config_info_has_values_of_vllm(page: str) -> None:
    ours, real = (
        dict(re.findall(r'(\w+)="([^"]*)"', next(line for line in text.splitlines() if "cache_config_info{" in line)))
        for text in (page, (DATA / "vllm-metrics-0.32.0-busy.txt").read_text())
    )

    assert ours.items() <= real.items()
    assert {"block_size", "num_gpu_blocks", "kv_cache_size_tokens", "enable_prefix_caching"} <= ours.keys()
