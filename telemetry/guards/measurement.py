"""Measures the canary and the baseline of rollouts from stored readings, and reports the analysis to the rollouts.

Theory of operation. A router's figures carry the policy and the revision that placed a request, so canary and baseline
differ in the revision alone. Both are measured from the time at which every router ran the current stage, plus the
warm-up. If the canary is limited to task groups or routers, the same groups or routers and the others are measured
before the rollout as well: a difference that existed then is not caused by the canary. For a share of the prefixes,
nobody knows how these prefixes differed before; there the baseline is weighted to the canary's mix of task groups. The
last stage of a rollout makes the revision active and has no canary.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import msgspec

from controlplane.isolation import isolated_items
from controlplane.models import PeriodicTask, PolicyRevision, Replica, ReplicaState, Rollout, RolloutState, Router
from controlplane.services.policies.rollout_plans import GuardLimits, Stage, read_stage
from controlplane.services.policies.rollouts import Verdict, apply_verdict
from telemetry.guards.analysis import Bin, Measured, Side, analyze
from telemetry.guards.confidence import MIN_GROUP_REQUESTS, mix_weights
from telemetry.metrics.histograms import Buckets, merge
from telemetry.metrics.windows import Window
from telemetry.storage.locks import GUARD, advisory_lock
from telemetry.storage.rule_sums import (
    LatencyKind,
    RevisionLatency,
    RevisionSums,
    requests_by_replica,
    revision_latencies,
    revision_sums,
)

HISTORY_S = 3600.0  # before a rollout
SHORTEST_BIN_S, LONGEST_BIN_S = 10.0, 60.0
BINS = 10  # of a stage, within the limits of a bin's length
SUMMED = ("requests", "answered", "failed", "prompt_tokens", "cached_tokens")
Row = RevisionSums | RevisionLatency


def analyze_rollouts(now: datetime) -> int:
    """Analyze the current stage of every open rollout with a guard; how many, 0 if another worker runs."""
    with advisory_lock(GUARD) as acquired, isolated_items(PeriodicTask.ROLLOUT_GUARDS) as item:
        rollouts = list(_rollouts_to_analyze()) if acquired else []
        for rollout in rollouts:
            with item(f"{rollout.pk}: {rollout.revision}"):
                analyze_rollout(rollout, now)
    return len(rollouts)


def analyze_rollout(rollout: Rollout, now: datetime) -> Verdict:
    """Analyze one rollout, which then acts on the verdict. The verdict is WARMING until the warm-up is over."""
    limits = msgspec.convert(rollout.guard, GuardLimits)
    verdict, figures = Verdict.WARMING, list[dict[str, Any]]()
    since = rollout.stage_converged_at and rollout.stage_converged_at + timedelta(seconds=limits.warm_up_s)
    if since is not None and since < now:
        verdict, figures = analyze(limits, measure(rollout, since=since, until=now))
    apply_verdict(rollout.pk, stage=rollout.stage, verdict=verdict, readings=figures)
    return verdict


def _rollouts_to_analyze() -> list[Rollout]:
    states = (RolloutState.PROGRESSING, RolloutState.HOLDING, RolloutState.PAUSED)
    rollouts = Rollout.objects.filter(state__in=states, guard__isnull=False).exclude(stages=[])
    return list(rollouts.select_related("revision__policy__pool"))


def measure(rollout: Rollout, *, since: datetime, until: datetime) -> Measured:
    """Canary and baseline in a period, and before the rollout if both can be identified there. Fourteen queries."""
    policy, stage = rollout.revision.policy, read_stage(rollout.stages[rollout.stage])
    step_s = bin_length_s(stage.observe_s)
    window = _whole_bins(since, until, step_s)
    history = _whole_bins(rollout.started_at - timedelta(seconds=HISTORY_S), rollout.started_at, step_s)
    active = policy.live()
    now = _load_rows(policy.pool.name, policy.name, policy.name, window)
    canary = now.only(lambda row: row.revision == rollout.revision.number)
    baseline = now.only(lambda row: active is not None and row.revision == active.number)
    loads = (_loads(policy.pool_id, policy.pool.name, window), _loads(policy.pool_id, policy.pool.name, history))
    if stage.share < 1:
        return Measured(Side(canary.bins(window)), Side(baseline.with_mix_of(canary).bins(window)), *loads)
    in_stage = _stage_filter(stage)
    before = _load_rows(policy.pool.name, policy.name, "", history).placed_by(active)
    inside, outside = before.only(in_stage), before.only(lambda row: not in_stage(row))
    return Measured(
        Side(canary.bins(window), inside.bins(history)), Side(baseline.bins(window), outside.bins(history)), *loads
    )


def _stage_filter(stage: Stage) -> Callable[[Row], bool]:
    """A filter for rows of a stage's routers and task groups. A query if the stage names routers."""
    routers = None
    if stage.routers is not None:
        routers = frozenset(Router.objects.filter(name__in=stage.routers).values_list("pk", flat=True))
    groups = None if stage.groups is None else frozenset(stage.groups)
    return lambda row: (routers is None or row.router_id in routers) and (groups is None or row.group in groups)


