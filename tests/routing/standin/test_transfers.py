"""KV transfers between two stand-ins, as vLLM with NixlConnector does them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.routing.standin.replica_process import ReplicaProcess, replica_process
from tests.side_by_side import alone

FAST = ("--prefill-rate", "1000000", "--step-s", "0.0005")
WORDS = "word " * 400
PREFILL = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}, "min_tokens": 1}


@pytest.fixture(scope="module")
def prefill() -> Iterator[ReplicaProcess]:
    with replica_process(*FAST, "--role", "prefill") as process:
        yield process


@pytest.fixture(scope="module")
def shared() -> Iterator[ReplicaProcess]:
    with replica_process(*FAST, "--role", "decode") as process:
        yield process


@pytest.fixture
def decode(shared: ReplicaProcess) -> ReplicaProcess:
    shared.restore()
    return shared


def prefilled(prefill: ReplicaProcess, text: str = WORDS) -> dict[str, Any]:
    """The parameters with which the blocks of a prompt can be fetched."""
    found: dict[str, Any] = prefill.chat(text, max_tokens=1, **PREFILL).json["kv_transfer_params"]
    return found


def cached(response: Any) -> int:
    tokens: int = response.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_a_prompt_is_computed_by_one_replica_and_continued_by_another(prefill, decode):
    params = prefilled(prefill)
    text = prefill.chat(WORDS, max_tokens=8).json["choices"]

    response = decode.chat(WORDS, max_tokens=8, kv_transfer_params=params)

    prompt_tokens = response.json["usage"]["prompt_tokens"]
    assert params | {"remote_block_ids": [], "remote_engine_id": "", "remote_request_id": ""} == {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [], "remote_engine_id": "",
        "remote_request_id": "", "remote_host": "127.0.0.1", "remote_port": prefill.port, "tp_size": 1,
    }  # fmt: skip
    assert len(params["remote_block_ids"]) == -(-prompt_tokens // 16)
    assert response.json["choices"] == text
    assert response.json["kv_transfer_params"] is None
    assert cached(response) == prompt_tokens - 1  # the last token is always computed
    assert decode.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer") == prompt_tokens - 1
    assert decode.metric("vllm:external_prefix_cache_hits_total") == prompt_tokens - 1
    assert decode.metric("vllm:prefix_cache_hits_total") == 0


def test_transferred_blocks_are_cached_as_if_computed(prefill, decode):
    decode.chat(WORDS, kv_transfer_params=prefilled(prefill))

    assert cached(decode.chat(WORDS)) > 300


@pytest.mark.parametrize("change", [{}, {"remote_engine_id": "other"}, {"remote_request_id": "x"}, {"remote_port": 9}])
def test_blocks_that_were_fetched_or_are_unknown_are_computed(change, prefill, decode):
    params = prefilled(prefill)
    if not change:
        decode.chat(WORDS, kv_transfer_params=params)
        decode.restore()

    response = decode.chat(WORDS, kv_transfer_params=params | change)

    assert (response.status, cached(response)) == (200, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_with_the_policy_fail_a_request_without_its_blocks_ends_with_an_error(stream, prefill):
    with replica_process(*FAST, "--role", "decode", "--kv-load-failure-policy", "fail") as strict:
        response = strict.chat(WORDS, stream=stream, kv_transfer_params=prefilled(prefill) | {"remote_port": 9})

    assert response.status == (200 if stream else 500)
    error = response.events[0] if stream else response.json
    assert error["error"]["type"] == "InternalServerError"


def test_only_a_prompt_that_ended_by_its_length_is_kept(prefill):
    assert prefill.chat(WORDS, max_tokens=1).json["kv_transfer_params"] is None
    assert prefill.chat(WORDS, max_tokens=1, n=2, **PREFILL).json["kv_transfer_params"] is None
    stopped = prefill.chat(WORDS, max_tokens=2000, stop=["a", "e", "i", "o", "u"], **PREFILL).json
    assert (stopped["choices"][0]["finish_reason"], stopped["kv_transfer_params"]) == ("stop", None)


def test_a_replica_without_a_role_ignores_the_parameters(prefill):
    with replica_process(*FAST) as plain:
        assert plain.chat(WORDS, max_tokens=1, **PREFILL).json["kv_transfer_params"] is None
        assert cached(plain.chat("x" + WORDS, kv_transfer_params=prefilled(prefill, "x" + WORDS))) == 0
        assert plain.send("POST", "/standin/kv_transfer", {}).status == 404
    assert prefill.send("POST", "/standin/kv_transfer", {}).status == 400


@alone
def test_a_transfer_takes_time_by_its_tokens(prefill):
    with replica_process(*FAST, "--role", "decode", "--kv-transfer-rate", "1000") as slow:
        params = prefilled(prefill)
        started_s = time.perf_counter()
        response = slow.chat(WORDS, max_tokens=1, kv_transfer_params=params)

        assert time.perf_counter() - started_s > response.json["usage"]["prompt_tokens"] / 1000
