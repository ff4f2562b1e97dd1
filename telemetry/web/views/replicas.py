"""A replica: how warm it is, what its engine says of itself, and how reading it goes."""

from __future__ import annotations

from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.utils import timezone
from django.views.decorators.http import require_GET

from controlplane.models import Replica
from telemetry.metrics.windows import ReplicaRow
from telemetry.services.figures.heat import heat_strips
from telemetry.services.figures.overview import replica_rows
from telemetry.services.figures.reconciliation import newest_part, reconcile
from telemetry.services.figures.replicas import rank_rows, scraping_of
from telemetry.services.figures.subjects import Subject
from telemetry.storage.answers import usage_reports
from telemetry.web.asking import Asked, asked_about
from telemetry.web.pages import around, frame, live_part
from telemetry.web.silence import silence_of


@require_GET
def replica_detail(request: HttpRequest, replica_name: str) -> HttpResponse:
    """The whole page; its charts ask for their figures themselves."""
    state, replica = _asked(request, replica_name)
    agreement = {"reconciled": reconcile([replica.pool], newest_part(state.range.table), only=replica)}
    return render(request, "telemetry/replica.html", {**_live(state, replica), **frame(request, state), **agreement})


@live_part
def replica_live(request: HttpRequest, replica_name: str) -> HttpResponse:
    """What changes by itself."""
    return render(request, "telemetry/replica_live.html", _live(*_asked(request, replica_name)))


def _asked(request: HttpRequest, replica_name: str) -> tuple[Asked, Replica]:
    replica = get_object_or_404(Replica.objects.select_related("pool"), name=replica_name)
    return asked_about(request, Subject.of_replica(replica)), replica


def _row_of(replica: Replica, state: Asked) -> ReplicaRow:
    """The replica's line among its pool's; Http404 where it was removed since it was looked up."""
    rows = replica_rows([replica.pool], state.range.now)
    found = next((row for row in rows if row.name == replica.name), None)
    if found is None:
        raise Http404(f"Replica {replica.name} was removed.")
    return found


def _live(state: Asked, replica: Replica) -> dict[str, Any]:
    """A fixed number of queries."""
    scraping = scraping_of(replica)
    return {
        **around(state),
        "replica": replica,
        "row": _row_of(replica, state),
        "usage": usage_reports(replica.pool.name, replica.name, newest_part(state.range.table)),
        "scraping": scraping,
        "silence": silence_of(scraping.read_at, timezone.now())
        if state.range.live and replica.state != "disabled"
        else "",
        "ranks": rank_rows(replica, state.range.table),
        "strip": heat_strips([replica], state.range.window)[replica.name],
    }
