"""Other engines than vLLM, by the names that their documentation gives; and what each has no name for."""

from pathlib import Path

import pytest

from telemetry.metrics.engine import EngineKey, read_replica
from telemetry.metrics.engine_names import (
    COUNTERS,
    ENGINES,
    EXPECTED,
    GAUGES,
    HISTOGRAMS,
    OPTIONAL_COUNTERS,
    CacheFacts,
    may_count_twice,
)
from telemetry.metrics.exposition import ExpositionError
from tests.telemetry.expositions import replica_text
from tests.telemetry.metrics.pages import SGLANG, TENSORRT_LLM

TIERS = {"device_tokens", "host_tokens", "p2p_tokens", "disk_tokens", "other_tokens"}
DATA = Path(__file__).resolve().parents[2] / "data" / "vllm"


def only(sample):
    ((key, engine),) = sample.engines.items()
    return key, engine


def test_sglang_s_counters_are_ours_and_its_tiers_add_up():
    """H3, H4: what was not on the device counts as external."""
    sample = read_replica(SGLANG)
    key, engine = only(sample)

    assert (sample.engine, sample.role, key) == ("sglang", "", EngineKey("llama", "0"))
    assert engine.counters == {
        "queries": 8_128_902, "prompt_tokens": 8_128_902, "generation_tokens": 7_557_572, "finished": 11_228,
        "hits": 2_000_000, "device_tokens": 2_000_000, "host_tokens": 300_000, "other_tokens": 40_000,
        "external_hits": 340_000, "preemptions": 3,
    }  # fmt: skip
    assert engine.gauges == {"running": 162, "waiting": 2826, "kv_usage_ratio": 0.28}
    assert (engine.histograms["ttft"].counts, engine.histograms["ttft"].sum) == ({0: 2, 1: 5, 2: 6}, 2.5)
    assert sample.facts == CacheFacts(64, 4096)
    assert engine.not_reported == {"external_queries", "p2p_tokens", "disk_tokens", "itl"}


def test_tensorrt_llm_s_counters_are_ours_and_a_mean_per_request_is_no_time_between_tokens():
    sample = read_replica(TENSORRT_LLM)
    _, engine = only(sample)

    assert sample.engine == "tensorrt_llm"
    assert engine.counters == {
        "queries": 9000, "prompt_tokens": 9000, "generation_tokens": 1200, "finished": 42, "hits": 4096,
    }  # fmt: skip
    assert engine.gauges == {"running": 4, "waiting": 1, "kv_usage_ratio": 0.4}
    assert sample.facts == CacheFacts(32, 1000)
    assert {"itl", "external_hits", "device_tokens", "preemptions"} <= engine.not_reported


@pytest.mark.parametrize(
    ("text", "counter"),
    [
        pytest.param(SGLANG, "sglang:cached_tokens_total", id="sglang"),
        pytest.param(TENSORRT_LLM, "trtllm_prompt_cached_tokens_total", id="tensorrt_llm"),
    ],
)
def test_a_counter_without_a_first_count_is_0_where_it_is_declared_and_else_not_reported(text, counter):
    """H16's trap once more: absent is not 0."""
    without = "".join(line for line in text.splitlines(keepends=True) if not line.startswith(counter))
    undeclared = without.replace(f"# TYPE {counter} counter\n", "")

    assert only(read_replica(without))[1].counters["hits"] == 0
    absent = only(read_replica(undeclared))[1]
    assert "hits" not in absent.counters
    assert "hits" in absent.not_reported


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_sglang_says_which_half_of_a_split_it_is(role):
    """H19"""
    assert read_replica(SGLANG.replace('engine_type="unified"', f'engine_type="{role}"')).role == role


def test_sglang_s_data_parallel_ranks_are_engines():
    """H15"""
    ranks = SGLANG + "".join(
        f'sglang:num_running_reqs{{dp_rank="{rank}",model_name="llama",tp_rank="0"}} {5 + rank}.0\n' for rank in (1, 2)
    )
    running = {key.engine: engine.gauges["running"] for key, engine in read_replica(ranks).engines.items()}

    assert running == {"0": 162, "1": 6, "2": 7}


