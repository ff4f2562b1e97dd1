"""Guards, from readings to a rollout that is promoted, held or rolled back."""

from __future__ import annotations

import re
from datetime import timedelta
from threading import Thread

import pytest
from django.db import connection

from controlplane.models import ConfigSnapshot, RolloutState
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.fleet.task_groups import create_task_group
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from controlplane.services.policies.rollout_plans import GuardLimits, RolloutPlan, make_plan
from controlplane.services.policies.rollouts import Verdict, advance_rollouts, pause_rollout
from controlplane.services.routers import announce, record_ack
from telemetry.guards.measurement import analyze_rollouts, bin_length_s, measure
from telemetry.storage.locks import GUARD, advisory_lock
from tests.telemetry.conftest import T0
from tests.telemetry.readings import route_reading, stored_together

pytestmark = pytest.mark.django_db
BEFORE = T0 - timedelta(minutes=30)  # when the canary's history begins
GUARD_LIMITS = {"warm_up_s": 60, "min_requests": 100}
FAST, SLOW = {48: 50, 50: 45, 52: 5}, {50: 60, 90: 40}  # TTFT by bucket: some 0.01 s; 0.08 s


@pytest.fixture
def routers(pool, time_machine):
    """Two routers that run whatever is newest."""
    time_machine.move_to(T0, tick=False)
    for name in ("r1", "r2"):
        add_replica(pool, name=name, url=f"http://10.0.0.{name[1]}:8000")
    return [announce(name=f"router-{n}", boot="b", version="1", admin_url=f"http://10.1.0.{n}:8081") for n in (1, 2)]


def converge(routers):
    newest = ConfigSnapshot.objects.order_by("-number").first()
    for router in routers:
        record_ack(router.pk, number=newest.number, sha256=newest.sha256)
    advance_rollouts()


@pytest.fixture
def begin(pool, routers, time_machine):
    """Publishes revision 2 of pool ``chat`` by a plan, at T0, and has every router run its first stage."""

    def publish(plan: RolloutPlan):
        policy = pool.policies.get(group=None)
        rollout = publish_revision(save_draft(policy, {"strategy": "prefix_hash"}).pk, plan=plan)
        converge(routers)
        rollout.refresh_from_db()
        assert (rollout.state, rollout.stage_converged_at) == (RolloutState.PROGRESSING, T0)
        return rollout

    return publish


def by_share(pool, **guard):
    stages = [{"share": 0.25, "observe_s": 600}]
    return make_plan(pool.policies.get(group=None), stages=stages, guard={**GUARD_LIMITS, **guard})


@stored_together()
def traffic(router, minute, revision, *, hit_rate=0.6, failed=0, ttft=None, plain=None, group="", replicas=(50, 50)):
    """A minute that ended so many minutes after T0: 100 requests, and how long they waited."""
    at = T0 + timedelta(minutes=minute)
    for replica, requests in zip(("r1", "r2"), replicas, strict=True):
        # Every other minute is a little better, so that nothing is known for certain.
        cached = requests * 100 * (hit_rate + 0.01 * (minute % 2))
        counters = {"requests": requests, "ok_requests": requests - failed / 2, "replica_error_requests": failed / 2}
        tokens = {"usage_reported": requests, "prompt_tokens": requests * 100, "cached_tokens": cached}
        route_reading(router, at, revision=revision, group=group, replica=replica, **counters, **tokens)
    timed = {"ttft": ttft or FAST} if plain is None else {"plain": plain}
    route_reading(router, at, revision=revision, group=group, **timed)


def judged(rollout, time_machine, minute):
    time_machine.move_to(T0 + timedelta(minutes=minute), tick=False)
    assert analyze_rollouts(T0 + timedelta(minutes=minute)) == 1
    rollout.refresh_from_db()
    return {reading["name"]: reading for reading in rollout.readings}


def test_no_analysis_during_warm_up(pool, routers, begin, time_machine):
    rollout = begin(by_share(pool, warm_up_s=300))
    for minute in range(1, 5):
        traffic(routers[0], minute, 1)
        traffic(routers[0], minute, 2, hit_rate=0.0, failed=50)
    assert judged(rollout, time_machine, 4) == {}
    assert (rollout.state, rollout.readings_at) == (RolloutState.PROGRESSING, T0 + timedelta(minutes=4))


def test_a_canary_with_slow_plain_responses_is_rolled_back(pool, routers, begin, time_machine):
    rollout = begin(by_share(pool))
    for minute in range(1, 9):
        traffic(routers[0], minute, 1, plain=FAST)
        traffic(routers[1], minute, 2, plain=SLOW)
    readings = judged(rollout, time_machine, 8)

    assert rollout.state == RolloutState.ROLLED_BACK
    assert readings["plain_latency_p95_s"]["verdict"] == Verdict.FAILED
    assert "ttft_p95_s" not in readings


