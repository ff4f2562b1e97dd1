"""The whole fleet: pools with their replicas and sources.

Pools. Each change says first what will happen.

Replicas. Each change says first what will happen.

Task groups: requests with one purpose, and the replicas they may use.
"""

from __future__ import annotations

from django.contrib import messages
from django.db.models import Prefetch
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods

from controlplane.errors import ControlPlaneError
from controlplane.models import Pool, Project, Replica, ReplicaState, TaskGroup
from controlplane.services.fleet.pools import create_pool, remove_pool, update_pool
from controlplane.services.fleet.replicas import add_replica, remove_replica, set_replica_state, update_replica
from controlplane.services.fleet.served_models import unnamed_model_warning
from controlplane.services.fleet.task_groups import create_task_group, remove_task_group, update_task_group
from controlplane.web.base import errors_as_messages, form_page, mine, signed_in, within
from controlplane.web.fleet_rows import source_lines, warm_ups, with_sources
from controlplane.web.forms.fleet import PoolForm, PoolSettingsForm, ReplicaForm, TaskGroupForm
from controlplane.web.tables import asked_sort

COLUMNS = ("name", "state", "url", "weight", "block_tokens", "capacity_blocks")


@require_GET
def fleet(request: HttpRequest) -> HttpResponse:
    """Every pool with its replicas, sorted by plain links."""
    sort = asked_sort(request, COLUMNS)
    pools = mine(request, Pool.objects.select_related("project")).prefetch_related(
        Prefetch("replicas", Replica.objects.order_by("name")), with_sources()
    )
    rows = [
        {"pool": pool, "replicas": sort.apply(pool.replicas.all()), "sources": source_lines(pool)} for pool in pools
    ]
    context = {"pools": rows, "sort": sort, "warm_ups": warm_ups(mine(request, Replica.objects.all()))}
    return render(request, "controlplane/fleet.html", context)


@require_GET
@never_cache
def warming(request: HttpRequest) -> HttpResponse:
    """The replicas that are warmed up, for a refresh."""
    return render(request, "controlplane/warming.html", {"warm_ups": warm_ups(mine(request, Replica.objects.all()))})


@require_http_methods(["GET", "POST"])
def pool_new(request: HttpRequest) -> HttpResponse:
    """A pool of its own for models that other replicas do not serve."""
    form = PoolForm(within(request, Project.objects.all()), request.POST or None)
    if request.method == "POST" and form.is_valid():
        try:
            pool = create_pool(**form.cleaned_data, by=signed_in(request))
        except ControlPlaneError as error:
            form.refuse(error)
        else:
            messages.success(request, f"Pool {pool.name} was created. Add its first replica.")
            if warning := unnamed_model_warning(pool):
                messages.warning(request, warning)
            return redirect("controlplane:replica-new", pool_id=pool.pk)
    return form_page(
        request, form, title="Add a pool", action="Add the pool", back="controlplane:fleet", back_label="Fleet"
    )


@require_http_methods(["GET", "POST"])
def pool_edit(request: HttpRequest, pool_id: int) -> HttpResponse:
    """What routers do about a pool: its names, health checks, caps and limits."""
    pool = get_object_or_404(Pool.objects.select_related("project"), pk=pool_id)
    form = PoolSettingsForm(request.POST or None, pool=pool)
    if request.method == "POST" and form.is_valid():
        try:
            update_pool(pool, **form.cleaned_data, by=signed_in(request))
        except ControlPlaneError as error:
            form.refuse(error)
        else:
            messages.success(request, f"Pool {pool.name} was changed; routers learn of it at once.")
            return redirect("controlplane:fleet")
    title = f"Pool {pool.name}"
    return form_page(request, form, title=title, action="Save", back="controlplane:fleet", back_label="Fleet")


