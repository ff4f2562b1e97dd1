"""Judging trials: what was measured of each open rollout that has a guard, told to the rollout."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import msgspec

from controlplane.isolation import isolated_items
from controlplane.models import PeriodicTask, Rollout, RolloutState
from controlplane.services.policies.rollout_plans import GuardLimits
from controlplane.services.policies.rollouts import Verdict, apply_verdict
from telemetry.guards.evidence import measure
from telemetry.guards.judge import judge
from telemetry.storage.locks import GUARD, advisory_lock


def analyze_rollouts(now: datetime) -> int:
    """Judge the present stage of every open trial once; how many. 0 where somebody else is at it."""
    with advisory_lock(GUARD) as ours, isolated_items(PeriodicTask.ROLLOUT_GUARDS) as item:
        rollouts = list(_guarded()) if ours else []
        for rollout in rollouts:
            with item(f"{rollout.pk}: {rollout.revision}"):
                analyze_rollout(rollout, now)
    return len(rollouts)


def analyze_rollout(rollout: Rollout, now: datetime) -> Verdict:
    """One verdict and its figures; the rollout decides what follows. Warming up until the caches had their time."""
    limits = msgspec.convert(rollout.guard, GuardLimits)
    verdict, figures = Verdict.WARMING, list[dict[str, Any]]()
    since = rollout.stage_converged_at and rollout.stage_converged_at + timedelta(seconds=limits.warm_up_s)
    if since is not None and since < now:
        verdict, figures = judge(limits, measure(rollout, since=since, until=now))
    apply_verdict(rollout.pk, stage=rollout.stage, verdict=verdict, readings=figures)
    return verdict


def _guarded() -> list[Rollout]:
    running = (RolloutState.PROGRESSING, RolloutState.HOLDING, RolloutState.PAUSED)
    trials = Rollout.objects.filter(state__in=running, guard__isnull=False).exclude(stages=[])
    return list(trials.select_related("revision__policy__pool"))