def bin_length_s(observe_s: float) -> float:
    """Length of a bin: a minute, or less for a stage shorter than ten minutes."""
    return float(math.floor(min(max(observe_s / BINS, SHORTEST_BIN_S), LONGEST_BIN_S)))


def _load_rows(pool: str, policy: str, timed_policy: str, window: Window) -> _Rows:
    """What a policy placed, and latencies of ``timed_policy``; "": of all requests of the pool. Five queries."""
    latencies = (revision_latencies(pool, timed_policy, window, kind) for kind in LatencyKind)
    return _Rows(revision_sums(policy, window), *latencies)


@dataclass(frozen=True, slots=True)
class _Rows:
    placed: Sequence[RevisionSums]
    first_tokens: Sequence[RevisionLatency]  # TTFT of streamed responses
    non_streamed: Sequence[RevisionLatency]  # latency of the other responses

    def placed_by(self, revision: PolicyRevision | None) -> _Rows:
        """Rows of one revision, and latencies of the groups in which it placed requests."""
        placed = [row for row in self.placed if revision is not None and row.revision == revision.number]
        groups = {row.group for row in placed}
        latencies = ([row for row in rows if row.group in groups] for rows in (self.first_tokens, self.non_streamed))
        return _Rows(placed, *latencies)

    def only(self, condition: Callable[[Row], bool]) -> _Rows:
        latencies = (list(filter(condition, rows)) for rows in (self.first_tokens, self.non_streamed))
        return _Rows(list(filter(condition, self.placed)), *latencies)

    def with_mix_of(self, canary: _Rows) -> _Rows:
        """The rows, weighted to the canary's mix of task groups; latencies are not weighted."""
        known = {group for group, requests in self._by_group("requests").items() if requests >= MIN_GROUP_REQUESTS}
        by_requests, by_tokens = (
            mix_weights(canary._by_group(name), self._by_group(name), known) for name in ("answered", "prompt_tokens")
        )
        weighted = [
            replace(
                row,
                answered=row.answered * by_requests[row.group],
                failed=row.failed * by_requests[row.group],
                prompt_tokens=row.prompt_tokens * by_tokens[row.group],
                cached_tokens=row.cached_tokens * by_tokens[row.group],
            )
            for row in self.placed
        ]
        return _Rows(weighted, self.first_tokens, self.non_streamed)

    def _by_group(self, name: str) -> Counter[str]:
        sums: Counter[str] = Counter()
        for row in self.placed:
            sums[row.group] += getattr(row, name)
        return sums

    def bins(self, window: Window) -> list[Bin]:
        """Every bin of a window; none without requests."""
        sums: dict[datetime, Counter[str]] = defaultdict(Counter)
        for row in self.placed:
            sums[row.start].update({name: getattr(row, name) for name in SUMMED})
        ttft, non_streamed = _by_start(self.first_tokens), _by_start(self.non_streamed)
        return [
            Bin(
                start,
                **{name: sums[start][name] for name in SUMMED},
                ttft=ttft.get(start),
                non_streamed_latency=non_streamed.get(start),
            )
            for start in (window.starts() if sums else ())
        ]


def _by_start(rows: Sequence[RevisionLatency]) -> dict[datetime, Buckets]:
    parts: dict[datetime, list[Buckets]] = defaultdict(list)
    for row in rows:
        parts[row.start].append(row.waits)
    return {start: merged.buckets for start, buckets in parts.items() if (merged := merge(buckets)) is not None}


def _whole_bins(since: datetime, until: datetime, step_s: float) -> Window:
    """All complete bins from ``since`` on; at least one, which may be shorter."""
    count = max(math.floor((until - since).total_seconds() / step_s), 1)
    end = min(since + timedelta(seconds=count * step_s), max(until, since + timedelta(seconds=1)))
    return Window(since, end, step_s)


def _loads(pool_id: int, pool: str, window: Window) -> Mapping[str, float]:
    """Requests per unit of weight of each active replica, also of those without requests."""
    counts = requests_by_replica(pool, window)
    active = Replica.objects.filter(pool_id=pool_id, state=ReplicaState.ACTIVE).values_list("name", "weight")
    return {name: counts.get(name, 0) / weight for name, weight in active}
