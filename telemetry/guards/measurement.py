"""Measures the canary and the baseline of rollouts from collected decisions, and reports the analysis to the rollouts.

Theory of operation. A decision has the policy and the revision that placed the request, so canary and baseline differ
in the revision alone. Both are measured from the time at which every router ran the current stage, plus the warm-up.
Each is also measured in the two hours before the canary began, when the active revision placed all requests: a request
belonged to the canary's side if the stage would select it, by its router, its task group and the position of its
prefix. The last stage of a rollout makes the revision active and has no canary.

Decisions are read in full up to ``MAX_ROWS`` in a window; of a busier policy, the first of every bin are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controlplane.isolation import isolated_items
from controlplane.models import PeriodicTask, Rollout, RolloutState, Router
from controlplane.services.policies.rollout_plans import Stage, read_guard, read_stage
from controlplane.services.policies.rollouts import Verdict, apply_verdict
from routing.schema import PREFIX_SPACE, split_position, split_seed
from telemetry.guards.analysis import Measured, Requests, Side, analyze
from telemetry.metrics.windows import Window
from telemetry.storage.decisions import PlacedRequests, placed_between
from telemetry.storage.locks import GUARD, advisory_lock

HISTORY_S = 7200.0  # before the canary
SHORTEST_BIN_S, LONGEST_BIN_S = 10.0, 60.0
BINS = 10  # of a stage, within the limits of a bin's length
COLLECTED_S = 10.0  # after its end, a bin's decisions are expected to be collected
MAX_ROWS = 120_000  # of a window
MAX_MISPLACED = 0.01  # share of requests whose prefix is on the other side: the split has another boundary
ANSWERED, FAILED = ("ok", "replica_error", "router_error"), ("replica_error", "router_error")


def analyze_rollouts(now: datetime) -> int:
    """Analyze the current stage of every open rollout with a guard; how many, 0 if another worker runs."""
    with advisory_lock(GUARD) as acquired, isolated_items(PeriodicTask.ROLLOUT_GUARDS) as item:
        rollouts = list(_rollouts_to_analyze()) if acquired else []
        for rollout in rollouts:
            with item(f"{rollout.pk}: {rollout.revision}"):
                analyze_rollout(rollout, now)
    return len(rollouts)


def analyze_rollout(rollout: Rollout, now: datetime) -> None:
    """Analyze one rollout, which then acts on the verdict: WARMING during the warm-up, later one for each new bin."""
    limits = read_guard(rollout.guard or {})
    verdict, figures = Verdict.WARMING, list[dict[str, Any]]()
    since, due_at = analyzed_since(rollout), next_analysis_at(rollout)
    until = now - timedelta(seconds=COLLECTED_S)
    if since is not None and due_at is not None and since < until:
        if now < due_at:
            return
        verdict, figures = analyze(limits, measure(rollout, since=since, until=until))
    apply_verdict(rollout.pk, stage=rollout.stage, verdict=verdict, readings=figures)


def analyzed_since(rollout: Rollout) -> datetime | None:
    """The end of the current stage's warm-up; None while some router does not run the stage."""
    since = rollout.stage_converged_at
    return since and since + timedelta(seconds=read_guard(rollout.guard or {}).warm_up_s)


