"""Whatever happens to rollouts, in whatever order: routers are told what the rows say, and nothing is lost."""

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

from controlplane.errors import RolloutMoveError
from controlplane.models import OPEN_ROLLOUTS, PolicyRevision, Rollout, RolloutState, Router, RoutingPolicy
from controlplane.services.fleet.pools import create_pool
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from controlplane.services.policies.rollout_transitions import TRANSITIONS
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
from tests.controlplane.rollouts import ack, nack, newest, publish_stages, said_of_pool, start_routers

pytestmark = pytest.mark.django_db
STRATEGIES = ("random", "least_load", "power_of_two", "round_robin")
PEOPLE = {"pause": pause_rollout, "resume": resume_rollout, "promote": promote_rollout, "abort": abort_rollout}
NAMES = ("router-1", "router-2", "router-3")
PLANS = ((), ({"share": 0.1},), ({"routers": ["router-1"]}, {"routers": ["router-1", "router-2"]}))
SETTINGS = settings(
    max_examples=15,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),  # each example has a database to itself
)


class Rollouts(RuleBasedStateMachine):
    """One policy, three routers, a clock; publications, acknowledgements, refusals, verdicts, people, losses."""

    def __init__(self):
        super().__init__()
        self.before = transaction.savepoint()
        self.now = timezone.now()
        self.travel = time_machine.travel(self.now, tick=False)
        self.travel.start()
        self.policy = RoutingPolicy.objects.get(pool=create_pool("machine", models=["m"], strategy="round_robin"))
        self.in_force = said_of_pool("machine")  # what routers are told besides the trial

    def teardown(self):
        self.travel.stop()
        transaction.savepoint_rollback(self.before)

    @initialize()
    def begin(self):
        start_routers(*NAMES)
        ack()

    def open_one(self):
        return Rollout.objects.filter(state__in=OPEN_ROLLOUTS).first()

    @rule(
        strategy=st.sampled_from(STRATEGIES),
        stages=st.sampled_from(
            [(), ({"share": 0.1},), ({"routers": ["router-1"]}, {"share": 1.0, "routers": list(NAMES[:2])})]
        ),
        guard=st.sampled_from([None, {}]),
    )
    def publish(self, strategy, stages, guard):
        former = self.open_one()
        if stages:
            publish_stages(self.policy, stages, settings={"strategy": strategy}, guard=guard)
        else:
            publish_revision(save_draft(self.policy, {"strategy": strategy}).pk)
        if former is not None:
            former.refresh_from_db()
            assert former.state == RolloutState.SUPERSEDED

    @rule(name=st.sampled_from(NAMES))
    def acknowledge(self, name):
        ack(Router.objects.get(name=name))

    @rule(name=st.sampled_from(NAMES))
    def refuse(self, name):
        nack(Router.objects.get(name=name))

    @rule(name=st.sampled_from(NAMES))
    def come_back(self, name):
        router = Router.objects.get(name=name)
        told = {"name": name, "boot": "b", "admin_url": router.admin_url}
        announce(**told, revision=router.running_number, sha256=router.running_sha256)

    @rule(seconds=st.sampled_from([1, 31, 61, 300]))
    def time_goes_by(self, seconds):
        self.now += timedelta(seconds=seconds)
        self.travel.stop()
        self.travel = time_machine.travel(self.now, tick=False)
        self.travel.start()

    @rule()
    def tick(self):
        mark_lost_routers()
        before = list(Rollout.objects.values_list("pk", "state", "stage"))
        advance_rollouts()
        assert list(Rollout.objects.values_list("pk", "state", "stage")) == before, "a second tick changes nothing"

    @precondition(lambda self: self.open_one() is not None)
    @rule(verdict=st.sampled_from(list(Verdict)), late=st.booleans())
    def judge(self, verdict, late):
        rollout = self.open_one()
        before, stage = rollout.state, rollout.stage
        apply_verdict(rollout.pk, stage=stage - 1 if late and stage else stage, verdict=verdict, readings=[])
        rollout.refresh_from_db()
        if late and stage:
            assert (rollout.state, rollout.stage) == (before, stage)
        elif verdict is Verdict.BREACHED and rollout.guard is not None and rollout.revision.state != "live":
            assert rollout.state == RolloutState.ROLLED_BACK

    @precondition(lambda self: self.open_one() is not None)
    @rule(move=st.sampled_from(sorted(PEOPLE)))
    def somebody_decides(self, move):
        rollout = self.open_one()
        allowed = rollout.state in TRANSITIONS[move].before and rollout.revision.state == "trial"
        try:
            PEOPLE[move](rollout.pk, by=None, reason="because")
        except RolloutMoveError:
            assert not allowed
        else:
            assert allowed

    @invariant()
    def one_revision_is_in_force_and_at_most_one_on_trial(self):
        states = list(PolicyRevision.objects.filter(policy=self.policy).values_list("state", flat=True))
        assert states.count("live") == 1
        assert states.count("trial") <= 1
        assert Rollout.objects.filter(state__in=OPEN_ROLLOUTS).count() <= 1
        assert states.count("trial") == 0 or self.open_one() is not None

    @invariant()
    def routers_are_told_what_the_rows_say(self):
        said, live = said_of_pool("machine"), self.policy.live()
        assert (said["revision"], said["settings"]) == (live.number, live.settings)
        trial, rollout = self.policy.canary(), self.open_one()
        if trial is None:
            assert "trial" not in said
            return
        scope = rollout.stages[rollout.stage]
        assert (said["trial"]["revision"], said["trial"]["settings"]) == (trial.number, trial.settings)
        assert (said["trial"]["share"], said["trial"]["routers"]) == (scope["share"], scope["routers"])

    @invariant()
    def a_revision_that_was_withdrawn_left_no_trace(self):
        """The settings in force change by a revision that comes into force, and by nothing else."""
        said = {name: value for name, value in said_of_pool("machine").items() if name != "trial"}
        if said["revision"] == self.in_force["revision"]:
            assert said == {name: value for name, value in self.in_force.items() if name != "trial"}
        else:
            assert said["revision"] > self.in_force["revision"]
            self.in_force = said

    @invariant()
    def every_move_was_one_of_the_table(self):
        for rollout in Rollout.objects.prefetch_related("steps"):
            steps = list(rollout.steps.all())
            assert steps[-1].after == rollout.state
            for former, step in pairwise(steps):
                assert step.before == former.after
                assert step.before in TRANSITIONS[step.move].before
                assert step.after == TRANSITIONS[step.move].after

    @invariant()
    def what_is_complete_is_in_force_and_what_went_on_was_run(self):
        for rollout in Rollout.objects.select_related("revision", "snapshot"):
            if rollout.state == RolloutState.COMPLETE:
                assert rollout.revision.state in {"live", "retired"}
            if rollout.snapshot is not None:
                assert rollout.snapshot.number <= newest().number


@pytest.mark.timeout(400)  # a busy machine takes some minutes
def test_whatever_happens_routers_are_told_what_the_rows_say():
    run_state_machine_as_test(Rollouts, settings=SETTINGS)
