"""Expositions of real engines and routers, and of hostile ones (H9, H14, H15)."""

import math
import random
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from telemetry.metrics import exposition
from telemetry.metrics.engine import EngineKey, read_replica
from telemetry.metrics.exposition import ExpositionError, read_samples
from telemetry.metrics.histograms import ROUTER_EDGES
from telemetry.metrics.router import RouteKey, read_router
from tests.telemetry.expositions import replica_text, router_text

DATA = Path(__file__).resolve().parents[2] / "data" / "vllm"
CAPTURES = sorted(DATA.glob("vllm-metrics-*.txt"))
LABELS = 'engine="0",model_name="tiny"'


def capture(name):
    return (DATA / f"vllm-metrics-{name}.txt").read_text("utf-8")


def only_engine(text):
    ((key, engine),) = read_replica(text).engines.items()
    return key, engine


def test_a_real_engine_after_its_load():
    sample = read_replica(capture("0.32.0-after"))
    key, engine = only_engine(capture("0.32.0-after"))

    assert key == EngineKey("tiny", "0")
    expected = {
        "queries": 342_127, "hits": 152_512, "finished": 177, "preemptions": 6, "device_tokens": 152_512,
        "host_tokens": 0, "mm_cache_queries": 0, "mm_cache_hits": 0, "queue_count": 177, "prefill_count": 177,
        "queue_ms": pytest.approx(752_905.048), "prefill_ms": pytest.approx(97_748.002),
        "computed_prompt_tokens": 177_615, "cached_prompt_tokens": 152_512, "transferred_prompt_tokens": 0,
    }  # fmt: skip
    assert {name: engine.counters[name] for name in expected} == expected
    assert not [name for name in engine.counters if name.startswith("block_")], "unknown without --kv-cache-metrics"
    assert "iteration" not in str(engine.counters)  # H14: vllm:iteration_tokens_total is a histogram
    assert engine.histograms["ttft"].total == 179
    assert (sample.facts.block_tokens, sample.facts.capacity_blocks) == (32, 2048)
    assert sample.started_s == pytest.approx(1_795_195_497.23)
    assert engine.created_s == pytest.approx(1_795_195_532.9167)
    assert sample.lora_adapters is None, "unknown without --enable-lora"


def test_a_real_engine_under_load():
    _, engine = only_engine(capture("0.32.0-busy"))

    assert (engine.gauges["running"], engine.gauges["waiting"]) == (51, 29)
    assert (engine.gauges["waiting_capacity"], engine.gauges["waiting_deferred"]) == (29, 0)
    assert 0.8 < engine.gauges["kv_usage_ratio"] < 0.9


def test_multimodal_items_and_waiting_reasons_are_added_up():
    reasons = (
        f'vllm:num_requests_waiting_by_reason{{{LABELS},lane="{lane}",reason="capacity"}} 2\n' for lane in ("a", "b")
    )
    media = f"vllm:mm_cache_queries_total{{{LABELS}}} 8\nvllm:mm_cache_hits_total{{{LABELS}}} 6\n"
    _, engine = only_engine(replica_text(1, 0) + media + "".join(reasons))

    assert (engine.counters["mm_cache_queries"], engine.counters["mm_cache_hits"]) == (8, 6)
    assert engine.gauges["waiting_capacity"] == 4


def test_a_real_engine_with_sampled_blocks_and_lora_adapters():
    """It keeps a series for each set of adapters that there was; the newest is the current one."""
    text = capture("0.32.0-blocks-lora")
    _, engine = only_engine(text)

    assert {name: count for name, count in engine.counters.items() if name.startswith("block_")} == {
        "block_lifetime_ms": pytest.approx(346_333_737.045), "block_lifetime_count": 4854,
        "block_idle_ms": pytest.approx(345_151_005.477), "block_idle_count": 4854,
        "block_reuse_gap_ms": pytest.approx(45_002.105), "block_reuse_gap_count": 90,
    }  # fmt: skip
    newest = 'running_lora_adapters="",waiting_lora_adapters=""} 1.7954804633'
    assert newest in text
    assert read_replica(text).lora_adapters == ()
    assert read_replica(text.replace(newest, newest.replace("804633", "804400"))).lora_adapters == ("gamma",)


def lora_line(running, waiting="", at="1.8e9"):
    labels = f'max_lora="2",running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"'
    return f"vllm:lora_requests_info{{{labels}}} {at}\n"