def test_a_harmful_canary_is_rolled_back_with_its_figures(pool, routers, begin, time_machine):
    rollout = begin(by_share(pool))
    for minute in range(1, 9):
        traffic(routers[0], minute, 1)
        traffic(routers[1], minute, 2, hit_rate=0.3)
    readings = judged(rollout, time_machine, 8)
    assert rollout.state == RolloutState.ROLLED_BACK
    hits = readings["hit_rate"]
    assert hits["verdict"] == Verdict.FAILED
    assert (hits["baseline"], hits["canary"]) == (pytest.approx(0.605, abs=0.01), pytest.approx(0.305, abs=0.01))
    assert hits["limit"] == pytest.approx(0.555, abs=0.01)
    assert readings["ttft_p95_s"]["verdict"] == Verdict.PASSED
    assert rollout.history.order_by("-pk").first().evidence == rollout.readings
    assert re.fullmatch(r"Hit rate 30\.\d %, baseline 60\.\d %: 30\.0 points less \(± \d+\.\d\)\.", rollout.why)
    assert pool.policies.get(group=None).live().number == 1


@pytest.mark.parametrize(
    "harmful", [("error_ratio", {"failed": 20}), ("ttft_p95_s", {"ttft": SLOW})], ids=["errors", "ttft"]
)
def test_errors_and_latency_roll_back(pool, routers, begin, time_machine, harmful):
    (name, harm), rollout = harmful, begin(by_share(pool))
    for minute in range(1, 9):
        traffic(routers[0], minute, 1)
        traffic(routers[0], minute, 2, **harm)
    assert judged(rollout, time_machine, 8)[name]["verdict"] == Verdict.FAILED
    assert rollout.state == RolloutState.ROLLED_BACK


def test_load_skew_rolls_back(pool, routers, begin, time_machine):
    rollout = begin(by_share(pool))
    for minute in range(-10, 0):
        traffic(routers[0], minute, 1)
    for minute in range(1, 9):
        traffic(routers[0], minute, 1)
        traffic(routers[0], minute, 2, replicas=(900, 10))
    readings = judged(rollout, time_machine, 8)
    assert (readings["load_skew"]["verdict"], readings["load_skew"]["baseline"]) == (Verdict.FAILED, 1.0)
    assert readings["load_skew"]["canary"] == pytest.approx(950 / 505, abs=0.02)


def test_a_harmless_canary_is_promoted_when_the_stage_ends(pool, routers, begin, time_machine):
    rollout = begin(by_share(pool, max_error_ratio=0.05))
    for minute in range(1, 12):
        traffic(routers[0], minute, 1)
        traffic(routers[1], minute, 2)
    readings = judged(rollout, time_machine, 9)
    assert {reading["verdict"] for reading in readings.values()} == {Verdict.PASSED}
    assert (rollout.state, rollout.stage) == (RolloutState.PROGRESSING, 0)
    judged(rollout, time_machine, 11)
    assert rollout.stage == 1
    assert pool.policies.get(group=None).live().number == 2


def two_groups(router, minute, *, canary_assistant, canary_chat):
    """A canary that got mostly chat, of which hardly anything hits, beside a baseline that got mostly assistants."""
    traffic(router, minute, 1, group="assistant", hit_rate=0.9, replicas=(80, 80))
    traffic(router, minute, 1, group="chat", hit_rate=0.1, replicas=(20, 20))
    traffic(router, minute, 2, group="assistant", hit_rate=canary_assistant, replicas=(20, 20))
    traffic(router, minute, 2, group="chat", hit_rate=canary_chat, replicas=(80, 80))


def test_another_mix_of_groups_does_not_count_against_the_canary(pool, routers, begin, time_machine):
    rollout = begin(by_share(pool, max_error_ratio=0.05))
    for minute in range(1, 12):
        two_groups(routers[0], minute, canary_assistant=0.9, canary_chat=0.1)
    hits = judged(rollout, time_machine, 9)["hit_rate"]
    assert hits["verdict"] == Verdict.PASSED
    assert hits["canary"] == pytest.approx(hits["baseline"]) == pytest.approx(0.2 * 0.9 + 0.8 * 0.1, abs=0.01)
    judged(rollout, time_machine, 11)
    assert rollout.stage == 1


