"""Sums over workers: nothing counted twice, nothing going backwards."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from routing.observability.exposition import EXPOSED_EDGES, PREFIX, Histogram, header
from routing.observability.metrics import GRACE_S, POLICY_TTFT, SeriesKey
from routing.workers.metrics import Counts, Families, add, lines, parse, series_key
from routing.workers.multiprocess import merged_rows


def exposed(count: int, seconds: list[float], up: int = 1, pool: str = "chat", *, is_fine: bool = True) -> str:
    histogram = Histogram()
    for value in seconds:
        histogram.observe(value)
    where = f'pool="{pool}",group="",replica="a"'
    return "\n".join(
        [
            *header("requests_total", "counter", "Requests."),
            f'warmpath_router_requests_total{{{where},policy="p",revision="3",reason="x",outcome="ok"}} {count}',
            *header("ttft_seconds", "histogram", "TTFT."),
            *histogram.lines("warmpath_router_ttft_seconds", where, is_fine=is_fine),
            *header("replica_up", "gauge", "Up."),
            f'warmpath_router_replica_up{{pool="{pool}",replica="a"}} {up}',
            *header("in_flight", "gauge", "In flight."),
            f'warmpath_router_in_flight{{pool="{pool}",replica="a"}} 2',
        ]
    )


def everything(_: SeriesKey, *, tried: bool = False) -> bool:
    return True


def text(families: Families, *, is_fine: bool = True) -> str:
    return "\n".join(lines(families, is_fine=is_fine)) + "\n"


def values(families: Families) -> dict[str, float]:
    return values_of(text(families))


def values_of(exposition: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            found[sample.name + sample.labels.get("le", "")] = sample.value
    return found


@given(st.lists(st.lists(st.floats(0.0005, 1000.0), max_size=20), min_size=1, max_size=4))
def test_merged_histograms_are_the_histogram_of_everything(by_worker: list[list[float]]) -> None:
    total: Families = {}
    for seconds in by_worker:
        add(total, parse(exposed(1, seconds)))
    whole = values(parse(exposed(len(by_worker), [value for seconds in by_worker for value in seconds])))
    merged = values(total)
    assert merged.pop("warmpath_router_ttft_seconds_sum") == pytest.approx(
        whole.pop("warmpath_router_ttft_seconds_sum")
    )
    for known in (merged, whole):
        known.pop("warmpath_router_in_flight")
    assert merged == whole


@given(st.lists(st.lists(st.floats(0.0005, 1000.0), max_size=20), min_size=1, max_size=4))
def test_merged_histograms_have_the_edges_that_one_process_exposes(by_worker: list[list[float]]) -> None:
    total: Families = {}
    for seconds in by_worker:
        add(total, parse(exposed(1, seconds)))
    everything = [value for seconds in by_worker for value in seconds]

    merged = values_of(text(total, is_fine=False))
    alone = values_of(exposed(len(by_worker), everything, is_fine=False) + "\n")

    buckets = [{le: count for le, count in found.items() if "_bucket" in le} for found in (merged, alone)]
    assert buckets[0] == buckets[1]
    assert len(buckets[0]) == len(EXPOSED_EDGES) + 1


def test_one_workers_text_is_shown_as_it_was() -> None:
    before = exposed(5, [0.1, 0.1, 3.0, 5000.0])
    assert sorted(text(parse(before)).splitlines()) == sorted(before.splitlines())


def test_gauges_add_up_but_a_replica_is_up_only_where_all_find_it_so() -> None:
    total = Counts().total([parse(exposed(1, [], up=1)), parse(exposed(2, [], up=0))], everything)
    assert values(total)["warmpath_router_in_flight"] == 4
    assert values(total)["warmpath_router_replica_up"] == 0
    assert values(total)["warmpath_router_requests_total"] == 3


def test_a_replica_is_shown_as_the_worker_sees_it_that_sees_it_worst() -> None:
    def row(health: str, breaker: str, share: float, running: int, last_ok_at: str | None) -> dict[str, Any]:
        said = {"health": health, "breaker": breaker, "reason": f"{health} {breaker}", "share": share}
        counted = {"running": running, "waiting_tokens": 10 * running, "connections": 1, "warming": None}
        ranks = [{"running": running, "waiting_tokens": 10 * running}, {"running": 0, "waiting_tokens": 0}]
        return {"pool": "chat", "name": "a", **said, **counted, "ranks": ranks, "last_ok_at": last_ok_at}

    up, out = row("up", "closed", 1.0, 1, "2026-01-01T00:00:01"), row("up", "open", 0.25, 2, "2026-01-01T00:00:02")
    down, unknown = row("down", "closed", 1.0, 3, None), row("unknown", "closed", 1.0, 0, None)
    trying = row("up", "half_open", 0.0, 0, None)
    for rows, reason, breaker in (
        ([up, out, down], "down closed", "open"),
        ([up, out], "up open", "open"),
        ([up, trying, down], "down closed", "half_open"),
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
    assert merged_rows([[up], [out]])[0]["last_ok_at"] == "2026-01-01T00:00:02"


def test_what_an_ended_worker_counted_stays_and_its_gauges_go() -> None:
    counts = Counts()
    counts.add_exited(parse(exposed(7, [0.1])), [], everything)
    counts.add_exited(parse(exposed(5, [0.1])), [], everything)
    alone = values(counts.total([], everything))
    assert alone["warmpath_router_requests_total"] == 12
    assert alone["warmpath_router_ttft_seconds_count"] == 2
    assert "warmpath_router_in_flight" not in alone
    assert values(counts.total([parse(exposed(1, []))], everything))["warmpath_router_requests_total"] == 13
    assert values(counts.total([], everything))["warmpath_router_requests_total"] == 12


def test_a_series_vanishes_whole_after_its_time_and_leaves_nothing_behind() -> None:
    now = 0.0
    counts = Counts(lambda: now)

    def knows(key: SeriesKey, *, tried: bool = False) -> bool:
        return key[0] != "old"

    counts.add_exited(parse(exposed(7, [0.1], pool="old")), [], everything)
    present = parse(exposed(2, [], pool="old"))
    assert values(counts.total([present], knows))["warmpath_router_requests_total"] == 9
    now = GRACE_S - 60
    assert values(counts.total([present], knows))["warmpath_router_requests_total"] == 9
    now = GRACE_S - 10  # before the worker itself lets go of it
    assert values(counts.total([present], knows)) == {}
    assert values(counts.total([], everything)) == {}
    assert counts._left_at == {}


def test_a_series_vanishes_whole_whichever_worker_ends_meanwhile() -> None:
    now = 0.0
    counts = Counts(lambda: now)

    def knows(key: SeriesKey, *, tried: bool = False) -> bool:
        return key[0] != "old"

    present, ending = parse(exposed(2, [], pool="old")), parse(exposed(3, []))
    assert 'pool="old"' in text(counts.total([present, ending], knows))
    now = GRACE_S - 60
    counts.add_exited(ending, [present], knows)
    assert 'pool="old"' in text(counts.total([present], knows))
    now = GRACE_S - 10  # before the worker itself lets go of it
    assert 'pool="old"' not in text(counts.total([present], knows))


def test_what_a_dead_worker_counted_of_a_trial_leaves_some_time_after_the_trial() -> None:
    now, is_tried = 0.0, True
    counts = Counts(lambda: now)

    def knows(_: SeriesKey, *, tried: bool = False) -> bool:
        return is_tried or not tried

    where = 'pool="chat",group="",policy="p",revision="3"'
    histogram = Histogram()
    histogram.observe(0.1)
    text = "\n".join(
        [
            *header(POLICY_TTFT, "histogram", "TTFT."),
            *histogram.lines(f"{PREFIX}{POLICY_TTFT}", where, is_fine=True),
            exposed(1, [0.1]),
        ]
    )
    counts.add_exited(parse(text), [], knows)

    name = f"{PREFIX}{POLICY_TTFT}_count"
    now = 2 * GRACE_S
    assert values(counts.total([parse(text)], knows))[name] == 2
    is_tried = False
    assert values(counts.total([parse(text)], knows))[name] == 2
    now = 3 * GRACE_S - 10
    left = values(counts.total([parse(text)], knows))
    assert name not in left
    assert left["warmpath_router_requests_total"] == 2


def test_labels_are_read_as_they_were_written() -> None:
    sample = 'm{pool="a\\"b\\\\c\\n",group="",replica="r{}, =",policy="p",revision="12",le="0.5"}'
    assert series_key(sample) == ('a"b\\c\n', "", "r{}, =", "p", 12)
    assert series_key("process_cpu_seconds_total") == ("", "", "", "", 0)