@require_http_methods(["GET", "POST"])
def pool_remove(request: HttpRequest, pool_id: int) -> HttpResponse:
    """Remove an empty pool."""
    pool = get_object_or_404(Pool, pk=pool_id)
    if request.method == "POST":
        with errors_as_messages(request):
            remove_pool(pool, by=signed_in(request))
            messages.success(request, f"Pool {pool.name} was removed.")
        return redirect("controlplane:fleet")
    context = {
        "back": reverse("controlplane:fleet"),
        "title": f"Remove pool {pool.name}",
        "text": "Requests for its models are refused from then on. A pool with replicas or task groups stays.",
        "action": "Remove the pool",
        "danger": True,
    }
    return render(request, "controlplane/confirm.html", context)


CONSEQUENCES = {
    ReplicaState.ACTIVE: "Routers send it requests again as soon as their health checks find it up. Its cache may be "
    "cold: expect its hit rate to climb over the first minutes.",
    ReplicaState.DRAINING: "Requests that it is running finish. New ones go to the other replicas of its pool, which "
    "have to compute the prefixes that it held warm. Nothing is cut off.",
    ReplicaState.DISABLED: "Routers stop checking its health and send it nothing new. Requests that it is running are "
    "left to finish. Use it for a replica that is being taken away; to let it rest, drain it.",
}


@require_http_methods(["GET", "POST"])
def replica_new(request: HttpRequest, pool_id: int) -> HttpResponse:
    """Add a replica; routers learn of it at once."""
    pool = get_object_or_404(Pool, pk=pool_id)
    form = ReplicaForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        try:
            replica = add_replica(pool, **form.cleaned_data, by=signed_in(request))
        except ControlPlaneError as error:
            form.refuse(error)
        else:
            messages.success(request, f"Replica {replica.name} was added; routers send it requests once it answers.")
            return redirect("controlplane:fleet")
    title = f"Add a replica to {pool.name}"
    return form_page(
        request, form, title=title, action="Add the replica", back="controlplane:fleet", back_label="Fleet"
    )


@require_http_methods(["GET", "POST"])
def replica_edit(request: HttpRequest, replica_id: int) -> HttpResponse:
    """Change where a replica is, what it can take and what it is found by."""
    replica = get_object_or_404(Replica.objects.select_related("pool__project"), pk=replica_id)
    form = ReplicaForm(request.POST or None, replica=replica)
    if request.method == "POST" and form.is_valid():
        try:
            update_replica(replica, **form.cleaned_data, by=signed_in(request))
        except ControlPlaneError as error:
            form.refuse(error)
        else:
            messages.success(request, f"Replica {replica.name} was changed; routers learn of it at once.")
            return redirect("controlplane:fleet")
    title, back = f"Replica {replica.name}", "controlplane:fleet"
    return form_page(request, form, title=title, action="Save", back=back, back_label="Fleet", replica=replica)


@require_http_methods(["GET", "POST"])
def replica_state(request: HttpRequest, replica_id: int, state: str) -> HttpResponse:
    """Activate, drain or disable a replica, after saying what will happen."""
    if state not in ReplicaState.values:
        raise Http404
    wanted = ReplicaState(state)
    replica = get_object_or_404(Replica.objects.select_related("pool"), pk=replica_id)
    if request.method == "POST":
        with errors_as_messages(request):
            set_replica_state(replica, wanted, by=signed_in(request))
            messages.success(request, f"Replica {replica.name} is now {wanted.label.lower()}.")
        return redirect("controlplane:fleet")
    verb = {ReplicaState.ACTIVE: "Activate", ReplicaState.DRAINING: "Drain", ReplicaState.DISABLED: "Disable"}[wanted]
    others = replica.pool.replicas.filter(state=ReplicaState.ACTIVE).exclude(pk=replica.pk).count()
    context = {
        "back": reverse("controlplane:fleet"),
        "title": f"{verb} replica {replica.name}",
        "text": CONSEQUENCES[wanted],
        "warning": _last_one(replica) if wanted != ReplicaState.ACTIVE and not others else "",
        "action": f"{verb} {replica.name}",
    }
    return render(request, "controlplane/confirm.html", context)


