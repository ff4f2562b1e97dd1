"""The fleet: pools, replicas and task groups. Changes with consequences are confirmed first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from django.contrib import messages
from django.db.models import Prefetch, QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render, resolve_url
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods

from controlplane.models import Pool, Project, Replica, ReplicaState, Router, TaskGroup
from controlplane.services.fleet.kv_event_sources import proposed_events
from controlplane.services.fleet.pools import create_pool, remove_pool, update_pool
from controlplane.services.fleet.replicas import add_replica, remove_replica, set_replica_state, update_replica
from controlplane.services.fleet.served_models import unnamed_model_warning
from controlplane.services.fleet.task_groups import (
    create_task_group,
    purge_response_cache,
    remove_task_group,
    update_task_group,
)
from controlplane.web.base import (
    confirm_page,
    current_user,
    form_page,
    manageable,
    render_live,
    requested_sort,
    viewable,
)
from controlplane.web.forms.fleet import PoolForm, PoolSettingsForm, PurgeForm, ReplicaForm, TaskGroupForm
from controlplane.web.views.sources import prefetch_sources, source_rows

COLUMNS = ("name", "state", "url", "weight", "block_tokens", "capacity_blocks")
FLEET = "controlplane:fleet"
GROUPS = "controlplane:task-groups"


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The warm-up of one replica, summed over all routers that report it."""

    replica: Replica
    routers: int
    prefixes_done: int
    prefixes: int
    tokens_done: int
    tokens: int  # estimated

    @property
    def ratio(self) -> float:
        """The share of tokens that is done, 0 to 1; 0 before routers know the total."""
        return min(1.0, self.tokens_done / self.tokens) if self.tokens else 0.0


def warm_ups(replicas: QuerySet[Replica]) -> list[WarmUp]:
    """The replicas that routers warm up now, by name. At most two queries."""
    reports: dict[str, list[Mapping[str, int]]] = {}
    for warming in Router.objects.filter(lost_at=None).exclude(warming={}).values_list("warming", flat=True):
        for name, progress in warming.items():
            reports.setdefault(name, []).append(progress)
    if not reports:
        return []
    return [
        WarmUp(
            replica,
            len(reports[replica.name]),
            *(
                sum(progress.get(key, 0) for progress in reports[replica.name])
                for key in ("prefixes_done", "prefixes", "tokens_done", "tokens")
            ),
        )
        for replica in replicas.filter(name__in=reports).select_related("pool").order_by("name")
    ]


@require_GET
def fleet(request: HttpRequest) -> HttpResponse:
    """Every pool with its replicas and sources."""
    sort = requested_sort(request, COLUMNS)
    pools = viewable(request, Pool.objects.select_related("project")).prefetch_related(
        Prefetch("replicas", Replica.objects.order_by("name")), prefetch_sources()
    )
    rows = [{"pool": pool, "replicas": sort.apply(pool.replicas.all()), "sources": source_rows(pool)} for pool in pools]
    context = {"pools": rows, "sort": sort, "warm_ups": warm_ups(viewable(request, Replica.objects.all()))}
    return render_live(request, "controlplane/fleet.html", context, partial=False)


@require_GET
@never_cache
def warming(request: HttpRequest) -> HttpResponse:
    """The replicas that are warming up, for a refresh."""
    context = {"warm_ups": warm_ups(viewable(request, Replica.objects.all()))}
    return render_live(request, "controlplane/fleet.html", context, partial=True)


@require_http_methods(["GET", "POST"])
def pool_new(request: HttpRequest) -> HttpResponse:
    """Add a pool."""
    form = PoolForm(manageable(request, Project.objects.all()), request.POST or None)
    if form.is_valid():
        with form.service_errors():
            pool = create_pool(**form.cleaned_data, by=current_user(request))
            messages.success(request, f"Pool {pool.name} was created. Add its first replica.")
            if warning := unnamed_model_warning(pool):
                messages.warning(request, warning)
            return redirect("controlplane:replica-new", pool_id=pool.pk)
    return form_page(request, form, title="Add pool", action="Add pool", back=FLEET, back_label="Fleet")


