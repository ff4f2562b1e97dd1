"""Replicas. Each change says first what will happen."""

from __future__ import annotations

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods

from controlplane.errors import ControlPlaneError
from controlplane.models import Pool, Replica, ReplicaState
from controlplane.services.fleet.replicas import add_replica, remove_replica, set_replica_state, update_replica
from controlplane.web.doors import form_page, refusals_as_messages, signed_in
from controlplane.web.forms.replicas import ReplicaForm

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
        with refusals_as_messages(request):
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
        with refusals_as_messages(request):
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