def test_another_mix_of_groups_does_not_hide_harm(pool, routers, begin, time_machine):
    """As a whole the canary hits 54 %, no less than the baseline's 54 %; each group hits less than its own."""
    rollout = begin(by_share(pool))
    for minute in range(1, 9):
        traffic(routers[0], minute, 1, group="assistant", hit_rate=0.98, replicas=(25, 25))
        traffic(routers[0], minute, 1, group="chat", hit_rate=0.4, replicas=(75, 75))
        traffic(routers[0], minute, 2, group="assistant", hit_rate=0.68, replicas=(75, 75))
        traffic(routers[0], minute, 2, group="chat", hit_rate=0.15, replicas=(25, 25))
    hits = judged(rollout, time_machine, 8)["hit_rate"]
    assert (hits["verdict"], rollout.state) == (Verdict.FAILED, RolloutState.ROLLED_BACK)
    assert hits["baseline"] == pytest.approx(0.75 * 0.98 + 0.25 * 0.4, abs=0.01)


def test_too_little_traffic_holds_and_a_paused_rollout_is_analyzed(pool, routers, begin, time_machine, admin_user):
    rollout = begin(by_share(pool))
    traffic(routers[0], 5, 1)
    readings = judged(rollout, time_machine, 11)
    assert rollout.state == RolloutState.HOLDING
    assert "The canary has 0 of at least 100 requests" in readings["hit_rate"]["detail"]
    pause_rollout(rollout.pk, by=admin_user)
    for minute in range(12, 20):
        traffic(routers[0], minute, 1)
        traffic(routers[0], minute, 2, hit_rate=0.1)
    judged(rollout, time_machine, 20)
    assert rollout.state == RolloutState.ROLLED_BACK


def test_a_group_that_always_hit_less_is_compared_with_itself(pool, routers, begin, time_machine):
    create_task_group(pool, "cold")
    create_task_group(pool, "warm")
    stages = [{"groups": ["cold"], "observe_s": 600}]
    rollout = begin(
        make_plan(pool.policies.get(group=None), stages=stages, guard={**GUARD_LIMITS, "max_error_ratio": 0.05})
    )
    for minute in range(-20, 0):
        traffic(routers[0], minute, 1, group="cold", hit_rate=0.2)
        traffic(routers[0], minute, 1, group="warm", hit_rate=0.8)
    for minute in range(1, 12):
        traffic(routers[0], minute, 2, group="cold", hit_rate=0.2)
        traffic(routers[0], minute, 1, group="warm", hit_rate=0.8)
    readings = judged(rollout, time_machine, 9)
    assert readings["hit_rate"]["verdict"] == Verdict.PASSED
    assert readings["hit_rate"]["limit"] == pytest.approx(0.155, abs=0.01)


def test_a_router_is_compared_with_others_and_with_its_own_past(pool, routers, begin, time_machine):
    stages = [{"routers": ["router-1"], "observe_s": 600}]
    rollout = begin(make_plan(pool.policies.get(group=None), stages=stages, guard=GUARD_LIMITS))
    for minute in range(-20, 0):
        for router in routers:
            traffic(router, minute, 1)
    for minute in range(1, 9):
        traffic(routers[0], minute, 2, hit_rate=0.3)
        traffic(routers[1], minute, 1)
    measured = measure(rollout, since=T0 + timedelta(minutes=1), until=T0 + timedelta(minutes=8))
    assert [len(side) for side in (measured.canary.now, measured.canary.before, measured.baseline.before)] == [
        7,
        60,
        60,
    ]
    assert sum(one.requests for one in measured.canary.before) == 2000
    assert judged(rollout, time_machine, 8)["hit_rate"]["verdict"] == Verdict.FAILED


def test_a_rollout_without_guard_or_stages_is_not_analyzed(pool, routers, begin, time_machine):
    begin(make_plan(pool.policies.get(group=None), stages=[{"share": 0.5, "observe_s": 600}], guard=None))
    assert analyze_rollouts(T0 + timedelta(minutes=5)) == 0


@pytest.mark.django_db(transaction=True)
def test_two_workers_do_not_analyze_at_once(pool, routers, begin):
    begin(by_share(pool))
    counted = []

    def another():
        counted.append(analyze_rollouts(T0 + timedelta(minutes=5)))
        connection.close()

    with advisory_lock(GUARD) as ours:
        assert ours
        thread = Thread(target=another)
        thread.start()
        thread.join(20)
    assert counted == [0]


def test_bins_are_minutes_or_shorter_for_a_short_stage():
    assert [bin_length_s(observe_s) for observe_s in (0, 60, 300, 600, 86_400)] == [10.0, 10.0, 30.0, 60.0, 60.0]
    assert GuardLimits().warm_up_s == 120
