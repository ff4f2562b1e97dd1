"""Figures beside each other, from stored readings: H5, H6, H7, H13, H16, H17, H19, T1, T6."""

from datetime import timedelta

import pytest
from django.db import connection
from django.template.loader import render_to_string
from django.test.utils import CaptureQueriesContext

from controlplane.models import Router
from controlplane.services.fleet.replicas import add_replica
from telemetry.metrics.histograms import ROUTER_EDGES
from telemetry.metrics.windows import Window
from telemetry.services import series
from telemetry.services.ceilings import ceilings
from telemetry.services.engine_notes import EngineNotes, engine_notes
from telemetry.services.objectives import share_within
from telemetry.services.reconciliation import reconcile
from tests.telemetry.conftest import T0
from tests.telemetry.readings import engine_reading, gap, route_reading, router_scraped, scraped

pytestmark = pytest.mark.django_db
MINUTE = Window(T0, T0 + timedelta(seconds=60), 10.0)
AT = T0 + timedelta(seconds=5)


@pytest.fixture
def replicas(pool):
    return [add_replica(pool, name=f"r{n}", url=f"http://127.0.0.1:91{n:02}") for n in range(1, 4)]


@pytest.fixture
def router(db):
    router = Router.objects.create(name="router-1", admin_url="http://127.0.0.1:8081", boot="b", last_seen_at=T0)
    router_scraped(router, AT)
    return router


