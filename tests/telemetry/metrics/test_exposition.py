"""Expositions of real engines, of old ones, and of hostile ones (S8, H9, H14, H15)."""

import contextlib
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from telemetry.metrics import exposition
from telemetry.metrics.engine import EngineKey, read_replica
from telemetry.metrics.exposition import ExpositionError, read_samples
from telemetry.metrics.histograms import ROUTER_EDGES
from telemetry.metrics.router import RouteKey, read_router
from tests.telemetry.expositions import replica_text, router_text

DATA = Path(__file__).resolve().parents[2] / "data" / "vllm"
CAPTURES = sorted(DATA.glob("vllm-metrics-*.txt"))


def capture(name):
    return (DATA / f"vllm-metrics-{name}.txt").read_text("utf-8")


def only_engine(text):
    ((key, engine),) = read_replica(text).engines.items()
    return key, engine


def test_a_real_engine_after_its_load():
    sample = read_replica(capture("0.32.0-after"))
    key, engine = only_engine(capture("0.32.0-after"))

    assert key == EngineKey("tiny", "0")
    assert (engine.counters["queries"], engine.counters["hits"]) == (342_127, 152_512)
    assert (engine.counters["finished"], engine.counters["preemptions"]) == (177, 6)
    assert (engine.counters["device_tokens"], engine.counters["host_tokens"]) == (152_512, 0)
    assert engine.histograms["ttft"].total == 179
    assert engine.histograms["ttft"].sum == pytest.approx(872.396)
    assert len(engine.histograms["ttft"].edges) == 22
    assert (sample.facts.block_tokens, sample.facts.capacity_blocks) == (32, 2048)
    assert sample.started_s == pytest.approx(1_795_195_497.23)
    assert engine.created_s == pytest.approx(1_795_195_532.9167)


def test_a_real_engine_under_load():
    _, engine = only_engine(capture("0.32.0-busy"))

    assert (engine.gauges["running"], engine.gauges["waiting"]) == (51, 29)
    assert 0.8 < engine.gauges["kv_usage_ratio"] < 0.9


def test_a_real_engine_splits_the_first_token_s_time_and_the_prompt_s_tokens():
    """Time in queue and in prefill, waiting by reason, prompt tokens by source."""
    _, after = only_engine(capture("0.32.0-after"))
    _, busy = only_engine(capture("0.32.0-busy"))

    assert (after.counters["queue_count"], after.counters["prefill_count"]) == (177, 177)
    assert after.counters["queue_ms"] == pytest.approx(752_905.048)
    assert after.counters["prefill_ms"] == pytest.approx(97_748.002)
    sources = [after.counters[f"{name}_prompt_tokens"] for name in ("computed", "cached", "transferred")]
    assert sources == [177_615, 152_512, 0]
    assert (after.counters["mm_cache_queries"], after.counters["mm_cache_hits"]) == (0, 0)
    assert (busy.gauges["waiting_capacity"], busy.gauges["waiting_deferred"]) == (29, 0)
    assert not [name for name in after.counters if name.startswith("block_")], "without --kv-cache-metrics unknown"


def test_multimodal_items_are_read_apart_and_reasons_add_up():
    labels = 'engine="0",model_name="tiny"'
    reasons = [
        f'vllm:num_requests_waiting_by_reason{{{labels},lane="{lane}",reason="capacity"}} 2\n' for lane in ("a", "b")
    ]
    media = f"vllm:mm_cache_queries_total{{{labels}}} 8\nvllm:mm_cache_hits_total{{{labels}}} 6\n"
    _, engine = only_engine(replica_text(1, 0) + media + "".join(reasons))

    assert (engine.counters["mm_cache_queries"], engine.counters["mm_cache_hits"]) == (8, 6)
    assert engine.gauges["waiting_capacity"] == 4


