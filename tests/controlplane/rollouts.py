"""Helpers for tests of rollouts: publishing by stages, acknowledging routers, and snapshots."""

from controlplane.models import ConfigSnapshot, RolloutState, Router
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from controlplane.services.policies.rollout_plans import make_plan
from controlplane.services.policies.rollouts import Verdict, advance_rollouts, apply_verdict
from controlplane.services.routers import announce, record_ack, record_nack

AWAITING, PENDING, PROGRESSING, PAUSED, HOLDING, COMPLETE, ABORTED, ROLLED_BACK, SUPERSEDED = RolloutState

FORMER = {"strategy": "round_robin"}
NEXT = {"strategy": "prefix_hash"}
READING = {"name": "hit_rate", "unit": "ratio", "baseline": 0.6, "canary": 0.41, "limit": 0.05}
FAILED = [{**READING, "verdict": "failed", "detail": "A hit rate of 41.0 % compared with 60.0 %."}]
INCONCLUSIVE = [{**READING, "canary": None, "verdict": "inconclusive", "detail": "12 of 200 requests so far."}]


def publish_stages(policy, stages=({"share": 0.05}, {"share": 0.25}), *, settings=NEXT, by=None, guard=None, **options):
    """Publish a draft with stages that are observed for a minute each, by default without a guard."""
    draft = save_draft(policy, settings, by=by)
    observed_stages = [{"observe_s": 60, **stage} for stage in stages]
    return publish_revision(draft.pk, by=by, plan=make_plan(policy, stages=observed_stages, guard=guard), **options)


def start_routers(*names):
    """Routers that sent their first heartbeat and run no configuration yet."""
    return [
        announce(name=name, boot="b", admin_url=f"http://10.0.1.{number}:8081") for number, name in enumerate(names, 1)
    ]


def newest():
    """The newest snapshot."""
    return ConfigSnapshot.objects.first()


def ack(*routers):
    """Acknowledge the newest snapshot for these routers, by default for all connected ones."""
    snapshot = newest()
    for router in routers or Router.objects.filter(lost_at=None):
        record_ack(router.pk, number=snapshot.number, sha256=snapshot.sha256)
    advance_rollouts()


def nack(router, reason="no room"):
    """Reject the newest snapshot for a router."""
    running = Router.objects.get(pk=router.pk).running_number
    record_nack(router.pk, number=newest().number, path="$.pools[0]", reason=reason, running_number=running)
    advance_rollouts()


def verdict(rollout, outcome, readings=(), stage=None):
    """Store a result of the canary analysis for the current stage, or for another."""
    rollout.refresh_from_db()
    apply_verdict(
        rollout.pk, stage=rollout.stage if stage is None else stage, verdict=Verdict(outcome), readings=list(readings)
    )
    rollout.refresh_from_db()


def newest_pool_policy(name="default"):
    """The policy of a pool in the newest snapshot."""
    return next(pool for pool in newest().document["pools"] if pool["name"] == name)["policy"]


def state(rollout):
    """(state, stage) from the database."""
    rollout.refresh_from_db()
    return RolloutState(rollout.state), rollout.stage


def transitions(rollout):
    return [step.transition for step in rollout.history.all()]


def announce_all(routers):
    """Send a heartbeat with an unchanged configuration."""
    for router in routers:
        router.refresh_from_db()
        heartbeat = {"name": router.name, "boot": router.boot, "admin_url": router.admin_url}
        announce(**heartbeat, revision=router.running_number, sha256=router.running_sha256)
