"""Figures beside each other, from stored readings: H5, H6, H13, H16, H17, H19, T1."""

from datetime import timedelta

import pytest
from django.db import connection
from django.template.loader import render_to_string
from django.test.utils import CaptureQueriesContext

from controlplane.models import Router
from controlplane.services.fleet.replicas import add_replica
from telemetry.metrics.windows import Window
from telemetry.services.figures.engine import EngineNotes, engine_notes, reconcile
from telemetry.services.figures.overview import Fleet, Subject
from tests.telemetry.conftest import T0, fleet_of
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


def reported(router, replica, cached, **more):
    tokens = {"predicted_responses": 500, "predicted_prompt_tokens": 50_000, "predicted_tokens": cached // 2}
    route_reading(
        router, AT, replica=replica, requests=500, usage_reported=500, prompt_tokens=50_000, cached_tokens=cached,
        **(tokens | {"predicted_cached_tokens": cached} | more),
    )  # fmt: skip


@pytest.fixture
def disagreeing(router, replicas):
    """r1's counters and responses agree, r2's counters stay 0 though its responses report hits, r3 reports no hits."""
    for replica, hits, missing in zip(replicas, (25_000, 0, None), ((), (), ("hits", "ttft")), strict=True):
        known = {} if hits is None else {"hits": hits}
        engine_reading(replica, AT, queries=50_000, prompt_tokens=51_000, finished=500, not_reported=missing, **known)
    reported(router, "r1", 24_500, predicted_tokens=24_000)
    reported(router, "r2", 24_500, predicted_tokens=24_000)
    reported(router, "r3", 24_500, predicted_tokens=24_000)


def test_each_replica_s_three_rates_and_what_comes_of_them(pool, disagreeing):
    """H17; vLLM once had counters that stayed 0 while the cache worked."""
    rows = {row.replica: row for row in reconcile(fleet_of(pool), MINUTE)}

    assert {name: row.comparison.agreement.value for name, row in rows.items()} == {
        "r1": "agree", "r2": "disagree", "r3": "agree",
    }  # fmt: skip
    assert (rows["r1"].engine.ratio, rows["r1"].responses.ratio) == (0.5, 0.49)
    assert rows["r1"].engine.not_eligible_tokens == 1000  # H6
    assert rows["r2"].comparison.points == pytest.approx(49.0)
    assert rows["r3"].engine.ratio is None
    assert "not reported by this engine" in rows["r3"].comparison.reason


def test_reconciling_costs_the_same_queries_whatever_the_fleet(pool, disagreeing):
    with CaptureQueriesContext(connection) as asked:
        reconcile(Fleet(Subject([pool])), MINUTE)
    assert len(asked) == 5


def test_the_table_shows_which_rates_agree(pool, disagreeing):
    page = render_to_string("telemetry/reconciliation.html", {"rows": reconcile(fleet_of(pool), MINUTE)})

    for words in ("50.0 %", "49.0 %", "differ</span>", "not reported by this engine", "49.0"):
        assert words in page
    assert "No replicas yet" in render_to_string("telemetry/reconciliation.html", {"rows": []})


def test_a_prediction_of_some_responses_says_of_how_many_and_is_compared_with_those(pool, router, replicas):
    reported(router, "r1", 5_000, predicted_responses=250, predicted_prompt_tokens=25_000, predicted_tokens=20_000)

    rows = reconcile(fleet_of(pool), MINUTE)

    assert rows[0].comparison.rates == (0.8, 0.2)  # of all responses it is 0.1
    assert "The prediction and the 50 % of responses that had one differ by 60.0 points" in rows[0].comparison.reason
    page = render_to_string("telemetry/reconciliation.html", {"rows": rows})
    assert '80.0 % <span class="muted small">of 50.0 % of responses' in page.replace("\xa0", " ")


def test_an_engine_s_notes_name_what_it_lacks_and_what_skews_it(pool, replicas):
    """H13, H19: a gap names nothing, so the newest scrape that succeeded counts."""
    old, new, decode = replicas
    scraped(old, AT, engine="vllm", version="0.32.0")
    scraped(new, AT, engine="vllm", version="0.33.0")
    scraped(decode, AT, engine="sglang", role="decode")
    engine_reading(old, AT, engine="0", not_reported=["external_hits", "disk_tokens"], queries=1, hits=1)
    engine_reading(old, AT, engine="1", not_reported=["disk_tokens"], queries=1, hits=1)
    gap(old, AT + timedelta(seconds=5))

    notes = engine_notes(fleet_of(old.pool), MINUTE)

    assert (notes[old.pk].not_reported, notes[old.pk].reports("disk_tokens")) == (("disk_tokens",), False)
    assert notes[old.pk].reports("external_hits", "hits")
    assert "each time it tries to schedule it" in notes[old.pk].notes[0]
    assert notes[new.pk] == EngineNotes("vLLM", "0.33.0")
    assert notes[decode.pk].is_decode
    assert [sentence.split()[0] for sentence in notes[decode.pk].notes] == ["Decode", "SGLang"]
    with pytest.raises(ValueError, match="unknown figures: hit_rate"):
        notes[new.pk].reports("hit_rate")