@require_http_methods(["GET", "POST"])
def pool_edit(request: HttpRequest, pool_id: int) -> HttpResponse:
    """Change a pool: models, health checks, limits."""
    pool = get_object_or_404(Pool.objects.select_related("project"), pk=pool_id)
    form = PoolSettingsForm(request.POST or None, pool=pool).editing(pool)
    if form.is_valid():
        with form.service_errors(), form.locked():
            update_pool(pool, **form.cleaned_data, by=current_user(request))
            messages.success(request, f"Pool {pool.name} was changed. Routers receive the change within seconds.")
            return redirect(FLEET)
    return form_page(request, form, title=f"Pool {pool.name}", action="Save", back=FLEET, back_label="Fleet")


@require_http_methods(["GET", "POST"])
def pool_remove(request: HttpRequest, pool_id: int) -> HttpResponse:
    """Remove an empty pool."""
    pool = get_object_or_404(Pool, pk=pool_id)
    return confirm_page(
        request,
        partial(remove_pool, pool, by=current_user(request)),
        back=FLEET,
        title=f"Remove pool {pool.name}",
        text="Routers then reject requests for its models. A pool with replicas or task groups cannot be removed.",
        action="Remove pool",
        done=f"Pool {pool.name} was removed.",
    )


VERBS = {ReplicaState.ACTIVE: "Activate", ReplicaState.DRAINING: "Drain", ReplicaState.DISABLED: "Disable"}
CONSEQUENCES = {
    ReplicaState.ACTIVE: "Routers send it requests as soon as its health checks pass. Its cache may be cold: "
    "expect its hit rate to rise over the first minutes.",
    ReplicaState.DRAINING: "Running requests finish. New requests go to the other replicas of the pool, which must "
    "compute the prefixes that this replica has cached.",
    ReplicaState.DISABLED: "Running requests finish. Routers send it no new requests and stop its health checks. "
    "Use this before you take a replica away; to pause it for a while, drain it.",
}


@require_http_methods(["GET", "POST"])
def replica_new(request: HttpRequest, pool_id: int) -> HttpResponse:
    """Add a replica."""
    pool = get_object_or_404(Pool, pk=pool_id)
    form = ReplicaForm(request.POST or None)
    if form.is_valid():
        with form.service_errors():
            name = add_replica(pool, **form.cleaned_data, by=current_user(request)).name
            messages.success(request, f"Replica {name} was added. It receives requests once its health checks pass.")
            return redirect(FLEET)
    title = f"Add replica to {pool.name}"
    return form_page(request, form, title=title, action="Add replica", back=FLEET, back_label="Fleet")


@require_http_methods(["GET", "POST"])
def replica_edit(request: HttpRequest, replica_id: int) -> HttpResponse:
    """Change a replica."""
    replica = get_object_or_404(Replica.objects.select_related("pool__project"), pk=replica_id)
    proposed = proposed_events(replica) if request.GET.get("kv_events") == "reported" else None
    form = ReplicaForm(request.POST or None, replica=replica, events=proposed).editing(replica)
    if form.is_valid():
        with form.service_errors(), form.locked():
            update_replica(replica, **form.cleaned_data, by=current_user(request))
            messages.success(request, f"Replica {replica.name} was changed. Routers receive the change within seconds.")
            return redirect(FLEET)
    title = f"Replica {replica.name}"
    context = {"replica": replica, "proposed_events": proposed_events(replica), "is_filled_in": proposed is not None}
    return form_page(request, form, title=title, action="Save", back=FLEET, back_label="Fleet", **context)


@require_http_methods(["GET", "POST"])
def replica_state(request: HttpRequest, replica_id: int, state: str) -> HttpResponse:
    """Activate, drain or disable a replica."""
    if state not in ReplicaState.values:
        raise Http404
    new_state = ReplicaState(state)
    replica = get_object_or_404(Replica.objects.select_related("pool"), pk=replica_id)
    return confirm_page(
        request,
        partial(set_replica_state, replica, new_state, by=current_user(request)),
        back=FLEET,
        title=f"{VERBS[new_state]} replica {replica.name}",
        text=CONSEQUENCES[new_state],
        warning=_last_replica_warning(replica) if new_state != ReplicaState.ACTIVE else "",
        action=f"{VERBS[new_state]} {replica.name}",
        done=f"Replica {replica.name} is now {new_state.label.lower()}.",
        danger=False,
    )


