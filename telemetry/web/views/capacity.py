"""Capacity and cost of a pool: number of replicas, cache size, and a shared cache."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django import forms
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.gzip import gzip_page
from django.views.decorators.http import require_GET, require_POST

from controlplane.models import Pool
from controlplane.web.base import current_user, errors_as_messages, viewable
from controlplane.web.forms.base import Form
from telemetry.lab.shared_cache import TIERS, tier_parameters, tiers_of
from telemetry.services.lab.sizing import create_sweep, newest_sweep, open_sweep, sizing_of
from telemetry.web.lab_figures import sweep_figure
from telemetry.web.ranges import page_state
from telemetry.web.views.what_ifs import WINDOWS

DEFAULT_RANGE = "24h"


class TierForm(Form):
    """Latency and bandwidth of each tier; empty fields take the defaults."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, (label, default, (low, high)) in tier_parameters().items():
            self.fields[name] = forms.FloatField(
                required=False,
                min_value=low,
                max_value=high,
                label=label,
                widget=forms.TextInput({"inputmode": "decimal", "placeholder": f"{default:g}", "autocomplete": "off"}),
            )


@require_GET
def capacity_page(request: HttpRequest) -> HttpResponse:
    """What other sizes would bring, and whether a shared cache would pay."""
    state = page_state(request, default=DEFAULT_RANGE, needs_pool=True)
    pool = state.subject.pool
    form = TierForm({name: request.GET[name] for name in tier_parameters() if name in request.GET})
    context: dict[str, Any] = {"page_state": state, "pool": pool, "form": form, "windows": WINDOWS}
    if pool is not None:
        tiers = tiers_of(form.cleaned_data) if form.is_valid() else list(TIERS)
        context |= {"sizing": sizing_of(pool, state.range.window, tiers), "open_sweep": open_sweep(pool)}
    return render(request, "telemetry/capacity.html", context, status=422 if form.errors else 200)


@require_GET
@gzip_page  # the response contains no secret
def capacity_figure(request: HttpRequest, pool_name: str, slug: str) -> HttpResponse:
    """The chart of the newest sweep: ``replicas`` or ``cache``."""
    pool = get_object_or_404(viewable(request, Pool.objects.all()), name=pool_name)
    found = newest_sweep(pool)
    points = {} if found is None or found.sweep is None else found.sweep.curves
    if not points.get(slug):
        raise Http404("There is no data for this chart.")
    return JsonResponse(sweep_figure(points[slug], slug))


@require_POST
def capacity_sweep(request: HttpRequest, pool_name: str) -> HttpResponse:
    """Start a sweep, and show its progress."""
    pool = get_object_or_404(Pool, name=pool_name)
    seconds = request.POST.get("window", "")
    if seconds not in dict(WINDOWS):
        seconds = "1800"
    end = timezone.now()
    target = f"{reverse('telemetry:capacity')}?pool={pool.name}"
    with errors_as_messages(request):
        created = create_sweep(pool, start=end - timedelta(seconds=int(seconds)), end=end, by=current_user(request))
        target = reverse("telemetry:what-if", args=[created.pk])
    return redirect(target)
