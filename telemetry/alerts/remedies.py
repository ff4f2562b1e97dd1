"""The action that remedies an alert: one table, by kind of cause and by kind of alert.

The most likely cause decides; an alert without causes has the remedy of its kind. Where nothing in Warmpath remedies
it, the table says why and what to do instead. Pages offer a remedy to those who may submit its page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from django.db.models import OuterRef, Subquery
from django.db.models.fields.json import KT
from django.urls import reverse
from django.utils import timezone

from controlplane.models import PolicyRevision, Replica, ReplicaState, RevisionState, Rollout, RoutingPolicy
from controlplane.models.policy import OPEN_ROLLOUTS
from controlplane.services.policies.lifecycle import healthy_revisions
from telemetry.alerts.findings import Result
from telemetry.alerts.kinds import KINDS
from telemetry.alerts.kinds.base import duration, percent
from telemetry.causes.evidence import CauseKind
from telemetry.models import Alert, AlertState, RuleKind

MAX_REASON = 200  # characters of the reason that a form is filled with


@dataclass(frozen=True, slots=True)
class Remedy:
    """What to do. Without a path nothing in Warmpath does it, and ``hint`` says why."""

    label: str = ""  # of the button, with the name of what it changes
    path: str = ""
    route: str = ""  # of ``path``: those who may submit it are offered the remedy
    hint: str = ""  # a sentence beside the button
    is_over: bool = False  # the condition no longer holds, and the alert resolves soon


Evidence = Mapping[str, Any]  # of a cause; {} for an alert without causes
Action = Callable[[Alert, Evidence], Remedy]


def _remedy(label: str, route: str, *args: object, hint: str = "", query: Mapping[str, str] | None = None) -> Remedy:
    path = reverse(route, args=args)
    return Remedy(label, f"{path}?{urlencode(query)}" if query else path, route, hint)


def _page(label: str, route: str, hint: str = "", **query: str) -> Action:
    """A page of the alert's pool."""
    return lambda alert, _: _remedy(
        label.format(pool=alert.pool.name), route, hint=hint, query={"pool": alert.pool.name, **query}
    )


def _replica(hint: str, to: ReplicaState | None = None) -> Action:
    """Drain an active replica, activate one that is out by a setting, or open the page of one. One query."""

    def action(alert: Alert, evidence: Evidence) -> Remedy:
        names = evidence.get("replicas") or [alert.subject]
        found = sorted(Replica.objects.filter(pool=alert.pool, name__in=names), key=lambda row: names.index(row.name))
        for row in found if to else ():
            if (row.state == ReplicaState.ACTIVE) is (to == ReplicaState.DRAINING):
                out = f"It is {row.state}: routers send it no new requests."
                verb, why = ("Drain", hint) if to == ReplicaState.DRAINING else ("Activate", out)
                return _remedy(f"{verb} {row.name}", "controlplane:replica-state", row.pk, to, hint=why)
        name = found[0].name if found else ""
        return _remedy(f"Open {name}", "telemetry:replica", name, hint=hint) if name else _FLEET(alert, evidence)

    return action


