"""What routers counted of both sides of a trial, out of the readings.

Theory of operation. A router's figures carry the policy and the revision that placed a request, so the two sides are
told apart by the revision alone. Both are looked at from the moment at which every router ran the present stage, plus
the warm-up. Where the trial is bound to task groups or routers, the same groups or routers are looked at in the time
before the trial as well, beside the others: how they differed then is not the trial's doing. Which prefixes a share
takes in cannot be told from before: there the baseline is weighed until its task groups are mixed as the trial's are.
Nothing is on trial for everything: a rollout's last stage puts the revision in force.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from controlplane.models import PolicyRevision, Replica, ReplicaState, Rollout, Router
from controlplane.services.policies.rollout_plans import Stage, read_stage
from telemetry.guards.confidence import LEAST_REQUESTS, weights
from telemetry.guards.judge import Bin, Measured, Side
from telemetry.metrics.histograms import Buckets, merge
from telemetry.metrics.windows import Window
from telemetry.storage.rule_sums import (
    LatencyKind,
    RevisionLatency,
    RevisionSums,
    requests_by_replica,
    revision_latencies,
    revision_sums,
)

HISTORY_S = 3600.0  # how far back before a trial is looked
SHORTEST_BIN_S, LONGEST_BIN_S = 10.0, 60.0
BINS = 10  # that the time of a stage is cut into, where the bins' lengths allow


@dataclass(frozen=True, slots=True)
class Reach:
    """The routers and the task groups that the present stage takes in; None: all."""

    routers: frozenset[int] | None
    groups: frozenset[str] | None

    def takes(self, row: RevisionSums | RevisionLatency) -> bool:
        """Whether a row is of a router and a group that are taken in."""
        of_router = self.routers is None or row.router_id in self.routers
        return of_router and (self.groups is None or row.group in self.groups)


def measure(rollout: Rollout, *, since: datetime, until: datetime) -> Measured:
    """Both sides of a trial between two moments, and before it began where that can be told. Fourteen queries."""
    policy, stage = rollout.revision.policy, read_stage(rollout.stages[rollout.stage])
    step_s = bin_length_s(stage.observe_s)
    window = _whole_bins(since, until, step_s)
    history = _whole_bins(rollout.started_at - timedelta(seconds=HISTORY_S), rollout.started_at, step_s)
    tried, live = rollout.revision.number, policy.live()
    now = _counts(policy.pool.name, policy.name, policy.name, window)
    trial = now.only(lambda row: row.revision == tried)
    baseline = now.only(lambda row: live is not None and row.revision == live.number)
    load = (_load(policy.pool_id, policy.pool.name, window), _load(policy.pool_id, policy.pool.name, history))
    if stage.share < 1:
        return Measured(Side(trial.bins(window)), Side(baseline.mixed_as(trial).bins(window)), *load)
    reach = _reach(stage)
    before = _counts(policy.pool.name, policy.name, "", history).placed_by(live)
    inside, outside = before.only(reach.takes), before.only(lambda row: not reach.takes(row))
    return Measured(
        Side(trial.bins(window), inside.bins(history)), Side(baseline.bins(window), outside.bins(history)), *load
    )


def _reach(stage: Stage) -> Reach:
    """Of a stage; a query where it names routers."""
    ids = None
    if stage.routers is not None:
        ids = frozenset(Router.objects.filter(name__in=stage.routers).values_list("pk", flat=True))
    return Reach(ids, None if stage.groups is None else frozenset(stage.groups))


def bin_length_s(observe_s: float) -> float:
    """A minute, or less where a stage is to be over before ten of them."""
    return float(math.floor(min(max(observe_s / BINS, SHORTEST_BIN_S), LONGEST_BIN_S)))


def _counts(pool: str, policy: str, waits_of: str, window: Window) -> _Counts:
    """What a policy placed, and what of ``waits_of`` was timed; "": of all that the pool served. Five queries."""
    timed = (revision_latencies(pool, waits_of, window, of) for of in LatencyKind)
    return _Counts(revision_sums(policy, window), *timed)


@dataclass(frozen=True, slots=True)
class _Counts:
    placed: Sequence[RevisionSums]
    first_tokens: Sequence[RevisionLatency]  # of streamed responses
    plain: Sequence[RevisionLatency]  # latency of the others

    def placed_by(self, revision: PolicyRevision | None) -> _Counts:
        """Those of one revision; of times that are not told apart, those of the groups where it placed anything."""
        kept = [row for row in self.placed if revision is not None and row.revision == revision.number]
        groups = {row.group for row in kept}
        of_groups = ([row for row in rows if row.group in groups] for rows in (self.first_tokens, self.plain))
        return _Counts(kept, *of_groups)

    def only(self, belongs: Callable[[RevisionSums | RevisionLatency], bool]) -> _Counts:
        """What belongs to one side."""
        times = (list(filter(belongs, rows)) for rows in (self.first_tokens, self.plain))
        return _Counts(list(filter(belongs, self.placed)), *times)

    def mixed_as(self, trial: _Counts) -> _Counts:
        """The same, weighed until its task groups are mixed as the trial's are; what was waited stays as it is."""
        asked = self._by_group("requests")
        known = {group for group, requests in asked.items() if requests >= LEAST_REQUESTS}
        answers, tokens = (
            weights(trial._by_group(unit), self._by_group(unit), known) for unit in ("answered", "prompt_tokens")
        )
        weighed = [_weighed(row, answers[row.group], tokens[row.group]) for row in self.placed]
        return _Counts(weighed, self.first_tokens, self.plain)

    def _by_group(self, unit: str) -> Counter[str]:
        sums: Counter[str] = Counter()
        for row in self.placed:
            sums[row.group] += getattr(row, unit)
        return sums

    def bins(self, window: Window) -> list[Bin]:
        """Every bin of a window; empty without a request."""
        sums: dict[datetime, Counter[str]] = defaultdict(Counter)
        for row in self.placed:
            sums[row.start].update({name: getattr(row, name) for name in _COUNTED})
        ttft, plain = _by_start(self.first_tokens), _by_start(self.plain)
        return (
            [_bin(start, sums[start], ttft.get(start), plain.get(start)) for start in window.starts()] if sums else []
        )