def lora_text(*adapters, at="1.8e9", started=5):
    return replica_text(1, 0, started=started) + lora_line(*adapters, at=at)


@pytest.mark.parametrize(
    ("text", "adapters"),
    [
        pytest.param(lora_text("b,a", "c,a"), ("a", "b", "c"), id="running and waiting"),
        pytest.param(lora_text("a" * 150), ("a" * 100,), id="a long name is cut"),
        pytest.param(lora_text(",".join(f"n{n:02}" for n in range(99))),
                     (*(f"n{n:02}" for n in range(32)), "..."), id="many"),
        pytest.param(lora_text("a", at="1.7e9") + lora_line(",".join(["n" * 50] * 90)), None, id="too long"),
        pytest.param(lora_text("a", at="NaN"), None, id="NaN"),
        pytest.param(lora_text("a", at="x"), None, id="not a number"),
        pytest.param(lora_text("a\0"), None, id="NUL"),
        pytest.param(lora_text("a").replace("waiting_lora", "other_lora"), None, id="other labels"),
        pytest.param(lora_text("a", started=None), None, id="several API servers"),
        pytest.param(lora_text("a") + replica_text(1, 0, engine="1"), None, id="several engines"),
    ],
)  # fmt: skip
def test_adapters_are_bounded_and_unknown_where_they_may_be_wrong(text, adapters):
    """An invalid list of adapters does not affect other figures (T9)."""
    sample = read_replica(text)

    assert sample.lora_adapters == adapters
    assert min(sample.engines.items())[1].counters["queries"] == 1


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
def test_every_capture_agrees_with_prometheus_client(path):
    text = path.read_text("utf-8")
    names = {"vllm:prefix_cache_queries_total", "vllm:num_requests_running", "vllm:time_to_first_token_seconds_bucket"}
    expected = [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name in names
    ]

    assert [(sample.name, sample.labels, sample.value) for sample in read_samples(text, names)] == expected
    assert only_engine(text)[1].counters["queries"] >= 0


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("vllm:prefix_cache_queries_total", ""),
        ("vllm:prefix_cache_queries", ""),
        ("vllm:prefix_cache_queries_total", f"vllm:gpu_prefix_cache_queries_total{{{LABELS}}} 7\n"),
    ],
    ids=["current", "without _total", "current and former"],
)
def test_names_of_all_releases_are_read_and_the_current_one_is_preferred(name, more):
    """H14"""
    text = replica_text(1000, 100).replace("vllm:prefix_cache_queries_total", name) + more

    assert only_engine(text)[1].counters["queries"] == 1000


@pytest.mark.parametrize(
    ("unit", "queries"),
    [("queried blocks", 16_000), ("queried tokens", 1000), ("queriedtokens", 1000), ("", None)],
)
def test_counters_of_blocks_become_tokens_and_a_counter_without_a_unit_is_not_reported(unit, queries):
    """vLLM 0.8 counted blocks, 0.9 counted tokens, under one name; only its HELP text says which."""
    former = [f"vllm:gpu_prefix_cache_{name}_total" for name in ("queries", "hits")]
    text = replica_text(1000, 100).replace("vllm:prefix_cache_", "vllm:gpu_prefix_cache_")
    if unit:
        text = "".join(f"# HELP {name} GPU prefix cache, in terms of number of {unit}.\n" for name in former) + text

    engine = only_engine(text)[1]

    assert engine.counters.get("queries") == queries
    assert engine.counters.get("hits") == (None if queries is None else queries / 10)
    assert {"queries", "hits"} & engine.not_reported == (set() if queries else {"queries", "hits"})


def test_counters_of_blocks_of_unknown_size_are_not_reported():
    name = "vllm:gpu_prefix_cache_queries_total"
    text = replica_text(1000, 100, facts=False).replace("vllm:prefix_cache_queries_total", name)
    assert "queries" in only_engine(f"# HELP {name} number of queried blocks.\n{text}")[1].not_reported


def test_a_usage_in_percent_is_not_read_as_a_ratio():
    text = replica_text(1000, 100) + f"vllm:kv_cache_usage_perc{{{LABELS}}} 43.0\n"
    text = "\n".join(line for line in text.split("\n") if not (line.startswith("vllm:kv_cache") and "43" not in line))
    assert "kv_usage_ratio" in only_engine(text)[1].not_reported


