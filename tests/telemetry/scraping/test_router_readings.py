"""What is stored of a router's counts, label set by label set."""

import pytest

from telemetry.models import RouterReading
from tests.fakes.fake_metrics_server import text
from tests.telemetry.expositions import router_text
from tests.telemetry.scraping.ticks import router, tick

pytestmark = pytest.mark.django_db


def test_a_router_s_label_set_that_is_new_in_its_boot_counts_from_zero(pool, metrics_server):
    """A router makes a label set when it first counts under it."""
    router(
        metrics_server,
        text(router_text()),
        text(
            router_text(
                {
                    "requests": {"ok": 5, "replica_error": 1},
                    "usage_reported": 5,
                    "prompt_tokens": 900,
                    "cached_tokens": 600,
                    "ttft": {10: 2, 200: 3},
                }
            )
        ),
        text(
            router_text(
                {
                    "requests": {"ok": 5, "replica_error": 1},
                    "usage_reported": 5,
                    "prompt_tokens": 900,
                    "cached_tokens": 600,
                    "ttft": {10: 2, 200: 3},
                }
            )
        ),
    )
    for number in range(3):
        tick(number)

    counted = RouterReading.objects.exclude(pool="").order_by("policy")
    ttft, requests = counted
    assert (requests.requests, requests.ok_requests, requests.replica_error_requests) == (6, 5, 1)
    assert (requests.prompt_tokens, requests.cached_tokens) == (900, 600)
    assert (ttft.policy, ttft.ttft_at, ttft.ttft_counts) == ("", [10, 200], [2, 3])
    states = RouterReading.objects.filter(pool="").order_by("at").values_list("state", flat=True)
    assert list(states) == ["first", "ok", "ok"]


def test_the_ttft_of_a_revision_on_trial_is_a_row_of_its_own(pool, metrics_server):
    def counted(number):
        arms = ({"revision": 1, "policy_ttft": {10: 4 * number}}, {"revision": 2, "policy_ttft": {12: number}})
        return text(router_text({"ttft": {10: 4 * number, 12: number}}, *arms))

    router(metrics_server, *map(counted, (1, 2, 4)))
    for number in range(3):
        tick(number)

    rows = RouterReading.objects.filter(pool="chat", replica="").order_by("at", "revision")
    assert [(row.group, row.policy, row.revision, row.ttft_at, row.ttft_counts) for row in rows] == [
        ("", "chat", 1, [10], [4]),
        ("", "chat", 2, [12], [1]),
        ("", "chat", 1, [10], [8]),
        ("", "chat", 2, [12], [2]),
    ]


def test_latencies_are_stored_beside_the_ttft_of_the_same_label_set(pool, metrics_server):
    def counted(number):
        counts = {"ttft": {10: number}, "streamed_latency": {90: number}, "plain_latency": {100: 3 * number}}
        return text(router_text(counts))

    router(metrics_server, *map(counted, (1, 2)))
    for number in range(2):
        tick(number)

    reading = RouterReading.objects.get(pool="chat")
    assert (reading.ttft_at, reading.ttft_counts) == ([10], [1])
    assert (reading.streamed_latency_at, reading.streamed_latency_counts) == ([90], [1])
    assert (reading.plain_latency_at, reading.plain_latency_counts) == ([100], [3])
    assert reading.plain_latency_layout_id == reading.ttft_layout_id


def test_a_router_s_new_boot_counts_from_zero(pool, metrics_server):
    before = router_text({"requests": {"ok": 5}}, boot="b1")
    router(metrics_server, text(before), text(router_text({"requests": {"ok": 7}}, boot="b2")))

    tick(0)
    tick(1)

    reading = RouterReading.objects.get(pool="chat")
    assert (reading.state, reading.requests) == ("reset", 7)


def test_requests_refused_before_a_pool_was_known_stay_with_the_router_itself(pool, metrics_server):
    nowhere = {"pool": "", "replica": "", "policy": "", "revision": ""}
    router(
        metrics_server,
        text(router_text({**nowhere, "requests": {"client_error": 1}})),
        text(router_text({**nowhere, "requests": {"client_error": 4}})),
    )
    tick(0)
    tick(1)

    reading = RouterReading.objects.latest("at")
    assert (reading.pool, reading.state, reading.requests) == ("", "ok", 3)


def test_predictions_spills_and_ttft_by_reuse_of_a_router_are_stored(pool, metrics_server):
    """H17"""
    before = {"requests": {("hit", "ok"): 5}, "usage_reported": 5, "prompt_tokens": 500, "cached_tokens": 100}
    after = {
        "requests": {("hit", "ok"): 7, ("spill", "ok"): 2, ("elsewhere", "replica_error"): 1},
        "usage_reported": 8,
        "prompt_tokens": 900,
        "cached_tokens": 400,
        "predicted_answers": 3,
        "predicted_prompt_tokens": 400,
        "predicted_tokens": 350,
        "predicted_cached_tokens": 300,
        "hit_ttft": {3: 2},
        "miss_ttft": {90: 1},
    }
    router(metrics_server, text(router_text(before)), text(router_text(after)))

    tick(0)
    tick(1)

    counted = RouterReading.objects.get(policy="chat")
    assert (counted.requests, counted.spilled_requests, counted.predicted_answers) == (5, 3, 3)
    assert (counted.predicted_prompt_tokens, counted.predicted_tokens, counted.predicted_cached_tokens) == (
        400,
        350,
        300,
    )
    by_reuse = RouterReading.objects.exclude(reuse="").order_by("reuse").values_list("reuse", "replica", "ttft_counts")
    assert list(by_reuse) == [("hit", "", [2]), ("miss", "", [1])]


def test_spills_are_unknown_where_placing_knows_no_home(pool, metrics_server):
    router(
        metrics_server,
        text(router_text({"requests": {("round_robin", "ok"): 5}})),
        text(router_text({"requests": {("round_robin", "ok"): 9}})),
    )

    tick(0)
    tick(1)

    assert RouterReading.objects.get(policy="chat").spilled_requests is None
