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
def test_merged_metrics_equal_those_of_one_process(all_buckets: bool, by_worker: list[list[float]]) -> None:
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


def test_the_metrics_of_a_single_worker_are_exposed_unchanged() -> None:
    before = exposed(5, [0.1, 0.1, 3.0, 5000.0])
    assert sorted(text(parse(before)).splitlines()) == sorted(before.splitlines())


def test_gauges_add_up_but_a_replica_is_up_only_if_all_workers_find_it_up() -> None:
    total = totals(MergedMetrics(), [parse(exposed(1, [], up=1)), parse(exposed(2, [], up=0))])
    assert total["warmpath_router_in_flight"] == 4
    assert total["warmpath_router_replica_up"] == 0
    assert total["warmpath_router_requests_total"] == 3


def test_the_store_of_response_caches_is_up_only_if_all_workers_reach_it() -> None:
    name = "warmpath_router_response_cache_store_up"
    workers = [parse(f"# HELP {name} Whether.\n# TYPE {name} gauge\n{name} {value}") for value in (1, 1, 0)]

    assert totals(MergedMetrics(), workers[:2]) == {name: 1}
    assert totals(MergedMetrics(), workers) == {name: 0}


def test_other_routers_are_heard_only_if_all_workers_hear_them_and_their_bytes_add_up() -> None:
    def of_worker(peers: int, age_s: float, received: int) -> Families:
        name = "warmpath_router_shared_state_"
        kinds = {"peers": ("gauge", peers), "age_seconds": ("gauge", age_s), "bytes_total": ("counter", received)}
        return parse("\n".join(f"# TYPE {name}{key} {kind}\n{name}{key} {it}" for key, (kind, it) in kinds.items()))

    merged = totals(MergedMetrics(), [of_worker(2, 0.05, 100), of_worker(0, 0.25, 20)])
    assert list(merged.values()) == [0, 0.25, 120]


def test_workers_count_checks_of_semantic_caches_together_and_shared_ones_once() -> None:
    def of_worker(own: int, shared: int, precision: float) -> Families:
        kinds = {"checks_total": ("counter", own), "shared_checks": ("gauge", shared)}
        kinds["recent_precision_ratio"] = ("gauge", precision)
        name = "warmpath_router_semantic_cache_"
        lines = [f"# HELP {name}{key} Of it.\n# TYPE {name}{key} {kind}" for key, (kind, _) in kinds.items()]
        samples = [f"{name}{key} {value}" for key, (_, value) in kinds.items()]
        return parse("\n".join(line for pair in zip(lines, samples, strict=True) for line in pair))

    merged = totals(MergedMetrics(), [of_worker(3, 20, 0.9), of_worker(4, 21, 0.95)])
    assert {name.removeprefix("warmpath_router_semantic_cache_"): value for name, value in merged.items()} == {
        "checks_total": 7,
        "shared_checks": 21,
        "recent_precision_ratio": 0.9,
    }


def test_events_are_followed_only_if_all_workers_follow_them_and_their_blocks_count_once() -> None:
    def of_worker(followed: int, blocks: int, lag_s: float) -> Families:
        gauges = {"followed": followed, "blocks": blocks, "offloaded_blocks": blocks, "lag_seconds": lag_s, "state": 1}
        gauges["state_timestamp_seconds"] = 1_700_000_000 + blocks
        lines = [
            f"# HELP warmpath_router_kv_events_{name} Of a replica.\n# TYPE warmpath_router_kv_events_{name} gauge\n"
            f"warmpath_router_kv_events_{name} {value}"
            for name, value in gauges.items()
        ]
        return parse("\n".join(lines))

    total = totals(MergedMetrics(), [of_worker(1, 500, 0.25), of_worker(0, 400, 0.5)])
    assert total == {
        "warmpath_router_kv_events_followed": 0,
        "warmpath_router_kv_events_blocks": 500,
        "warmpath_router_kv_events_offloaded_blocks": 500,
        "warmpath_router_kv_events_lag_seconds": 0.5,
        "warmpath_router_kv_events_state": 2,  # workers that report this state
        "warmpath_router_kv_events_state_timestamp_seconds": 1_700_000_500,
    }