def test_data_parallel_ranks_are_separate_engines():
    """H15"""
    sample = read_replica(replica_text(100, 10, engine="0") + replica_text(300, 30, engine="1"))

    assert [key.engine for key in sorted(sample.engines)] == ["0", "1"]
    assert sample.facts.capacity_blocks == 2 * 2048


@pytest.mark.parametrize(("tokens", "blocks"), [("41719", 1303), ("49216", 1537), ("0", 1537), ("None", 1537)])
def test_an_engine_with_several_groups_of_layers_has_room_for_fewer_tokens_than_its_blocks(tokens, blocks):
    """As vLLM 0.32 reports a model of which every other layer has a sliding window."""
    labels = f'block_size="32",engine="0",kv_cache_size_tokens="{tokens}",num_gpu_blocks="1538"'
    text = replica_text(1000, 100, facts=False) + f"vllm:cache_config_info{{{labels}}} 1.0\n"

    assert read_replica(text).facts.capacity_blocks == blocks


@pytest.mark.parametrize(("value", "lacks"), [("True", False), ("False", True), ("None", False)])
def test_an_engine_says_whether_it_runs_without_prefix_caching(value, lacks):
    labels = f'block_size="32",enable_prefix_caching="{value}",engine="0",num_gpu_blocks="1538"'
    text = replica_text(1000, 100, facts=False) + f"vllm:cache_config_info{{{labels}}} 1.0\n"

    assert read_replica(text).facts.lacks_prefix_cache == lacks


def test_a_torn_histogram_or_an_invalid_gauge_is_unknown_and_affects_nothing_else():
    text = replica_text(1000, 100, ttft=(1, 2, 3, 4, 5), running="NaN", blocks="None")
    torn = "\n".join(line for line in text.split("\n") if 'le="+Inf"' not in line)

    sample, (_, engine) = read_replica(torn), only_engine(torn)
    assert "ttft" not in engine.histograms
    assert "running" not in engine.gauges
    assert sample.facts.capacity_blocks is None
    assert engine.counters["queries"] == 1000


def test_label_values_may_contain_anything():
    model = 'a"b\\c\nd}{ e=",' + "é"
    escaped = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    text = f'vllm:prefix_cache_queries_total{{engine="0",model_name="{escaped}"}} 5 1700000000000\n'

    key, engine = only_engine(text)
    assert (key.model, engine.counters["queries"]) == (model, 5)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param(replica_text(1, 0)[:-1], id="torn"),
        pytest.param('vllm:prefix_cache_hits_total{engine="0"\n', id="unclosed"),
        pytest.param('vllm:prefix_cache_hits_total{engine="0"} x\n', id="not a number"),
        pytest.param('vllm:prefix_cache_hits_total{engine="0"} 1_000\n', id="a number in Python only"),
        pytest.param('vllm:prefix_cache_hits_total{engine="0"} 0 # {t="1"} 5\n', id="exemplar"),
        pytest.param('vllm:prefix_cache_hits_total{engine="0",engine="1"} 1\n', id="duplicate label"),
        pytest.param(f'vllm:prefix_cache_hits_total{{engine="{"0" * 201}"}} 1\n', id="long label"),
        pytest.param(f'vllm:prefix_cache_hits_total{{engine="0"}} {"1" * 5000}\n', id="long line"),
        pytest.param("other 1\n" * (exposition.MAX_SERIES + 1), id="too many series"),
        pytest.param("x" * exposition.MAX_BYTES + "\n", id="too long"),
        pytest.param(replica_text("NaN", 0), id="NaN"),
        pytest.param(replica_text("+Inf", 0), id="infinite"),
        pytest.param(replica_text(-1, 0), id="negative"),
        pytest.param("python_info 1\n", id="another program"),
    ],
)
def test_an_invalid_exposition_is_rejected_as_a_whole(text):
    with pytest.raises(ExpositionError):
        read_replica(text)


@pytest.mark.parametrize("seed", range(20))
def test_a_randomly_damaged_exposition_is_read_or_rejected(seed):
    generator = random.Random(seed)
    text = list(replica_text(1000, 100, ttft=(1, 2, 3, 4, 5), started=1.0))
    for _ in range(30):
        text[generator.randrange(len(text))] = generator.choice('{}",=\n\\ 0e#')
    try:
        sample = read_replica("".join(text))
    except ExpositionError:
        return
    for engine in sample.engines.values():
        assert all(value >= 0 and math.isfinite(value) for value in engine.counters.values())


