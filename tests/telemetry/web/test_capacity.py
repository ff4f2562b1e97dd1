"""The pages "Value", "Capacity and cost" and "Before and after"."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from datetime import timedelta

import pytest
import time_machine

from controlplane.models import ClientKey, Pool, Rollout, RolloutState, TaskGroup
from controlplane.services.fleet.pools import create_pool, create_project, update_pool
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from telemetry.models import Decision, WhatIf, WhatIfState
from telemetry.services.lab.replays import update_curve
from telemetry.services.lab.reports import NOTHING, compared
from telemetry.web.views.reports import FIGURES, comparison_rows
from tests.telemetry.services.lab.test_breakdowns import fleet as room  # noqa: F401 - a fixture
from tests.telemetry.services.lab.test_reports import traffic  # noqa: F401 - a fixture
from tests.telemetry.services.lab.test_sizing import COSTS, bins, learnt
from tests.telemetry.services.lab.test_value import scraped, served
from tests.telemetry.stored_decisions import a_router, decided, repeated_in_a_row
from tests.telemetry.what_if_results import finished_sweep, predict_draft

pytestmark = pytest.mark.django_db


@pytest.fixture
def sized(visitor, noon, room):  # noqa: F811
    """A pool with a day of breakdowns, a finished sweep, a model and prices."""
    bins(room)
    bins(room, group="agents")
    finished_sweep(room, noon)
    update_pool(room, kv_cache={"bytes_per_token": 327_680}, costs=COSTS)
    update_curve(room, noon)
    return visitor


def test_the_page_shows_sizes_and_advice(sized, django_assert_max_num_queries):
    with django_assert_max_num_queries(30):
        page = sized.get("/capacity/").text
    for words in (
        "What caches saved",
        "9,600 requests",
        "172.80 USD a day",
        "320 KiB, 625 MiB for 2,000 tokens",
        "One replica fewer: hit rate",
        "It would save 172.80 USD a day",
        "40 GiB",  # 131,072 tokens
        "10.0 % are lost to capacity and duplication",
        "needs: the cache size of every replica and requests in the last hour",
        "unknown",
        "Run a capacity sweep",
    ):
        assert words in page, words


def test_the_page_shows_what_a_response_cache_would_bring(sized, noon, room):  # noqa: F811
    assert "No request digests in this range" in sized.get("/capacity/").text
    router = a_router()
    repeated_in_a_row(router, noon, 120)
    decided(router, noon - timedelta(minutes=3), 500, group="", digest_ratio=1.0)
    TaskGroup.objects.create(pool=room, name="cached", response_cache={})
    decided(router, noon - timedelta(minutes=2), 501, group="cached", digest_ratio=1.0)

    page = sized.get("/capacity/").text

    for words in (
        "Repeats, TTL 1 h",
        "50.0 %",
        "60.0 k prompt, 3,000 generated tokens",
        "no group",
        "Has a response cache",
    ):
        assert words in page, words
    for words in ("TTL 1 d", "Digests are of"):
        assert words not in page, words


def test_the_page_says_how_uncertain_a_sample_is(sized, noon):
    router = a_router()
    repeated_in_a_row(router, noon, 120, digest_ratio=0.5)
    assert "No request digests" not in (page := sized.get("/capacity/").text)
    assert "None of 120 captured requests" in page  # no digest has the level of the sample
    Decision.objects.all().delete()
    for seq in range(120):
        at = noon - timedelta(minutes=120 - seq)
        digest = (seq // 2 if seq % 4 < 2 else 1000 + seq) << 6 | 1
        decided(router, at, seq, request_digest=digest, digest_ratio=0.5, latency_s=2.0)
    page = sized.get("/capacity/").text
    assert "Digests are of 50.0 % of the prompts" in page
    assert "240" in page
    assert "25.0 %" in page


def test_the_charts_have_the_data_of_the_tables(sized):
    by_replicas = sized.get("/capacity/chat/figures/replicas/").json()
    assert by_replicas["data"][0]["x"] == [3, 4, 5]
    assert by_replicas["layout"]["shapes"][0]["x0"] == 4
    assert sized.get("/capacity/chat/figures/cache/").json()["data"][0]["x"] == [131_072, 262_144]
    assert sized.get("/capacity/chat/figures/other/").status_code == 404
    assert sized.get("/capacity/none/figures/cache/").status_code == 404


def test_tiers_come_from_the_url_and_an_invalid_one_is_shown_at_its_field(sized):
    assert "1.50 s" in sized.get("/capacity/?cpu_latency_ms=1500").text
    answer = sized.get("/capacity/?cpu_latency_ms=-1")
    assert answer.status_code == 422
    assert 'id="id_cpu_latency_ms_error"' in answer.text


def test_a_sweep_that_is_not_calibrated_advises_nothing(sized):
    what_if = WhatIf.objects.get()
    what_if.result["calibration"] |= {"is_calibrated": False, "problems": ["Only 3 requests were counted."]}
    what_if.save()
    page = sized.get("/capacity/").text
    assert "Not calibrated: no advice" in page
    assert "Only 3 requests were counted." in page
    assert "One replica fewer" not in page


def test_a_sweep_is_started_and_followed(sized):
    response = sized.post("/capacity/chat/sweep/", {"window": "7200"})
    created = WhatIf.objects.first()
    assert response["Location"] == f"/what-if/{created.pk}/"
    assert created.end - created.start == timedelta(seconds=7190)  # the newest decisions are not collected yet
    page = sized.get("/capacity/").text
    assert f"/what-if/{created.pk}/" in page
    assert "Run a capacity sweep" not in page
    assert "/capacity/?pool=chat" in sized.get(f"/what-if/{WhatIf.objects.last().pk}/").text


def test_an_unmeasured_pool_and_an_empty_fleet_say_what_to_do(visitor):
    assert "No pools yet" in visitor.get("/capacity/").text
    assert "No pools yet" in visitor.get("/report/").text


def test_a_pool_without_replicas_says_why_it_cannot_be_swept(visitor, pool):
    page = visitor.get("/capacity/").text
    assert "No replayed requests in this range" in page
    assert "Not predicted yet" in page
    page = visitor.post("/capacity/chat/sweep/", follow=True).text
    assert "has no active replica" in page
    assert WhatIf.objects.count() == 0


def test_a_report_shows_both_windows_and_unknown_figures_as_unknown(
    visitor,
    noon,
    traffic,  # noqa: F811
    django_assert_max_num_queries,
):
    Pool.objects.update(created_at=noon - timedelta(days=1))
    noon_at = noon.isoformat().removesuffix("+00:00")
    with_clock_at_one = {"at": noon_at, "span": "1h", "pool": "chat"}
    with time_machine.travel(noon + timedelta(hours=1), tick=False), django_assert_max_num_queries(36):
        page = visitor.get("/report/", with_clock_at_one).text
    for words in ("30.0 %", "60.0 %", "+30.0 points", "better", "unknown", "No price is set", "streamed responses"):
        assert words in page, words


def test_a_difference_that_is_shown_as_zero_is_neither_better_nor_worse():
    def side(hit_rate):
        return replace(NOTHING, hit_rate=hit_rate)

    def rows_of(after, *, has_verdict=True):
        return comparison_rows(compared("", side(0.5), side(after)), FIGURES, has_verdict=has_verdict)

    def word(after):
        return next(row["word"] for row in rows_of(after) if row["word"])

    assert word(0.502) == "better"
    with pytest.raises(StopIteration):
        word(0.4996)
    assert {row["word"] for row in rows_of(0.9, has_verdict=False)} == {""}


@pytest.mark.parametrize("query", ["at=yesterday", "span=5s", "span=1000d", "span=x"])
def test_an_invalid_report_says_what_is_expected(visitor, pool, query):
    answer = visitor.get(f"/report/?pool=chat&{query}")
    assert answer.status_code == 422
    assert "Expected a" in answer.text


@pytest.mark.parametrize(
    ("prediction", "words"),
    [
        ({}, ">Predicted</th>"),
        ({"is_calibrated": False}, "was not calibrated"),
        ({"state": WhatIfState.FAILED, "result": None, "reason": "No traffic."}, "the what-if failed. No traffic."),
        ({"ended_at": None}, "Not predicted: no stored what-if of these settings had ended"),
        ({"rollout": RolloutState.ROLLED_BACK}, "has not placed all traffic, so"),
        ({"rollout": RolloutState.PROGRESSING}, "has not placed all traffic yet, so"),
    ],
)
def test_a_rollout_links_to_its_report_which_shows_what_was_predicted(visitor, noon, pool, prediction, words):
    prediction = dict(prediction)
    state = prediction.pop("rollout", RolloutState.COMPLETE)
    draft = save_draft(pool.policies.select_related("pool").get(group=None), {"strategy": "random"})
    predict_draft(draft, **{"ended_at": noon - timedelta(hours=3), **prediction})
    rollout = publish_revision(draft.pk)
    Rollout.objects.filter(pk=rollout.pk).update(
        started_at=noon - timedelta(hours=2),
        state=state,
        finished_at=None if state == RolloutState.PROGRESSING else noon - timedelta(hours=1),
    )
    Pool.objects.update(created_at=noon - timedelta(days=1))
    assert f"/report/?rollout={rollout.pk}" in visitor.get(f"/rollouts/{rollout.pk}/").text
    page = visitor.get(f"/report/?rollout={rollout.pk}").text
    assert "Rollout of revision 2" in page
    assert words in page
    assert ("45.0 %" in page) == (words == ">Predicted</th>" or "calibrated" in words)
    assert visitor.get("/report/?rollout=999").status_code == 404


def test_without_a_time_the_latest_changes_are_offered_instead_of_an_error(visitor, pool):
    rollout = publish_revision(save_draft(pool.policies.get(group=None), {"strategy": "random"}).pk)
    page = visitor.get("/report/").text
    assert "xpected a time" not in page
    assert f'<a href="?rollout={rollout.pk}">chat r2</a>' in page


def test_the_value_page_says_what_caches_saved_and_asks_for_a_price(visitor, noon, traffic):  # noqa: F811
    traffic = learnt(traffic).pool
    rollout = publish_revision(save_draft(traffic.policies.get(group=None), {"strategy": "random"}).pk)
    Rollout.objects.filter(pk=rollout.pk).update(started_at=noon - timedelta(minutes=10))
    red = {"name": "team-red", "tenant": "acme", "hint": "wpk_", "digest": "0" * 64, "groups": ["agents"]}
    ClientKey.objects.create(project=traffic.project, **red)
    project = create_project("others")
    ClientKey.objects.create(project=project, name="team-blue", hint="wpk_", digest="1" * 64, groups=["agents"])

    page = visitor.get("/value/").text

    for words in (
        "On Tue 04 Mar 2031, prefix caches saved 1.0 replica-minutes, 30 % of prefill",
        "What better placement could have saved is unknown.",
        "No price is set for pool chat",
        '<span class="actions"><a class="button" href="/fleet/pools/',  # not printed
        "#id_costs-gpu_hour_price",
        "team-red (tenant acme)",
        f"/report/?rollout={rollout.pk}",
        "chat r2, random",
    ):
        assert words in page, words
    assert "team-blue" not in page
    assert "Money" not in page
    update_pool(traffic, costs=COSTS)
    page = visitor.get("/value/?by=week&pool=chat").text
    assert page.count(">Money saved<") == page.count(">Money it could add<") == 2
    assert "2.0 GPU-minutes (0.12 USD)" in page
    assert "No price is set" not in page


def test_the_value_page_without_traffic_says_what_is_missing(visitor, noon):
    assert "No traffic was measured yet." in visitor.get("/value/?by=nonsense&at=nonsense&pool=none").text
    assert "There is no pool named &#x27;none&#x27;." in visitor.get("/value/?pool=none").text
    assert visitor.get("/value.csv?pool=none").status_code == 404


def test_bars_have_one_unit_where_the_hours_of_a_pool_are_unknown(visitor, noon, pool):
    learnt(pool)
    create_pool("batch", models=["small"])
    scraped(noon - timedelta(days=1), noon)
    served(noon - timedelta(days=1), 500)
    served(noon, 500, pool="batch")
    assert re.findall('<rect class="h8" width="([^"]*)"', visitor.get("/value/?by=day").text) == ["1000.0000"] * 2


def test_the_value_is_exported_by_step_and_task_group(visitor, noon, traffic):  # noqa: F811
    learnt(traffic)
    rows = list(csv.DictReader(visitor.get("/value.csv?by=day").text.splitlines()))
    assert [(row["pool"], row["group"], row["requests"], row["saved_tokens"]) for row in rows] == [
        ("chat", "agents", "200", "60000.0")
    ]
    assert rows[0]["placement_money"] == ""
    document = visitor.get("/api/v1/value?by=day").json()
    assert document["periods"][0]["groups"][0]["saved"]["tokens"] == 60_000
    assert visitor.get("/api/v1/value?by=month").status_code == 422