def test_a_real_engine_that_samples_blocks_tells_of_their_life():
    _, engine = only_engine(capture("0.32.0-blocks-lora"))

    counted = {name: count for name, count in engine.counters.items() if name.startswith("block_")}
    assert counted == {
        "block_lifetime_ms": pytest.approx(346_333_737.045),
        "block_lifetime_count": 4854,
        "block_idle_ms": pytest.approx(345_151_005.477),
        "block_idle_count": 4854,
        "block_reuse_gap_ms": pytest.approx(45_002.105),
        "block_reuse_gap_count": 90,
    }


def test_a_real_engine_tells_the_adapters_of_its_newest_step():
    """It keeps a series for each set of adapters that there was; the newest is the present one."""
    text = capture("0.32.0-blocks-lora")
    idle = 'running_lora_adapters="",waiting_lora_adapters=""} 1.7954804633'
    assert idle in text

    assert read_replica(text).lora_adapters == ()
    assert read_replica(text.replace(idle, idle.replace("804633", "804400"))).lora_adapters == ("gamma",)
    assert read_replica(capture("0.32.0-after")).lora_adapters is None, "without --enable-lora"


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
        pytest.param(lora_text("a", at="NaN"), None, id="no time"),
        pytest.param(lora_text("a", at="x"), None, id="no number"),
        pytest.param(lora_text("a\0"), None, id="a name that no database can hold"),
        pytest.param(lora_text("a").replace("waiting_lora", "other_lora"), None, id="other labels"),
        pytest.param(lora_text("a", started=None), None, id="several API servers"),
        pytest.param(lora_text("a") + replica_text(1, 0, engine="1"), None, id="several engines"),
    ],
)  # fmt: skip
def test_adapters_are_bounded_and_unknown_where_they_may_be_wrong(text, adapters):
    """Nothing that is told of adapters spoils the other figures (S8, T9)."""
    sample = read_replica(text)

    assert sample.lora_adapters == adapters
    assert min(sample.engines.items())[1].counters["queries"] == 1


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
def test_every_capture_is_read_and_agrees_with_prometheus_client(path):
    text = path.read_text("utf-8")
    names = {"vllm:prefix_cache_queries_total", "vllm:num_requests_running", "vllm:time_to_first_token_seconds_bucket"}
    theirs = [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name in names
    ]

    assert [(sample.name, sample.labels, sample.value) for sample in read_samples(text, names)] == theirs
    assert only_engine(text)[1].counters["queries"] >= 0


def test_tokens_of_an_iteration_are_a_histogram_and_no_counter():
    """H14's trap: ``vllm:iteration_tokens_total``."""
    assert "iteration" not in str(only_engine(capture("0.32.0-after"))[1].counters)


@pytest.mark.parametrize(
    "queries", ["vllm:prefix_cache_queries_total", "vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries_total"]
)
def test_names_of_all_releases(queries):
    """H14"""
    text = replica_text(1000, 100).replace("vllm:prefix_cache_queries_total", queries)

    assert only_engine(text)[1].counters["queries"] == 1000


def test_the_present_name_wins_over_the_former_one():
    both = replica_text(1000, 100) + 'vllm:gpu_prefix_cache_queries_total{engine="0",model_name="tiny"} 7\n'

    assert only_engine(both)[1].counters["queries"] == 1000


def test_ranks_of_one_server_are_engines_of_their_own():
    """H15"""
    text = replica_text(100, 10, engine="0") + replica_text(300, 30, engine="1")
    sample = read_replica(text)

    assert [key.engine for key in sorted(sample.engines)] == ["0", "1"]
    assert sample.facts.capacity_blocks == 2 * 2048


def test_without_process_metrics_the_start_is_unknown():
    """H9: several API servers."""
    assert read_replica(replica_text(1, 0)).started_s is None


def test_a_capacity_that_is_not_known_yet_is_unknown():
    text = replica_text(1, 0).replace('num_gpu_blocks="2049"', 'num_gpu_blocks="None"')

    assert read_replica(text).facts.capacity_blocks is None


