"""Guards, from readings to a rollout that is promoted, held or rolled back."""

from __future__ import annotations

import re
from datetime import timedelta
from itertools import count, islice
from threading import Thread

import numpy as np
import pytest
from django.db import connection

from controlplane.models import ConfigSnapshot, RolloutState
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.fleet.task_groups import create_task_group
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from controlplane.services.policies.rollout_plans import RolloutPlan, make_plan
from controlplane.services.policies.rollouts import PAST_FIGURE, Verdict, advance_rollouts, pause_rollout
from controlplane.services.routers import announce, record_ack
from routing.schema import PREFIX_SPACE, split_position, split_seed
from telemetry.guards import measurement
from telemetry.guards.measurement import COLLECTED_S, analyze_rollouts, measure
from telemetry.storage.locks import GUARD, advisory_lock
from tests.telemetry.conftest import T0
from tests.telemetry.stored_decisions import decision, store

pytestmark = pytest.mark.django_db
GUARD_LIMITS = {"warm_up_s": 60, "min_requests": 100}
FAST, SLOW = 0.05, 0.2  # median TTFT
SHARE = 0.25


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


def traffic(
    router, minutes, revision, *, hit_rate=0.6, failed=0.0, ttft=FAST, plain=None, group="", prompts=None, **of
):
    """Store 100 requests for each minute after T0, of this router and revision.

    ``prompts``: prefixes; by default 20 of the side of revision 2 or 1 of a canary of ``SHARE``.
    """
    rng, rows = np.random.default_rng(revision), []
    for minute in minutes:
        at = T0 + timedelta(minutes=minute)
        for number in range(100):
            outcome = "replica_error" if rng.random() < failed else "ok"
            cached = {"prompt_tokens": 1000, "cached_tokens": 1000 if rng.random() < hit_rate else 0}
            waited = (ttft if plain is None else plain) * float(rng.lognormal(0, 0.5))
            timed = {"ttft_s": waited, "streamed": True} if plain is None else {"latency_s": waited, "streamed": False}
            if plain is not None:
                timed["ttft_s"] = None
            rows.append(
                decision(
                    router,
                    at + timedelta(seconds=0.6 * number),
                    next(SEQUENCE),
                    revision=revision,
                    group=group,
                    prefix=int(rng.choice(PREFIXES[revision == 2] if prompts is None else prompts)),
                    outcome=outcome,
                    status=200 if outcome == "ok" else 502,
                    **(cached | timed),
                )
            )
    store(rows)


def prefixes_of_side(*, canary, count=20):
    seed = split_seed("chat")
    inside = (prefix for prefix in range(1, 10_000) if (split_position(prefix, seed) < SHARE * PREFIX_SPACE) == canary)
    return list(islice(inside, count))


PREFIXES = {is_canary: prefixes_of_side(canary=is_canary) for is_canary in (True, False)}
SEQUENCE = count(1)


def an_hour_before(router, **changes):
    """Half an hour of both sides, all placed by revision 1."""
    for of_canary in (True, False):
        traffic(router, range(-30, 0), 1, prompts=PREFIXES[of_canary], **changes)


def judged(rollout, time_machine, minute):
    """The analysis of everything before that minute; bins are minutes, and collected ten seconds later."""
    now = T0 + timedelta(minutes=minute, seconds=COLLECTED_S)
    time_machine.move_to(now, tick=False)
    assert analyze_rollouts(now) == 1
    rollout.refresh_from_db()
    return {reading["name"]: reading for reading in rollout.readings}


def test_no_analysis_during_warm_up(pool, routers, begin, time_machine):
    rollout = begin(by_share(pool, warm_up_s=300))
    traffic(routers[0], range(4), 1)
    traffic(routers[0], range(4), 2, hit_rate=0.0, failed=0.5)
    assert judged(rollout, time_machine, 4) == {}
    assert rollout.state == RolloutState.PROGRESSING
    assert rollout.readings_at == T0 + timedelta(minutes=4, seconds=COLLECTED_S)


