"""What-ifs: predictions that come true, their queue, and what cannot be predicted."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

import msgspec
import pytest
from django.db.models import F
from django.utils import timezone

from controlplane.errors import ConflictError, InvalidError
from controlplane.models import Pool, Replica
from controlplane.services.fleet.pools import create_pool
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from routing.replay.block_runs import Forest
from routing.replay.routed import pooled_hit_rate
from routing.schema import (
    CacheAwareSettings,
    LowestCostSettings,
    PrefixHashSettings,
    RandomSettings,
    RoundRobinSettings,
    Settings,
    TieredSettings,
)
from routing.traffic.trace import read_columns
from telemetry.models import Decision, WhatIf, WhatIfState
from telemetry.services.lab import what_if_runs
from telemetry.services.lab.what_if_model import WhatIfError
from telemetry.services.lab.what_ifs import cancel_what_if, create_what_if, trace_lines
from tests.telemetry.services.lab.what_if_world import Served, Traffic, add_fleet, publish_and_store, serve, traffic

pytestmark = pytest.mark.django_db
START = datetime.now(UTC) - timedelta(hours=1)
COUNTED_S = 160.0  # of the traffic's 480, which the replay uses to warm its caches


WORSE_ROUTING, BETTER_ROUTING = RoundRobinSettings(), LowestCostSettings()


@pytest.fixture(scope="module")
def workload() -> Traffic:
    return traffic(1)


@cache
def served(workload: Traffic, encoded: bytes, **size: int) -> Served:
    """The workload served under encoded settings, once."""
    return serve(workload, msgspec.json.decode(encoded, type=Settings), **size)


def serve_once(workload: Traffic, settings: Settings, **size: int) -> Served:
    return served(workload, msgspec.json.encode(settings), **size)


def play(pool: Pool, workload: Traffic, settings: Settings, **options: Any) -> None:
    """Publish the settings, serve the workload under them, and store the decisions."""
    publish_and_store(pool, workload, settings, START, served=serve_once(workload, settings), **options)


@pytest.fixture(scope="module")
def module_fleet(once_for_module, workload) -> int:
    """The id of a pool whose fleet served the workload by round robin, stored once."""
    return once_for_module(store_fleet, workload)


def store_fleet(workload: Traffic) -> int:
    pool = add_fleet(create_pool("chat"))
    play(pool, workload, WORSE_ROUTING)
    return pool.pk


@pytest.fixture
def played(db, module_fleet) -> Pool:
    """A fleet that served the workload by round robin."""
    return Pool.objects.get(pk=module_fleet)


@pytest.fixture
def fleet(played) -> Pool:
    """The fleet without traffic."""
    Decision.objects.all().delete()
    return played


def predict(pool: Pool, *candidates: dict[str, Any]) -> WhatIf:
    created = create_what_if(pool, candidates, start=START, end=START + timedelta(minutes=8))
    what_if_runs.run_queued()
    created.refresh_from_db()
    return created


Change = tuple[Settings | None, dict[str, int], str]  # the candidate's settings and size, and the verdict
BETTER: tuple[Change, ...] = (
    (LowestCostSettings(), {}, "better"),
    (PrefixHashSettings(), {}, "better"),
    (CacheAwareSettings(), {}, "better"),
    (TieredSettings(), {}, "better"),
)
WORSE: tuple[Change, ...] = (
    (RandomSettings(), {}, "worse"),
    (RoundRobinSettings(), {}, "worse"),
    (None, {"replicas": 3}, "worse"),
    (None, {"cache_tokens": 20_000}, "worse"),
)


def check_predictions(pool: Pool, workload: Traffic, active: Settings, changes: tuple[Change, ...]) -> None:
    """Predict all changes by one what-if, and compare each with what the fleet does after it."""
    settings = [{} if change is None else {"settings": msgspec.to_builtins(change)} for change, _, _ in changes]
    sizes = [size for _, size, _ in changes]
    what_if = predict(pool, *({"name": f"c{n}", **settings[n], **sizes[n]} for n in range(len(changes))))

    assert what_if.state == WhatIfState.DONE, what_if.reason
    assert what_if.result["calibration"]["problems"] == []
    for candidate, (change, size, expected) in zip(what_if.result["candidates"][1:], changes, strict=True):
        predicted, truth = candidate["figures"], serve_once(workload, change or active, **size)
        assert predicted["hit_rate"] == pytest.approx(truth.hit_rate(COUNTED_S), abs=0.03), (change, size)
        assert predicted["ttft_p50_s"] == pytest.approx(truth.ttft_s(COUNTED_S, 0.5), rel=0.2), (change, size)
        assert predicted["ttft_p95_s"] == pytest.approx(truth.ttft_s(COUNTED_S, 0.95), rel=0.25), (change, size)
        assert candidate["verdict"] == expected, (change, size)


def test_predictions_of_better_policies_come_true(played, workload):
    check_predictions(played, workload, WORSE_ROUTING, BETTER)


def test_predictions_of_worse_policies_and_smaller_fleets_come_true(fleet, workload):
    play(fleet, workload, BETTER_ROUTING)
    check_predictions(fleet, workload, BETTER_ROUTING, WORSE)


def test_engines_have_the_same_prefill_rate_at_any_hit_rate(fleet, workload):
    often = traffic(2, rate=2.0, prompts=4, turns=6)
    rates, hit_rates = [], []
    for requests, settings, size in ((workload, WORSE_ROUTING, {}), (often, BETTER_ROUTING, {"cache_tokens": 400_000})):
        Decision.objects.all().delete()
        result = serve_once(requests, settings, **size)
        publish_and_store(fleet, requests, settings, START, served=result)
        engine = predict(fleet, {"name": "random", "settings": {"strategy": "random"}}).result["engine"]
        rates.append(engine["prefill_rate"])
        hit_rates.append(result.hit_rate(0))

    assert hit_rates[0] < 0.45
    assert hit_rates[1] > 0.78
    assert rates == pytest.approx([8000, 8000], rel=0.05)


def test_waiting_in_a_router_is_no_prefill_time(played):
    before = predict(played, {"name": "random", "settings": {"strategy": "random"}}).result["engine"]
    Decision.objects.update(prefill_s=F("ttft_s"))
    Decision.objects.update(ttft_s=F("ttft_s") + 3.0, latency_s=F("latency_s") + 3.0)

    after = predict(played, {"name": "random", "settings": {"strategy": "random"}}).result["engine"]

    assert after["prefill_rate"] == pytest.approx(before["prefill_rate"], rel=0.001)


def test_the_baseline_is_the_policy_of_the_window_not_the_present_one(played):
    draft = save_draft(played.policies.get(group=None), {"strategy": "lowest_cost"})
    publish_revision(draft.pk)

    what_if = predict(played, {"name": "prefix_hash", "settings": {"strategy": "prefix_hash"}})

    assert what_if.result["calibration"]["is_calibrated"], what_if.result["calibration"]["problems"]
    assert what_if.result["candidates"][0]["strategy"] == "round_robin"


def test_a_replay_that_does_not_match_what_was_measured_gives_no_verdict(played):
    Decision.objects.update(cached_tokens=F("cached_tokens") / 4)

    what_if = predict(played, {"name": "lowest_cost", "settings": {"strategy": "lowest_cost"}})

    calibration = what_if.result["calibration"]
    assert not calibration["is_calibrated"]
    assert "replay's hit rate of the newer half" in calibration["problems"][0]
    assert what_if.result["candidates"][1]["verdict"] == "unknown"


def test_several_candidates_are_compared_and_one_that_cannot_run_says_why(played):
    what_if = predict(played, {"name": "three", "replicas": 3}, {"name": "tiny", "cache_tokens": 1000})
    active, three, tiny = what_if.result["candidates"]
    assert (active["replicas"], three["replicas"]) == (4, 3)
    assert three["verdict"] in {"worse", "mixed", "same"}
    assert "too small" in tiny["reason"]
    assert tiny["figures"] is None
    assert set(active["groups"]) == {"g0", "g1", "g2"}


def test_a_candidate_whose_queue_grows_until_the_end_has_no_other_verdict(played):
    active, one = predict(played, {"name": "one", "replicas": 1}).result["candidates"]

    assert (active["overloaded_replicas"], active["summary"]) == (0, "")
    assert (one["overloaded_replicas"], one["verdict"]) == (1, "overload")
    assert one["summary"].startswith("one: overload: the queue of 1 of 1 replicas grows until the end, ")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ttft_s": None}, "prefill rate is unknown"),
        ({"cached_tokens": None}, "prefill rate is unknown"),
        ({"replica": "unknown"}, None),
    ],
)
def test_traffic_without_the_needed_figures_fails_with_the_reason(played, changes, reason):
    Decision.objects.update(**changes)
    what_if = predict(played, {"name": "three", "replicas": 3})
    assert what_if.state == (WhatIfState.FAILED if reason else WhatIfState.DONE)
    assert (reason or "") in what_if.reason


def test_a_pool_with_prefill_replicas_fails_with_the_reason(played):
    add_replica(played, name="prefill", url="http://10.0.1.1:8000", role="prefill")
    what_if = predict(played, {"name": "other", "settings": {"strategy": "lowest_cost"}})
    assert what_if.state == WhatIfState.FAILED
    assert "prefill replicas" in what_if.reason


def test_a_replica_with_unknown_cache_size_fails_with_its_name(played):
    Replica.objects.filter(name="r1").update(capacity_blocks=None)
    what_if = predict(played, {"name": "three", "replicas": 3})
    assert what_if.state == WhatIfState.FAILED
    assert "r1" in what_if.reason


@pytest.mark.parametrize(
    ("candidates", "path"),
    [
        ([], "$.candidates"),
        ([{"name": "a"}] * 2, "$.candidates"),
        ([{"name": "a"}] * 9, "$.candidates"),
        ([{}], "$.candidates[0].name"),
        ([{"name": "a", "settings": {"strategy": "magic"}}], "$.candidates[0].settings"),
        ([{"name": "a", "replicas": 0}], "$.candidates[0].replicas"),
        ([{"name": "a", "replicas": True}], "$.candidates[0].replicas"),
        ([{"name": "a", "cache_tokens": 1.5}], "$.candidates[0].cache_tokens"),
        ([{"name": "a", "groups": {"chat": {"strategy": "magic"}}}], "$.candidates[0].groups.chat"),
        ([{"name": "a", "typo": 1}], "$.candidates[0].typo"),
    ],
)
def test_invalid_candidates_are_rejected_with_the_field(fleet, candidates, path):
    with pytest.raises(InvalidError) as caught:
        create_what_if(fleet, candidates)
    assert caught.value.faults[0].path == path
    assert WhatIf.objects.count() == 0


@pytest.mark.parametrize("window", [timedelta(seconds=30), timedelta(days=2), timedelta(seconds=-60)])
def test_a_window_has_a_minute_to_a_day(fleet, window):
    end = timezone.now()
    with pytest.raises(InvalidError, match="window"):
        create_what_if(fleet, [{"name": "a", "replicas": 2}], start=end - window, end=end)


def test_an_unknown_task_group_fails_with_its_name(played):
    what_if = predict(played, {"name": "a", "groups": {"unknown-group": {"strategy": "random"}}})
    assert what_if.state == WhatIfState.FAILED
    assert "unknown-group" in what_if.reason


def test_open_what_ifs_of_a_pool_are_bounded_and_old_ones_deleted(fleet, monkeypatch):
    for number in range(10):
        create_what_if(fleet, [{"name": f"a{number}", "replicas": 2}])
    with pytest.raises(ConflictError, match="queued or running"):
        create_what_if(fleet, [{"name": "one too many", "replicas": 2}])
    WhatIf.objects.update(state=WhatIfState.DONE)
    monkeypatch.setattr("telemetry.services.lab.what_ifs.KEPT", 5)
    create_what_if(fleet, [{"name": "newest", "replicas": 2}])
    assert WhatIf.objects.count() == 5


def test_a_queued_what_if_is_cancelled_at_once_and_an_ended_one_cannot_be(fleet):
    created = create_what_if(fleet, [{"name": "a", "replicas": 2}])
    assert cancel_what_if(created.pk).state == WhatIfState.CANCELLED
    assert what_if_runs.run_queued() == 0
    with pytest.raises(ConflictError, match="has ended"):
        cancel_what_if(created.pk)


def test_a_running_what_if_stops_when_it_is_cancelled(played, monkeypatch):
    monkeypatch.setattr(what_if_runs, "REPORT_INTERVAL_S", 0.0)
    follow = what_if_runs._follow

    def cancel_first(process, ends_at, report):
        WhatIf.objects.update(is_cancelled=True)
        follow(process, ends_at, report)

    monkeypatch.setattr(what_if_runs, "_follow", cancel_first)
    assert predict(played, {"name": "three", "replicas": 3}).state == WhatIfState.CANCELLED


def test_the_what_if_of_a_killed_worker_runs_again_and_gives_up_after_three_attempts(played):
    killed = create_what_if(played, [{"name": "three", "replicas": 3}], start=START, end=START + timedelta(minutes=8))
    WhatIf.objects.update(state=WhatIfState.RUNNING, attempts=1, heartbeat_at=timezone.now())
    assert what_if_runs.run_queued() == 0  # its worker may be alive
    WhatIf.objects.update(heartbeat_at=timezone.now() - timedelta(minutes=4))
    assert what_if_runs.run_queued() == 1
    killed.refresh_from_db()
    assert (killed.state, killed.attempts) == (WhatIfState.DONE, 2)

    WhatIf.objects.update(state=WhatIfState.RUNNING, attempts=3, heartbeat_at=timezone.now() - timedelta(minutes=4))
    what_if_runs.run_queued()
    killed.refresh_from_db()
    assert killed.state == WhatIfState.FAILED
    assert "killed" in killed.reason


def test_a_replay_process_that_fails_is_a_reason_and_not_an_exception(played, monkeypatch):
    monkeypatch.setattr(what_if_runs, "COMMAND", ("-c", "import sys; sys.exit('no memory')"))
    what_if = predict(played, {"name": "three", "replicas": 3})
    assert what_if.state == WhatIfState.FAILED
    assert "no memory" in what_if.reason


def test_the_trace_of_a_window_can_be_simulated(played, workload, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(trace_lines(played, START, START + timedelta(minutes=8))))

    columns = read_columns(path)

    assert len(columns) == len(workload.prompts)
    assert list(columns.prompt_tokens) == [row.prompt_tokens for row in workload.prompts]
    shared = pooled_hit_rate(Forest(columns), None)
    assert shared is not None
    assert 0.5 < shared < 0.9  # the prefixes that prompts share are in it


def test_a_replay_that_writes_many_warnings_ends_and_a_failed_one_says_its_last_words(monkeypatch):
    monkeypatch.setattr(what_if_runs, "MAX_RUN_S", 60.0)  # a full pipe would block it until then
    script = "import sys; sys.stderr.write('warning ' * 100_000 + 'out of memory'); sys.exit(int(sys.argv[1]))"

    what_if_runs.run_process([sys.executable, "-c", script, "0"], lambda _: None)
    with pytest.raises(WhatIfError, match=r"status 3: .*out of memory$"):
        what_if_runs.run_process([sys.executable, "-c", script, "3"], lambda _: None)
