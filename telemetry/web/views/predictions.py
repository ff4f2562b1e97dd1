"""Pages of predictions and outcomes: the record of all rollouts, its charts, and the part of a rollout's page."""

from __future__ import annotations

from typing import Any

from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.cache import never_cache
from django.views.decorators.gzip import gzip_page
from django.views.decorators.http import require_GET

from controlplane.models import Pool, Rollout
from controlplane.web.base import viewable
from telemetry.models import Prediction
from telemetry.services.lab.prediction_records import is_recorded_later, records_of, summarize
from telemetry.web.prediction_figures import FIGURES, error_figure

LISTED = 200


@require_GET
@never_cache
def prediction_list(request: HttpRequest) -> HttpResponse:
    """What was predicted for each rollout and what became of it; ``?pool=NAME`` selects a pool."""
    pools, selected, records = _selected(request)
    context = {
        "records": records,
        "summary": summarize(records),
        "pools": pools,
        "selected": selected,
        "limit": LISTED,
        "figures": [(slug, figure.title) for slug, figure in FIGURES.items() if figure.has_values(records)],
    }
    return render(request, "telemetry/predictions.html", context)


def _selected(request: HttpRequest) -> tuple[list[Pool], str, list[Prediction]]:
    """(the pools that the user may see, the name of the selected one, the newest records)."""
    pools, selected = viewable(request, Pool.objects.all()), request.GET.get("pool", "")
    if "\0" in selected:  # PostgreSQL rejects it
        raise Http404
    return list(pools), selected, records_of(pools.filter(name=selected) if selected else pools, LISTED)


@require_GET
@gzip_page  # the response contains no secret
def prediction_figure(request: HttpRequest, slug: str) -> HttpResponse:
    """A chart of the errors over time: ``hit-rate`` or ``ttft``."""
    if slug not in FIGURES:
        raise Http404("There is no such chart.")
    _, _, records = _selected(request)
    return JsonResponse(error_figure(records, slug))


@require_GET
@never_cache
def prediction_of_rollout(request: HttpRequest, rollout_id: int) -> HttpResponse:
    """Prediction and outcome of one rollout, as a part of its page."""
    rollout = get_object_or_404(
        viewable(request, Rollout.objects.select_related("revision__policy__pool")), pk=rollout_id
    )
    record = Prediction.objects.filter(rollout=rollout).first()
    context: dict[str, Any] = {
        "rollout": rollout,
        "record": record,
        "is_live": record.is_open if record else is_recorded_later(rollout),
    }
    return render(request, "telemetry/prediction_of_rollout.html", context)
