"""Everything that routers were ever told to run: the whole fleet's configurations, numbered."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET

from controlplane.errors import ConflictError
from controlplane.models import ConfigSnapshot, Router
from controlplane.services.policies.comparisons import effects_of_configurations
from controlplane.web.paging import number_asked

PAGE = 25


@require_GET
@never_cache
def configuration_list(request: HttpRequest) -> HttpResponse:
    """A page of configurations, newest first, and which routers run each."""
    rows, before = _plain(), number_asked(request, "before")
    page = list((rows.filter(number__lt=before) if before else rows)[: PAGE + 1])
    running = _running()
    newest = rows.first()
    context = {
        "rows": [(row, running.get((row.number, row.sha256), [])) for row in page[:PAGE]],
        "newest": newest,
        "more": page[PAGE - 1].number if len(page) > PAGE else None,
        "later": bool(before),
        "strangers": _strangers(running),
    }
    return render(request, "controlplane/configurations.html", context)


@require_GET
def configuration_detail(request: HttpRequest, number: int) -> HttpResponse:
    """One configuration: why there is one, what it does instead of the one before, who runs it."""
    row = get_object_or_404(_plain(), number=number)
    former = _plain().filter(number__lt=number).first()
    context = {
        "one": row,
        "former": former,
        "next": _plain().filter(number__gt=number).order_by("number").first(),
        "routers": _running().get((row.number, row.sha256), []),
        **_effects(former, row),
    }
    return render(request, "controlplane/configuration.html", context)


@require_GET
def configuration_compare(request: HttpRequest) -> HttpResponse:
    """What one configuration does instead of another."""
    numbers = [number_asked(request, name) for name in ("from", "to")]
    before, after = (get_object_or_404(_plain(), number=number) if number else None for number in numbers)
    context: dict[str, Any] = {"before": before, "after": after}
    if before and after:
        context |= _effects(before, after)
    return render(request, "controlplane/configuration_compare.html", context)


def _plain() -> QuerySet[ConfigSnapshot]:
    """Configurations, newest first, without the two columns that are as large as the fleet."""
    return ConfigSnapshot.objects.defer("sealed", "document").select_related("created_by").order_by("-number")


def _effects(before: ConfigSnapshot | None, after: ConfigSnapshot) -> dict[str, Any]:
    """What changed; ``unreadable`` says why nobody can tell any more."""
    if before is None:
        return {"effects": [], "unreadable": ""}
    try:
        return {"effects": effects_of_configurations(before, after), "unreadable": ""}
    except ConflictError as error:
        return {"effects": [], "unreadable": str(error)}


def _running() -> dict[tuple[int, str], list[Router]]:
    """Routers by what they run, as far as they told."""
    found: dict[tuple[int, str], list[Router]] = defaultdict(list)
    for router in Router.objects.exclude(running_number=None).order_by("name"):
        found[router.running_number or 0, router.running_sha256].append(router)
    return found


def _strangers(running: dict[tuple[int, str], list[Router]]) -> list[Router]:
    """Routers that run a configuration which is none of ours."""
    ours = set(
        ConfigSnapshot.objects.filter(number__in=[number for number, _ in running]).values_list("number", "sha256")
    )
    return [router for key, routers in running.items() if key not in ours for router in routers]