def test_a_torn_histogram_is_unknown_and_spoils_nothing_else():
    text = replica_text(1000, 100, ttft=(1, 2, 3, 4, 5))
    torn = "\n".join(line for line in text.split("\n") if 'le="+Inf"' not in line)

    engine = only_engine(torn)[1]
    assert "ttft" not in engine.histograms
    assert engine.counters["queries"] == 1000


def test_labels_may_hold_anything():
    hostile = 'a"b\\c\nd}{ e=",' + "é"
    escaped = hostile.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    text = f'vllm:prefix_cache_queries_total{{engine="0",model_name="{escaped}"}} 5 1700000000000\n'

    ((key, engine),) = read_replica(text).engines.items()
    assert (key.model, engine.counters["queries"]) == (hostile, 5)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param(replica_text(1, 0)[:-1], id="torn"),
        pytest.param('vllm:prefix_cache_hits_total{engine="0"\n', id="unclosed"),
        pytest.param('vllm:prefix_cache_hits_total{engine="0"} x\n', id="no number"),
        pytest.param('vllm:prefix_cache_hits_total{engine="0"} 1_000\n', id="a number of Python's"),
        pytest.param('vllm:prefix_cache_hits_total{engine="0"} 0 # {t="1"} 5\n', id="exemplar"),
        pytest.param('vllm:prefix_cache_hits_total{engine="0",engine="1"} 1\n', id="a label twice"),
        pytest.param(f'vllm:prefix_cache_hits_total{{engine="{"0" * 201}"}} 1\n', id="long label"),
        pytest.param(f'vllm:prefix_cache_hits_total{{engine="0"}} {"1" * 5000}\n', id="long line"),
        pytest.param("other 1\n" * (exposition.MAX_SERIES + 1), id="too many series"),
        pytest.param("x" * exposition.MAX_BYTES + "\n", id="too long"),
        pytest.param(replica_text("NaN", 0), id="NaN"),
        pytest.param(replica_text("+Inf", 0), id="infinite"),
        pytest.param(replica_text(-1, 0), id="negative"),
        pytest.param("python_info 1\n", id="another program's"),
    ],
)
def test_what_cannot_be_trusted_is_refused_as_a_whole(text):
    """S8, R19"""
    with pytest.raises(ExpositionError):
        read_replica(text)


def test_a_gauge_that_is_no_number_is_unknown():
    assert "running" not in only_engine(replica_text(1, 0, running="NaN"))[1].gauges


@given(junk=st.text(max_size=200))
def test_any_text_is_read_or_refused_and_nothing_else(junk):
    """S8"""
    for text in (
        junk + "\n",
        f"vllm:prefix_cache_queries_total{junk}\n",
        f"warmpath_router_requests_total{{{junk}}} 1\n",
    ):
        for read in (read_replica, read_router):
            with contextlib.suppress(ExpositionError):
                read(text)


@pytest.mark.parametrize("seed", range(20))
def test_a_capture_with_random_damage_is_read_or_refused(seed):
    """S8"""
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


def test_memory_of_series_is_bounded():
    for number in range(exposition.CACHED_SERIES + 100):
        read_samples(f'known{{n="{number}"}} 1\n', {"known"})

    assert exposition._series.cache_info().currsize <= exposition.CACHED_SERIES


def test_a_router_s_text():
    sample = read_router(
        router_text(
            {
                "group": "coding",
                "requests": {"ok": 5, "replica_error": 1, "cancelled": 2},
                "prompt_tokens": 900,
                "ttft": {7: 3},
            },
            boot="b7",
        )
    )

    assert sample.boot == "b7"
    counted = sample.routes[RouteKey("chat", "coding", "r1", "chat", 1)].counters
    assert counted == {
        "requests": 8, "ok_requests": 5, "replica_error_requests": 1, "cancelled_requests": 2, "prompt_tokens": 900,
        "spilled_requests": 0,
    }  # fmt: skip
    ttft = sample.routes[RouteKey("chat", "coding", "r1")].histograms["ttft"]
    assert (ttft.edges, ttft.counts) == (ROUTER_EDGES, {7: 3})


