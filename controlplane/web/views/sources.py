"""Replica sources: where replicas are discovered, and the adoption of proposed replicas."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice

from django.contrib import messages
from django.db.models import Prefetch
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from controlplane.discovery import KINDS
from controlplane.models import DiscoveredReplica, DiscoveredState, Pool, ReplicaSource, ReplicaState
from controlplane.services.discovery import adoption, sources
from controlplane.web.base import confirm_page, current_user, errors_as_messages
from controlplane.web.forms.sources import SourceForm

MAX_ROWS = 50  # of each kind; REST returns all


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A source on the fleet page, with the discovered replicas that need attention."""

    source: ReplicaSource
    kind: str
    waiting: list[DiscoveredReplica]  # proposed, or not ready yet
    missing: list[DiscoveredReplica]  # adopted, and not in the last response or not updatable
    dismissed: list[DiscoveredReplica]  # their replicas were removed by users


def prefetch_sources() -> Prefetch[str]:
    """The prefetch of a pool query with which ``source_rows`` runs no query."""
    rows = DiscoveredReplica.objects.select_related("replica").order_by("key")
    return Prefetch("sources", ReplicaSource.objects.defer("encrypted").prefetch_related(Prefetch("discovered", rows)))


def source_rows(pool: Pool) -> list[SourceRow]:
    """A pool's sources, by name."""
    return [_row(source) for source in pool.sources.all()]


def _row(source: ReplicaSource) -> SourceRow:
    def first(rows: Iterable[DiscoveredReplica]) -> list[DiscoveredReplica]:
        return list(islice(rows, MAX_ROWS))

    found = list(source.discovered.all())
    return SourceRow(
        source,
        KINDS[source.kind].label if source.kind in KINDS else source.kind,
        waiting=first(row for row in found if row.is_open),
        missing=first(row for row in found if row.replica and (row.missing_since or row.drained_at or row.problem)),
        dismissed=first(row for row in found if row.state == DiscoveredState.DISMISSED and row.missing_since is None),
    )


@require_GET
@never_cache
def pool_sources(request: HttpRequest, pool_id: int) -> HttpResponse:
    """The sources of one pool on the fleet page, for a refresh."""
    pool = get_object_or_404(Pool.objects.prefetch_related(prefetch_sources()), pk=pool_id)
    return render(request, "controlplane/sources.html", {"pool": pool, "lines": source_rows(pool)})


@require_http_methods(["GET", "POST"])
def source_new(request: HttpRequest, pool_id: int) -> HttpResponse:
    """Choose a kind and add a source."""
    pool = get_object_or_404(Pool, pk=pool_id)
    kind = KINDS.get(request.GET.get("kind", ""), next(iter(KINDS.values())))
    form = SourceForm(kind, request.POST or None)
    if form.is_valid():
        with form.service_errors():
            source = sources.create_source(pool, kind=kind.name, **form.arguments(), by=current_user(request))
            messages.success(request, f"Replica source {source.name} was added. It is polled within seconds.")
            return redirect("controlplane:fleet")
    return _form(request, form, pool)


@require_http_methods(["GET", "POST"])
def source_edit(request: HttpRequest, source_id: int) -> HttpResponse:
    """Change a source; kind, name and pool cannot be changed."""
    source = get_object_or_404(ReplicaSource.objects.select_related("pool"), pk=source_id)
    form = SourceForm(KINDS[source.kind], request.POST or None, source=source).editing(source)
    if form.is_valid():
        with form.service_errors(), form.locked():
            sources.update_source(source, **form.arguments(), by=current_user(request))
            messages.success(request, f"Replica source {source.name} was changed.")
            return redirect("controlplane:fleet")
    return _form(request, form, source.pool)


def _form(request: HttpRequest, form: SourceForm, pool: Pool) -> HttpResponse:
    context = {"form": form, "pool": pool, "kinds": KINDS.values(), "kind": form.kind, "source": form.source}
    return render(request, "controlplane/source_edit.html", context, status=422 if form.errors else 200)


@require_http_methods(["GET", "POST"])
def source_remove(request: HttpRequest, source_id: int) -> HttpResponse:
    """Remove a source; its replicas stay."""
    source = get_object_or_404(ReplicaSource.objects.select_related("pool"), pk=source_id)
    adopted = source.discovered.exclude(replica=None)
    draining = adopted.filter(drained_here=True, replica__state=ReplicaState.DRAINING).count()
    proposed = source.discovered.filter(state=DiscoveredState.PROPOSED).count()
    return confirm_page(
        request,
        partial(sources.remove_source, source, by=current_user(request)),
        back="controlplane:fleet",
        title=f"Remove replica source {source.name}",
        text=f"It is no longer polled. Its {adopted.count()} replicas stay as they are ({draining} of them draining) "
        f"and are no longer updated. Its {proposed} proposals are deleted.",
        action=f"Remove {source.name}",
        done=f"Replica source {source.name} was removed; its replicas stay.",
    )


@require_POST
def source_poll(request: HttpRequest, source_id: int) -> HttpResponse:
    """Poll a source now."""
    source = get_object_or_404(ReplicaSource, pk=source_id)
    with errors_as_messages(request):
        sources.request_poll(source)
        messages.success(request, f"Replica source {source.name} is being polled.")
    return redirect("controlplane:fleet")


@require_POST
def discovered_adopt(request: HttpRequest, discovered_id: int) -> HttpResponse:
    """Add a discovered replica to the pool."""
    discovered = get_object_or_404(DiscoveredReplica, pk=discovered_id)
    with errors_as_messages(request):
        replica = adoption.adopt(discovered, by=current_user(request))
        messages.success(
            request, f"Replica {replica.name} was added. It receives requests once its health checks pass."
        )
    return redirect("controlplane:fleet")
