"""The overview of the fleet or a pool, and the pages of a task group and a replica."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from urllib.parse import urlencode

from django.db.models import Count, Q
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_GET

from controlplane.models import OPEN_ROLLOUTS, Event, Pool, Replica, Rollout, RolloutState, Router, TaskGroup
from controlplane.services.policies.rollout_transitions import scope_text
from controlplane.services.routers import responding
from controlplane.web.base import render_live, requested_sort
from telemetry.lab.breakdown import LOSS_TEXTS, Breakdown, actionable_losses
from telemetry.metrics.windows import Window
from telemetry.models import AlertState, RuleKind, ScrapeState
from telemetry.services.alerts.alerts import alerts, open_alerts
from telemetry.services.figures.engine import last_day_of, reconcile
from telemetry.services.figures.groups import (
    active_revisions,
    group_tiles,
    has_requests,
    policies_in_use,
    replica_shares,
)
from telemetry.services.figures.kv_streams import kv_streams_of
from telemetry.services.figures.overview import (
    Fleet,
    Subject,
    before,
    change_of,
    fleet_tiles,
    group_rows,
    replica_rows,
    with_ttft,
)
from telemetry.services.figures.replicas import heat_strips, rank_rows
from telemetry.services.figures.semantic_cache import semantic_cache_of
from telemetry.services.lab.breakdowns import breakdowns_by_pool
from telemetry.services.lab.costs import has_response_cache, response_cache_figures
from telemetry.services.lab.decisions import MIN_PROMPTS, lint_prompts
from telemetry.services.lab.scaling import scaling_of
from telemetry.services.lab.value import saved_in
from telemetry.storage.dimension_sums import usage_reports
from telemetry.web.breakdown_figures import draw_precision
from telemetry.web.pages import (
    GROUP_COLUMNS,
    MAIN_CHARTS,
    frame,
    live_context,
    live_part,
    replica_table,
    scrape_gap,
    wall_context,
)
from telemetry.web.ranges import NO_GROUP, PageState, overview_of, page_state, page_state_of, path_of, replica_named

# What the page of a removed replica shows.
BEFORE_REMOVAL, AFTER_REMOVAL = timedelta(hours=1), timedelta(minutes=1)
MAX_ALERTS = 5
HIT_RATE_FELL = Q(state=AlertState.FIRING, rule__kind=RuleKind.HIT_RATE_DROP, suppression__isnull=True)


def _open_rollouts(pools: list[Pool]) -> list[dict[str, Any]]:
    """Open rollouts: their requests, the analysis so far, and what is missing for a verdict. One query."""
    rows = Rollout.objects.filter(state__in=OPEN_ROLLOUTS, revision__policy__pool__in=pools)
    return [_rollout(rollout) for rollout in rows.defer("past_readings").select_related("revision__policy__pool")]


def _rollout(rollout: Rollout) -> dict[str, Any]:
    details = {reading["verdict"]: reading["detail"] for reading in reversed(rollout.readings)}
    rates = [(it["canary"], it["baseline"]) for it in rollout.readings if it["name"] == "hit_rate"]
    return {
        "rollout": rollout,
        "scope": scope_text(rollout),
        "hit_rate": next((canary - active for canary, active in rates if None not in {canary, active}), None),
        "verdict": next((word for word in ("failed", "inconclusive", "passed") if word in details), ""),
        "missing": rollout.why if rollout.state == RolloutState.HOLDING else details.get("inconclusive", ""),
    }


@require_GET
def overview(request: HttpRequest) -> HttpResponse:
    """The overview of the fleet or of ``?pool=``. ``?group=`` and ``?replica=`` redirect to pages of their own."""
    state = page_state(request)
    subject = state.subject
    if subject.replica is not None or subject.group is not None:
        query = request.GET.copy()
        for name in ("pool", "group", "replica"):
            query.pop(name, None)
        return redirect(f"{path_of(subject)}?{query.urlencode()}")
    context = _overview(request, state) | frame(state, MAIN_CHARTS)
    if context["pool"] is not None and "wall" not in context:
        context["reconciled"] = reconcile(context["fleet"], last_day_of(state.range.table))
    return render_live(request, "telemetry/overview.html", context, partial=False)


@live_part
def overview_live(request: HttpRequest) -> HttpResponse:
    """The overview without its charts, for a refresh."""
    return render_live(request, "telemetry/overview.html", _overview(request, page_state(request)), partial=True)


@require_GET
def pool_detail(request: HttpRequest, pool_name: str) -> HttpResponse:
    """Redirects to the overview of a pool."""
    get_object_or_404(Pool, name=pool_name)
    return redirect(
        overview_of(pool_name, **{name: str(value) for name, value in request.GET.items() if name != "pool"})
    )


def _overview(request: HttpRequest, state: PageState) -> dict[str, Any]:
    """The live part. Its size and queries do not depend on the fleet's size, except for the replicas of one page."""
    if request.GET.get("wall"):
        return wall_context(state)
    subject, window = state.subject, state.range.tiles
    now = window.end if state.range.live else timezone.now()
    period = before(window)
    fleet = Fleet(subject, period.start)
    pools = state.pools if subject.pool is None else [subject.pool]
    tiles = fleet_tiles(fleet, window)
    group_sort = requested_sort(request, GROUP_COLUMNS, param="gsort")
    rows = replica_rows(fleet, state.range.table)
    table = replica_table(request, rows, lambda listed: with_ttft(listed, fleet.replicas, state.range.table))
    shown = {row.name for row in table.page}
    breakdowns = breakdowns_by_pool(pools, window)
    return {
        **live_context(state),
        "fleet": fleet,
        "tiles": tiles,
        "change": change_of(tiles, fleet, period),
        "saved": saved_in(fleet, pools, window, now),
        "losses": _largest_losses(pools, breakdowns),
        "policies": policies_in_use(pools),
        "rollouts": _open_rollouts(pools),
        "routers": Router.objects.aggregate(total=Count("pk"), up=Count("pk", filter=responding(timezone.now()))),
        "pool": pools[0] if len(pools) == 1 else None,
        "scaling": scaling_of(pools, now, fleet)[0] if len(pools) == 1 else None,
        "incident": len(pools) == 1 and open_alerts(pools[0]).filter(HIT_RATE_FELL).exists(),
        "cache": (
            response_cache_figures(subject.pools, state.range.table) if has_response_cache(subject.pools) else None
        ),
        "read_at": tiles.read_at,
        "scrape_gap": scrape_gap(tiles.read_at) if state.range.live and tiles.replicas_total else "",
        "replicas": table,
        "not_up": [row for row in rows if row.health in {"down", "stale"}],
        "strips": heat_strips([replica for replica in fleet.replicas if replica.name in shown], window),
        "groups": group_sort.apply(group_rows(fleet, state.range.table)),
        "group_sort": group_sort,
    }


