"""The ladder: how far is the hit rate from the reachable share, where is it lost, and what would more room bring?"""

from __future__ import annotations

from typing import Any

from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.gzip import gzip_page
from django.views.decorators.http import require_GET

from controlplane.models import Pool
from telemetry.lab.ladder import Ladder, Loss
from telemetry.lab.words import LOSSES, doubts, sentence, worth_saying
from telemetry.models import DecisionCursor
from telemetry.services.lab.ladders import curve_of, ladder_of, ladders_by_group
from telemetry.web.asking import Asked, asked
from telemetry.web.ladder_figures import curve_figure, curve_sentence, ladder_figure, steps_of
from telemetry.web.ranges import PRESETS

NEXT = {
    "task-groups": ("controlplane:task-groups", "Task groups"),
    "fleet": ("controlplane:fleet", "Fleet"),
    "policies": ("controlplane:policies", "Policies"),
    "events": ("telemetry:events", "Events"),
}


@require_GET
def ladder(request: HttpRequest) -> HttpResponse:
    """One pool's ladder, or one of its task groups'. A fixed number of queries."""
    state = asked(request)
    pool = _pool(state)
    context: dict[str, Any] = {"asked": state, "presets": PRESETS, "pool": pool}
    if pool is not None:
        context |= _shown(state, pool)
    return render(request, "telemetry/ladder.html", context)


@require_GET
@gzip_page  # holds no secret that its length could tell
def figure(request: HttpRequest, slug: str) -> HttpResponse:
    """The figure that ladder.js draws: ``steps`` or ``curve``."""
    state = asked(request)
    pool = _pool(state)
    if pool is not None and slug == "steps":
        found = ladder_of(pool, state.range.window, state.subject.group)
        if found is not None:
            return JsonResponse(ladder_figure(found))
    if pool is not None and slug == "curve":
        curve = curve_of(pool)
        if curve is not None and curve.points:
            return JsonResponse(curve_figure(curve))
    raise Http404("there is nothing to draw")


def _pool(state: Asked) -> Pool | None:
    """The pool that is asked for, or the first one."""
    return state.subject.pool or next(iter(state.pools), None)


def _shown(state: Asked, pool: Pool) -> dict[str, Any]:
    window, group = state.range.window, state.subject.group
    found, groups, curve = ladder_of(pool, window, group), ladders_by_group(pool, window), curve_of(pool)
    told: dict[str, Any] = {
        "ladder": found,
        "group": group,
        "groups": [(one, *_worst(one.ladder)) for one in groups],
        "curve": curve,
        "curve_sentence": curve_sentence(curve) if curve else "",
    }
    if found is None:
        return told | {"failing": DecisionCursor.objects.exclude(reason="").filter(router__lost_at=None).first()}
    steps = [(step, _link(step.words.to) if step.words else None) for step in steps_of(found)]
    return told | {"sentence": sentence(found), "notes": doubts(found), "steps": steps}


def _worst(ladder: Ladder) -> tuple[Loss | None, str]:
    """The loss that a task group could do most about, with its name; None where there is none to speak of."""
    found = next(iter(worth_saying(ladder.losses())), None)
    return found, LOSSES[found.key].label if found else ""


def _link(to: str) -> tuple[str, str]:
    name, label = NEXT[to]
    return reverse(name), label
