"""Metrics merged over workers: nothing is counted twice, and no counter goes backwards."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from routing.observability.metrics import (
    EXPOSED_EDGES,
    GRACE_S,
    POLICY_TTFT,
    PREFIX,
    ConfiguredSeries,
    Histogram,
    header,
)
from routing.schema import Canary, PolicyConfig, PoolConfig, ReplicaConfig, RoundRobinSettings, RouterConfig
from routing.workers.metrics import Families, MergedMetrics, add, lines, parse, series_key
from routing.workers.multiprocess import merged_rows


def exposed(count: int, seconds: list[float], up: int = 1, pool: str = "chat", *, all_buckets: bool = True) -> str:
    histogram = Histogram()
    for value in seconds:
        histogram.observe(value)
    where = f'pool="{pool}",group="",replica="a"'
    return "\n".join(
        [
            *header("requests_total", "counter", "Requests."),
            f'warmpath_router_requests_total{{{where},policy="p",revision="3",reason="x",outcome="ok"}} {count}',
            *header("ttft_seconds", "histogram", "TTFT."),
            *histogram.lines("warmpath_router_ttft_seconds", where, all_buckets=all_buckets),
            *header("replica_up", "gauge", "Up."),
            f'warmpath_router_replica_up{{pool="{pool}",replica="a"}} {up}',
            *header("in_flight", "gauge", "In flight."),
            f'warmpath_router_in_flight{{pool="{pool}",replica="a"}} 2',
        ]
    )


def configured(*pools: str, with_canary: bool = False) -> ConfiguredSeries:
    settings = RoundRobinSettings()
    policy = PolicyConfig("p", 3, settings, canary=Canary(4, settings, 0.5) if with_canary else None)
    replicas = (ReplicaConfig("a", "http://a:8000"),)
    return ConfiguredSeries(
        RouterConfig(
            hash_secret="5ec2e7" * 8, pools=tuple(PoolConfig(name, policy, replicas=replicas) for name in pools)
        )
    )


def text(families: Families, *, all_buckets: bool = True) -> str:
    return "\n".join(lines(families, all_buckets=all_buckets)) + "\n"


def values(exposition: str) -> dict[str, float]:
    samples = (sample for family in text_string_to_metric_families(exposition) for sample in family.samples)
    return {sample.name + sample.labels.get("le", ""): sample.value for sample in samples}


def totals(metrics: MergedMetrics, present: list[Families], series: ConfiguredSeries | None = None) -> dict[str, float]:
    return values(text(metrics.total(present, series)))


@pytest.mark.parametrize("all_buckets", [True, False])
@given(st.lists(st.lists(st.floats(0.0005, 1000.0), max_size=20), min_size=1, max_size=4))
def test_merged_metrics_equal_those_of_one_process(all_buckets, by_worker):
    total: Families = {}
    for seconds in by_worker:
        add(total, parse(exposed(1, seconds)))
    everything = [value for seconds in by_worker for value in seconds]
    merged = values(text(total, all_buckets=all_buckets))
    single = values(exposed(len(by_worker), everything, all_buckets=all_buckets) + "\n")
    name = "warmpath_router_ttft_seconds_sum"
    assert merged.pop(name) == pytest.approx(single.pop(name))
    assert merged.pop("warmpath_router_in_flight") == 2 * len(by_worker)
    del single["warmpath_router_in_flight"]
    assert merged == single
    if not all_buckets:
        assert sum("_bucket" in key for key in merged) == len(EXPOSED_EDGES) + 1


def test_the_metrics_of_a_single_worker_are_exposed_unchanged():
    before = exposed(5, [0.1, 0.1, 3.0, 5000.0])
    assert sorted(text(parse(before)).splitlines()) == sorted(before.splitlines())


@pytest.mark.parametrize(
    ("name", "kind", "by_worker", "expected"),
    [
        ("requests_total", "counter", [1, 2], 3),
        ("in_flight", "gauge", [2, 2], 4),
        ("replica_up", "gauge", [1, 0], 0),
        ("response_cache_store_up", "gauge", [1, 1], 1),
        ("response_cache_store_up", "gauge", [1, 1, 0], 0),
        ("shared_state_peers", "gauge", [2, 0], 0),
        ("shared_state_age_seconds", "gauge", [0.05, 0.25], 0.25),
        ("shared_state_bytes_total", "counter", [100, 20], 120),
        ("semantic_cache_checks_total", "counter", [3, 4], 7),
        ("semantic_cache_shared_checks", "gauge", [20, 21], 21),
        ("semantic_cache_recent_precision_ratio", "gauge", [0.9, 0.95], 0.9),
        ("kv_events_followed", "gauge", [1, 0], 0),
        ("kv_events_blocks", "gauge", [500, 400], 500),
        ("kv_events_offloaded_blocks", "gauge", [500, 400], 500),
        ("kv_events_lag_seconds", "gauge", [0.25, 0.5], 0.5),
        ("kv_events_state", "gauge", [1, 1], 2),  # workers that report this state
        ("kv_events_state_timestamp_seconds", "gauge", [1_700_000_500, 1_700_000_400], 1_700_000_500),
        ("pool_saturation_ratio", "gauge", [0.25, 0.5], 0.75),
        ("pool_saturation_ratio", "gauge", [0.75, 0.5, 0.1], 1),
        ("pool_waiting_work_seconds", "gauge", [1.5, 2.0, 0], 3.5),
        ("pool_prefill_tokens_per_second", "gauge", [800, 800], 800),
    ],
)
def test_samples_of_workers_add_up_unless_they_are_about_something_that_workers_share(name, kind, by_worker, expected):
    workers = [parse("\n".join([*header(name, kind, "."), f"{PREFIX}{name} {value}"])) for value in by_worker]

    assert totals(MergedMetrics(), workers) == {f"{PREFIX}{name}": expected}


def row(health: str = "up", breaker: str = "closed", running: int = 0, **fields: Any) -> dict[str, Any]:
    """A replica as a worker sees it."""
    load = {"running": running, "waiting_tokens": 10 * running}
    state = {"health": health, "breaker": breaker, "reason": f"{health} {breaker}", "share": 1.0, "last_ok_at": None}
    ranks = [load, {"running": 0, "waiting_tokens": 0}]
    return {"pool": "chat", "name": "a", **state, **load, "connections": 1, "warming": None, "ranks": ranks, **fields}


def test_a_replica_has_the_worst_state_that_any_worker_reports():
    up = row(running=1, last_ok_at="2026-01-01T00:00:01")
    open_ = row("up", "open", 2, share=0.25, last_ok_at="2026-01-01T00:00:02")
    down, unknown = row("down", running=3), row("unknown")
    half_open = row("up", "half_open", share=0.0)
    for rows, reason, breaker in (
        ([up, open_, down], "down closed", "open"),
        ([up, open_], "up open", "open"),
        ([up, half_open, down], "down closed", "half_open"),
        ([unknown, up], "up closed", "closed"),
    ):
        [merged] = merged_rows([one] for one in rows)
        assert (merged["reason"], merged["health"], merged["breaker"]) == (reason, reason.split()[0], breaker)
        assert merged["share"] == min(one["share"] for one in rows)
        assert merged["ranks"] == [
            {"running": merged["running"], "waiting_tokens": merged["waiting_tokens"]},
            {"running": 0, "waiting_tokens": 0},
        ]
        assert merged["running"] * 10 == merged["waiting_tokens"] == sum(one["waiting_tokens"] for one in rows)
    assert merged_rows([[unknown], [unknown]])[0]["last_ok_at"] is None
    assert merged_rows([[up], [open_]])[0]["last_ok_at"] == "2026-01-01T00:00:02"


def test_each_event_stream_is_that_of_the_worker_which_knows_least():
    def streams(*states: str) -> list[dict[str, Any]]:
        return [row(kv_events=[{"rank": rank, "state": state} for rank, state in enumerate(states)] or None)]

    by_worker = streams("following", "estimated"), streams("replaying", "partial"), streams("partial", "following")
    [merged] = merged_rows(by_worker)

    assert merged["kv_events"] == [{"rank": 0, "state": "replaying"}, {"rank": 1, "state": "estimated"}]
    assert merged_rows([streams(), streams()])[0]["kv_events"] is None


def test_warm_up_progress_is_summed_over_workers():
    one = {"prefixes_done": 1, "prefixes": 3, "tokens_done": 100, "tokens": 300}
    two = {"prefixes_done": 0, "prefixes": 2, "tokens_done": 0, "tokens": 500}
    both = merged_rows([[row(warming=one)], [row(warming=two)], [row()]])[0]["warming"]

    assert both == {"prefixes_done": 1, "prefixes": 5, "tokens_done": 100, "tokens": 800}
    assert merged_rows([[row()], [row()]])[0]["warming"] is None


def test_counters_of_an_exited_worker_stay_and_its_gauges_go():
    metrics = MergedMetrics()
    metrics.add_exited(parse(exposed(7, [0.1])), [], None)
    metrics.add_exited(parse(exposed(5, [0.1])), [], None)
    remaining = totals(metrics, [])
    assert remaining["warmpath_router_requests_total"] == 12
    assert remaining["warmpath_router_ttft_seconds_count"] == 2
    assert "warmpath_router_in_flight" not in remaining
    assert totals(metrics, [parse(exposed(1, []))])["warmpath_router_requests_total"] == 13


def test_a_series_is_dropped_as_a_whole_after_its_grace_period_even_if_a_worker_exits_meanwhile():
    now = 0.0
    metrics, series = MergedMetrics(lambda: now), configured("chat")
    metrics.add_exited(parse(exposed(7, [0.1], pool="old")), [], None)
    present, exiting = parse(exposed(2, [], pool="old")), parse(exposed(3, []))
    assert 'pool="old"' in text(metrics.total([present, exiting], series))
    now = GRACE_S - 60
    metrics.add_exited(exiting, [present], series)
    assert 'pool="old"' in text(metrics.total([present], series))
    now = GRACE_S - 10  # before the worker itself drops it
    assert 'pool="old"' not in text(metrics.total([present], series))
    assert 'pool="old"' not in text(metrics.total([], None))


def test_canary_metrics_of_an_exited_worker_are_dropped_after_the_canary():
    now = 0.0
    metrics, labels = MergedMetrics(lambda: now), 'pool="chat",group="",policy="p",revision="3"'
    histogram = Histogram()
    histogram.observe(0.1)
    exposition = "\n".join(
        [
            *header(POLICY_TTFT, "histogram", "TTFT."),
            *histogram.lines(f"{PREFIX}{POLICY_TTFT}", labels, all_buckets=True),
            exposed(1, [0.1]),
        ]
    )
    during, after = configured("chat", with_canary=True), configured("chat")
    metrics.add_exited(parse(exposition), [], during)

    name = f"{PREFIX}{POLICY_TTFT}_count"
    now = 2 * GRACE_S
    assert totals(metrics, [parse(exposition)], during)[name] == 2
    assert totals(metrics, [parse(exposition)], after)[name] == 2
    now = 3 * GRACE_S - 10
    remaining = totals(metrics, [parse(exposition)], after)
    assert name not in remaining
    assert remaining["warmpath_router_requests_total"] == 2


def test_label_values_are_unescaped():
    sample = 'm{pool="a\\"b\\\\c\\n",group="",replica="r{}, =",policy="p",revision="12",le="0.5"}'
    assert series_key(sample) == ('a"b\\c\n', "", "r{}, =", "p", 12)
    assert series_key("process_cpu_seconds_total") == ("", "", "", "", 0)