def _largest_losses(pools: list[Pool], breakdowns: dict[int, tuple[Breakdown, Window]]) -> dict[str, Any] | None:
    """The breakdown of the pool that loses most tokens; None without replayed requests."""
    known = [(pool, *breakdowns[pool.pk]) for pool in pools if pool.pk in breakdowns]
    if not known:
        return None

    def lost(breakdown: Breakdown) -> float:
        return sum(loss.tokens for loss in actionable_losses(breakdown.losses()))

    pool, breakdown, bins = max(known, key=lambda item: lost(item[1]))
    losses = [(LOSS_TEXTS[loss.key], loss.ratio) for loss in actionable_losses(breakdown.losses())]
    return {"pool": pool, "breakdown": breakdown, "bins": bins, "losses": losses}


@require_GET
def group_detail(request: HttpRequest, pool_name: str, group_name: str) -> HttpResponse:
    """A task group's page."""
    state, pool, group = _group_state(request, pool_name, group_name)
    prompts = lint_prompts([pool.name], timezone.now(), group=state.subject.group)
    lint = {"prompts": next(iter(prompts), None), "min_prompts": MIN_PROMPTS}
    context = {**_group(state, pool, group), **frame(state), **lint}
    return render_live(request, "telemetry/group.html", context, partial=False)


@live_part
def group_live(request: HttpRequest, pool_name: str, group_name: str) -> HttpResponse:
    """A task group's page without its charts, for a refresh."""
    return render_live(
        request, "telemetry/group.html", _group(*_group_state(request, pool_name, group_name)), partial=True
    )


