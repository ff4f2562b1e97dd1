"""Rollouts under any sequence of events: configurations match the rows, and every transition is in the table."""

from datetime import timedelta
from itertools import pairwise

import pytest
import time_machine
from django.db import transaction
from django.utils import timezone
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from controlplane.errors import RolloutTransitionError
from controlplane.models import OPEN_ROLLOUTS, PolicyRevision, Rollout, RolloutState, Router, RoutingPolicy
from controlplane.services.fleet.pools import create_pool
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from controlplane.services.policies.rollout_transitions import BY_USER, TRANSITIONS
from controlplane.services.policies.rollouts import (
    Verdict,
    abort_rollout,
    advance_rollouts,
    apply_verdict,
    pause_rollout,
    promote_rollout,
    resume_rollout,
)
from controlplane.services.routers import announce, mark_lost_routers
from tests.controlplane.rollouts import ack, nack, newest, newest_pool_policy, publish_stages, start_routers

pytestmark = pytest.mark.django_db
STRATEGIES = ("random", "least_load", "power_of_two", "round_robin")
ACTIONS = {"pause": pause_rollout, "resume": resume_rollout, "promote": promote_rollout, "abort": abort_rollout}
NAMES = ("router-1", "router-2", "router-3")
SETTINGS = settings(
    max_examples=8,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),  # each example rolls its transaction back
)


class Rollouts(RuleBasedStateMachine):
    """One policy, three routers and a clock; publications, acknowledgements, rejections, verdicts, user actions."""

    def __init__(self):
        super().__init__()
        self.before = transaction.savepoint()
        self.now = timezone.now()
        self.travel = time_machine.travel(self.now, tick=False)
        self.travel.start()
        self.policy = RoutingPolicy.objects.get(pool=create_pool("machine", models=["m"], strategy="round_robin"))
        self.active = newest_pool_policy("machine")

    def teardown(self):
        self.travel.stop()
        transaction.savepoint_rollback(self.before)

    @initialize()
    def begin(self):
        start_routers(*NAMES)
        ack()

    def open_rollout(self):
        return Rollout.objects.filter(state__in=OPEN_ROLLOUTS).first()

    @rule(
        strategy=st.sampled_from(STRATEGIES),
        stages=st.sampled_from(
            [(), ({"share": 0.1},), ({"routers": ["router-1"]}, {"share": 1.0, "routers": list(NAMES[:2])})]
        ),
        guard=st.sampled_from([None, {}]),
    )
    def publish(self, strategy, stages, guard):
        previous = self.open_rollout()
        if stages:
            publish_stages(self.policy, stages, settings={"strategy": strategy}, guard=guard)
        else:
            publish_revision(save_draft(self.policy, {"strategy": strategy}).pk)
        if previous is not None:
            previous.refresh_from_db()
            assert previous.state == RolloutState.SUPERSEDED

    @rule(name=st.sampled_from(NAMES))
    def acknowledge(self, name):
        ack(Router.objects.get(name=name))

    @rule(name=st.sampled_from(NAMES))
    def reject(self, name):
        nack(Router.objects.get(name=name))

    @rule(name=st.sampled_from(NAMES))
    def send_heartbeat(self, name):
        router = Router.objects.get(name=name)
        heartbeat = {"name": name, "boot": "b", "admin_url": router.admin_url}
        announce(**heartbeat, revision=router.running_number, sha256=router.running_sha256)

    @rule(seconds=st.sampled_from([1, 31, 61, 300]))
    def pass_time(self, seconds):
        self.now += timedelta(seconds=seconds)
        self.travel.stop()
        self.travel = time_machine.travel(self.now, tick=False)
        self.travel.start()

    @rule()
    def advance(self):
        mark_lost_routers()
        before = list(Rollout.objects.values_list("pk", "state", "stage"))
        advance_rollouts()
        assert list(Rollout.objects.values_list("pk", "state", "stage")) == before, "a second call changes nothing"

    @precondition(lambda self: self.open_rollout() is not None)
    @rule(verdict=st.sampled_from(list(Verdict)), late=st.booleans())
    def analyze(self, verdict, late):
        rollout = self.open_rollout()
        before, stage = rollout.state, rollout.stage
        apply_verdict(rollout.pk, stage=stage - 1 if late and stage else stage, verdict=verdict, readings=[])
        rollout.refresh_from_db()
        if late and stage:
            assert (rollout.state, rollout.stage) == (before, stage)
        elif verdict is Verdict.FAILED and rollout.guard is not None and rollout.revision.state != "live":
            assert rollout.state == RolloutState.ROLLED_BACK

    @precondition(lambda self: self.open_rollout() is not None)
    @rule(action=st.sampled_from(sorted(ACTIONS)))
    def user_acts(self, action):
        rollout = self.open_rollout()
        allowed = rollout.state in BY_USER[action].before and rollout.revision.state == "canary"
        try:
            ACTIONS[action](rollout.pk, by=None, reason="because")
        except RolloutTransitionError:
            assert not allowed
        else:
            assert allowed

    @invariant()
    def one_revision_is_active_and_at_most_one_is_a_canary(self):
        states = list(PolicyRevision.objects.filter(policy=self.policy).values_list("state", flat=True))
        assert states.count("live") == 1
        assert states.count("canary") <= 1
        assert Rollout.objects.filter(state__in=OPEN_ROLLOUTS).count() <= 1
        assert states.count("canary") == 0 or self.open_rollout() is not None

    @invariant()
    def the_configuration_matches_the_rows(self):
        config, live = newest_pool_policy("machine"), self.policy.live()
        assert (config["revision"], config["settings"]) == (live.number, live.settings)
        canary, rollout = self.policy.canary(), self.open_rollout()
        if canary is None:
            assert "canary" not in config
            return
        scope = rollout.stages[rollout.stage]
        assert (config["canary"]["revision"], config["canary"]["settings"]) == (canary.number, canary.settings)
        assert (config["canary"]["share"], config["canary"]["routers"]) == (scope["share"], scope["routers"])

    @invariant()
    def a_rolled_back_revision_leaves_no_trace(self):
        """The active settings change only by another active revision."""
        config = {name: value for name, value in newest_pool_policy("machine").items() if name != "canary"}
        if config["revision"] == self.active["revision"]:
            assert config == {name: value for name, value in self.active.items() if name != "canary"}
        else:
            assert config["revision"] > self.active["revision"]
            self.active = config

    @invariant()
    def every_transition_is_in_a_table(self):
        for rollout in Rollout.objects.prefetch_related("history"):
            steps = list(rollout.history.all())
            assert steps[-1].after == rollout.state
            for previous, step in pairwise(steps):
                assert step.before == previous.after
                same_name = [transition for transition in TRANSITIONS if transition.name == step.transition]
                assert any(step.before in each.before and step.after == each.after for each in same_name)

    @invariant()
    def a_complete_rollout_has_an_active_revision(self):
        for rollout in Rollout.objects.select_related("revision", "snapshot"):
            if rollout.state == RolloutState.COMPLETE:
                assert rollout.revision.state in {"live", "retired"}
            if rollout.snapshot is not None:
                assert rollout.snapshot.number <= newest().number


@pytest.mark.timeout(400)  # a busy machine takes some minutes
def test_rollouts_under_any_sequence_of_events():
    run_state_machine_as_test(Rollouts, settings=SETTINGS)