def test_a_harmful_canary_is_rolled_back_with_its_figures(pool, routers, begin, time_machine):
    rollout = begin(by_share(pool))
    an_hour_before(routers[0])
    traffic(routers[0], range(8), 1)
    traffic(routers[1], range(8), 2, hit_rate=0.3)
    readings = judged(rollout, time_machine, 8)
    assert rollout.state == RolloutState.ROLLED_BACK
    hits = readings["hit_rate"]
    assert hits["verdict"] == Verdict.FAILED
    assert (hits["baseline"], hits["canary"]) == (pytest.approx(0.6, abs=0.05), pytest.approx(0.3, abs=0.05))
    assert hits["limit"] == pytest.approx(0.55, abs=0.05)
    assert readings["ttft_p95_s"]["verdict"] != Verdict.FAILED
    assert rollout.history.order_by("-pk").first().evidence == rollout.readings
    assert (hits["canary_requests"], hits["baseline_requests"], hits["bins"]) == (700, 700, 7)
    (past,) = rollout.past_readings
    assert past["at"] == rollout.readings_at.isoformat()
    assert past["figures"][0] == {name: hits[name] for name in PAST_FIGURE}
    text = r"Hit rate \d+\.\d % \(\d+\.\d % before\), baseline \d+\.\d % \(\d+\.\d % before\): "
    assert re.fullmatch(text + r"\d+\.\d points less than expected \(certain above \d+\.\d\)\.", rollout.why)
    assert pool.policies.get(group=None).live().number == 1


@pytest.mark.parametrize(
    ("name", "harm"), [("error_ratio", {"failed": 0.2}), ("ttft_p95_s", {"ttft": SLOW})], ids=["errors", "ttft"]
)
def test_errors_and_latency_roll_back(pool, routers, begin, time_machine, name, harm):
    rollout = begin(by_share(pool))
    an_hour_before(routers[0])
    traffic(routers[0], range(8), 1)
    traffic(routers[0], range(8), 2, **harm)
    assert judged(rollout, time_machine, 8)[name]["verdict"] == Verdict.FAILED
    assert rollout.state == RolloutState.ROLLED_BACK


def test_a_boundary_of_the_policy_s_own_leaves_the_past_out(pool, routers, begin, time_machine):
    """The prefixes that are stored are then not those by which the routers chose."""
    rollout = begin(by_share(pool))
    an_hour_before(routers[0])
    traffic(routers[0], range(8), 1, prompts=range(1, 100))
    traffic(routers[0], range(8), 2, prompts=range(101, 200))
    measured = measure(rollout, since=T0, until=T0 + timedelta(minutes=8))
    assert [len(side.before) for side in measured.sides] == [0, 0]
    assert "before" not in judged(rollout, time_machine, 8)["hit_rate"]["detail"]


def test_a_harmless_canary_is_promoted_when_the_stage_ends(pool, routers, begin, time_machine):
    wide = {"max_error_ratio": 0.05, "max_hit_rate_drop": 0.2, "max_ttft_p95_growth": 1.0}
    rollout = begin(by_share(pool, **wide))
    an_hour_before(routers[0])
    traffic(routers[0], range(12), 1)
    traffic(routers[1], range(12), 2)
    readings = judged(rollout, time_machine, 9)
    assert {reading["verdict"] for reading in readings.values()} == {Verdict.PASSED}
    assert (rollout.state, rollout.stage) == (RolloutState.PROGRESSING, 0)
    judged(rollout, time_machine, 11)
    assert rollout.stage == 1
    assert pool.policies.get(group=None).live().number == 2


def test_an_analysis_waits_for_the_next_bin(pool, routers, begin, time_machine):
    rollout = begin(by_share(pool))
    traffic(routers[0], range(6), 1)
    traffic(routers[1], range(6), 2)
    judged(rollout, time_machine, 5)
    first = rollout.readings_at
    judged(rollout, time_machine, 5.5)
    assert rollout.readings_at == first
    judged(rollout, time_machine, 6)
    assert rollout.readings_at > first