def _group_state(request: HttpRequest, pool_name: str, group_name: str) -> tuple[PageState, Pool, TaskGroup | None]:
    """The group is None for requests without a group, and for a removed group with measurements."""
    pool = get_object_or_404(Pool, name=pool_name)
    if group_name == NO_GROUP:
        return page_state_of(request, Subject.of_pool(pool, "")), pool, None
    group = pool.groups.filter(name=group_name).first()
    state = page_state_of(request, Subject.of_pool(pool, group_name))
    if group is None and not has_requests(state.subject, state.range.window):
        raise Http404(f"Pool {pool.name} has no task group {group_name!r}.")
    return state, pool, group


def _group(state: PageState, pool: Pool, group: TaskGroup | None) -> dict[str, Any]:
    cache = response_cache_figures([pool], state.range.table, group=state.subject.group)
    has_cache = bool(cache.hits or cache.misses or (group and group.response_cache))
    return {
        "cache": cache if has_cache else None,
        **live_context(state),
        "pool": pool,
        "group": group,
        "own_alerts": open_alerts(pool).filter(state=AlertState.FIRING, rule__group=group) if group else (),
        "rules": group.alert_rules.order_by("name") if group else (),
        "tiles": group_tiles(state.subject, state.range.window),
        "shares": replica_shares(state.subject, state.range.table),
        "revisions": active_revisions(group, pool.pk),
        "semantic": (semantic := semantic_cache_of(group, pool.name)),
        "sketch": None if semantic is None else draw_precision(semantic),
    }


@require_GET
def replica_detail(request: HttpRequest, replica_name: str) -> HttpResponse:
    """A replica's page. That of a removed replica shows the hour before its removal by default."""
    state, replica, removal = _replica_state(request, replica_name)
    if removal is not None and not {"range", "from", "to"} & set(request.GET):
        times = {"from": removal.at - BEFORE_REMOVAL, "to": removal.at + AFTER_REMOVAL}
        query = urlencode({name: f"{at:%Y-%m-%dT%H:%M:%S}" for name, at in times.items()})
        return redirect(f"{reverse('telemetry:replica', args=[replica_name])}?{query}")
    context = {**_replica(state, replica, removal), **frame(state)}
    context["reconciled"] = reconcile(context["fleet"], last_day_of(state.range.table))
    return render_live(request, "telemetry/replica.html", context, partial=False)


@live_part
def replica_live(request: HttpRequest, replica_name: str) -> HttpResponse:
    """A replica's page without its charts, for a refresh."""
    context = _replica(*_replica_state(request, replica_name))
    return render_live(request, "telemetry/replica.html", context, partial=True)


def _replica_state(request: HttpRequest, replica_name: str) -> tuple[PageState, Replica, Event | None]:
    replica, removal = replica_named(request, replica_name)
    if replica is None:
        raise Http404(f"No pool has had a replica {replica_name!r}.")
    return page_state_of(request, Subject.of_replica(replica)), replica, removal


def _replica(state: PageState, replica: Replica, removal: Event | None) -> dict[str, Any]:
    window, fleet = state.range.tiles, Fleet(state.subject, state.range.window.start)
    scraping = fleet.states.get(replica.pk) or ScrapeState()
    return {
        **live_context(state),
        "fleet": fleet,
        "replica": replica,
        "removal": removal,
        "own_alerts": open_alerts(replica.pool).filter(state=AlertState.FIRING, subject=replica.name),
        "past_alerts": alerts(replica.pool).filter(subject=replica.name)[:MAX_ALERTS] if removal else (),
        "row": with_ttft(replica_rows(fleet, window), [replica], window)[0],
        "usage": usage_reports(replica.pool.name, replica.name, last_day_of(state.range.table)),
        "scraping": scraping,
        "read_at": scraping.ok_at,
        "scrape_gap": scrape_gap(scraping.ok_at) if state.range.live and replica.state != "disabled" else "",
        "ranks": rank_rows(replica, state.range.table),
        "strip": heat_strips([replica], state.range.window)[replica.name],
        "kv_streams": kv_streams_of(replica),
    }
