"""Metrics: what the router counts and exposes."""

from __future__ import annotations

import os
import platform
from array import array

import pytest

from routing import __version__
from routing.balancing.placement import CandidateLoads
from routing.observability.decision_log import Record
from routing.observability.metrics import EDGES, EXPOSED_EDGES, GRACE_S, ConfiguredSeries, Histogram, Metrics, Outcome
from routing.schema import ConcurrencyConfig, RouterConfig, TaskGroupConfig
from tests.fakes.replica import streaming
from tests.routing.proxy.harness import config, routed, samples

PREDICTED = (
    "usage_reported",
    "predicted_responses",
    "predicted_prompt_tokens",
    "predicted_tokens",
    "predicted_cached_tokens",
)
LE = [*map(repr, EXPOSED_EDGES), "+Inf"]
USAGE = b'{"usage":{"prompt_tokens":431,"prompt_tokens_details":{"cached_tokens":416}}}'
EVENT = b"data: " + USAGE + b"\n\n"
HISTOGRAMS = {
    f"{name}_seconds_bucket" for name in ("ttft", "policy_ttft", "reuse_ttft", "queue", "latency", "policy_latency")
}


def record(replica: str = "replica-0", revision: int = 1, blocks: int = 0) -> Record:
    record = Record(
        "id", 0.0, "chat", "", "unmatched", "everyday", revision, "round_robin", replica, "round_robin", 5, 16, None,
        [array("Q", range(blocks))], CandidateLoads([]),
    )  # fmt: skip
    record.status, record.is_streamed = 200, True
    record.ttft_s = 0.5
    record.prompt_tokens, record.cached_tokens = 33, 16
    return record


async def test_every_metric_of_the_contract_is_exposed_and_parses(replica):
    replica.script = streaming(EVENT)
    groups = (TaskGroupConfig(name="coding"),)
    async with routed(config([replica], groups=groups), revision=8) as harness:
        await harness.until(lambda: harness.router.services.checks.status("replica-0").is_up, "a first finding")
        for _ in range(3):
            await harness.chat(headers=[b"X-Task-Group: coding"])
        await harness.chat(b"not JSON")
        _, text = await harness.admin("GET", "/metrics")
        boot = harness.router.boot
    scraped = samples(text)
    labels_of_replica = {"pool": "chat", "group": "coding", "replica": "replica-0"}
    series = {**labels_of_replica, "policy": "everyday", "revision": "1"}
    ok = {**series, "reason": "round_robin", "outcome": "ok"}
    assert (ok, 3) in scraped["warmpath_router_requests_total"]
    rejected = [
        labels for labels, _ in scraped["warmpath_router_requests_total"] if labels["outcome"] == "client_error"
    ]
    assert rejected == [dict.fromkeys(ok, "") | {"outcome": "client_error"}]
    compiled = str("TEST_COMPILED" in os.environ).lower()
    build = {"version": __version__, "compiled": compiled, "python": platform.python_version()}
    assert scraped["warmpath_router_info"] == [({"router": "tested", "boot": boot} | build, 1)]
    assert scraped["warmpath_router_config_revision"] == [({}, 8)]
    for name, value in (("usage_reported", 3), ("prompt_tokens", 1293), ("cached_tokens", 1248)):
        assert scraped[f"warmpath_router_{name}_total"] == [(series, value)]
    assert scraped["warmpath_router_ttft_seconds_count"] == [(labels_of_replica, 3)]
    assert scraped["warmpath_router_latency_seconds_count"] == [({**labels_of_replica, "response": "streamed"}, 3)]
    assert [labels["le"] for labels, _ in scraped["warmpath_router_ttft_seconds_bucket"]] == LE
    where = {"pool": "chat", "replica": "replica-0"}
    for name, value in (("replica_up", 1), ("in_flight", 0), ("waiting_tokens", 0)):
        assert scraped[f"warmpath_router_{name}"] == [(where, value)]
    for name in ("start_time_seconds", "cpu_seconds_total", "resident_memory_bytes"):
        assert scraped[f"process_{name}"][0][1] > 0
    assert scraped["warmpath_router_config_applied_timestamp_seconds"][0][1] > 1e9


NO_POOLS = ConfiguredSeries(RouterConfig(hash_secret="5ec2e7" * 8, pools=()))


@pytest.mark.parametrize(("seconds", "index"), [(0.0, 0), (EDGES[0], 0), (EDGES[0] * 1.001, 1), (EDGES[200], 200)])
def test_a_bucket_includes_its_edge(seconds, index):
    histogram = Histogram()
    histogram.observe(seconds)
    assert next(iter(histogram.lines("x", "", all_buckets=True))) == f'x_bucket{{,le="{EDGES[index]!r}"}} 1'


def test_series_are_dropped_a_grace_period_after_their_configuration(two):
    now = 0.0
    metrics = Metrics(clock=lambda: now)
    for name in ("replica-0", "replica-1"):
        metrics.count_placed(record(name), Outcome.OK)
    assert "reuse_ttft" in "\n".join(metrics.lines())

    series = ConfiguredSeries(config(two[:1]))
    metrics.prune(series)
    assert "replica-1" in "\n".join(metrics.lines())
    now = GRACE_S + 1
    metrics.prune(series)
    text = "\n".join(metrics.lines())
    assert "replica-1" not in text
    assert 'replica="replica-0"' in text

    metrics.prune(NO_POOLS)
    now += GRACE_S + 1
    metrics.prune(NO_POOLS)
    assert "reuse_ttft" not in "\n".join(metrics.lines())