def told(router, replica, cached, **more):
    tokens = {"predicted_answers": 500, "predicted_prompt_tokens": 50_000, "predicted_tokens": cached // 2}
    route_reading(
        router, AT, replica=replica, requests=500, usage_reported=500, prompt_tokens=50_000, cached_tokens=cached,
        cacheable_tokens=48_000, **(tokens | {"predicted_cached_tokens": cached} | more),
    )  # fmt: skip


@pytest.fixture
def disagreeing(router, replicas):
    """r1 agrees with its answers, r2's counters stay 0 though its answers tell of hits, r3 reports no hits."""
    for replica, hits, missing in zip(replicas, (25_000, 0, None), ((), (), ("hits", "ttft")), strict=True):
        known = {} if hits is None else {"hits": hits}
        engine_reading(replica, AT, queries=50_000, prompt_tokens=51_000, finished=500, not_reported=missing, **known)
    told(router, "r1", 24_500, predicted_tokens=24_000)
    told(router, "r2", 24_500, predicted_tokens=24_000)
    told(router, "r3", 24_500, predicted_tokens=24_000)


def test_each_replica_s_three_rates_and_what_comes_of_them(pool, disagreeing):
    """H17; vLLM once had counters that stayed 0 while the cache worked."""
    rows = {row.replica: row for row in reconcile([pool], MINUTE)}

    assert {name: row.comparison.agreement.value for name, row in rows.items()} == {
        "r1": "agree", "r2": "disagree", "r3": "agree",
    }  # fmt: skip
    assert (rows["r1"].engine.ratio, rows["r1"].answers.ratio) == (0.5, 0.49)
    assert rows["r1"].engine.not_eligible_tokens == 1000  # H6
    assert rows["r2"].comparison.points == pytest.approx(49.0)
    assert rows["r3"].engine.ratio is None
    assert "not reported by this engine" in rows["r3"].comparison.reason


def test_reconciling_costs_the_same_queries_whatever_the_fleet(pool, disagreeing):
    with CaptureQueriesContext(connection) as asked:
        reconcile([pool], MINUTE)
    assert len(asked) == 5


def test_the_table_says_in_words_what_agrees(pool, disagreeing):
    page = render_to_string("telemetry/reconciliation.html", {"rows": reconcile([pool], MINUTE)})

    for words in ("50.0 %", "49.0 %", "disagree", "not reported by this engine", "49.0"):
        assert words in page
    assert "Add one" in render_to_string("telemetry/reconciliation.html", {"rows": []})


def test_an_engine_s_notes_name_what_it_lacks_and_what_skews_it(pool, replicas):
    """H13, H19, R19: a gap names nothing, so the newest scrape that succeeded counts."""
    old, new, decode = replicas
    scraped(old, AT, engine="vllm", version="0.32.0")
    scraped(new, AT, engine="vllm", version="0.33.0")
    scraped(decode, AT, engine="sglang", role="decode")
    engine_reading(old, AT, engine="0", not_reported=["external_hits", "itl"], queries=1, hits=1)
    engine_reading(old, AT, engine="1", not_reported=["itl"], queries=1, hits=1)
    gap(old, AT + timedelta(seconds=5))

    notes = engine_notes(replicas, MINUTE)

    assert (notes[old.pk].not_reported, notes[old.pk].reports("itl")) == (("itl",), False)
    assert notes[old.pk].reports("external_hits", "hits")
    assert "once for each time its scheduling is tried" in notes[old.pk].notes[0]
    assert notes[new.pk] == EngineNotes("vLLM", "0.33.0")
    assert notes[decode.pk].decodes
    assert [sentence.split()[0] for sentence in notes[decode.pk].notes] == ["A", "SGLang"]
    with pytest.raises(ValueError, match="no figures of a reading: hit_rate"):
        notes[new.pk].reports("hit_rate")


def test_a_ceiling_stands_beside_every_rate(pool, router):
    """H7"""
    route_reading(router, AT, group="a", replica="r1", requests=5, prompt_tokens=1000, cacheable_tokens=900)
    route_reading(router, AT, group="b", replica="r1", requests=5, prompt_tokens=1000, cacheable_tokens=500)
    route_reading(router, AT, group="b", replica="r2", requests=5, prompt_tokens=8000)  # block size unknown

    found = ceilings([pool], MINUTE)

    assert found.by_pool == {"chat": 0.7}
    assert found.by_group == {("chat", "a"): 0.9, ("chat", "b"): 0.5}
    assert found.by_replica == {("chat", "r1"): 0.7, ("chat", "r2"): None}


def test_a_share_within_a_time_is_exact_at_an_edge_and_bounded_between_two(pool, router, replicas):
    """T6"""
    engine_reading(replicas[0], AT, ttft={0: 60, 1: 20, 3: 15, 4: 5}, queries=1, hits=1)

    at_edge = share_within([pool], MINUTE, 0.5)
    between = share_within([pool], MINUTE, 0.7)
    beyond = share_within([pool], MINUTE, 60.0)

    assert (at_edge.low_ratio, at_edge.high_ratio, at_edge.low_edge_s) == (0.8, 0.8, 0.5)
    assert (at_edge.requests, at_edge.clock, at_edge.is_exact) == (100, "engine", True)
    assert (between.low_ratio, between.high_ratio) == (0.8, 0.8)
    assert (between.low_edge_s, between.high_edge_s) == (0.5, 1.0)
    assert (beyond.low_ratio, beyond.high_ratio, beyond.high_edge_s) == (0.95, 1.0, None)
    assert share_within([pool], MINUTE, 0.05).low_ratio == 0.0


def test_a_share_is_by_the_routers_clock_where_there_is_one(pool, router, replicas):
    """T1, T8"""
    engine_reading(replicas[0], AT, ttft={4: 100}, queries=1, hits=1)
    route_reading(router, AT, ttft={10: 3, 200: 1})

    share = share_within([pool], MINUTE, ROUTER_EDGES[10])

    assert (share.low_ratio, share.high_ratio, share.clock) == (0.75, 0.75, "router")
    assert share_within([pool], MINUTE, 1.0, clock="engine").low_ratio == 0.0
    assert share_within([pool], Window.last(60, until=T0), 1.0) is None


def test_ttft_of_what_was_cached_and_of_what_was_computed_are_two_lines(pool, router):
    """T1, T5: by the routers' clock, each with its bucket."""
    route_reading(router, AT, ttft={10: 9, 120: 2})
    route_reading(router, AT, ttft={10: 9}, reuse="hit")
    route_reading(router, AT, ttft={120: 2}, reuse="miss")

    hit, miss = series.ttft_by_reuse([pool], MINUTE)

    assert (hit.label, miss.label) == ("p95 mostly cached (router)", "p95 mostly computed (router)")
    assert ROUTER_EDGES[9] < hit.points[0][1] <= ROUTER_EDGES[10]
    assert miss.band[0] == (ROUTER_EDGES[119], ROUTER_EDGES[120])
