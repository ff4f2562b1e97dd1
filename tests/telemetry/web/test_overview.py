import re
from datetime import timedelta

import pytest
import time_machine

from controlplane.models import Pool, Replica, Rollout, Router, TaskGroup
from controlplane.services.fleet.pools import create_pool, update_pool
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.fleet.task_groups import update_task_group
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from controlplane.services.policies.rollout_plans import make_plan
from telemetry.metrics.windows import Window
from telemetry.models import CapacityCurve, ScrapeShard, ScrapeState
from telemetry.services.lab.value import saved_in
from telemetry.services.notifications.channels import create_channel, update_channel
from tests.telemetry.breakdown_bins import PROMPT, breakdown_bin
from tests.telemetry.conftest import fleet_of
from tests.telemetry.readings import cache_reading, route_reading
from tests.telemetry.stored_decisions import a_router


def test_the_first_visit_says_the_next_step(visitor):
    assert "Add pool" in visitor.get("/").text
    pool = create_pool("chat")
    text = visitor.get("/").text
    assert f'href="/fleet/pools/{pool.pk}/replicas/new/"' in text
    assert "data-chart" not in text


def test_before_the_first_reading_nothing_is_zero(visitor):
    add_replica(create_pool("chat"), name="gpu-1", url="http://gpu-1:8000")

    text = visitor.get("/").text

    assert "Waiting for the first scrape" in text
    tiles = text[text.index('id="tiles"') : text.index('id="charts"')]
    assert tiles.count("unknown") >= 4
    assert "0.0" not in tiles


def test_tiles_show_the_figures_with_their_reachable_share_and_whose_clock(visitor, fleet, noon):
    assert "reachable hit rate: not enough requests replayed yet" in visitor.get("/").text
    breakdown_bin(fleet, noon - timedelta(minutes=10), requests=400, reachable=0.85)
    text = visitor.get("/").text

    assert re.search(r'<span class="value">\d\d\.\d %</span>', text)
    assert '<span class="note">reachable about 85 %; ' in text
    assert "85.0 % reachable (± 0.0 points, 400 requests, " in text
    assert "could be reached" not in text
    assert "routers&#x27; clock" in text or "routers' clock" in text
    assert "<small>of 4 replicas</small>" in text
    assert "1 of 1 routers" in text


def test_tiles_are_of_the_chosen_range_say_it_and_compare_it_with_the_period_before(visitor, fleet, noon):
    """The policy of five minutes ago raised the hit rate and lowered TTFT; nothing is known before ten minutes ago."""
    short, whole = (visitor.get(f"/?range={key}").text for key in ("5m", "10m"))

    assert tile_text(short, "Hit rate").startswith("Hit rate, last 5 min")
    assert float(re.search(r"\+(\d+\.\d) points against the period before", tile_text(short, "Hit rate"))[1]) > 10
    assert re.search(r"0\.\d+\S p50, 0\.\d+\S p95 of the period before; routers' clock", tile_text(short, "TTFT"))
    assert [tile_text(whole, name).split(" %")[0] for name in ("Hit rate", "TTFT")] != [
        tile_text(short, name).split(" %")[0] for name in ("Hit rate", "TTFT")
    ]
    assert "period before: unknown" in tile_text(whole, "Hit rate")
    assert "period before: unknown" in tile_text(whole, "TTFT")
    assert "requests/s, last 10 min" in tile_text(whole, "Serving, now")
    fixed = visitor.get("/?from=2031-03-04T11:52&to=2031-03-04T11:55").text
    assert tile_text(fixed, "Hit rate").startswith("Hit rate, in this range")