async def test_series_are_dropped_without_scrapes(two, monkeypatch):
    now = 0.0
    async with routed(config(two), revision=1) as harness:
        metrics = harness.router.services.metrics
        monkeypatch.setattr(metrics, "_clock", lambda: now)
        for _ in two:
            await harness.chat()
        await harness.push(config(two[:1]), 2)
        assert len(metrics._series) == 2
        now = GRACE_S + 1
        await harness.push(config(two[:1]), 3)
        assert {key[2] for key in metrics._series} == {"replica-0"}


def test_predictions_are_counted_beside_their_results():
    """At most the tokens of the whole prompt."""
    metrics = Metrics()
    for hit_tokens, estimate, prompt, cached in ((530, 520, 500, 240), (0, 100, 100, 0), (None, 90, 90, 80)):
        answered = record()
        answered.hit_tokens, answered.prompt_tokens_estimate = hit_tokens, estimate
        answered.prompt_tokens, answered.cached_tokens = prompt, cached
        metrics.count_placed(answered, Outcome.OK)
    silent = record()
    silent.hit_tokens, silent.prompt_tokens, silent.cached_tokens = 5, None, None
    metrics.count_placed(silent, Outcome.OK)

    scraped = samples("\n".join(metrics.lines()) + "\n")
    counted = {name: scraped[f"warmpath_router_{name}_total"][0][1] for name in PREDICTED}
    assert counted == {
        "usage_reported": 3,
        "predicted_responses": 2,
        "predicted_prompt_tokens": 600,
        "predicted_tokens": 500,
        "predicted_cached_tokens": 240,
    }


def test_ttft_is_split_by_whether_half_of_the_prompt_was_cached():
    metrics = Metrics()
    for prompt, cached in ((100, 50), (100, 100), (100, 49), (100, 0), (100, None), (0, 0)):
        answered = record()
        answered.prompt_tokens, answered.cached_tokens = prompt, cached
        metrics.count_placed(answered, Outcome.OK)

    scraped = samples("\n".join(metrics.lines()) + "\n")
    by_reuse = {labels["reuse"]: value for labels, value in scraped["warmpath_router_reuse_ttft_seconds_count"]}
    assert by_reuse == {"hit": 2, "miss": 2}
    assert scraped["warmpath_router_ttft_seconds_count"][0][1] == 6
    (labels, _), *_ = scraped["warmpath_router_reuse_ttft_seconds_count"]
    assert set(labels) == {"pool", "group", "reuse"}


def test_exposed_buckets_count_exactly_what_fine_ones_do():
    histogram = Histogram()
    edge = EXPOSED_EDGES[3]
    for seconds in (0.0, EXPOSED_EDGES[0], EXPOSED_EDGES[0] * 1.001, edge, edge * 1.001, 1e4, EXPOSED_EDGES[-1]):
        histogram.observe(seconds)

    bucket_samples = samples("# TYPE x histogram\n" + "\n".join(histogram.lines("x", 'pool="chat"')) + "\n")

    assert [labels["le"] for labels, _ in bucket_samples["x_bucket"]] == LE
    counts = [count for _, count in bucket_samples["x_bucket"]]
    assert counts == [2, 3, 3, 4, *[5] * (len(EXPOSED_EDGES) - 5), 6, 7]
    assert bucket_samples["x_count"] == [({"pool": "chat"}, 7)]


async def test_every_series_of_every_histogram_has_the_same_edges(two):
    for replica in two:
        replica.script = streaming(EVENT)
    groups = tuple(TaskGroupConfig(name=name) for name in ("coding", "chatting"))
    limits = ConcurrencyConfig(max_running=8)
    async with routed(config(two, groups=groups, concurrency=limits)) as harness:
        for group in (b"coding", b"chatting", b"coding", b"coding"):
            await harness.chat(headers=[b"X-Task-Group: " + group])
        placed = record()
        placed.arm = "canary"
        harness.router.services.metrics.count_placed(placed, Outcome.OK)
        placed.is_streamed, placed.ttft_s, placed.latency_s = False, None, 2.0
        harness.router.services.metrics.count_placed(placed, Outcome.OK)
        _, text = await harness.admin("GET", "/metrics")
        _, fine = await harness.admin("GET", "/metrics?buckets=fine")
        status, error = await harness.admin("GET", "/metrics?buckets=some")

    edges: dict[tuple[str, str], list[str]] = {}
    for name, bucket_samples in samples(text).items():
        for labels, _ in bucket_samples:
            if name.endswith("_bucket"):
                rest = str(sorted((label, value) for label, value in labels.items() if label != "le"))
                edges.setdefault((name, rest), []).append(labels["le"])
    assert {name.removeprefix("warmpath_router_") for name, _ in edges} == HISTOGRAMS
    assert len(edges) > len(HISTOGRAMS)
    assert all(bucket_samples == LE for bucket_samples in edges.values())
    assert {labels["le"] for labels, _ in samples(fine)["warmpath_router_ttft_seconds_bucket"]} - set(LE)
    assert (status, error["error"]) == (400, "buckets: expected fine, or no such parameter")
