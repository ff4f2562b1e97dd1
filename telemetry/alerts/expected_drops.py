"""What it costs that replicas were away, wherever their prompts went. Pure.

Theory of operation. The prompts of a replica that goes away are sent to others, and back to it when it returns: each
time they meet a cache that does not know them, also at replicas that nothing happened to. An opening is at home at a
replica with the part of its tokens that it had there before. That part of what it usually hits is the most that is put
down to the replica, and no more than the opening lost. Openings that had next to nothing there are the witnesses: where
they hit less than usual too, something else is at work, and what is put down shrinks as their hit rate did. Openings
that nobody sent before are put down to nothing.

Whether a drop is only what it costs that replicas restarted or were away, told by the prompts that were theirs.

A kind of rule sees what replicas counted, and so a restarted replica's own cold cache (kinds/base.py). This looks at
what became of each opening, which takes queries of its own: it is asked only where a drop was found shortly after
something happened to a replica. Where routers told of too few requests the replica's part of the traffic has to do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from django.conf import settings

from controlplane.models import Pool
from telemetry.alerts.history_window import Past, Seen, WindowSum
from telemetry.alerts.kinds import Asked, Kind, RuleSettings
from telemetry.alerts.kinds.base import MUTED, OTHERS, muted
from telemetry.alerts.verdict import POOL, Result, Verdict
from telemetry.causes.evidence import Prefix, Sums, added, grouped
from telemetry.storage import rule_sums

ELSEWHERE = 0.1  # of its tokens, at most, that a witness had at replicas that were away
WITNESSES = 0.1  # of all tokens, at least, that theirs have to be
Key = tuple[str, int | None]  # task group, opening


def explained_ratio(
    before: Sequence[Prefix], now: Sequence[Prefix], away: Collection[str], cold: Collection[str] = ()
) -> float | None:
    """The part of the tokens of now that would have been cached had nobody been away, 0 to 1; None unless known.

    Openings at replicas that are ``cold`` lost what they lost there to that, wherever they were at home.
    """
    total = added(it.sums for it in now).prompt
    usual = grouped(before, _key)
    if not total or not usual:
        return None
    gone = grouped((it for it in before if it.replica in away), _key)
    shares = {key: gone.get(key, Sums()).prompt / sums.prompt for key, sums in usual.items() if sums.prompt}
    warm = grouped((it for it in now if it.replica not in cold), _key)
    kept = _kept(usual, {key: sums for key, sums in warm.items() if shares.get(key, 1.0) < ELSEWHERE}, total)
    lost = sum(_lost(sums, kept * (usual[key].rate or 0.0), shares[key]) for key, sums in warm.items() if key in shares)
    at_cold = grouped((it for it in now if it.replica in cold), _key)
    lost += sum(_lost(sums, kept * (usual[key].rate or 0.0), 1.0) for key, sums in at_cold.items() if key in shares)
    return lost / total


def _key(part: Prefix) -> Key:
    return part.group, part.prefix


def _lost(sums: Sums, usual: float, share: float) -> float:
    """Tokens of an opening that were not cached because a part of it was elsewhere."""
    return max(min(sums.lost(usual), share * usual * sums.prompt), 0.0)


def _kept(usual: dict[Key, Sums], witnesses: dict[Key, Sums], total: float) -> float:
    """What witnesses still hit of what they usually do, 0 to 1; 1 where they are too few to tell."""
    seen = added(witnesses.values())
    due = sum(sums.prompt * (usual[key].rate or 0.0) for key, sums in witnesses.items())
    return min(seen.cached / due, 1.0) if due and seen.prompt >= WITNESSES * total else 1.0


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
    is_told_of = MUTED in verdict.figures and verdict.figures[OTHERS] is Result.OK
    if verdict.result is not Result.BREACH or not away or is_told_of:
        return verdict
    without = _without(watched, away, watched.window(verdict))
    if without is None:
        return verdict
    if watched.judge(verdict, without).result is Result.BREACH:
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
    now = rule_sums.prefix_totals(pool, group, *spans[1])
    if sum(part.sums.prompt for part in now) < COVERED * queries:
        return None
    return rule_sums.prefix_totals(pool, group, *spans[0]), now


def _replicas(watched: Watched, spans: Spans) -> Sides | None:
    """The whole pool as one opening that is at home at each replica with its part of the tokens. Three queries."""
    if watched.asked.group:
        return None
    names: dict[int, str] = dict(watched.pool.replicas.values_list("pk", "name"))
    before, now = (
        [
            Prefix("", None, it.replica, Sums(prompt=it.queries, cached=it.hits))
            for it in rule_sums.engine_totals(names, *span)
            if it.queries and it.hits is not None
        ]
        for span in spans
    )
    return before, now
