"""Readings of a router, one per label set."""

from datetime import timedelta

import pytest

from controlplane.models import Router
from telemetry.metrics.windows import PointState, Window
from telemetry.models import Reading, RouterReading, ScrapeState
from telemetry.services.figures.replicas import rank_rows
from tests.fakes.fake_metrics_server import status, text
from tests.telemetry.conftest import T0
from tests.telemetry.expositions import replica_text, router_text
from tests.telemetry.scraping.cycles import replica, run_cycle, scrape_router

pytestmark = pytest.mark.django_db


def test_a_label_set_that_is_new_in_its_boot_counts_from_zero(pool, metrics_server):
    """A router creates a label set when it first counts under it."""
    counts = {
        "requests": {"ok": 5, "replica_error": 1}, "usage_reported": 5, "prompt_tokens": 900, "cached_tokens": 600,
        "ttft": {10: 2, 200: 3},
    }  # fmt: skip
    scrape_router(metrics_server, router_text(), router_text(counts), router_text(counts))

    ttft, requests = RouterReading.objects.exclude(pool="").order_by("policy")
    assert (requests.requests, requests.ok_requests, requests.replica_error_requests) == (6, 5, 1)
    assert (requests.prompt_tokens, requests.cached_tokens) == (900, 600)
    assert (ttft.policy, ttft.ttft_at, ttft.ttft_counts) == ("", [10, 200], [2, 3])
    states = RouterReading.objects.filter(pool="").order_by("at").values_list("state", flat=True)
    assert list(states) == ["first", "ok", "ok"]


def test_the_ttft_of_each_revision_is_a_reading_of_its_own(pool, metrics_server):
    def exposition(number):
        revisions = ({"revision": 1, "policy_ttft": {10: 4 * number}}, {"revision": 2, "policy_ttft": {12: number}})
        return router_text({"ttft": {10: 4 * number, 12: number}}, *revisions)

    scrape_router(metrics_server, *map(exposition, (1, 2, 4)))

    rows = RouterReading.objects.filter(pool="chat", replica="").order_by("at", "revision")
    assert list(rows.values_list("policy", "revision", "ttft_at", "ttft_counts")) == [
        ("chat", 1, [10], [4]), ("chat", 2, [12], [1]), ("chat", 1, [10], [8]), ("chat", 2, [12], [2]),
    ]  # fmt: skip


def test_latencies_are_stored_beside_the_ttft_of_the_same_label_set(pool, metrics_server):
    def exposition(number):
        return router_text({"ttft": {10: number}, "streamed_latency": {90: number}, "plain_latency": {100: 3 * number}})

    scrape_router(metrics_server, *map(exposition, (1, 2)))

    reading = RouterReading.objects.get(pool="chat")
    assert (reading.ttft_at, reading.ttft_counts) == ([10], [1])
    assert (reading.streamed_latency_at, reading.streamed_latency_counts) == ([90], [1])
    assert (reading.plain_latency_at, reading.plain_latency_counts) == ([100], [3])
    assert reading.plain_latency_layout_id == reading.ttft_layout_id


@pytest.mark.parametrize(
    ("before", "after", "reason", "expected"),
    [
        pytest.param("b1", "b2", "hit", ("reset", 7, 0), id="a new boot counts from zero"),
        pytest.param("b1", "b1", "round_robin", ("ok", 2, None), id="without a preferred replica there is no overflow"),
    ],
)
def test_requests_of_a_label_set(pool, metrics_server, before, after, reason, expected):
    counts = ((5, before), (7, after))
    scrape_router(metrics_server, *(router_text({"requests": {(reason, "ok"): n}}, boot=boot) for n, boot in counts))

    reading = RouterReading.objects.get(pool="chat")
    assert (reading.state, reading.requests, reading.spilled_requests) == expected


def probes(number, tokens):
    return own_requests(number, tokens, 0) + f'warmpath_router_engine_probes_total{{replica="r1"}} {number + 1}\n'


def own_requests(number, prompt, cached):
    counts = {"requests": number, "prompt_tokens": prompt, "cached_tokens": cached}
    return "".join(f'warmpath_router_own_{name}_total{{replica="r1"}} {value}\n' for name, value in counts.items())