def test_a_replica_has_the_worst_state_that_any_worker_reports() -> None:
    def row(health: str, breaker: str, share: float, running: int, last_ok_at: str | None) -> dict[str, Any]:
        state = {"health": health, "breaker": breaker, "reason": f"{health} {breaker}", "share": share}
        load = {"running": running, "waiting_tokens": 10 * running, "connections": 1, "warming": None}
        ranks = [{"running": running, "waiting_tokens": 10 * running}, {"running": 0, "waiting_tokens": 0}]
        return {"pool": "chat", "name": "a", **state, **load, "ranks": ranks, "last_ok_at": last_ok_at}

    up, open_ = row("up", "closed", 1.0, 1, "2026-01-01T00:00:01"), row("up", "open", 0.25, 2, "2026-01-01T00:00:02")
    down, unknown = row("down", "closed", 1.0, 3, None), row("unknown", "closed", 1.0, 0, None)
    half_open = row("up", "half_open", 0.0, 0, None)
    for rows, reason, breaker in (
        ([up, open_, down], "down closed", "open"),
        ([up, open_], "up open", "open"),
        ([up, half_open, down], "down closed", "half_open"),
        ([unknown, up], "up closed", "closed"),
    ):
        [merged] = merged_rows([row] for row in rows)
        assert (merged["reason"], merged["health"], merged["breaker"]) == (reason, reason.split()[0], breaker)
        assert merged["share"] == min(row["share"] for row in rows)
        assert merged["ranks"] == [
            {"running": merged["running"], "waiting_tokens": merged["waiting_tokens"]},
            {"running": 0, "waiting_tokens": 0},
        ]
        assert merged["running"] * 10 == merged["waiting_tokens"] == sum(row["waiting_tokens"] for row in rows)
    assert merged_rows([[unknown], [unknown]])[0]["last_ok_at"] is None
    assert merged_rows([[up], [open_]])[0]["last_ok_at"] == "2026-01-01T00:00:02"


def test_each_event_stream_is_that_of_the_worker_which_knows_least() -> None:
    def row(*states: str) -> dict[str, Any]:
        known = {"health": "up", "breaker": "closed", "share": 1.0, "warming": None, "ranks": [], "last_ok_at": None}
        loads = {"running": 0, "waiting_tokens": 0, "connections": 0}
        streams = [{"rank": rank, "state": state} for rank, state in enumerate(states)] or None
        return {"pool": "chat", "name": "a", **known, **loads, "kv_events": streams}

    rows = row("following", "estimated"), row("replaying", "partial"), row("partial", "following")
    [merged] = merged_rows([one] for one in rows)

    assert merged["kv_events"] == [{"rank": 0, "state": "replaying"}, {"rank": 1, "state": "estimated"}]
    assert merged_rows([[row()], [row()]])[0]["kv_events"] is None


def test_counters_of_an_exited_worker_stay_and_its_gauges_go() -> None:
    metrics = MergedMetrics()
    metrics.add_exited(parse(exposed(7, [0.1])), [], None)
    metrics.add_exited(parse(exposed(5, [0.1])), [], None)
    remaining = totals(metrics, [])
    assert remaining["warmpath_router_requests_total"] == 12
    assert remaining["warmpath_router_ttft_seconds_count"] == 2
    assert "warmpath_router_in_flight" not in remaining
    assert totals(metrics, [parse(exposed(1, []))])["warmpath_router_requests_total"] == 13


def test_a_series_is_dropped_as_a_whole_after_its_grace_period_even_if_a_worker_exits_meanwhile() -> None:
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


def test_canary_metrics_of_an_exited_worker_are_dropped_after_the_canary() -> None:
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


def test_label_values_are_unescaped() -> None:
    sample = 'm{pool="a\\"b\\\\c\\n",group="",replica="r{}, =",policy="p",revision="12",le="0.5"}'
    assert series_key(sample) == ('a"b\\c\n', "", "r{}, =", "p", 12)
    assert series_key("process_cpu_seconds_total") == ("", "", "", "", 0)


def test_the_saturation_of_workers_adds_up_to_at_most_1_and_their_prefill_rate_is_not_added() -> None:
    def worker(ratio: float, waiting_s: float) -> Families:
        figures = (("saturation_ratio", ratio), ("waiting_work_seconds", waiting_s), ("prefill_tokens_per_second", 800))
        return parse(
            "\n".join(
                line
                for name, value in figures
                for line in (
                    *header(f"pool_{name}", "gauge", "."),
                    f'{PREFIX}pool_{name}{{pool="chat"}} {value}',
                )
            )
        )

    def merged(*workers: Families) -> list[float]:
        return list(totals(MergedMetrics(), list(workers)).values())

    assert merged(worker(0.25, 1.5), worker(0.5, 2.0)) == [0.75, 3.5, 800]
    assert merged(worker(0.75, 1.5), worker(0.5, 2.0), worker(0.1, 0)) == [1, 3.5, 800]
