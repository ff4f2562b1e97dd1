"""Metric names of the supported engines, and what each of them does not report."""

from pathlib import Path

import pytest

from telemetry.metrics.engine import EngineKey, read_replica
from telemetry.metrics.engine_names import (
    ENGINES,
    EXPECTED,
    OPTIONAL_COUNTERS,
    TIERS,
    CacheFacts,
    may_count_twice,
)
from telemetry.metrics.exposition import ExpositionError
from tests.telemetry.expositions import replica_text
from tests.telemetry.metrics.pages import SGLANG, TENSORRT_LLM

DATA = Path(__file__).resolve().parents[2] / "data" / "vllm"
CAPTURE = (DATA / "vllm-metrics-0.32.0-after.txt").read_text("utf-8")


def only(text):
    ((key, engine),) = read_replica(text).engines.items()
    return key, engine


def test_sglang():
    """H3, H4: cached tokens that are not on the device are external hits."""
    sample, (key, engine) = read_replica(SGLANG), only(SGLANG)

    assert (sample.engine, sample.role, key) == ("sglang", "", EngineKey("llama", "0"))
    assert engine.counters == {
        "queries": 8_128_902, "prompt_tokens": 8_128_902, "generation_tokens": 7_557_572, "finished": 11_228,
        "hits": 2_000_000, "device_tokens": 2_000_000, "host_tokens": 300_000, "other_tokens": 40_000,
        "external_hits": 340_000, "preemptions": 3,
    }  # fmt: skip
    assert engine.gauges == {"running": 162, "waiting": 2826, "kv_usage_ratio": 0.28}
    assert engine.histograms["ttft"].counts == {0: 2, 1: 5, 2: 6}
    assert sample.facts == CacheFacts(64, 4096)
    assert engine.not_reported == {"external_queries", "p2p_tokens", "disk_tokens"}


def test_tensorrt_llm():
    """Its mean time per output token of a request is not the time between tokens."""
    sample, (_, engine) = read_replica(TENSORRT_LLM), only(TENSORRT_LLM)

    assert sample.engine == "tensorrt_llm"
    assert engine.counters == {
        "queries": 9000, "prompt_tokens": 9000, "generation_tokens": 1200, "finished": 42, "hits": 4096,
    }  # fmt: skip
    assert engine.gauges == {"running": 4, "waiting": 1, "kv_usage_ratio": 0.4}
    assert sample.facts == CacheFacts(32, 1000)
    assert {"external_hits", "device_tokens", "preemptions"} <= engine.not_reported


@pytest.mark.parametrize(
    ("text", "counter"),
    [
        pytest.param(SGLANG, "sglang:cached_tokens_total", id="sglang"),
        pytest.param(TENSORRT_LLM, "trtllm_prompt_cached_tokens_total", id="tensorrt_llm"),
    ],
)
def test_a_counter_before_its_first_count_is_0_if_it_is_declared_and_else_not_reported(text, counter):
    """H16: absent is not 0."""
    declared = "".join(line for line in text.splitlines(keepends=True) if not line.startswith(counter))
    undeclared = declared.replace(f"# TYPE {counter} counter\n", "")

    assert only(declared)[1].counters["hits"] == 0
    assert "hits" not in only(undeclared)[1].counters
    assert "hits" in only(undeclared)[1].not_reported


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_sglang_reports_its_role_in_a_split(role):
    """H19"""
    assert read_replica(SGLANG.replace('engine_type="unified"', f'engine_type="{role}"')).role == role


def test_data_parallel_ranks_of_sglang_are_engines():
    """H15"""
    ranks = SGLANG + "".join(
        f'sglang:num_running_reqs{{dp_rank="{rank}",model_name="llama",tp_rank="0"}} {5 + rank}.0\n' for rank in (1, 2)
    )
    running = {key.engine: engine.gauges["running"] for key, engine in read_replica(ranks).engines.items()}

    assert running == {"0": 162, "1": 6, "2": 7}


def test_metrics_of_no_supported_engine_are_rejected():
    with pytest.raises(ExpositionError, match="no metrics of vLLM, SGLang or TensorRT-LLM"):
        read_replica("nv_inference_count 5\n")


@pytest.mark.parametrize("names", ENGINES, ids=lambda names: names.engine)
def test_engines_use_known_names_and_share_no_metric(names):
    found = {*names.counters, *names.gauges, *names.histograms}.union(*(split.names for split in names.splits))

    assert found <= EXPECTED | set(OPTIONAL_COUNTERS)
    others = [metric for other in ENGINES if other is not names for metric in other.metrics]
    assert not any(metric.startswith(prefix) for prefix in names.prefixes for metric in others)


@pytest.mark.parametrize(("release", "missing"), [("0.28.0", set(TIERS)), ("0.32.0", set())])
def test_captures_of_two_releases_are_read_and_name_what_they_lack(release, missing):
    """H14"""
    _, engine = only((DATA / f"vllm-metrics-{release}-after.txt").read_text("utf-8"))

    assert engine.not_reported == missing
    assert engine.counters["queries"] > 0


@pytest.mark.parametrize(
    ("version", "not_reported", "twice"),
    [
        pytest.param("0.28.0", (), True, id="before"),
        pytest.param("0.32.0+cpu", (), True, id="the last before"),
        pytest.param("0.33.0", (), False, id="the first that counts once"),
        pytest.param("0.33.1rc1.dev5+g12", ("device_tokens",), False, id="the version takes precedence"),
        pytest.param("1.0", (), False, id="long after"),
        pytest.param("", ("device_tokens",), True, id="metrics of before 0.32"),
        pytest.param("", (), None, id="unknown"),
        pytest.param("dev", (), None, id="not a version"),
    ],
)
def test_which_releases_count_a_request_once_per_retry(version, not_reported, twice):
    """H13"""
    assert may_count_twice(version, not_reported) is twice


def test_a_metric_under_another_name_is_not_reported_rather_than_0():
    """H14"""
    renamed = replica_text(1000, 400).replace("vllm:prefix_cache_hits_total", "vllm:kv_prefix_hits_total")

    _, engine = only(renamed)
    assert "hits" not in engine.counters
    assert "hits" in engine.not_reported


def test_prompt_tokens_cached_at_the_first_output_are_not_read_as_hits():
    """H5: queries and hits are counted at admission."""
    _, engine = only(CAPTURE)

    metrics = {metric for names in ENGINES for metric in names.meanings if "by_source" not in metric}
    assert not any(metric.startswith("vllm:prompt_tokens_cached") for metric in metrics)
    assert (engine.counters["queries"], engine.counters["prompt_tokens"]) == (342_127, 330_127)


def test_metrics_that_may_be_wrong_behind_several_api_servers_are_not_read():
    """T9"""
    wrong = ("vllm:iteration_tokens_total", "vllm:lora_requests_info")
    assert not any(metric.startswith(wrong) for names in ENGINES for metric in names.metrics)


def test_behind_several_api_servers_start_times_are_unknown_and_the_rest_is_read():
    """H9: Prometheus' multiprocess mode has no process metrics and no ``_created``."""
    lines = CAPTURE.splitlines(keepends=True)
    several = "".join(line for line in lines if "_created" not in line and not line.startswith("process_"))

    assert (read_replica(several).started_s, only(several)[1].created_s) == (None, None)
    assert only(several)[1].counters["queries"] == 342_127