@require_http_methods(["GET", "POST"])
def replica_remove(request: HttpRequest, replica_id: int) -> HttpResponse:
    """Remove a replica."""
    replica = get_object_or_404(Replica.objects.select_related("pool"), pk=replica_id)
    return confirm_page(
        request,
        partial(remove_replica, replica, by=current_user(request)),
        back=FLEET,
        title=f"Remove replica {replica.name}",
        text="Routers send its requests to the other replicas, which must compute its prefixes again once. The engine "
        "itself is not touched. To take a replica out for a while, drain it instead.",
        warning=_last_replica_warning(replica),
        action=f"Remove {replica.name}",
        done=f"Replica {replica.name} was removed.",
    )


def _last_replica_warning(replica: Replica) -> str:
    pool = replica.pool
    if pool.replicas.filter(state=ReplicaState.ACTIVE).exclude(pk=replica.pk).exists():
        return ""
    return f"This is the only active replica of pool {pool.name}: requests for the pool will be rejected."


@require_GET
def group_list(request: HttpRequest) -> HttpResponse:
    """Every pool with its task groups."""
    groups = TaskGroup.objects.order_by("name").prefetch_related("replicas").select_related("policy")
    pools = viewable(request, Pool.objects.all()).prefetch_related(Prefetch("groups", groups))
    return render(request, "controlplane/task_groups.html", {"pools": pools})


@require_http_methods(["GET", "POST"])
def group_new(request: HttpRequest, pool_id: int) -> HttpResponse:
    """Add a task group to a pool."""
    pool = get_object_or_404(Pool, pk=pool_id)
    form = TaskGroupForm(pool, request.POST or None)
    if form.is_valid():
        with form.service_errors():
            name = create_task_group(pool, **form.cleaned_data, by=current_user(request)).name
            messages.success(request, f"Task group {name} was created. Clients select it with X-Task-Group: {name}.")
            return redirect(GROUPS)
    context = {"form": form, "pool": pool}
    return render(request, "controlplane/task_group_edit.html", context, status=422 if form.errors else 200)


@require_http_methods(["GET", "POST"])
def group_edit(request: HttpRequest, group_id: int) -> HttpResponse:
    """Change a task group."""
    group = get_object_or_404(TaskGroup.objects.select_related("pool"), pk=group_id)
    form = TaskGroupForm(group.pool, request.POST or None, group=group).editing(group)
    if form.is_valid():
        with form.service_errors(), form.locked():
            update_task_group(group, **form.cleaned_data, by=current_user(request))
            messages.success(request, f"Task group {group.name} was changed.")
            return redirect(GROUPS)
    context = {"form": form, "pool": group.pool, "group": group}
    return render(request, "controlplane/task_group_edit.html", context, status=422 if form.errors else 200)


@require_http_methods(["GET", "POST"])
def group_remove(request: HttpRequest, group_id: int) -> HttpResponse:
    """Remove a task group with its policy."""
    group = get_object_or_404(TaskGroup.objects.select_related("pool"), pk=group_id)
    return confirm_page(
        request,
        partial(remove_task_group, group, by=current_user(request)),
        back=GROUPS,
        title=f"Remove task group {group.name}",
        text="Its policy is removed too. Requests that name it then count as requests of the pool without a group. "
        "Its measurements are kept.",
        action=f"Remove {group.name}",
        done=f"Task group {group.name} was removed.",
    )


@require_http_methods(["GET", "POST"])
def group_purge(request: HttpRequest, group_id: int) -> HttpResponse:
    """Remove the stored responses of a task group from all routers."""
    group = get_object_or_404(TaskGroup.objects.select_related("pool"), pk=group_id)
    form = PurgeForm(request.POST if request.method == "POST" else None)
    if form.is_valid():
        with form.service_errors():
            purged = purge_response_cache(group, **form.cleaned_data, by=current_user(request))
            if purged.incomplete:
                messages.error(request, str(purged.incomplete))
            else:
                messages.success(request, f"{purged.entries} stored responses of task group {group.name} were removed.")
            return redirect("controlplane:task-group", group_id=group.pk)
    context = {
        "form": form,
        "danger": True,
        "title": f"Purge response cache of {group.name}",
        "text": "All routers and their store remove the stored responses of this task group. Its next requests go to "
        "replicas, which compute the responses again.",
        "action": "Purge response cache",
        "back": resolve_url("controlplane:task-group", group_id=group.pk),
    }
    return render(request, "controlplane/confirm.html", context, status=422 if form.errors else 200)
