"""Prompts: what keeps those of each task group from sharing more of the caches."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_GET

from controlplane.access.asker import asker_of
from controlplane.access.scope import visible
from controlplane.models import Pool
from telemetry.services.lab.prompts import FEW, LOOK_BACK, prompts_of


@require_GET
def prompt_list(request: HttpRequest) -> HttpResponse:
    """All task groups, those that lose most first; a refresh leaves out the frame."""
    pools = list(visible(asker_of(request), Pool.objects.all()).values_list("name", flat=True))
    asked = request.GET.get("pool", "")
    named = [asked] if asked in pools else pools
    groups = prompts_of(named, timezone.now())
    context = {
        "groups": groups,
        "pools": pools,
        "pool": asked if asked in pools else "",
        "gone": asked if asked and asked not in pools else "",
        "few": FEW,
        "minutes": int(LOOK_BACK.total_seconds() // 60),
    }
    refresh = request.headers.get("HX-Request") == "true"
    return render(request, "telemetry/prompts_live.html" if refresh else "telemetry/prompts.html", context)
