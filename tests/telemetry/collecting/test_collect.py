"""Decisions collected over real sockets: each is stored once, despite restarts and invalid pages."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection
from django.utils import timezone

from controlplane.models import Router
from telemetry.lab.chains import format_hash
from telemetry.models import Decision, DecisionCursor
from telemetry.scraping import collect
from telemetry.scraping.collect import collect_decisions
from telemetry.scraping.decision_records import faded_peak, sample_ratio
from telemetry.storage.locks import COLLECT
from tests.fakes.fake_metrics_server import endless, hang, status
from tests.side_by_side import alone
from tests.telemetry.conftest import T0
from tests.telemetry.decisions import FakeRing, decision, hashes, json_response

pytestmark = pytest.mark.django_db
NOW = T0 + timedelta(minutes=1)


@pytest.fixture(autouse=True)
def generous_deadlines(monkeypatch):
    """For busy machines; tests of deadlines set their own."""
    monkeypatch.setattr(collect, "RUN_S", 60.0)
    monkeypatch.setattr(collect, "PAGE_S", 30.0)


@pytest.fixture
def server(metrics_server):
    """Matches paths without their query."""
    scripted = metrics_server.next_responder
    metrics_server.next_responder = lambda path: scripted(path.partition("?")[0])
    return metrics_server


def router(server, name, *responses) -> Router:
    server.script(f"/{name}/admin/decisions", *responses)
    return Router.objects.create(name=name, admin_url=f"{server.url}/{name}", boot="b1", last_seen_at=timezone.now())


def stored() -> list[str]:
    return list(Decision.objects.order_by("router_id", "boot", "seq").values_list("request_id", flat=True))


def test_a_decision_is_stored_as_the_router_reports_it(server):
    ring = FakeRing()
    failed = [{"replica": "b", "tokens": 312}]  # during the stream
    changes = {"cached_tokens": None, "prompt_structure": {"segments": []}, "continued_after": failed}
    ring.records = [decision(1, group="support", rank=2, arm="canary", **changes)]
    router(server, "one", ring)
    DecisionCursor.objects.create(router=Router.objects.get(), sample_ratio=1.0)

    assert collect_decisions(NOW).decisions == 1

    row = Decision.objects.get()
    assert (row.at, row.boot, row.seq, row.request_id) == (T0 + timedelta(milliseconds=10), "b1", 1, "r1")
    assert (row.pool, row.group, row.policy, row.replica, row.rank, row.arm) == (
        *("chat", "support", "everyday", "a", 2, "canary"),
    )
    assert (row.prompt_tokens, row.cached_tokens, row.block_tokens, row.hash_tokens) == (240, None, 16, 64)
    assert [format_hash(block) for block in row.blocks] == hashes(1, 4)
    assert (format_hash(row.prefix), row.prefix, row.positions, row.sample_ratio) == ("f" * 16, -1, None, 1.0)
    assert row.continued_after == failed
    assert (row.candidates, row.prompt_structure) == (
        [{"replica": "a", "running": 1, "waiting_tokens": 0}],
        {"segments": []},
    )
    assert ring.tokens == ["Bearer router-token-for-tests"] * 2


def test_every_decision_is_stored_once_despite_restarts_and_repeated_requests(server):
    ring, other = FakeRing(page=3), FakeRing(boot="x")
    router(server, "one", ring)
    router(server, "two", other)
    ring.records = [decision(seq) for seq in range(1, 8)]
    other.records = [decision(1, request_id="other")]

    assert [collect_decisions(NOW).decisions for _ in range(2)] == [8, 0]
    assert stored() == [*(f"r{seq}" for seq in range(1, 8)), "other"]

    DecisionCursor.objects.update(seq=4)  # as if the worker was killed before it stored the cursor
    collect_decisions(NOW)
    ring.boot, ring.records = "b2", [decision(seq, request_id=f"again{seq}") for seq in range(1, 10)]
    collect_decisions(NOW)

    of_one = Decision.objects.filter(router__name="one")
    assert of_one.filter(boot="b1").count() == 7
    assert list(of_one.filter(boot="b2").order_by("seq").values_list("seq", flat=True)) == list(range(1, 10))


def test_dropped_and_invalid_decisions_are_counted_and_do_not_stop_the_others(server):
    ring = FakeRing()
    ring.records = [
        decision(11),
        decision(12, T0 - timedelta(days=400)),
        decision(13, T0 + timedelta(days=2)),
        decision(14, pool="a\0b"),
        decision(15, blocks=["no hash"]),
        decision(16, replica=7),
        decision(17, block_count=3),
        decision(18, candidates=[{"replica": "x" * 40_000}]),
    ]
    DecisionCursor.objects.create(router=router(server, "one", ring), sample_ratio=1.0)

    collect_decisions(NOW)

    cursor = DecisionCursor.objects.get()
    assert stored() == ["r11", "r18"]
    assert Decision.objects.get(seq=18).candidates is None
    assert (cursor.seq, cursor.collected, cursor.dropped) == (18, 2, 10 + 6)


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (status(401), "status 401"),
        (status(302, "http://169.254.169.254/"), "status 302"),
        (json_response({"boot": "b", "decisions": 7}), "not a page of decisions"),
        (json_response([]), "not a page of decisions"),
        (endless(), "too long"),
    ],
)
def test_an_invalid_page_is_recorded_and_affects_no_other_router(server, response, reason):
    ring = FakeRing()
    ring.records = [decision(1)]
    router(server, "bad", response)
    router(server, "good", ring)

    run = collect_decisions(NOW)

    assert (run.routers, run.decisions, run.failures) == (2, 1, 1)
    assert reason in DecisionCursor.objects.get(router__name="bad").reason
    assert DecisionCursor.objects.get(router__name="good").reason == ""


def test_an_address_outside_the_fleets_networks_is_not_requested(server, settings):
    settings.FLEET_NETWORKS = []
    router(server, "one", FakeRing())
    collect_decisions(NOW)
    assert "WARMPATH_FLEET_NETWORKS" in DecisionCursor.objects.get().reason
    assert not server.seen


@alone
def test_a_router_that_hangs_delays_no_other(server, monkeypatch):
    monkeypatch.setattr(collect, "PAGE_S", 3.0)
    ring = FakeRing()
    ring.records = [decision(1)]
    router(server, "hung", hang())
    router(server, "good", ring)
    assert collect_decisions(NOW).decisions == 1
    assert "no complete response" in DecisionCursor.objects.get(router__name="hung").reason


@pytest.mark.django_db(transaction=True)
def test_a_router_that_another_worker_collects_from_is_skipped(server):
    ring = FakeRing()
    ring.records = [decision(1)]
    busy, free = router(server, "busy", ring), router(server, "free", ring)
    other = connection.copy()
    with other.cursor() as cursor:
        cursor.execute("select pg_advisory_lock(%s)", [COLLECT + busy.pk])
        assert collect_decisions(NOW).routers == 1
    other.close()
    assert {row.router_id for row in Decision.objects.all()} == {free.pk}
    Decision.objects.all().delete()


def test_a_run_stores_no_more_than_its_budget_and_the_next_one_continues(server, settings):
    settings.DECISIONS_ROWS_PER_S = 60  # 300 a run
    ring = FakeRing(page=200)
    ring.records = [decision(seq, blocks=[]) for seq in range(1, 701)]
    router(server, "one", ring)
    assert [collect_decisions(NOW).decisions for _ in range(5)] == [250, 300, 150, 0, 0]
    assert Decision.objects.exclude(candidates=None).count() < 350


def test_the_sample_ratio_follows_the_budget(server, settings):
    settings.DECISIONS_BLOCKS_PER_S = 101
    ring = FakeRing()
    ring.records = [decision(seq, blocks=hashes(seq, 16)) for seq in range(1, 201)]  # 1,600 blocks a second
    router(server, "one", ring)
    collect_decisions(NOW)
    assert DecisionCursor.objects.get().sample_ratio == 2.0**-4  # of two seconds of them

    ring.records = [decision(seq, T0 + timedelta(seconds=10), blocks=hashes(seq, 64)) for seq in range(201, 205)]
    collect_decisions(NOW)
    row = Decision.objects.filter(seq=201).get()
    assert row.sample_ratio == 2.0**-4
    assert [format_hash(block) for block in row.blocks] == [hashes(201, 64)[at] for at in row.positions]
    assert all(int(format_hash(block), 16) < 2**60 for block in row.blocks)
    assert row.block_count == 64


@pytest.mark.parametrize(
    ("rate", "ratio"), [(0.0, 1.0), (2000.0, 1.0), (2001.0, 0.5), (8000.0, 0.25), (1e12, 2.0**-12)]
)
def test_the_sample_ratio_is_the_largest_power_of_two_within_the_budget(rate, ratio):
    assert sample_ratio(rate, 2000.0) == ratio


def test_a_peak_fades_and_is_never_below_the_current_rate():
    assert faded_peak(100.0, 10.0, 0.0) == 100.0
    assert 36 < faded_peak(100.0, 10.0, 600.0) < 37
    assert faded_peak(100.0, 10.0, 1e9) == 10.0