def test_the_cache_of_parsed_series_is_bounded():
    for number in range(exposition.CACHED_SERIES + 100):
        read_samples(f'known{{n="{number}"}} 1\n', {"known"})

    assert exposition._series.cache_info().currsize <= exposition.CACHED_SERIES


def test_a_router_s_counters_and_histograms_by_label_set():
    first = {
        "group": "coding", "requests": {"ok": 5, "replica_error": 1, "cancelled": 2}, "prompt_tokens": 900,
        "ttft": {7: 3}, "streamed_latency": {9: 2}, "plain_latency": {20: 5},
    }  # fmt: skip
    revisions = ({"revision": n, "policy_ttft": {7: n}, "policy_plain_latency": {20: n}} for n in (1, 2))
    sample = read_router(router_text(first, *revisions, boot="b7"))

    assert sample.boot == "b7"
    assert sample.routes[RouteKey("chat", "coding", "r1", "chat", 1)].counters == {
        "requests": 8, "ok_requests": 5, "replica_error_requests": 1, "cancelled_requests": 2, "prompt_tokens": 900,
        "spilled_requests": 0,
    }  # fmt: skip
    histograms = sample.routes[RouteKey("chat", "coding", "r1")].histograms
    assert histograms["ttft"].edges == ROUTER_EDGES
    assert {name: of.counts for name, of in histograms.items()} == {
        "ttft": {7: 3}, "streamed_latency": {9: 2}, "plain_latency": {20: 5},
    }  # fmt: skip
    for revision in (1, 2):
        by_revision = sample.routes[RouteKey("chat", "", "", "chat", revision)].histograms
        assert {name: of.counts for name, of in by_revision.items()} == {
            "ttft": {7: revision}, "plain_latency": {20: revision},
        }  # fmt: skip
    assert RouteKey("chat", "", "", "", 0) not in sample.routes


def test_an_unknown_kind_of_response_is_ignored():
    text = router_text({"plain_latency": {20: 5}}).replace('response="plain"', 'response="pushed"')

    assert read_router(text).routes == {}


def test_what_the_router_really_serves_is_read():
    """The names and the sparse histograms are the router's own."""
    from routing.balancing.placement import CandidateLoads
    from routing.observability.decision_log import Record
    from routing.observability.metrics import Metrics, Outcome

    metrics = Metrics()
    for seconds in (0.0005, 0.05, 0.05, 3.0, 10_000.0):
        placed = ("chat", "", "", "everyday", 4, "", "r1", "")
        record = Record("", 0.0, *placed, 1, None, None, [], CandidateLoads([]), arm="canary")
        record.status, record.is_streamed = 200, True
        record.ttft_s = record.latency_s = seconds
        metrics.count_placed(record, Outcome.OK)
        record.is_streamed, record.ttft_s = False, None
        metrics.count_placed(record, Outcome.OK)

    routes = read_router(router_text() + "\n".join(metrics.lines(all_buckets=True)) + "\n").routes
    for key in (RouteKey("chat", "", "r1"), RouteKey("chat", "", "", "everyday", 4)):
        ttft = routes[key].histograms["ttft"]
        assert ttft.total == 5
        assert (min(ttft.counts), max(ttft.counts)) == (0, len(ROUTER_EDGES))
        assert routes[key].histograms["plain_latency"].counts == ttft.counts
    assert routes[RouteKey("chat", "", "r1")].histograms["streamed_latency"].counts == ttft.counts
    assert routes[RouteKey("chat", "", "r1", "everyday", 4)].counters["ok_requests"] == 10


def test_a_router_may_serve_more_series_than_a_replica():
    """50 groups on 8 replicas with 40 latencies each."""
    ttft = dict.fromkeys(range(100, 140), 1)
    routes = [{"group": f"g{group}", "replica": f"r{n}", "ttft": ttft} for group in range(50) for n in range(8)]
    text = router_text(*routes)

    assert text.count("\n") > exposition.MAX_SERIES
    assert len(read_router(text).routes) == 400
    for invalid in ("x 1\n" * (exposition.ROUTER_SERIES + 1), replica_text(1, 0)):
        with pytest.raises(ExpositionError):
            read_router(invalid)