def test_what_caches_saved_is_of_the_range_and_of_the_time_of_all_replicas(visitor, fleet, noon):
    Pool.objects.filter(pk=fleet.pk).update(created_at=noon - timedelta(days=1))
    assert tile_text(visitor.get("/").text, "Saved").startswith(
        "Saved, last 15 min unknown The prefill rate is unknown"
    )
    CapacityCurve.objects.create(pool=fleet, at=noon, prefill_rate=4000.0, fitted_requests=500)
    text = visitor.get("/?range=15m").text
    assert re.match(
        r"Saved, last 15 min 0\.\d+ of 1 replica-hours prefill of cached tokens; set a price", tile_text(text, "Saved")
    )
    assert f'href="/fleet/pools/{fleet.pk}/">set a price</a>' in text
    update_pool(fleet, costs={"gpu_hour_price": 3.6, "gpus_per_replica": 2, "currency": "EUR"})
    priced = tile_text(visitor.get("/?range=15m").text, "Saved")
    hours, money = map(
        float, re.match(r"Saved, last 15 min ([\d.]+) of 2 GPU-hours ([\d.]+) EUR of prefill", priced).groups()
    )
    assert money == pytest.approx(3.6 * hours, rel=0.06)
    latest = Window(noon - timedelta(minutes=5), noon, 300)
    assert saved_in(fleet_of(fleet), [fleet], latest, noon).amount.hours < 0.9 * hours
    for name in ("b", "c"):
        create_pool(name, models=[name])
        route_reading(a_router(), noon - timedelta(minutes=1), pool=name, requests=1)
    assert "; without b, c;" in tile_text(visitor.get("/").text, "Saved")


def test_a_hit_rate_above_the_reachable_one_is_explained(visitor, fleet, noon):
    breakdown_bin(fleet, noon - timedelta(minutes=10), requests=400, reachable=0.2)
    assert "an estimate from replayed requests of a longer time, so the measured hit rate can be above it" in shown(
        visitor.get("/").text
    )
    breakdown_bin(fleet, noon - timedelta(minutes=5), requests=4000, reachable=0.95)
    assert "so the measured hit rate can be above it" not in visitor.get("/").text


def test_the_page_says_where_the_hit_rate_goes_and_which_rollout_runs(visitor, fleet, noon, operator):
    text = visitor.get("/").text
    assert "Unknown: no request of this range was replayed yet" in text
    assert 'id="rollout-' not in text
    terms = {"capacity": 0.82, "split": 0.82, "best": 0.78, "predicted": 0.5, "delivered": 0.5, "reported_tokens": 1.0}
    tokens = {name: share * 400 * PROMPT for name, share in terms.items()}
    breakdown_bin(fleet, noon - timedelta(minutes=10), requests=400, reachable=0.85, **tokens)
    draft = save_draft(fleet.policies.get(group=None), {"strategy": "random"}, by=operator)
    plan = make_plan(fleet.policies.get(group=None), "by_share", observe_s=600, shares=[0.25, 1])
    rollout = publish_revision(draft.pk, by=operator, reason="a test", plan=plan)
    reading = {"name": "hit_rate", "unit": "ratio", "baseline": 0.6, "canary": 0.62, "limit": 0.57}
    readings = [reading | {"verdict": "inconclusive", "detail": "40 more requests are needed."}]
    Rollout.objects.filter(pk=rollout.pk).update(readings=readings, state="progressing")

    text = visitor.get("/?range=1h").text
    losses = shown(text[text.index('id="losses-title"') - 4 : text.index("Load and replicas")])
    assert "28.0 points placement 4.0 points spreading 3.0 points capacity What-if Breakdown" in losses
    assert 'href="/what-if/?pool=chat"' in text
    assert "/breakdown/?pool=chat&amp;range=1h" in text
    line = shown(text[text.index(f'id="rollout-{rollout.pk}"') + 20 : text.index('id="losses-title"')])
    assert "Rollout: random r3" in line
    assert "For 25 % of prefixes. Inconclusive: 40 more requests are needed. Difference so far: +2.0 points." in line
    assert "canary random r3" in tile_text(text, "Policy, now")


def test_of_several_pools_the_tile_names_each_policy_and_leads_to_its_pool(visitor, fleet, noon):
    add_replica(create_pool("other", models=["other"]), name="b-1", url="http://b-1:8000")
    text = visitor.get("/").text
    assert tile_text(text, "Policies, now") == "Policies, now chat : prefix_hash r2 other : lowest_cost r1"
    assert 'href="/?pool=other"' in text
    assert "Load and replicas" not in text
    assert "Load and replicas" in visitor.get("/?pool=chat").text


