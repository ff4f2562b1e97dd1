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

NOT_SPOKEN = {
    "GET /kv_event_sources": "no KV events yet",
    "messages": "Anthropic's API is not the stand-in's business",
    "messages-stream": "Anthropic's API is not the stand-in's business",
    "responses": "the responses API is not spoken yet",
    "per-request-metrics": "captured with an option that the stand-in does not have",
    "per-request-metrics-chat-stream": "captured with an option that the stand-in does not have",
    "queue-full": "has its own test: it needs a full queue",
    "queue-full-stream": "has its own test: it needs a full queue",
    "during-drain-health": "captured with --shutdown-timeout",
    "during-drain-new-request": "captured with --shutdown-timeout",
}
OWN_WORDS = {
    "token-id-out-of-vocab": "the stand-in's vocabulary is all 4-byte words",
}


@pytest.fixture(scope="module")
def replica() -> Iterator[ReplicaProcess]:
    with replica_process(*SIZE) as process:
        yield process


@pytest.fixture(scope="module")
def guarded() -> Iterator[ReplicaProcess]:
    with replica_process(*SIZE, "--api-key", "sekret") as process:
        yield process


# --- HTTP --------------------------------------------------------------------------------------------


def captured(name: str) -> list[Any]:
    lines = (DATA / f"vllm-http-0.32.0-{name}.jsonl").read_text().splitlines()
    cases = [json.loads(line) for line in lines]
    return [pytest.param(case, id=case["case"]) for case in cases if case["case"] not in NOT_SPOKEN]


def asked(case: dict[str, Any]) -> Any:
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
    return replica.send(request["method"], request["path"], asked(case), request.get("headers"))


def check_head(case: dict[str, Any], answer: Any) -> None:
    expected = case["response"]
    assert answer.status == expected["status"]
    for name in ("content-type", "vary", "allow", "transfer-encoding", "server"):
        assert answer.headers.get(name) == expected["headers"].get(name), name
    assert ("x-request-id" in answer.headers) == ("x-request-id" in expected["headers"])


def events_of(case: dict[str, Any]) -> list[Any]:
    text = "".join(read[1] for read in case["response"]["reads"])
    data = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


def check_body(case: dict[str, Any], answer: Any) -> None:
    if "reads" in case["response"]:
        expected = [json.dumps(shape(event)) for event in events_of(case)]
        found = [json.dumps(shape(event)) for event in answer.events]
        if "n2" in case["case"]:  # the order of two answers' tokens is timing
            expected, found = sorted(expected), sorted(found)
        assert found == expected
        return
    body = case["response"]["body"]
    if not body or case["request"]["method"] == "HEAD":
        assert answer.body == b""
        return
    document = json.loads(body)
    if answer.status == 200:
        assert list(answer.json) == list(document)
        assert shape(answer.json) == shape(document)
    elif case["case"] in OWN_WORDS:
        assert shape(answer.json) == shape(document)
    else:
        assert answer.json == document


@pytest.mark.parametrize("case", captured("ok"))
def test_what_vllm_answers_the_stand_in_answers_in_the_same_form(replica: ReplicaProcess, case: Any) -> None:
    answer = send(replica, case)

    check_head(case, answer)
    check_body(case, answer)


@pytest.mark.parametrize("case", captured("errors"))
def test_what_vllm_refuses_the_stand_in_refuses_in_the_same_words(replica: ReplicaProcess, case: Any) -> None:
    answer = send(replica, case)

    check_head(case, answer)
    check_body(case, answer)


@pytest.mark.parametrize("case", captured("sleep-hang-crash"))
def test_sleeping_and_waking_answers_as_vllm_does(replica: ReplicaProcess, case: Any) -> None:
    answer = send(replica, case)

    check_head(case, answer)
    check_body(case, answer)


@pytest.mark.parametrize("case", captured("auth-queue-drain"))
def test_the_api_key_guards_what_vllm_guards(guarded: ReplicaProcess, case: Any) -> None:
    answer = send(guarded, case)

    check_head(case, answer)
    check_body(case, answer)


def test_a_full_queue_is_a_503_as_vllm_words_it() -> None:
    with replica_process(*SIZE, "--max-num-queued-reqs", "1", "--step-s", "0.2") as replica:
        busy = threading.Thread(target=replica.chat, args=("a long answer", 20))
        busy.start()
        replica.wait_for(lambda: replica.send("GET", "/load").json == {"server_load": 1}, "the first request")
        case = next(
            json.loads(line)
            for line in (DATA / "vllm-http-0.32.0-auth-queue-drain.jsonl").read_text().splitlines()
            if '"queue-full"' in line
        )

        answer = send(replica, case)
        streamed = replica.chat("x", stream=True)

        check_head(case, answer)
        check_body(case, answer)
        assert (streamed.status, streamed.json) == (503, answer.json)
        assert replica.metric("vllm:admission_rejections_total", reason="max_num_queued_reqs") == 2
        busy.join()


def test_every_captured_exchange_is_either_spoken_or_named_as_not() -> None:
    names = {
        json.loads(line)["case"] for path in DATA.glob("vllm-http-*.jsonl") for line in path.read_text().splitlines()
    }

    assert names >= NOT_SPOKEN.keys()


def test_usage_tells_cached_and_created_tokens_as_vllm_does_for_chat_and_for_completions() -> None:
    long = "the same opening " * 60
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
EMPTY_WITHOUT_USE = "http_"


@pytest.fixture(scope="module")
def shown() -> Iterator[dict[str, Exposed]]:
    """Metric families of the stand-in after one request of each kind."""
    with replica_process(*SIZE) as replica:
        replica.send("GET", "/v1/models")
        replica.chat("hello")
        replica.send("GET", "/v1/nothing")
        answer = replica.send("GET", "/metrics")
        assert answer.headers["content-type"] == "text/plain; version=1.0.0; charset=utf-8"
        yield exposed(answer.body.decode())


@pytest.mark.parametrize("name", REAL)
def test_each_metric_has_vllms_type_help_labels_and_buckets(shown: dict[str, Exposed], name: str) -> None:
    real, ours = REAL[name], shown[name]

    assert (ours.kind, ours.help_text) == (real.kind, real.help_text)
    assert ours.samples == real.samples
    if not name.startswith("http_request_duration_seconds"):  # there the real one leaves out buckets at random
        assert ours.edges == real.edges
    for label in real.values.keys() & {"engine", "reason", "source", "sleep_state", "finished_reason", "generation"}:
        assert ours.values[label] == real.values[label]


def test_the_families_come_in_vllms_order_and_there_are_no_others(shown: dict[str, Exposed]) -> None:
    assert list(shown) == list(REAL)


BLOCKS = exposed((DATA / "vllm-metrics-0.32.0-blocks-lora.txt").read_text())


def test_with_vllms_option_the_life_of_sampled_blocks_is_told() -> None:
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


def test_the_cache_configuration_is_told_with_vllms_values() -> None:
    with replica_process(*SIZE) as replica:
        page = replica.send("GET", "/metrics").body.decode()
    ours, real = (
        dict(re.findall(r'(\w+)="([^"]*)"', next(line for line in text.splitlines() if "cache_config_info{" in line)))
        for text in (page, (DATA / "vllm-metrics-0.32.0-busy.txt").read_text())
    )

    told = {"prefix_caching_hash_algo", "kv_cache_memory_bytes"}  # the one is ours, the other has no meaning here
    assert {key: value for key, value in ours.items() if key not in told} == {
        key: value for key, value in real.items() if key not in told
    }
