"""The stand-in replica as a running server: streams, faults, disconnecting clients, shutdown."""

from __future__ import annotations

import http.client
import json
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from tests.routing.standin.replica_process import DEADLINE_S, ReplicaProcess, replica_process


@pytest.fixture(scope="module")
def shared() -> Iterator[ReplicaProcess]:
    with replica_process() as process:
        yield process


@pytest.fixture
def replica(shared: ReplicaProcess) -> Iterator[ReplicaProcess]:
    """A replica without a fault and with an empty cache."""
    yield shared
    shared.restore()


def open_stream(replica: ReplicaProcess, content: str, max_tokens: int = 4) -> http.client.HTTPConnection:
    """Start a stream and read nothing of it."""
    connection = replica.connect()
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": max_tokens, "stream": True}
    replica.start(connection, "POST", "/v1/chat/completions", body)
    return connection


def test_the_next_turn_finds_the_previous_output_in_the_cache(replica):
    first = replica.chat("a question of odd length", max_tokens=200).json
    answer = first["choices"][0]["message"]["content"]
    messages = [
        {"role": "user", "content": "a question of odd length"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "and then?"},
    ]

    second = replica.send("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 2}).json

    whole_turn = first["usage"]["total_tokens"] - 1  # the last token's KV is never computed
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == whole_turn // 16 * 16


def test_replicas_with_the_same_seed_generate_the_same_output(replica):
    with replica_process() as other:
        assert other.chat("hello", max_tokens=9).json["choices"] == replica.chat("hello", max_tokens=9).json["choices"]


def test_tokenize_and_usage_count_the_same_tokens(replica):
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "grüße, 世界"}]
    counted = replica.send("POST", "/tokenize", {"messages": messages}).json
    usage = replica.send("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 1}).json["usage"]

    assert counted["count"] == len(counted["tokens"]) == usage["prompt_tokens"]


def test_token_ids_and_text_share_blocks(replica):
    prompt = "the very same beginning in two forms, which is long enough for a few blocks " * 4
    tokens = replica.send("POST", "/tokenize", {"prompt": prompt}).json["tokens"]
    replica.send("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 1})

    usage = replica.send("POST", "/v1/completions", {"prompt": tokens, "max_tokens": 1}).json["usage"]

    assert usage["prompt_tokens_details"]["cached_tokens"] == (usage["prompt_tokens"] - 1) // 16 * 16


def test_prompts_with_different_salts_share_no_blocks(replica):
    long = "shared beginning " * 30
    replica.chat(long, cache_salt="a")

    cached = [
        replica.chat(long, cache_salt=salt).json["usage"]["prompt_tokens_details"]["cached_tokens"] for salt in "ab"
    ]

    assert cached[0] > 0
    assert cached[1] == 0


@pytest.mark.parametrize(
    ("fields", "reads_cache"),
    [
        ({"echo": True}, True),
        ({"logprobs": 1}, True),
        ({"echo": True, "logprobs": 0}, False),
        ({"prompt_logprobs": 0}, False),
    ],
)
def test_log_probabilities_of_the_prompt_are_computed_without_cached_blocks(replica, fields, reads_cache):
    body = {"prompt": "a few examples of a task " * 30, "max_tokens": 1}
    replica.send("POST", "/v1/completions", body)
    queries = replica.metric("vllm:prefix_cache_queries_total")

    usage = replica.send("POST", "/v1/completions", body | fields).json["usage"]

    assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) == reads_cache
    assert (replica.metric("vllm:prefix_cache_queries_total") > queries) == reads_cache


def test_without_prefix_caching_nothing_is_reused_or_counted():
    with replica_process("--no-enable-prefix-caching") as replica:
        for _ in range(2):
            usage = replica.chat("shared beginning " * 30).json["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert replica.metric("vllm:prefix_cache_queries_total") == 0
        assert replica.metric("vllm:cache_config_info", enable_prefix_caching="False") == 1


def test_output_ends_before_a_stop_string(replica):
    whole = replica.chat("say something", max_tokens=20).json["choices"][0]["message"]["content"]
    stop = whole[30:34]

    choice = replica.chat("say something", max_tokens=20, stop=[stop]).json["choices"][0]

    assert choice["message"]["content"] == whole[: whole.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_a_stream_has_the_text_of_the_whole_response(replica):
    whole = replica.chat("hello", max_tokens=30).json["choices"][0]["message"]["content"]

    events = replica.chat("hello", max_tokens=30, stream=True).events

    assert events.pop() == "[DONE]"
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == whole


def test_output_stops_by_itself_unless_eos_is_ignored(replica):
    replica.fault(kind="slow", factor=0.05)  # a factor below 1 is faster

    own, forced = (replica.chat("and so on", max_tokens=900, ignore_eos=ignore).json for ignore in (False, True))

    assert own["choices"][0]["finish_reason"] == "stop"
    assert forced["choices"][0]["finish_reason"] == "length"
    assert own["usage"]["completion_tokens"] < forced["usage"]["completion_tokens"] == 900


@pytest.mark.parametrize("content", ["word", "word " * 40_000], ids=["decode", "prefill"])  # 6 s of prefill
def test_the_request_of_a_disconnected_client_is_aborted_and_not_counted(replica, content):
    before = replica.metric("vllm:e2e_request_latency_seconds_count")
    connection = open_stream(replica, content, max_tokens=5000)
    replica.wait_for(lambda: replica.metric("vllm:num_requests_running") == 1, "the request to run")

    connection.close()

    replica.wait_for(lambda: replica.metric("vllm:num_requests_running") == 0, "the request to be gone")
    assert replica.metric("vllm:e2e_request_latency_seconds_count") == before
    assert replica.metric("vllm:request_success_total", finished_reason="abort") == 0
    assert replica.send("GET", "/load").json == {"server_load": 0}


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_disconnect_while_the_process_is_stopped_cause_no_error(capfd, *, stream):
    body = {"messages": [{"role": "user", "content": "word"}], "max_tokens": 4, "stream": stream}
    with replica_process() as replica:
        replica.process.send_signal(signal.SIGSTOP)
        for _ in range(8):
            connection = replica.connect()
            replica.start(connection, "POST", "/v1/chat/completions", body)
            connection.close()
        replica.process.send_signal(signal.SIGCONT)

        response = replica.chat("word")

        assert response.json["usage"]["completion_tokens"] == 4
        assert replica.send("GET", "/load").json == {"server_load": 0}
    assert capfd.readouterr().err == ""


# --- faults ------------------------------------------------------------------------------------------


def test_a_hung_engine_sends_headers_only_and_its_gauges_go_stale(replica):
    assert replica.fault(kind="hang").json == {"kind": "hang"}
    connection = open_stream(replica, "hello")
    response = connection.getresponse()

    assert response.status == 200
    assert replica.send("GET", "/health").status == 200
    assert replica.metric("vllm:num_requests_running") == 0
    assert replica.metric("vllm:num_requests_waiting") == 0
    assert replica.send("GET", "/load").json == {"server_load": 1}

    replica.fault(kind="none")
    assert response.read().endswith(b"data: [DONE]\n\n")
    connection.close()


def test_a_slow_engine_takes_longer_by_its_factor(replica):
    replica.fault(kind="slow", factor=8)
    started_s = time.perf_counter()

    replica.chat("hello", max_tokens=10)

    assert time.perf_counter() - started_s > 10 * 0.010 * 8


def test_a_crash_aborts_a_stream_after_the_configured_events(replica):
    replica.fault(kind="crash_after_chunks", chunks=3)
    connection = open_stream(replica, "hello", max_tokens=50)
    response = connection.getresponse()

    with pytest.raises((http.client.IncompleteRead, ConnectionError)) as failure:
        response.read()

    if isinstance(failure.value, http.client.IncompleteRead):
        assert failure.value.partial.count(b"data: ") == 3
    connection.close()
    replica.wait_for(lambda: replica.metric("vllm:num_requests_running") == 0, "the request to be gone")


def test_a_crash_aborts_a_response_that_is_not_streamed(replica):
    replica.fault(kind="crash_after_chunks", chunks=0)

    with pytest.raises((http.client.HTTPException, ConnectionError)):
        replica.chat("hello")


def test_a_crashed_engine_sends_an_error_event_and_done(replica):
    replica.fault(kind="crash_after_chunks", chunks=2, how="engine")

    events = replica.chat("hello", max_tokens=50, stream=True).events

    assert events[-1] == "[DONE]"
    assert events[-2]["error"] == {
        "message": "EngineCore encountered an issue.",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
    assert len(events) == 4


@pytest.mark.parametrize("status", [429, 503])
def test_the_refuse_fault_responds_with_its_status(replica, status):
    replica.fault(kind="refuse", status=status)

    responses = [replica.chat("hello"), replica.chat("hello", stream=True)]

    assert [response.status for response in responses] == [status] * 2
    assert responses[0].json["error"]["code"] == status
    assert replica.send("GET", "/health").status == 200


@pytest.mark.parametrize(
    "fault",
    [{}, {"kind": "melt"}, {"kind": "slow", "factor": 0}, {"kind": "refuse", "status": 200}, {"kind": "hang", "x": 1}],
)
def test_an_invalid_fault_is_rejected_and_changes_nothing(replica, fault):
    assert replica.send("POST", "/standin/fault", fault).status == 400
    assert replica.send("GET", "/standin/fault").json == {"kind": "none"}


@pytest.mark.parametrize(
    "odd",
    [
        b'"max_tokens":' + b"9" * 5000,
        b'"zz":"\xff\xfe"',
        b'"messages":[{"role":"user","content":[7]}]',
        b'"messages":[{"role":"user","content":[["x"]]}]',
        b'"zz":' + b"[" * 100_000,
    ],
    ids=["digits", "utf8", "number", "list", "deep"],
)
def test_an_unreadable_body_is_a_400(replica, odd):
    body = b'{"messages":[{"role":"user","content":"x"}],' + odd + b"}"
    answer = replica.send("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    assert (answer.status, answer.json["error"]["code"]) == (400, 400)


# --- the end -----------------------------------------------------------------------------------------


def test_sigterm_ends_running_requests_with_abort_and_then_the_process():
    with replica_process() as replica:
        plain: list[object] = []
        thread = threading.Thread(target=lambda: plain.append(replica.chat("x", max_tokens=5000).json))
        thread.start()
        connection = open_stream(replica, "y", max_tokens=5000)
        response = connection.getresponse()
        replica.wait_for(lambda: replica.metric("vllm:num_requests_running") == 2, "both to run")

        replica.process.send_signal(signal.SIGTERM)

        *_, last, done = [event for event in response.read().split(b"\n\n") if event]
        connection.close()
        thread.join(DEADLINE_S)
        assert replica.process.wait(DEADLINE_S) == 0
    assert done == b"data: [DONE]"
    assert json.loads(last.removeprefix(b"data: "))["choices"][0]["finish_reason"] == "abort"
    assert plain[0]["choices"][0]["finish_reason"] == "abort"  # type: ignore[index]


def test_a_port_in_use_ends_the_start_with_a_message():
    with (
        replica_process() as replica,
        pytest.raises(AssertionError, match="did not start"),
        replica_process("--port", str(replica.port)),
    ):
        pass