def test_a_long_range_is_read_from_rollups_with_as_many_queries(visitor, fleet, noon, django_assert_max_num_queries):
    with django_assert_max_num_queries(60):
        text = visitor.get("/?range=30d").text
    assert 'data-refresh="60"' in text
    assert 'data-refresh="5"' in visitor.get("/?range=1h").text


def test_when_reading_stopped_the_page_says_since_when_and_what_is_safe(visitor, fleet, noon):
    with time_machine.travel(noon + timedelta(minutes=3), tick=False):
        text = visitor.get("/").text

    assert "Last successful scrape: " in text
    assert "Requests are not affected" in text


@pytest.mark.parametrize(
    ("second_router", "is_shown"), [(None, True), ({"lost_at": 1}, True), ({}, False)], ids=["one", "lost", "up"]
)
def test_when_no_router_responds_the_overview_says_so_within_15_seconds(visitor, fleet, noon, second_router, is_shown):
    """The last heartbeat was just before it stopped; a scrape failed since, and its alert fires after 30 s."""
    router = Router.objects.update_or_create(
        name="router-1", defaults={"admin_url": "http://127.0.0.1:9000", "last_seen_at": noon, "lost_at": None}
    )[0]
    Router.objects.exclude(pk=router.pk).delete()
    ScrapeState.objects.update_or_create(router=router, defaults={"at": noon, "failures": 1, "reason": "no response"})
    if second_router is not None:
        lost_at = noon if "lost_at" in second_router else None
        seen_at = noon + timedelta(seconds=9)
        Router.objects.create(name="router-2", admin_url="http://127.0.0.1:9001", last_seen_at=seen_at, lost_at=lost_at)
    for second, shown in ((12, False), (14, is_shown)):
        with time_machine.travel(noon + timedelta(seconds=second), tick=False):
            assert ('id="router-outage"' in visitor.get("/status/").text) is shown
            up = Router.objects.filter(lost_at=None).count() - (second >= 14)
            assert f"{up} of {Router.objects.count()} routers" in visitor.get("/").text


def test_when_the_disk_is_full_the_page_says_so(visitor, fleet, noon):
    ScrapeShard.objects.create(number=0, due_at=noon, lag_s=0, refused_since=noon + timedelta(minutes=1))
    with time_machine.travel(noon + timedelta(minutes=3), tick=False):
        text = visitor.get("/").text

    assert "disk became full" in text
    assert "Last successful scrape" not in text


def test_a_replica_that_is_down_shows_why(visitor, fleet):
    ScrapeState.objects.filter(replica__name="gpu-2").update(health="down", failures=3, reason="connection refused")

    text = visitor.get("/").text

    assert '<span class="badge bad">down</span>' in text
    assert "connection refused" in text
    tiles = text[text.index('id="tiles"') : text.index('id="charts"')]
    assert re.search(r'<a href="/replicas/gpu-2/">gpu-2</a> down</strong>; 1 of 1 routers', tiles)


def test_hits_of_response_caches_are_figures_of_their_own(visitor, fleet, noon):
    """Tiles, the group's page and the list of requests; the hit rate stays that of the engines."""
    before = visitor.get("/").text
    assert 'id="response-cache"' not in before
    group = TaskGroup.objects.get(pool=fleet, name="coding")
    update_task_group(group, response_cache={})
    assert tile_text(visitor.get("/").text) == "Response cache hits no requests last 15 min"
    cached = {"cache_hits": 30, "cache_misses": 10, "cache_bypasses": 5}
    saved = {"cache_prompt_tokens": 60_000, "cache_generated_tokens": 900}
    at = noon - timedelta(seconds=30)
    for name, counts in (("coding", cached | saved), ("retrieval", {"cache_misses": 20})):
        cache_reading(Router.objects.first(), at, pool=fleet.name, group=name, **counts)

    after = visitor.get("/").text
    assert tile_text(after) == ("Response cache hits 50.0 % 30 of 60 cacheable requests, last 15 min")
    assert tile_text(after, "Hit rate") == tile_text(before, "Hit rate")
    page = visitor.get(f"/pools/{fleet.name}/groups/coding/").text
    panel = shown(page[page.index('id="cache-title"') - 80 : page.index("Hits are not part")])
    assert "Hits 30 75.0 % of cacheable requests" in panel
    assert "Not cacheable 5 requests" in panel
    assert "60.0 k prompt, 900 generated" in panel
    assert "Prefill not needed unknown" in panel
    assert f'href="/task-groups/{group.pk}/purge/"' in page
    assert "30 more requests in this range were answered from a response cache" in visitor.get("/requests/").text

    CapacityCurve.objects.create(pool=fleet, at=noon, prefill_rate=1000.0, fitted_requests=500)
    update_pool(fleet, costs={"gpu_hour_price": 3.6, "gpus_per_replica": 2, "currency": "EUR"})
    page = visitor.get(f"/pools/{fleet.name}/groups/coding/").text
    panel = shown(page[page.index('id="cache-title"') : page.index("Hits are not part")])
    assert "Prefill not needed at most 1 min of a replica 0.12 EUR" in panel


