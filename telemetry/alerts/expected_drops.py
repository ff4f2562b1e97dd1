"""Recognizes drops that are only the cost of replicas that restarted or were down.

Theory of operation. The prompts of a replica that goes down are sent to other replicas, and back when it returns. Each
time they meet a cache that does not have them, also at replicas to which nothing happened. A prefix was at a replica
with the share of its tokens that it had there before. That share of what it usually hits is the most that is attributed
to the replica, and no more than the prefix lost. Prefixes that had almost nothing there are the control group: where
they hit less than usual too, something else is wrong, and the attributed loss shrinks as their hit rate did. Prefixes
without earlier requests attribute nothing.

Replicas that take over much more traffic evict their own prefixes for it. Where the unavailable ones had a fifth of the
tokens, the drop began with their absence and no revision was published, the loss of all known prefixes is attributed.

Kinds of rules see the counters of replicas, and so a restarted replica's own cold cache (``mark_restarts``). What
became of each prefix needs queries of its own, which are only made for a drop shortly after something happened to a
replica. Where routers reported too few requests, the replica's share of the traffic is used instead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings

from controlplane.models import Event, Pool
from telemetry.alerts.findings import POOL, Finding, Result
from telemetry.alerts.history_window import HistoryView, WindowSum
from telemetry.alerts.kinds import Kind, RuleSettings
from telemetry.alerts.kinds.base import restarts
from telemetry.causes import policies
from telemetry.causes.evidence import Prefix, Sums, sum_by, total
from telemetry.storage import rule_sums

MAX_CONTROL_SHARE = 0.1  # of its tokens that a prefix of the control group may have had at unavailable replicas
MIN_TAKEN_OVER = 0.2  # of the tokens before: with less, other replicas have room for what they take over
MIN_CONTROL_TOKENS = 0.1  # of all tokens that the control group must have
BEFORE_S = 600.0  # period that shows where a prefix was and what it usually hits
DETECTION_INTERVALS = 3  # scrape intervals until it is detected that a replica is down
MIN_COVERED = 0.25  # of the engines' tokens that routers must have reported
Key = tuple[str, int | None]  # task group, prefix
Period = tuple[datetime, datetime]


def explained_ratio(
    before: Sequence[Prefix],
    now: Sequence[Prefix],
    unavailable: Collection[str],
    cold: Collection[str] = (),
    *,
    may_crowd: bool = False,
) -> float | None:
    """Share of the current tokens that would be cached if no replica had been unavailable, 0 to 1; None if unknown.

    The whole loss at ``cold`` replicas is attributed to them, wherever the prefixes were before. ``may_crowd``: other
    replicas may have evicted prefixes for those that they took over.
    """
    tokens = total(prefix.sums for prefix in now).prompt
    usual = sum_by(before, _key)
    if not tokens or not usual:
        return None
    moved = sum_by((prefix for prefix in before if prefix.replica in unavailable), _key)
    shares = {key: moved.get(key, Sums()).prompt / sums.prompt for key, sums in usual.items() if sums.prompt}
    warm = sum_by((prefix for prefix in now if prefix.replica not in cold), _key)
    control = {key: sums for key, sums in warm.items() if shares.get(key, 1.0) < MAX_CONTROL_SHARE}
    all_before = sum(sums.prompt for sums in usual.values())
    is_crowded = may_crowd and sum(sums.prompt for sums in moved.values()) >= MIN_TAKEN_OVER * all_before
    retained = 1.0 if is_crowded else _retained(usual, control, tokens)
    at_cold = sum_by((prefix for prefix in now if prefix.replica in cold), _key)
    lost = 0.0
    for part, is_cold in ((warm, False), (at_cold, True)):
        for key, sums in part.items():
            if key in shares:
                rate = retained * (usual[key].rate or 0.0)
                share = 1.0 if is_cold or is_crowded else shares[key]
                lost += max(min(sums.lost(rate), share * rate * sums.prompt), 0.0)
    return lost / tokens


def _key(prefix: Prefix) -> Key:
    return prefix.group, prefix.prefix


def _retained(usual: dict[Key, Sums], control: dict[Key, Sums], tokens: float) -> float:
    """Hit rate of the control group relative to its usual one, 0 to 1; 1 for too little traffic."""
    current = total(control.values())
    expected = sum(sums.prompt * (usual[key].rate or 0.0) for key, sums in control.items())
    return min(current.cached / expected, 1.0) if expected and current.prompt >= MIN_CONTROL_TOKENS * tokens else 1.0


@dataclass(frozen=True, slots=True)
class EvaluatedRule:
    """A rule on a hit rate with the history that it evaluated."""

    pool: Pool
    kind: Kind
    settings: RuleSettings
    group: str
    view: HistoryView

    def window(self, finding: Finding[Any]) -> WindowSum:
        """The window that a finding is about."""
        if self.kind.window_of is None:
            return self.view.window(self.group)
        return self.kind.window_of(finding, self.view.now)

    def evaluate(self, finding: Finding[Any], window: WindowSum) -> Finding[Any]:
        """The finding that ``window`` as the newest window would have had without restarts."""
        if self.kind.evaluate_window is not None:
            return self.kind.evaluate_window(self.settings, finding, window)
        history, index = self.view.history, self.view.index
        windows = {**history.windows, self.group: [*history.windows.get(self.group, ())[:index], window]}
        view = replace(history, windows=windows, restarts={}).at(index)
        return self.kind.evaluate(self.settings, view, self.group)[POOL]


def mark_expected_drop(rule: EvaluatedRule, finding: Finding[Any]) -> Finding[Any]:
    """The finding; a breach that unavailable replicas alone cause is explained by them.

    Up to five queries for a drop within the rule's warm-up time after a replica restarted, went down or came up.
    """
    changes = rule.view.recent_membership_changes(rule.settings.warm_up_lookback_s)
    is_marked = finding.explained_by is not None and finding.explained_by.without is Result.OK
    if finding.result is not Result.BREACH or not changes or is_marked:
        return finding
    corrected = _corrected_window(rule, changes, rule.window(finding))
    if corrected is None:
        return finding
    if rule.evaluate(finding, corrected).result is Result.BREACH:
        return replace(finding, explained_by=None)
    last = {name: times[-1] for name, times in changes.items()}
    return replace(finding, explained_by=restarts(last, rule.settings.warm_up_lookback_s))


def _corrected_window(
    rule: EvaluatedRule, changes: Mapping[str, Sequence[datetime]], newest: WindowSum
) -> WindowSum | None:
    """The newest window as if no replica had been unavailable; None if unknown."""
    cold = rule.view.recent_restarts(rule.settings.warm_up_lookback_s)
    without_cold = None if rule.group else rule.view.window_without(cold)
    window, is_without_cold = (
        (without_cold, True) if without_cold is not None and without_cold.queries else (newest, False)
    )
    if not window.queries or window.hits is None:
        return None
    first = min(times[0] for times in changes.values())
    first -= timedelta(seconds=DETECTION_INTERVALS * settings.SCRAPE_INTERVAL_S)
    periods = ((first - timedelta(seconds=BEFORE_S), first), (window.start, rule.view.now))
    before, now = _by_prefix(rule, periods, window.queries) or _by_replica(rule, periods) or ((), ())
    if is_without_cold:
        now = [prefix for prefix in now if prefix.replica not in cold]
    ratio = explained_ratio(
        before,
        now,
        changes.keys(),
        () if is_without_cold else cold.keys(),
        may_crowd=newest.start >= first and not _has_new_revision(rule.pool, first),
    )
    return None if ratio is None else replace(window, hits=min(window.hits + ratio * window.queries, window.queries))


def _has_new_revision(pool: Pool, since: datetime) -> bool:
    """Whether a revision may have started to place requests shortly before ``since``, or later. One query."""
    events = Event.objects.filter(pool=pool, kind__in=policies.EVENTS, at__gt=since - timedelta(seconds=BEFORE_S))
    return events.exists()


def _by_prefix(
    rule: EvaluatedRule, periods: tuple[Period, Period], queries: float
) -> tuple[Sequence[Prefix], Sequence[Prefix]] | None:
    """Each prefix in both periods; None where routers reported too little. Two queries."""
    pool, group = rule.pool.name, rule.group or None
    now = rule_sums.prefix_totals(pool, group, *periods[1])
    if sum(prefix.sums.prompt for prefix in now) < MIN_COVERED * queries:
        return None
    return rule_sums.prefix_totals(pool, group, *periods[0]), now


def _by_replica(
    rule: EvaluatedRule, periods: tuple[Period, Period]
) -> tuple[Sequence[Prefix], Sequence[Prefix]] | None:
    """The whole pool as one prefix that each replica has with its share of the tokens. Three queries."""
    if rule.group:
        return None
    names: dict[int, str] = dict(rule.pool.replicas.values_list("pk", "name"))
    before, now = (
        [
            Prefix("", None, engine.replica, Sums(prompt=engine.queries, cached=engine.hits))
            for engine in rule_sums.engine_totals(names, *period)
            if engine.queries and engine.hits is not None
        ]
        for period in periods
    )
    return before, now