def _by_start(rows: Sequence[RevisionLatency]) -> dict[datetime, Buckets]:
    waits: dict[datetime, list[Buckets]] = defaultdict(list)
    for row in rows:
        waits[row.start].append(row.waits)
    return {start: merged.buckets for start, parts in waits.items() if (merged := merge(parts)) is not None}


def _weighed(row: RevisionSums, answers: float, tokens: float) -> RevisionSums:
    return replace(
        row,
        answered=row.answered * answers,
        failed=row.failed * answers,
        prompt_tokens=row.prompt_tokens * tokens,
        cached_tokens=row.cached_tokens * tokens,
    )


_COUNTED = ("requests", "answered", "failed", "prompt_tokens", "cached_tokens")


def _bin(start: datetime, sums: Counter[str], ttft: Buckets | None, plain: Buckets | None) -> Bin:
    return Bin(start, **{name: sums[name] for name in _COUNTED}, ttft=ttft, plain_latency=plain)


def _whole_bins(since: datetime, until: datetime, step_s: float) -> Window:
    """From ``since`` on as many bins as are over; at least one, which may be cut short."""
    count = max(math.floor((until - since).total_seconds() / step_s), 1)
    return Window(
        since, min(since + timedelta(seconds=count * step_s), max(until, since + timedelta(seconds=1))), step_s
    )


def _load(pool_id: int, pool: str, window: Window) -> Mapping[str, float]:
    """Requests by unit of weight, of each replica that is to serve; those that got none count too."""
    counts = requests_by_replica(pool, window)
    active = Replica.objects.filter(pool_id=pool_id, state=ReplicaState.ACTIVE).values_list("name", "weight")
    return {name: counts.get(name, 0) / weight for name, weight in active}
