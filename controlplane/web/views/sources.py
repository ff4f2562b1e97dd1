"""Replica sources: where a pool's replicas are looked for, and what a person decides about those that are found."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from controlplane.discovery import KINDS
from controlplane.errors import ControlPlaneError
from controlplane.models import DiscoveredReplica, DiscoveredState, Pool, ReplicaSource, ReplicaState
from controlplane.services.discovery import adoption as discovered_replicas
from controlplane.services.discovery import sources
from controlplane.web.base import errors_as_messages, signed_in
from controlplane.web.fleet_rows import source_lines, with_sources
from controlplane.web.forms.sources import SourceForm


@require_GET
@never_cache
def pool_sources(request: HttpRequest, pool_id: int) -> HttpResponse:
    """The part of the fleet page that tells of a pool's sources, for a refresh."""
    pool = get_object_or_404(Pool.objects.prefetch_related(with_sources()), pk=pool_id)
    return render(request, "controlplane/sources.html", {"pool": pool, "lines": source_lines(pool)})


@require_http_methods(["GET", "POST"])
def source_new(request: HttpRequest, pool_id: int) -> HttpResponse:
    """Choose a kind, fill in its settings, add the source."""
    pool = get_object_or_404(Pool, pk=pool_id)
    kind = KINDS.get(request.GET.get("kind", ""), next(iter(KINDS.values())))
    form = SourceForm(kind, request.POST or None)
    if request.method == "POST" and form.is_valid():
        try:
            source = sources.create_source(pool, kind=kind.name, **form.arguments(), by=signed_in(request))
        except ControlPlaneError as error:
            form.refuse(error)
        else:
            messages.success(request, f"Replica source {source.name} was added; it is looked at within seconds.")
            return redirect("controlplane:fleet")
    return _form(request, form, pool)


@require_http_methods(["GET", "POST"])
def source_edit(request: HttpRequest, source_id: int) -> HttpResponse:
    """Change a source; its kind, name and pool stay."""
    source = get_object_or_404(ReplicaSource.objects.select_related("pool"), pk=source_id)
    form = SourceForm(KINDS[source.kind], request.POST or None, source=source)
    if request.method == "POST" and form.is_valid():
        try:
            sources.update_source(source, **form.arguments(), by=signed_in(request))
        except ControlPlaneError as error:
            form.refuse(error)
        else:
            messages.success(request, f"Replica source {source.name} was changed.")
            return redirect("controlplane:fleet")
    return _form(request, form, source.pool)


@require_http_methods(["GET", "POST"])
def source_remove(request: HttpRequest, source_id: int) -> HttpResponse:
    """Forget a source, after saying what will happen."""
    source = get_object_or_404(ReplicaSource.objects.select_related("pool"), pk=source_id)
    if request.method == "POST":
        with errors_as_messages(request):
            sources.remove_source(source, by=signed_in(request))
            messages.success(request, f"Replica source {source.name} was removed; its replicas stay.")
        return redirect("controlplane:fleet")
    context = {
        "back": reverse("controlplane:fleet"),
        "title": f"Remove replica source {source.name}",
        "text": _consequence(source),
        "action": f"Remove {source.name}",
        "danger": True,
    }
    return render(request, "controlplane/confirm.html", context)


@require_POST
def source_look(request: HttpRequest, source_id: int) -> HttpResponse:
    """Have a source looked at now."""
    source = get_object_or_404(ReplicaSource, pk=source_id)
    with errors_as_messages(request):
        sources.request_poll(source)
        messages.success(request, f"Replica source {source.name} is looked at now.")
    return redirect("controlplane:fleet")


@require_POST
def discovered_adopt(request: HttpRequest, discovered_id: int) -> HttpResponse:
    """Make an engine that was found a replica."""
    with errors_as_messages(request):
        found = get_object_or_404(DiscoveredReplica, pk=discovered_id)
        replica = discovered_replicas.adopt(found, by=signed_in(request))
        messages.success(request, f"Replica {replica.name} was adopted; routers send it requests once it answers.")
    return redirect("controlplane:fleet")


@require_POST
def discovered_dismiss(request: HttpRequest, discovered_id: int) -> HttpResponse:
    """Want none of an engine that was found."""
    with errors_as_messages(request):
        found = get_object_or_404(DiscoveredReplica, pk=discovered_id)
        discovered_replicas.dismiss(found, by=signed_in(request))
        messages.success(request, f"{found.key} was dismissed. It can be adopted later.")
    return redirect("controlplane:fleet")


def _form(request: HttpRequest, form: SourceForm, pool: Pool) -> HttpResponse:
    context = {"form": form, "pool": pool, "kinds": KINDS.values(), "kind": form.kind, "source": form.source}
    return render(request, "controlplane/source_edit.html", context, status=422 if form.errors else 200)


def _consequence(source: ReplicaSource) -> str:
    """What removing a source does, in figures."""
    adopted = source.discovered.exclude(replica=None)
    stay, draining = adopted.count(), adopted.filter(drained_here=True, replica__state=ReplicaState.DRAINING).count()
    proposed = source.discovered.filter(state=DiscoveredState.PROPOSED).count()
    return (
        f"Nobody looks there any more. Its replicas stay as they are and follow nothing from then on: {stay} in all, "
        f"{draining} of which it is draining. Its {proposed} proposals, and what was dismissed, are forgotten."
    )