def test_a_text_of_no_engine_that_is_known_is_refused():
    with pytest.raises(ExpositionError, match="no metrics of vLLM, SGLang or TensorRT-LLM"):
        read_replica("nv_inference_count 5\n")


@pytest.mark.parametrize("names", ENGINES, ids=lambda names: names.engine)
def test_a_table_knows_our_names_alone_and_one_engine_s_text_is_no_other_s(names):
    found = {*names.counters, *names.gauges, *names.histograms}.union(*(split.names for split in names.splits))

    assert found <= EXPECTED | set(OPTIONAL_COUNTERS)
    assert {*COUNTERS, *GAUGES, *HISTOGRAMS} == EXPECTED
    others = [wire for other in ENGINES if other is not names for wire in other.metrics]
    assert not any(wire.startswith(prefix) for prefix in names.prefixes for wire in others)


@pytest.mark.parametrize(
    ("release", "missing"),
    [
        pytest.param("0.28.0-after", TIERS, id="0.28"),
        pytest.param("0.32.0-after", set(), id="0.32"),
    ],
)  # fmt: skip
def test_captures_of_both_releases_are_read_and_what_they_lack_is_named(release, missing):
    """H14"""
    _, engine = only(read_replica((DATA / f"vllm-metrics-{release}.txt").read_text("utf-8")))

    assert engine.not_reported == missing
    assert engine.counters["queries"] > 0


@pytest.mark.parametrize(
    ("version", "not_reported", "twice"),
    [
        pytest.param("0.28.0", (), True, id="before"),
        pytest.param("0.32.0+cpu", (), True, id="the last before"),
        pytest.param("0.33.0", (), False, id="the first that counts once"),
        pytest.param("0.33.1rc1.dev5+g12", ("device_tokens",), False, id="the version is believed first"),
        pytest.param("1.0", (), False, id="long after"),
        pytest.param("", ("device_tokens",), True, id="names of before 0.32"),
        pytest.param("", (), None, id="nobody knows"),
        pytest.param("dev", (), None, id="no version"),
    ],
)
def test_which_releases_count_a_request_once_per_retry(version, not_reported, twice):
    """H13"""
    assert may_count_twice(version, not_reported) is twice


def test_a_metric_under_another_name_is_not_reported_rather_than_0():
    """H14, R19"""
    renamed = replica_text(1000, 400).replace("vllm:prefix_cache_hits_total", "vllm:kv_prefix_hits_total")

    _, engine = only(read_replica(renamed))
    assert "hits" not in engine.counters
    assert "hits" in engine.not_reported


def test_figures_of_another_moment_are_not_taken_for_hits():
    """H5: ``prompt_tokens_cached`` is counted at the first output, queries are at admission."""
    _, engine = only(read_replica((DATA / "vllm-metrics-0.32.0-after.txt").read_text("utf-8")))

    wire = {name for names in ENGINES for name in names.meanings if "by_source" not in name}
    assert not any(name.startswith("vllm:prompt_tokens_cached") for name in wire)
    assert (engine.counters["queries"], engine.counters["prompt_tokens"]) == (342_127, 330_127)


@pytest.mark.parametrize("metric", ["vllm:iteration_tokens_total", "vllm:lora_requests_info"])
def test_what_may_be_wrong_behind_several_api_servers_is_not_read(metric):
    """T9"""
    assert not any(name.startswith(metric) for names in ENGINES for name in names.metrics)


def test_behind_several_api_servers_there_is_no_start_and_the_rest_is_read():
    """H9: Prometheus' multiprocess mode has no process metrics and no ``_created``."""
    text = (DATA / "vllm-metrics-0.32.0-after.txt").read_text("utf-8")
    several = "".join(
        line for line in text.splitlines(keepends=True) if "_created" not in line and not line.startswith("process_")
    )
    sample = read_replica(several)

    assert (sample.started_s, only(sample)[1].created_s) == (None, None)
    assert only(sample)[1].counters["queries"] == 342_127