def _roll_back(alert: Alert, evidence: Evidence) -> Remedy:
    """Back to the newest healthy revision if the named one is active; abort its rollout if it is a canary. One query.

    Healthy is one that no alert named and no guard rolled back.
    """
    number = int(evidence.get("revision") or 0)
    named = PolicyRevision.objects.filter(policy=OuterRef("pk"), number=number)
    healthy = healthy_revisions().filter(policy=OuterRef("pk"))
    live = PolicyRevision.objects.filter(policy=OuterRef("pk"), state=RevisionState.LIVE)
    rollouts = Rollout.objects.filter(revision__policy=OuterRef("pk"), revision__number=number, state__in=OPEN_ROLLOUTS)
    policies = RoutingPolicy.objects.filter(name=evidence.get("policy", ""), pool=alert.pool).values_list(
        "pk",
        Subquery(named.values("state")[:1]),
        Subquery(rollouts.values("pk")[:1]),
        Subquery(healthy.values("number")[:1]),
        Subquery(healthy.values(strategy=KT("settings__strategy"))[:1]),
        Subquery(live.values("published_at")[:1]),
    )
    policy, state, rollout, back, strategy, replaced_at = policies.first() or (None,) * 6
    if state == RevisionState.CANARY and rollout:
        return _remedy(f"Abort the canary r{number}", "controlplane:rollout-abort", rollout)
    if state != RevisionState.LIVE:
        return Remedy(hint=_recovery(alert, number, replaced_at))
    if back is None:
        hint = "There is no healthy revision to roll back to."
        return _remedy(f"Edit policy {evidence['policy']}", "controlplane:policy-edit", policy, hint=hint)
    reason = {"reason": f"Alert {alert.pk}: {alert.summary}"[:MAX_REASON]}
    return _remedy(f"Roll back to r{back}, {strategy}", "controlplane:policy-revert", policy, back, query=reason)


def _recovery(alert: Alert, number: int, replaced_at: datetime | None) -> str:
    """Since when the revision is replaced, and how far the hit rate has recovered by the newest evaluation."""
    left = f"Revision {number} is no longer active"
    if replaced_at is not None and replaced_at > alert.started_at:
        ago_s = (timezone.now() - replaced_at).total_seconds()
        left = f"Revision {number} was replaced {duration(round(ago_s))} ago"
    value = (alert.rule.verdict or {}).get("value")
    if value is None or alert.baseline is None:
        return f"{left}: the hit rate recovers as caches fill."
    return f"{left}: the hit rate recovers as caches fill, now {percent(value)}, usually {percent(alert.baseline)}."


def _canary(alert: Alert, _: Evidence) -> Remedy:
    """Abort the canary that began before the drop. One query."""
    rollouts = Rollout.objects.filter(
        revision__policy__pool=alert.pool, revision__state=RevisionState.CANARY, state__in=OPEN_ROLLOUTS
    )
    began = (
        rollouts.filter(started_at__lt=alert.started_at).order_by("-pk").values_list("pk", "revision__number").first()
    )
    if began is None:
        return Remedy(hint="No cause was found yet.")
    hint = "No cause was found yet; this canary began before the drop."
    return _remedy(f"Abort the canary r{began[1]}", "controlplane:rollout-abort", began[0], hint=hint)


def _task_group(alert: Alert, evidence: Evidence) -> Remedy:
    if alert.rule.group is None:
        return _GROUPS(alert, evidence)
    return _remedy(f"Edit task group {alert.rule.group.name}", "controlplane:task-group", alert.rule.group_id)


def _warm_up(alert: Alert, _: Evidence) -> Remedy:
    hint = "The cache fills by itself; warm-up of the pool fills it before traffic arrives."
    return _remedy(f"Set warm-up of {alert.pool.name}", "controlplane:pool", alert.pool_id, hint=hint)


_RESTART = "Restart its engine; routers send it requests again when it responds."
_FLEET = _page("Open replicas of {pool}", "controlplane:fleet", _RESTART)
_GROUPS = _page("Open task groups", "controlplane:task-groups")
_ROUTERS = _page("Open routers", "controlplane:routers", "Check that the process runs, then its log.")
_SIZE = _page("Capacity of {pool}", "telemetry:capacity", "More cache or replicas: the curve shows the effect of each.")
_COMPARE = _page("What-if of {pool}", "telemetry:what-ifs", "Compare strategies and settings on recorded traffic.")
_DRAIN = _replica("Its requests go to other replicas until its engine is restarted.", ReplicaState.DRAINING)