@require_http_methods(["GET", "POST"])
def replica_remove(request: HttpRequest, replica_id: int) -> HttpResponse:
    """Remove a replica, after saying what will happen."""
    replica = get_object_or_404(Replica.objects.select_related("pool"), pk=replica_id)
    if request.method == "POST":
        with errors_as_messages(request):
            remove_replica(replica, by=signed_in(request))
            messages.success(request, f"Replica {replica.name} was removed.")
        return redirect("controlplane:fleet")
    others = replica.pool.replicas.filter(state=ReplicaState.ACTIVE).exclude(pk=replica.pk).count()
    context = {
        "back": reverse("controlplane:fleet"),
        "title": f"Remove replica {replica.name}",
        "text": "Routers forget it: new requests go elsewhere, and the prefixes whose home it was move to the next "
        "replica in their order, cold at first. The engine itself is not touched. To take it out for a "
        "while, drain it instead.",
        "warning": "" if others else _last_one(replica),
        "action": f"Remove {replica.name}",
        "danger": True,
    }
    return render(request, "controlplane/confirm.html", context)


def _last_one(replica: Replica) -> str:
    return f"It is the only active replica of pool {replica.pool.name}: requests for that pool will be refused."


@require_GET
def group_list(request: HttpRequest) -> HttpResponse:
    """Every pool with its task groups."""
    groups = TaskGroup.objects.order_by("name").prefetch_related("replicas").select_related("policy")
    pools = mine(request, Pool.objects.all()).prefetch_related(Prefetch("groups", groups))
    return render(request, "controlplane/task_groups.html", {"pools": pools})


@require_http_methods(["GET", "POST"])
def group_new(request: HttpRequest, pool_id: int) -> HttpResponse:
    """A new task group of a pool."""
    pool = get_object_or_404(Pool, pk=pool_id)
    form = TaskGroupForm(pool, request.POST or None)
    if request.method == "POST" and form.is_valid():
        try:
            group = create_task_group(pool, **form.cleaned_data, by=signed_in(request))
        except ControlPlaneError as error:
            form.refuse(error)
        else:
            messages.success(request, f"Task group {group.name} was created: send X-Task-Group: {group.name}.")
            return redirect("controlplane:task-groups")
    context = {"form": form, "pool": pool}
    return render(request, "controlplane/task_group_edit.html", context, status=422 if form.errors else 200)


@require_http_methods(["GET", "POST"])
def group_edit(request: HttpRequest, group_id: int) -> HttpResponse:
    """Change whose a group is, which requests are its own, and what they may use."""
    group = get_object_or_404(TaskGroup.objects.select_related("pool"), pk=group_id)
    form = TaskGroupForm(group.pool, request.POST or None, group=group)
    if request.method == "POST" and form.is_valid():
        try:
            update_task_group(group, **form.cleaned_data, by=signed_in(request))
        except ControlPlaneError as error:
            form.refuse(error)
        else:
            messages.success(request, f"Task group {group.name} was changed.")
            return redirect("controlplane:task-groups")
    context = {"form": form, "pool": group.pool, "group": group}
    return render(request, "controlplane/task_group_edit.html", context, status=422 if form.errors else 200)


@require_http_methods(["GET", "POST"])
def group_remove(request: HttpRequest, group_id: int) -> HttpResponse:
    """Remove a group with its policy."""
    group = get_object_or_404(TaskGroup.objects.select_related("pool"), pk=group_id)
    if request.method == "POST":
        with errors_as_messages(request):
            remove_task_group(group, by=signed_in(request))
            messages.success(request, f"Task group {group.name} was removed.")
        return redirect("controlplane:task-groups")
    context = {
        "back": reverse("controlplane:task-groups"),
        "title": f"Remove task group {group.name}",
        "text": "Its own policy goes with it. Requests that name it are served as the pool's own from then on. What "
        "was measured of it stays.",
        "action": f"Remove {group.name}",
        "danger": True,
    }
    return render(request, "controlplane/confirm.html", context)
