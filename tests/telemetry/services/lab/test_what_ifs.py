"""What-ifs: predictions that come true, their queue, and what cannot be predicted."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from django.db.models import F
from django.utils import timezone

from controlplane.errors import ConflictError, InvalidError
from controlplane.models import Pool, Replica
from controlplane.services.fleet.replicas import add_replica, record_engine_facts
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from routing.replay.block_runs import Forest
from routing.replay.routed import pooled_hit_rate
from routing.schema import (
    CacheAwareSettings,
    LeastLoadSettings,
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
from telemetry.services.lab.what_if_traces import trace_lines
from telemetry.services.lab.what_ifs import cancel_what_if, create_what_if
from tests.telemetry.services.lab.what_if_world import Traffic, publish_and_store, serve, traffic

pytestmark = pytest.mark.django_db
CACHE_TOKENS = 60_000
START = datetime.now(UTC) - timedelta(hours=1)
COUNTED_S = 160.0  # of the traffic's 480, which the replay uses to warm its caches


@pytest.fixture
def fleet(pool: Pool) -> Pool:
    """Four replicas of 60,000 tokens."""
    for number in range(4):
        replica = add_replica(pool, name=f"r{number}", url=f"http://r{number}")
        record_engine_facts(replica, block_tokens=16, capacity_blocks=CACHE_TOKENS // 16)
    return pool


@pytest.fixture(scope="module")
def workload() -> Traffic:
    return traffic(1)


def play(pool: Pool, workload: Traffic, settings: Settings, **options: Any) -> None:
    """Publish the settings, serve the workload under them, and store the decisions."""
    publish_and_store(pool, workload, msgspec.to_builtins(settings), START, **options)


def predict(pool: Pool, *candidates: dict[str, Any]) -> WhatIf:
    created = create_what_if(pool, candidates, start=START, end=START + timedelta(minutes=8))
    what_if_runs.run_queued()
    created.refresh_from_db()
    return created


SCENARIOS = [
    (RoundRobinSettings(), LowestCostSettings(), {}, "better"),
    (RandomSettings(), PrefixHashSettings(), {}, "better"),
    (LeastLoadSettings(), CacheAwareSettings(), {}, "better"),
    (RoundRobinSettings(), TieredSettings(), {}, "better"),
    (LowestCostSettings(), RandomSettings(), {}, "worse"),
    (PrefixHashSettings(), RoundRobinSettings(), {}, "worse"),
    (LowestCostSettings(), None, {"replicas": 3}, "worse"),
    (CacheAwareSettings(), None, {"cache_tokens": 15_000}, "worse"),
]


@pytest.mark.parametrize(("active", "candidate", "size", "expected"), SCENARIOS)
def test_a_prediction_comes_true(fleet, workload, active, candidate, size, expected):
    play(fleet, workload, active)

    settings = {} if candidate is None else {"settings": msgspec.to_builtins(candidate)}
    what_if = predict(fleet, {"name": "candidate", **settings, **size})

    assert what_if.state == WhatIfState.DONE, what_if.reason
    result = what_if.result
    assert result["calibration"]["problems"] == []
    predicted, truth = result["candidates"][1]["figures"], serve(workload, candidate or active, **size)
    assert predicted["hit_rate"] == pytest.approx(truth.hit_rate(COUNTED_S), abs=0.03)
    assert predicted["ttft_p50_s"] == pytest.approx(truth.ttft_p50_s(COUNTED_S), rel=0.2)
    assert result["candidates"][1]["verdict"] == expected


@pytest.mark.parametrize(("ratio", "error"), [(0.25, 0.04), (0.0625, 0.07)])
def test_a_prediction_from_a_sample_of_hashes_is_close(fleet, workload, ratio, error):
    play(fleet, workload, RoundRobinSettings(), ratio=ratio)
    what_if = predict(fleet, {"name": "lowest_cost", "settings": {"strategy": "lowest_cost"}})
    predicted = what_if.result["candidates"][1]["figures"]
    assert predicted["hit_rate"] == pytest.approx(serve(workload, LowestCostSettings()).hit_rate(COUNTED_S), abs=error)
    assert any("block hashes" in note for note in what_if.result["notes"])


def test_the_baseline_is_the_policy_of_the_window_not_the_present_one(fleet, workload):
    play(fleet, workload, RoundRobinSettings())
    draft = save_draft(fleet.policies.get(group=None), {"strategy": "lowest_cost"})
    publish_revision(draft.pk)

    what_if = predict(fleet, {"name": "prefix_hash", "settings": {"strategy": "prefix_hash"}})

    assert what_if.result["calibration"]["is_calibrated"], what_if.result["calibration"]["problems"]
    assert what_if.result["candidates"][0]["strategy"] == "round_robin"


def test_a_replay_that_does_not_match_what_was_measured_gives_no_verdict(fleet, workload):
    play(fleet, workload, RoundRobinSettings())
    Decision.objects.update(cached_tokens=F("cached_tokens") / 4)

    what_if = predict(fleet, {"name": "lowest_cost", "settings": {"strategy": "lowest_cost"}})

    calibration = what_if.result["calibration"]
    assert not calibration["is_calibrated"]
    assert "hit rate of the active policy" in calibration["problems"][0]
    assert what_if.result["candidates"][1]["verdict"] == "unknown"


def test_several_candidates_are_compared_and_one_that_cannot_run_says_why(fleet, workload):
    play(fleet, workload, RoundRobinSettings())
    what_if = predict(fleet, {"name": "three", "replicas": 3}, {"name": "tiny", "cache_tokens": 1000})
    active, three, tiny = what_if.result["candidates"]
    assert (active["replicas"], three["replicas"]) == (4, 3)
    assert three["verdict"] in {"worse", "mixed", "same"}
    assert "too small" in tiny["reason"]
    assert tiny["figures"] is None
    assert set(active["groups"]) == {"g0", "g1", "g2"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ttft_s": None}, "prefill rate is unknown"),
        ({"cached_tokens": None}, "prefill rate is unknown"),
        ({"replica": "unknown"}, None),
    ],
)
def test_traffic_without_the_needed_figures_fails_with_the_reason(fleet, workload, changes, reason):
    play(fleet, workload, RoundRobinSettings())
    Decision.objects.update(**changes)
    what_if = predict(fleet, {"name": "three", "replicas": 3})
    assert what_if.state == (WhatIfState.FAILED if reason else WhatIfState.DONE)
    assert (reason or "") in what_if.reason


def test_a_window_without_requests_fails_with_the_reason(fleet):
    what_if = predict(fleet, {"name": "three", "replicas": 3})
    assert (what_if.state, what_if.reason) == (WhatIfState.FAILED, "No requests were captured in this window.")


def test_a_replica_with_unknown_cache_size_fails_with_its_name(fleet, workload):
    play(fleet, workload, RoundRobinSettings())
    Replica.objects.filter(name="r1").update(capacity_blocks=None)
    what_if = predict(fleet, {"name": "three", "replicas": 3})
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


def test_an_unknown_task_group_fails_with_its_name(fleet, workload):
    play(fleet, workload, RoundRobinSettings())
    what_if = predict(fleet, {"name": "a", "groups": {"unknown-group": {"strategy": "random"}}})
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


def test_a_running_what_if_stops_when_it_is_cancelled(fleet, workload, monkeypatch):
    play(fleet, workload, RoundRobinSettings())
    monkeypatch.setattr(what_if_runs, "REPORT_INTERVAL_S", 0.0)
    follow = what_if_runs._follow

    def cancel_first(process, ends_at, report):
        WhatIf.objects.update(is_cancelled=True)
        follow(process, ends_at, report)

    monkeypatch.setattr(what_if_runs, "_follow", cancel_first)
    assert predict(fleet, {"name": "three", "replicas": 3}).state == WhatIfState.CANCELLED


def test_the_what_if_of_a_killed_worker_runs_again_and_gives_up_after_three_attempts(fleet, workload):
    play(fleet, workload, RoundRobinSettings())
    killed = create_what_if(fleet, [{"name": "three", "replicas": 3}], start=START, end=START + timedelta(minutes=8))
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


def test_a_replay_process_that_fails_is_a_reason_and_not_an_exception(fleet, workload, monkeypatch):
    play(fleet, workload, RoundRobinSettings())
    monkeypatch.setattr(what_if_runs, "COMMAND", ("-c", "import sys; sys.exit('no memory')"))
    what_if = predict(fleet, {"name": "three", "replicas": 3})
    assert what_if.state == WhatIfState.FAILED
    assert "no memory" in what_if.reason


def test_the_trace_of_a_window_can_be_simulated(fleet, workload, tmp_path):
    play(fleet, workload, RoundRobinSettings())
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(trace_lines(fleet, START, START + timedelta(minutes=8))))

    columns = read_columns(path)

    assert len(columns) == len(workload.prompts)
    assert list(columns.prompt_tokens) == [row.prompt_tokens for row in workload.prompts]
    shared = pooled_hit_rate(Forest(columns), None)
    assert shared is not None
    assert 0.5 < shared < 0.9  # the prefixes that prompts share are in it