def of_probes(number, *, requests=0, tokens=0):
    """An engine that counted probes of 2 tokens, and requests with this many tokens together."""
    count = number + requests
    return replica_text(2 * number + tokens, tokens // 2, finished=count, ttft=(requests, number, 0, 0, 0))


def test_an_engine_that_got_probes_alone_has_no_traffic(pool, metrics_server):
    numbers = (0, 1, 3, 3)
    added = replica(pool, metrics_server, "r1", *map(of_probes, numbers))
    scrape_router(metrics_server, *(router_text() + probes(number, 2 * number) for number in numbers))

    rows = Reading.objects.filter(replica=added).order_by("at")
    figures = ("finished", "first_tokens", "queries", "prompt_tokens", "ttft_counts")
    assert list(rows.values_list(*figures)) == [(None,) * 5, *[(0, 0, 0, 0, [])] * 3]
    (rank,) = rank_rows(added, Window.last(60, until=T0 + timedelta(seconds=15)))
    assert (rank.hit_rate_ratio, rank.hit_rate_state, rank.requests_per_s) == (None, PointState.NO_TRAFFIC, 0)
    assert list(RouterReading.objects.values_list("pool", "replica").distinct()) == [("", "")]


def test_warm_ups_are_left_out_with_their_cached_tokens(pool, metrics_server):
    """Of 40 requests with 60,000 tokens, the router sent 30 with 50,000 tokens to warm the replica up."""
    texts = [
        replica_text(0, 0, finished=0, ttft=(0, 0, 0, 0, 0)),
        replica_text(60_000, 21_000, finished=40, ttft=(40, 0, 0, 0, 0)),
    ]
    added = replica(pool, metrics_server, "r1", *texts)
    scrape_router(
        metrics_server, router_text() + own_requests(0, 0, 0), router_text() + own_requests(30, 50_000, 20_000)
    )

    figures = ("finished", "first_tokens", "queries", "hits", "prompt_tokens", "ttft_counts")
    last = Reading.objects.filter(replica=added).order_by("at").values_list(*figures).last()
    assert last == (10, 10, 10_000, 1_000, 10_000, None)


def test_probes_are_left_out_of_the_counts_of_a_reading_and_its_first_tokens_are_unknown(pool, metrics_server):
    added = replica(
        pool,
        metrics_server,
        "r1",
        of_probes(0, requests=4, tokens=400),
        of_probes(2, requests=14, tokens=1400),
        of_probes(2, requests=24, tokens=2400),
    )
    scrape_router(metrics_server, *(router_text() + probes(number, 2 * number) for number in (0, 2, 2)))

    rows = Reading.objects.filter(replica=added).order_by("at")
    assert list(rows.values_list("finished", "first_tokens", "queries", "hits", "prompt_tokens", "ttft_counts")) == [
        (None,) * 6, (10, 10, 1000, 500, 1000, None), (10, 10, 1000, 500, 1000, [10]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("of_engine", "of_router", "finished"),
    [
        pytest.param((0, 0, 2, 2), (0, 2, 2, 2), [None, 0, 0, 0], id="the router is scraped before the engine"),
        pytest.param((0, 2, 2, 2), (0, 0, 2, 2), [None, 2, 0, 0], id="the engine is scraped before the router"),
        pytest.param((0, 0, 2, 2), (7, 2, 2, 2), [None, 0, 0, 0], id="another process of the router"),
    ],
)
def test_a_probe_is_left_out_once(pool, metrics_server, of_engine, of_router, finished):
    added = replica(pool, metrics_server, "r1", *map(of_probes, of_engine))
    scrape_router(metrics_server, *(router_text() + probes(number, 2 * number) for number in of_router))

    assert list(Reading.objects.filter(replica=added).order_by("at").values_list("finished", flat=True)) == finished


def test_kv_event_streams_are_kept_as_of_the_last_scrape(pool, metrics_server):
    def exposition(*lines):
        return router_text() + "".join(f"warmpath_router_kv_events_{line}\n" for line in lines)

    rank = '{pool="chat",replica="r1",rank="1"}'
    state = 'state{pool="chat",replica="r1",rank="1",state="partial"} 2'
    figures = (f"lag_seconds{rank} 0.25", f"lost_total{rank} 3", f"gaps_total{rank} NaN", f"blocks{rank} 7")
    scrape_router(metrics_server, exposition(state, *figures))
    stored = ScrapeState.objects.get(router__isnull=False)
    assert stored.kv_streams == {"r1": {"1": {"states": {"partial": 2}, "lag_s": 0.25, "lost": 3.0}}}

    metrics_server.script("/router/metrics", status(503), text(exposition()))
    for number, expected in ((1, None), (2, {})):
        run_cycle(number)
        stored.refresh_from_db()
        assert stored.kv_streams == expected


def test_the_loads_of_pools_are_kept_as_of_the_last_scrape(pool, metrics_server):
    figures = (
        'saturation_ratio{pool="chat"} 0.75', 'waiting_work_seconds{pool="chat"} 2.5',
        'prefill_tokens_per_second{pool="chat"} 8000', 'waiting_work_seconds{pool="other"} NaN',
    )  # fmt: skip
    exposition = router_text() + "".join(f"warmpath_router_pool_{line}\n" for line in figures)
    scrape_router(metrics_server, exposition)
    stored = ScrapeState.objects.get(router__isnull=False)
    assert stored.pool_loads == {"chat": {"saturation_ratio": 0.75, "waiting_s": 2.5, "prefill_tokens_per_s": 8000.0}}

    metrics_server.script("/router/metrics", status(503))
    run_cycle(1)
    stored.refresh_from_db()
    assert stored.pool_loads is None


def test_semantic_caches_are_kept_as_of_the_last_scrape(pool, metrics_server):
    names = 'pool="chat",group="faq"'
    lines = (
        f'state{{{names},state="serving"}} 2', f'state{{{names},state="stopped"}} 0', f"window_checks{{{names}}} 250",
        f"recent_precision_ratio{{{names}}} 0.99", f"precision_lower_bound_ratio{{{names}}} NaN",
        f'checks_total{{{names},similarity="0.95",result="right"}} 7',
        f'checks_total{{{names},similarity="0.95",result="wrong"}} 1',
        f'shared_checks{{{names},similarity="1.00",result="right"}} 9',
    )  # fmt: skip
    exposition = router_text() + "".join(f"warmpath_router_semantic_cache_{line}\n" for line in lines)
    scrape_router(metrics_server, exposition)
    stored = ScrapeState.objects.get(router__isnull=False)
    assert stored.semantic_caches == {
        "chat": {
            "faq": {
                "states": {"serving": 2, "stopped": 0},
                "window_checks": 250.0,
                "recent_precision": 0.99,
                "checks": {"0.95": {"right": 7, "wrong": 1}},
                "shared_checks": {"1.00": {"right": 9}},
            }
        }
    }

    metrics_server.script("/router/metrics", status(503))
    run_cycle(1)
    stored.refresh_from_db()
    assert stored.semantic_caches is None


def test_requests_without_a_pool_are_stored_with_the_router_itself(pool, metrics_server):
    nowhere = {"pool": "", "replica": "", "policy": "", "revision": ""}
    scrape_router(metrics_server, *(router_text({**nowhere, "requests": {"client_error": n}}) for n in (1, 4)))

    reading = RouterReading.objects.latest("at")
    assert (reading.pool, reading.state, reading.requests) == ("", "ok", 3)


def test_predictions_overflow_and_ttft_by_reuse_are_stored(pool, metrics_server):
    """H17"""
    before = {"requests": {("hit", "ok"): 5}, "usage_reported": 5, "prompt_tokens": 500, "cached_tokens": 100}
    predicted = {"predicted_responses": 3, "predicted_prompt_tokens": 400, "predicted_tokens": 350,
                 "predicted_cached_tokens": 300}  # fmt: skip
    after = {
        "requests": {("hit", "ok"): 7, ("spill", "ok"): 2, ("elsewhere", "replica_error"): 1},
        "usage_reported": 8, "prompt_tokens": 900, "cached_tokens": 400, **predicted,
        "hit_ttft": {3: 2}, "miss_ttft": {90: 1},
    }  # fmt: skip
    scrape_router(metrics_server, router_text(before), router_text(after))

    reading = RouterReading.objects.get(policy="chat")
    assert (reading.requests, reading.spilled_requests) == (5, 3)
    assert {name: getattr(reading, name) for name in predicted} == predicted
    by_reuse = RouterReading.objects.exclude(reuse="").order_by("reuse").values_list("reuse", "replica", "ttft_counts")
    assert list(by_reuse) == [("hit", "", [2]), ("miss", "", [1])]


def test_response_caches_and_objectives_have_readings_of_their_own(pool, metrics_server):
    def exposition(hits, store_up=1):
        cache = "warmpath_router_response_cache_"
        group = 'pool="chat",group="faq"'
        lines = [
            f'{cache}requests_total{{{group},result="hit"}} {hits}',
            f'{cache}requests_total{{{group},result="miss"}} 4',
            f'{cache}requests_total{{{group},result="of a later release"}} {hits}',
            f'{cache}saved_tokens_total{{{group},kind="prompt"}} {100 * hits}',
            *(f'warmpath_router_ttft_objectives_total{{{group},result="{it}"}} {hits}' for it in ("kept", "shed")),
        ]
        lines += [] if store_up is None else [f"{cache}store_up {store_up}"]
        return router_text() + "".join(f"{line}\n" for line in lines)

    scrape_router(metrics_server, exposition(1), exposition(3), exposition(3, store_up=0), exposition(3))

    (reading,) = RouterReading.objects.filter(pool="chat")
    assert (reading.group, reading.replica, reading.policy, reading.requests) == ("faq", "", "", None)
    assert (reading.cache_hits, reading.cache_misses, reading.cache_bypasses) == (2, 0, None)
    assert (reading.cache_prompt_tokens, reading.cache_generated_tokens) == (200, None)
    assert (reading.objective_requests, reading.objective_kept) == (4, 2)
    states = RouterReading.objects.filter(pool="").order_by("at").values_list("cache_store_up", flat=True)
    assert list(states) == [1, 1, 0, 1]


def test_what_a_worker_of_an_earlier_release_did_not_store_is_no_increase(pool, metrics_server):
    def exposition(kept):
        return (
            router_text() + f'warmpath_router_ttft_objectives_total{{pool="chat",group="faq",result="kept"}} {kept}\n'
        )

    scrape_router(metrics_server, router_text(), exposition(1_000_000), exposition(1_000_007))

    assert list(RouterReading.objects.filter(pool="chat").values_list("objective_kept", flat=True)) == [7]


def test_a_router_without_a_store_has_no_state_of_a_store(pool, metrics_server):
    scrape_router(metrics_server, router_text())
    assert RouterReading.objects.get().cache_store_up is None


def test_what_a_router_shares_is_known_while_it_reports_that(pool, metrics_server):
    def exposition(published, received, age=0.25, *, only_workers=False):
        shared = "warmpath_router_shared_state_"
        lines = [
            *([] if only_workers else [f"{shared}peers {2 if age else 0}"]),
            f'{shared}bytes_total{{direction="published"}} {published}',
            f'{shared}bytes_total{{direction="received"}} {received}',
            *([f"{shared}age_seconds {age}"] if age else []),
        ]
        return router_text() + "".join(f"{line}\n" for line in lines)

    pages = [
        exposition(100, 1000),
        exposition(200, 3000),
        exposition(200, 3000, age=None),
        exposition(20, 30),
        exposition(20, 30, only_workers=True),
        router_text(),
        status(500),
    ]
    scripted = [text(page) if isinstance(page, str) else page for page in pages]
    url = metrics_server.script("/router/metrics", *scripted)
    router = Router.objects.create(name="router-1", admin_url=url, boot="b1", last_seen_at=T0)
    found = []
    for number in range(len(pages)):
        run_cycle(number)
        found.append(ScrapeState.objects.get(router=router).shared_state)

    first, second, cut_off, restarted, only_workers, alone, unknown = found
    assert first == {"peers": 2, "age_s": 0.25, "published": 100, "received": 1000}
    assert (second["bytes_per_s"], second["peers"]) == (420.0, 2)
    assert ("age_s" in cut_off, cut_off["peers"]) == (False, 0)
    assert "bytes_per_s" not in restarted
    assert only_workers == alone == {}
    assert unknown is None