def test_latencies_are_read_by_the_kind_of_response():
    routes = read_router(
        router_text({"streamed_latency": {9: 2}, "plain_latency": {20: 5}, "policy_plain_latency": {20: 4}})
    ).routes

    whole = routes[RouteKey("chat", "", "r1")].histograms
    assert {name: one.counts for name, one in whole.items()} == {
        "streamed_latency": {9: 2},
        "plain_latency": {20: 5},
    }
    by_revision = routes[RouteKey("chat", "", "", "chat", 1)].histograms
    assert {name: one.counts for name, one in by_revision.items()} == {"plain_latency": {20: 4}}


def test_a_kind_of_response_that_is_not_known_is_left_out():
    text = router_text({"plain_latency": {20: 5}}).replace('response="plain"', 'response="pushed"')

    assert read_router(text).routes == {}


def test_the_ttft_of_a_revision_is_read_beside_that_of_all_requests():
    in_force, tried = ({"revision": number, "policy_ttft": {7: number}, "ttft": {7: 3}} for number in (1, 2))

    routes = read_router(router_text(in_force, tried)).routes

    assert routes[RouteKey("chat", "", "", "chat", 1)].histograms["ttft"].counts == {7: 1}
    assert routes[RouteKey("chat", "", "", "chat", 2)].histograms["ttft"].counts == {7: 2}
    assert RouteKey("chat", "", "", "", 0) not in routes


def test_what_the_router_really_serves_is_read():
    """The names and the sparse histograms are the router's own, not this file's idea of them."""
    from routing.balancing.decision import CandidateLoads
    from routing.observability.decision_record import Record
    from routing.observability.metrics import Metrics, Outcome

    metrics = Metrics()
    for seconds in (0.0005, 0.05, 0.05, 3.0, 10_000.0):
        placed = ("chat", "", "", "everyday", 4, "", "r1", "")
        record = Record("", 0.0, *placed, 1, None, None, [], CandidateLoads([]), arm="trial")
        record.on_first_byte(200, is_streamed=True)
        record.ttft_s = record.latency_s = seconds
        metrics.count_placed(record, Outcome.OK)
        record.is_streamed, record.ttft_s = False, None
        metrics.count_placed(record, Outcome.OK)

    routes = read_router(router_text() + "\n".join(metrics.lines(is_fine=True)) + "\n").routes
    for key in (RouteKey("chat", "", "r1"), RouteKey("chat", "", "", "everyday", 4)):
        ttft = routes[key].histograms["ttft"]
        assert ttft.total == 5
        assert (min(ttft.counts), max(ttft.counts)) == (0, len(ROUTER_EDGES))
        assert routes[key].histograms["plain_latency"].counts == ttft.counts
    assert routes[RouteKey("chat", "", "r1")].histograms["streamed_latency"].counts == ttft.counts
    assert routes[RouteKey("chat", "", "r1", "everyday", 4)].counters["ok_requests"] == 10


def test_another_program_is_no_router():
    with pytest.raises(ExpositionError):
        read_router(replica_text(1, 0))


def test_a_router_of_many_groups_and_replicas_says_more_than_a_replica_may():
    """50 groups on 8 replicas of 40 latencies each: it was refused whole when it was held to a replica's bound."""
    ttft = dict.fromkeys(range(100, 140), 1)
    routes = [
        {"group": f"g{group}", "replica": f"r{number}", "ttft": ttft} for group in range(50) for number in range(8)
    ]
    text = router_text(*routes)

    assert text.count("\n") > exposition.MAX_SERIES
    assert len(read_router(text).routes) == 400
    with pytest.raises(ExpositionError, match="more than"):
        read_router("x 1\n" * (exposition.ROUTER_SERIES + 1))
