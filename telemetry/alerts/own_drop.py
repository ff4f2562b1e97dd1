"""Whether a drop is only what it costs that replicas restarted or were away, told by the prompts that were theirs.

A kind of rule sees what replicas counted, and so a restarted replica's own cold cache (kinds/cold.py). This looks at
what became of each opening, which takes queries of its own: it is asked only where a drop was found shortly after
something happened to a replica. Where routers told of too few requests the replica's part of the traffic has to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from django.conf import settings

from controlplane.models import Pool
from telemetry.alerts.kinds import Asked, Kind, RuleSettings
from telemetry.alerts.kinds.cold import MUTED, OTHERS, muted
from telemetry.alerts.past import Past, Seen, WindowSum
from telemetry.alerts.rehoming import explained_ratio
from telemetry.alerts.verdict import POOL, Answer, Verdict
from telemetry.causes.evidence import Prefix, Sums
from telemetry.storage import drops

BEFORE_S = 600.0  # that say where an opening is at home, and what it usually hits
NOTICED = 3  # intervals within which it is noticed that a replica is away
COVERED = 0.25  # of the engines' tokens, at least, that routers have to have told of


@dataclass(frozen=True, slots=True)
class Watched:
    """A rule of a hit rate, and what it looked at."""

    pool: Pool
    kind: Kind
    settings: RuleSettings
    asked: Asked
    seen: Seen

    @property
    def newest(self) -> WindowSum:
        """Its newest window."""
        return self.seen.windows(self.asked.group)[-1]

    def window(self, verdict: Verdict) -> WindowSum:
        """What a verdict is about."""
        return self.newest if self.kind.window_of is None else self.kind.window_of(verdict, self.seen.now)

    def judge(self, verdict: Verdict, window: WindowSum) -> Verdict:
        """What it would say of another newest window, had nobody restarted."""
        if self.kind.judge_window is not None:
            return self.kind.judge_window(self.settings, verdict, window)
        past, group = self.seen.past, self.asked.group
        windows = {**past.windows, group: [*past.windows.get(group, ())[: self.seen.index], window]}
        other: Past = replace(past, windows=windows, restarts={})
        return self.kind.judge(self.settings, other.at(self.seen.index), self.asked)[POOL]


def unless_its_own(watched: Watched, verdict: Verdict) -> Verdict:
    """The verdict, with the replicas to which the drop is due among its figures where there is none but theirs.

    Up to four queries, where a drop was found within the rule's warm-up of something that happened to a replica.
    """
    away = watched.seen.disturbed(watched.settings.warm_up_reach_s)
    is_told_of = MUTED in verdict.figures and verdict.figures[OTHERS] is Answer.OK
    if verdict.answer is not Answer.BREACH or not away or is_told_of:
        return verdict
    without = _without(watched, away, watched.window(verdict))
    if without is None:
        return verdict
    if watched.judge(verdict, without).answer is Answer.BREACH:
        return replace(verdict, figures={name: it for name, it in verdict.figures.items() if name != MUTED})
    return muted(verdict, {name: times[-1] for name, times in away.items()}, watched.settings.warm_up_reach_s)


def _without(watched: Watched, away: Mapping[str, Sequence[datetime]], newest: WindowSum) -> WindowSum | None:
    """The newest window, had nobody been away; None where that cannot be told."""
    cold = watched.seen.restarted(watched.settings.warm_up_reach_s)
    rest = None if watched.asked.group else watched.seen.newest_without(cold)
    window, is_rest = (rest, True) if rest is not None and rest.queries else (newest, False)
    if not window.queries or window.hits is None:
        return None
    first = min(times[0] for times in away.values()) - timedelta(seconds=NOTICED * settings.SCRAPE_INTERVAL_S)
    spans = ((first - timedelta(seconds=BEFORE_S), first), (window.start, watched.seen.now))
    before, now = _openings(watched, spans, window.queries) or _replicas(watched, spans) or ((), ())
    if is_rest:
        now = [part for part in now if part.replica not in cold]
    ratio = explained_ratio(before, now, away.keys(), () if is_rest else cold.keys())
    return None if ratio is None else replace(window, hits=min(window.hits + ratio * window.queries, window.queries))


Spans = tuple[tuple[datetime, datetime], tuple[datetime, datetime]]
Sides = tuple[Sequence[Prefix], Sequence[Prefix]]


def _openings(watched: Watched, spans: Spans, queries: float) -> Sides | None:
    """What became of each opening, before and now; None where routers told of too little. Two queries."""
    pool, group = watched.pool.name, watched.asked.group or None
    now = drops.prefixes(pool, group, *spans[1])
    if sum(part.sums.prompt for part in now) < COVERED * queries:
        return None
    return drops.prefixes(pool, group, *spans[0]), now


def _replicas(watched: Watched, spans: Spans) -> Sides | None:
    """The whole pool as one opening that is at home at each replica with its part of the tokens. Three queries."""
    if watched.asked.group:
        return None
    names: dict[int, str] = dict(watched.pool.replicas.values_list("pk", "name"))
    before, now = (
        [
            Prefix("", None, it.replica, Sums(prompt=it.queries, cached=it.hits))
            for it in drops.engines(names, *span)
            if it.queries and it.hits is not None
        ]
        for span in spans
    )
    return before, now
