"""Task groups: requests with one purpose, and the replicas they may use."""

from __future__ import annotations

from django.contrib import messages
from django.db.models import Prefetch
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.views.decorators.http import require_GET, require_http_methods

from controlplane.errors import ControlPlaneError
from controlplane.models import Pool, TaskGroup
from controlplane.services.fleet.task_groups import create_task_group, remove_task_group, update_task_group
from controlplane.web.doors import mine, refusals_as_messages, signed_in
from controlplane.web.forms.task_groups import TaskGroupForm


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
        with refusals_as_messages(request):
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
