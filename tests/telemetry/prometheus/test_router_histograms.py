"""A router's histograms in a real Prometheus: sums over its series have the quantiles that Warmpath computes."""

from __future__ import annotations

import random
from array import array
from bisect import bisect_left
from pathlib import Path

import httpx
import pytest

from routing.balancing.placement import CandidateLoads
from routing.observability.decision_log import Record
from routing.observability.metrics import EXPOSED_EDGES, Metrics, Outcome
from routing.workers.metrics import add, lines, parse
from telemetry.metrics.histograms import merge, quantile
from telemetry.metrics.router import read_router
from tests.fakes import real_prometheus
from tests.fakes.fake_metrics_server import serving, text

pytestmark = pytest.mark.xdist_group("prometheus")
INFO = 'warmpath_router_info{router="a"} 1\n'
QUANTILES = (0.5, 0.9, 0.95, 0.99)


def waits(router: int) -> Metrics:
    """What one router timed: replicas that are warm, cold and in between, so that few have the same buckets."""
    drawn, metrics = random.Random(router), Metrics()
    for replica, (middle_s, count) in enumerate(((0.05, 40), (0.3, 7), (1.5, 900), (6.0, 60))):
        record = Record(
            "id", 0.0, "chat", "agents", "header", "everyday", 1, "lowest_cost", f"replica-{replica}", "least", 5, 16,
            None, [array("Q")], CandidateLoads([]),
        )  # fmt: skip
        record.prompt_tokens, record.cached_tokens = 32, 32 if replica == 0 else 0
        for _ in range(count):
            record.status, record.is_streamed = 200, True
            record.ttft_s = drawn.lognormvariate(0, 0.4) * middle_s
            metrics.count_placed(record, Outcome.OK)
    return metrics


def exposition(metrics: Metrics, *, all_buckets: bool = False) -> str:
    return INFO + "\n".join(metrics.lines(all_buckets=all_buckets)) + "\n"


def of_two_workers() -> str:
    total = parse(exposition(waits(3), all_buckets=True))
    add(total, parse(exposition(waits(4), all_buckets=True)))
    return "\n".join(lines(total)) + "\n"


def test_quantiles_of_summed_series_are_those_of_all_observations(tmp_path: Path) -> None:
    routers = [exposition(waits(1)), exposition(waits(2)), of_two_workers()]
    ours = _fine_quantiles([exposition(waits(number), all_buckets=True) for number in (1, 2, 3, 4)])
    with serving() as server:
        for number, told in enumerate(routers):
            server.script(f"/{number}/metrics", text(told))
        targets = [f"{server.url[7:]}/{number}/metrics" for number in range(len(routers))]
        with real_prometheus.running(tmp_path, targets) as url:
            count = "sum(warmpath_router_ttft_seconds_count)"
            real_prometheus.wait_until(lambda: _value(url, count) == 4 * 1007, "Prometheus to have scraped all three")
            for name in ("ttft_seconds", "reuse_ttft_seconds"):
                theirs = {q: _quantile(url, q, f"sum by (le) (warmpath_router_{name}_bucket)") for q in QUANTILES}

                for q in QUANTILES:
                    assert bisect_left(EXPOSED_EDGES, theirs[q]) == bisect_left(EXPOSED_EDGES, ours[q]), (name, q)
                    assert theirs[q] == pytest.approx(ours[q], rel=0.2), (name, q)


def _fine_quantiles(expositions: list[str]) -> dict[float, float]:
    routes = [route for told in expositions for route in read_router(told).routes.items()]
    merged = merge([route.histograms["ttft"] for key, route in routes if "ttft" in route.histograms and not key.reuse])
    assert merged is not None
    assert merged.buckets.total == 4 * 1007
    found = {q: quantile(merged.buckets, q) for q in QUANTILES}
    return {q: value.value for q, value in found.items() if value is not None}


def _quantile(url: str, q: float, of: str) -> float:
    value = _value(url, f"histogram_quantile({q}, {of})")
    assert value is not None
    return value


def _value(url: str, expression: str) -> float | None:
    answer = httpx.get(f"{url}/api/v1/query", params={"query": expression}, timeout=5).raise_for_status().json()
    found = answer["data"]["result"]
    return float(found[0]["value"][1]) if found else None