def next_analysis_at(rollout: Rollout) -> datetime | None:
    """When the bin that ends after the last analysis is collected; None as above."""
    since = analyzed_since(rollout)
    if since is None:
        return None
    collected = since + timedelta(seconds=COLLECTED_S)
    if not rollout.readings or rollout.readings_at is None:
        return collected
    step = timedelta(seconds=bin_length_s(read_stage(rollout.stages[rollout.stage]).observe_s))
    return collected + ((rollout.readings_at - collected) // step + 1) * step


def _rollouts_to_analyze() -> list[Rollout]:
    states = (RolloutState.PROGRESSING, RolloutState.HOLDING, RolloutState.PAUSED)
    rollouts = Rollout.objects.filter(state__in=states, guard__isnull=False).exclude(stages=[])
    return list(rollouts.select_related("revision__policy__pool"))


def measure(rollout: Rollout, *, since: datetime, until: datetime) -> Measured:
    """Canary and baseline in a period, and before the canary. Four or five queries."""
    policy, stage = rollout.revision.policy, read_stage(rollout.stages[rollout.stage])
    step_s = bin_length_s(stage.observe_s)
    started = rollout.history.filter(transition="start").values_list("at", flat=True).first() or rollout.started_at
    active = policy.live()
    split = _Split(stage, _router_ids(stage), split_seed(policy.name))
    active_number = 0 if active is None else active.number
    history = _whole_bins(started - timedelta(seconds=HISTORY_S), started, step_s)
    now = split.read(policy.name, (active_number, rollout.revision.number), _whole_bins(since, until, step_s))
    before = split.read(policy.name, (active_number,), history)
    is_canary = now.revisions == rollout.revision.number
    positions, positions_before = split.positions(now), split.positions(before)
    is_inside = before.in_scope & (positions_before < stage.share * PREFIX_SPACE)
    if stage.share < 1:
        # A request without a prefix is on no side. If the policy has a boundary of its own, stored prefixes are not
        # those by which routers choose, and the sides of the past are unknown.
        misplaced = ((positions < stage.share * PREFIX_SPACE) & now.in_scope) != is_canary
        known, known_before = now.prefixes != 0, before.prefixes != 0
        if np.count_nonzero(misplaced & known) > MAX_MISPLACED * len(misplaced):
            known_before &= False
    else:
        known, known_before = np.ones(len(now.bins), np.bool_), np.ones(len(before.bins), np.bool_)
    prompts = np.unique(np.concatenate((now.prefixes, before.prefixes)), return_inverse=True)[1]
    requests = _requests(now, prompts[: len(now.bins)])
    requests_before = _requests(before, prompts[len(now.bins) :])
    return Measured(
        Side(requests.take(is_canary & known), requests_before.take(is_inside & known_before)),
        Side(requests.take(~is_canary & known), requests_before.take(~is_inside & known_before)),
        is_split_by_prompt=stage.share < 1,
        has_common_prompts=stage.share == 1 and stage.groups is None,
    )


@dataclass(frozen=True, slots=True)
class _Split:
    """Which requests a stage selects."""

    stage: Stage
    routers: list[int] | None
    seed: int

    def read(self, policy: str, revisions: tuple[int, ...], window: Window) -> PlacedRequests:
        at_most = MAX_ROWS // len(window.starts())
        groups = self.stage.groups
        return placed_between(policy, revisions, window, routers=self.routers, groups=groups, at_most=at_most)

    def positions(self, placed: PlacedRequests) -> NDArray[np.float64]:
        """Positions of the prefixes among all prefixes; 0 where every prefix is selected."""
        if self.stage.share == 1:
            return np.zeros(len(placed.bins))
        prefixes, codes = np.unique(placed.prefixes, return_inverse=True)
        positions = [split_position(prefix, self.seed) for prefix in prefixes.tolist()]
        return np.array(positions, np.float64)[codes]


def _router_ids(stage: Stage) -> list[int] | None:
    if stage.routers is None:
        return None
    return list(Router.objects.filter(name__in=stage.routers).values_list("pk", flat=True))


def _requests(placed: PlacedRequests, prompts: NDArray[np.int64]) -> Requests:
    names = placed.outcomes.names
    answered, failed = (
        np.array([float(name in counted) for name in names] or [0.0])[placed.outcomes.codes]
        for counted in (ANSWERED, FAILED)
    )
    has_usage = ~np.isnan(placed.prompt_tokens) & ~np.isnan(placed.cached_tokens)
    return Requests(
        placed.bins,
        prompts,
        answered,
        failed,
        np.where(has_usage, placed.prompt_tokens, 0.0),
        np.where(has_usage, placed.cached_tokens, 0.0),
        placed.ttft_s,
        placed.plain_latency_s,
    )


def bin_length_s(observe_s: float) -> float:
    """Length of a bin: a minute, or less for a stage shorter than ten minutes."""
    return float(math.floor(min(max(observe_s / BINS, SHORTEST_BIN_S), LONGEST_BIN_S)))


def _whole_bins(since: datetime, until: datetime, step_s: float) -> Window:
    """All complete bins from ``since`` on; at least one, which may be shorter."""
    count = max(math.floor((until - since).total_seconds() / step_s), 1)
    end = min(since + timedelta(seconds=count * step_s), max(until, since + timedelta(seconds=1)))
    return Window(since, end, step_s)