def shown(text):
    return " ".join(re.sub(r"<[^>]+>", " ", text).split())


def tile_text(text, label="Response cache hits"):
    """The text of the tile with a label."""
    (tile,) = re.findall(rf'<span class="label">{label}.*?</div>', text, re.DOTALL)
    return shown(tile)


def test_state_in_the_url_reaches_every_part(visitor, fleet):
    text = visitor.get("/?range=1h&by=group&util=running").text

    assert "Hit rate by task group" in text
    assert "Running requests" in text
    assert "/charts/hit-rate/figure/?range=1h&amp;by=group&amp;util=running" in text
    assert "/live/?range=1h&amp;by=group" in text


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("pool=none", "There is no pool"),
        ("group=chat", "choose its pool too"),
        ("from=yesterday", "time is invalid"),
        ("from=0001-01-01T00:00&to=0001-01-02T00:00", "time is invalid"),
        ("from=2031-03-04T12:00&to=2031-03-04T11:00", "must start in the past"),
        ("from=2040-01-01T00:00&to=2040-01-02T00:00", "must start in the past"),
    ],
)
def test_an_invalid_range_is_reported_and_the_default_is_shown(visitor, fleet, query, words):
    answer = visitor.get(f"/?{query}")

    assert answer.status_code == 200
    assert words in answer.text


def test_the_overview_says_that_nobody_is_notified_until_a_channel_is_on(visitor, fleet):
    text = visitor.get("/").text
    assert "No notification channel is set up: nobody is notified." in text
    assert '<a class="button" href="/channels/new/">Add channel</a>' in text
    channel = create_channel("on-call", config={"url": "http://127.0.0.1:1/hook"})
    assert 'id="no-channel"' not in visitor.get("/").text
    update_channel(channel, enabled=False)
    text = visitor.get("/").text
    assert "All notification channels are disabled" in text
    assert '<a class="button" href="/channels/">Open channels</a>' in text


def test_a_replica_that_was_never_read_is_starting_for_15_minutes_and_then_down(visitor, fleet, noon):
    replica = add_replica(fleet, name="gpu-new", url="http://gpu-new:8000")
    state = ScrapeState.objects.create(replica=replica, at=noon, health="down", failures=9, reason="refused")

    def word():
        row = re.search(r'<tr id="replica-gpu-new">.*?</tr>', visitor.get("/").text, re.DOTALL)
        return re.search(r'class="badge ?(\w*)"[^>]*>(starting|down)<', row[0]).group(2)

    Replica.objects.filter(pk=replica.pk).update(created_at=noon - timedelta(minutes=14))
    assert word() == "starting"
    assert "refused; counts as down in 1 min" in visitor.get("/replicas/gpu-new/").text
    Replica.objects.filter(pk=replica.pk).update(created_at=noon - timedelta(minutes=16))
    assert word() == "down"
    ScrapeState.objects.filter(pk=state.pk).update(ok_at=noon - timedelta(minutes=1))
    Replica.objects.filter(pk=replica.pk).update(created_at=noon - timedelta(minutes=14))
    assert word() == "down"