def test_few_prompts_hold_the_last_canary_stage_with_the_reason(pool, routers, begin, time_machine):
    """An earlier stage is left to the other figures, because the next one may have more prompts."""
    stages = [{"share": 0.1, "observe_s": 600}, {"share": SHARE, "observe_s": 600}]
    limits = {**GUARD_LIMITS, "max_error_ratio": 0.05}
    few = [prefix for prefix in range(1, 1000) if split_position(prefix, split_seed("chat")) < 0.1 * PREFIX_SPACE][:3]
    rollout = begin(make_plan(pool.policies.get(group=None), stages=stages, guard=limits))
    traffic(routers[0], range(12), 1)
    traffic(routers[1], range(12), 2, prompts=few, hit_rate=0.1)
    readings = judged(rollout, time_machine, 11)
    assert readings == {}
    assert (rollout.state, rollout.stage) == (RolloutState.PROGRESSING, 1)
    assert "3 prompts in the canary: no verdict by hit rate." in rollout.history.order_by("-pk").first().reason

    converge(routers)
    traffic(routers[0], range(12, 24), 1)
    traffic(routers[1], range(12, 24), 2, prompts=few, hit_rate=0.1)
    readings = judged(rollout, time_machine, 23)
    assert readings["hit_rate"]["verdict"] == "no_verdict"
    assert (rollout.state, rollout.stage, rollout.held_by) == (RolloutState.HOLDING, 1, "analysis")
    assert rollout.why.startswith("3 prompts in the canary: no verdict by hit rate.")
    assert "promote it if that is enough" in rollout.why


def test_too_little_traffic_holds_and_a_paused_rollout_is_analyzed(pool, routers, begin, time_machine, admin_user):
    rollout = begin(by_share(pool))
    traffic(routers[0], [5], 1)
    readings = judged(rollout, time_machine, 11)
    assert rollout.state == RolloutState.HOLDING
    assert "The canary has 0 of at least 100 requests" in readings["hit_rate"]["detail"]
    pause_rollout(rollout.pk, by=admin_user)
    traffic(routers[0], range(12, 20), 1)
    traffic(routers[0], range(12, 20), 2, hit_rate=0.1)
    judged(rollout, time_machine, 20)
    assert rollout.state == RolloutState.ROLLED_BACK


def test_a_group_that_always_hit_less_is_compared_with_itself(pool, routers, begin, time_machine):
    create_task_group(pool, "cold")
    create_task_group(pool, "warm")
    stages = [{"groups": ["cold"], "observe_s": 600}]
    rollout = begin(
        make_plan(pool.policies.get(group=None), stages=stages, guard={**GUARD_LIMITS, "max_hit_rate_drop": 0.2})
    )
    cold, warm = {"group": "cold", "hit_rate": 0.2}, {"group": "warm", "hit_rate": 0.8}
    traffic(routers[0], range(-30, 0), 1, **cold, prompts=range(20))
    traffic(routers[0], range(-30, 0), 1, **warm, prompts=range(20, 40))
    traffic(routers[0], range(12), 2, **cold, prompts=range(20))
    traffic(routers[0], range(12), 1, **warm, prompts=range(20, 40))
    readings = judged(rollout, time_machine, 9)
    assert readings["hit_rate"]["verdict"] == Verdict.PASSED
    assert readings["hit_rate"]["limit"] == pytest.approx(0.0, abs=0.06)


def test_a_router_is_compared_with_others_and_with_its_own_past(pool, routers, begin, time_machine):
    stages = [{"routers": ["router-1"], "observe_s": 600}]
    rollout = begin(make_plan(pool.policies.get(group=None), stages=stages, guard=GUARD_LIMITS))
    for router in routers:
        traffic(router, range(-20, 0), 1)
    traffic(routers[0], range(9), 2, hit_rate=0.3, prompts=PREFIXES[False])
    traffic(routers[1], range(9), 1)
    measured = measure(rollout, since=T0 + timedelta(minutes=1), until=T0 + timedelta(minutes=8))
    assert [len(requests) for side in measured.sides for requests in side] == [700, 2000, 700, 2000]
    assert measured.has_common_prompts
    assert judged(rollout, time_machine, 8)["hit_rate"]["verdict"] == Verdict.FAILED


def test_of_many_requests_the_first_of_each_bin_are_read(pool, routers, begin, monkeypatch):
    rollout = begin(by_share(pool))
    traffic(routers[0], range(8), 1)
    monkeypatch.setattr(measurement, "MAX_ROWS", 80)
    measured = measure(rollout, since=T0, until=T0 + timedelta(minutes=8))
    assert np.bincount(measured.baseline.now.bins).tolist() == [10] * 8


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