REMEDIES: Mapping[str, Action | str] = {  # a text: why there is none
    CauseKind.REVISION: _roll_back,
    CauseKind.PROMPT_CHANGED: _page("Prompts of {pool}", "telemetry:prompts", "Its clients must change."),
    CauseKind.WORKLOAD_CHANGED: _GROUPS,
    CauseKind.CAPACITY: _SIZE,
    CauseKind.OVERFLOW: _SIZE,
    CauseKind.REPLICA_RESTARTED: _warm_up,
    CauseKind.REPLICA_ADDED: _warm_up,
    CauseKind.REPLICA_LOST: _replica(_RESTART, ReplicaState.ACTIVE),
    CauseKind.INDEX_STALE: _replica("Check its KV events and whether other clients use the engine."),
    CauseKind.ENGINE_SILENT: _replica("Check how its engine was started: it may hit as before."),
    CauseKind.CACHING_OFF: _DRAIN,
    RuleKind.HIT_RATE_DROP: _canary,
    RuleKind.HIT_RATE_FLOOR: _COMPARE,
    RuleKind.PREDICTION_GAP: _page("Open replicas of {pool}", "controlplane:fleet", "Check their KV events."),
    RuleKind.TTFT_OBJECTIVE: _SIZE,
    RuleKind.ERROR_RATIO: _page("Failed requests of {pool}", "telemetry:requests", outcome="failed"),
    RuleKind.STREAM_FAILURES: _page("Open replicas of {pool}", "controlplane:fleet", "Read the engine's log."),
    RuleKind.TRAFFIC_VANISHED: _ROUTERS,
    RuleKind.REPLICA_DOWN: _replica(_RESTART),
    RuleKind.METRICS_UNREADABLE: _replica("Check that the worker can reach its /metrics."),
    RuleKind.REPLICA_EJECTED: _DRAIN,
    RuleKind.KV_PRESSURE: _SIZE,
    RuleKind.LOAD_SKEW: _COMPARE,
    RuleKind.CACHE_STORE_DOWN: "The store is a server of its own: start it. Routers answer without it.",
    RuleKind.CACHE_SHARE_DROP: _task_group,
    RuleKind.SEMANTIC_CACHE_PRECISION: _task_group,
    RuleKind.ROUTER_LOST: _ROUTERS,
    RuleKind.ROUTERS_APART: _ROUTERS,
    RuleKind.ROLLOUT_STUCK: _ROUTERS,
    RuleKind.EVALUATOR_LAG: "Start the worker and beat, or give them more CPU; the worker's log has errors.",
    RuleKind.NO_DATA: _FLEET,
}


def remedy_of(alert: Alert, causes: Iterable[Mapping[str, Any]] | None = None) -> Remedy:
    """The remedy of the first of these causes (those of the alert by default), else of the alert's kind.

    At most one query. A resolved alert needs none.
    """
    first = next(iter(alert.causes if causes is None else causes), None)
    kind, evidence = (first["kind"], first.get("evidence") or {}) if first else (alert.rule.kind, {})
    action = REMEDIES.get(kind, "") if alert.state != AlertState.RESOLVED else ""
    return Remedy(hint=action) if isinstance(action, str) else action(alert, evidence)


def present_remedy(alert: Alert) -> Remedy:
    """The remedy for pages, which say when a firing alert resolves whose condition no longer holds."""
    remedy = remedy_of(alert)
    if not is_over(alert):
        return remedy
    is_needed = bool(remedy.path) or remedy.hint in REMEDIES.values()  # it says what to do, not what was done
    return replace(remedy, is_over=True, hint=_resolves(alert) if is_needed else f"{remedy.hint} {_resolves(alert)}")


def is_over(alert: Alert) -> bool:
    """Whether an alert still fires although its condition no longer holds."""
    return alert.state == AlertState.FIRING and (alert.rule.verdict or {}).get("result") == Result.OK


def _resolves(alert: Alert) -> str:
    """When a firing alert resolves whose condition no longer holds."""
    keep_s: float = KINDS[alert.rule.kind].read(alert.rule.settings).timing.keep_firing_s
    left_s = round(keep_s - (timezone.now() - alert.last_breach_at).total_seconds())
    return f"The condition no longer holds; the alert resolves {f'in {duration(left_s)}' if left_s > 0 else 'now'}."
