"""A task group: hit rate, reachable share, objective, where its requests go, and which policy sends them."""

from __future__ import annotations

from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.utils import timezone
from django.views.decorators.http import require_GET

from controlplane.models import Pool, TaskGroup
from telemetry.services.figures.groups import group_tiles, replica_shares, revisions_in_force, was_seen
from telemetry.services.figures.subjects import Subject
from telemetry.services.lab.prompts import FEW, prompts_of
from telemetry.web.asking import NO_GROUP, Asked, asked_about
from telemetry.web.pages import around, frame, live_part


@require_GET
def group_detail(request: HttpRequest, pool_name: str, group_name: str) -> HttpResponse:
    """The whole page; its charts ask for their figures themselves."""
    state, pool, group = _asked(request, pool_name, group_name)
    found = prompts_of([pool.name], timezone.now(), group=state.subject.group)
    described = {"prompts": next(iter(found), None), "few": FEW}
    return render(request, "telemetry/group.html", {**_live(state, pool, group), **frame(request, state), **described})


@live_part
def group_live(request: HttpRequest, pool_name: str, group_name: str) -> HttpResponse:
    """What changes by itself."""
    return render(request, "telemetry/group_live.html", _live(*_asked(request, pool_name, group_name)))


def _asked(request: HttpRequest, pool_name: str, group_name: str) -> tuple[Asked, Pool, TaskGroup | None]:
    """The page's state, its pool and its group; None for the requests of none, and for a removed one."""
    pool = get_object_or_404(Pool, name=pool_name)
    if group_name == NO_GROUP:
        return asked_about(request, Subject.of_pool(pool, "")), pool, None
    group = pool.groups.filter(name=group_name).first()
    state = asked_about(request, Subject.of_pool(pool, group_name))
    if group is None and not was_seen(state.subject, state.range.window):
        raise Http404(f"Pool {pool.name} has no task group {group_name!r}.")
    return state, pool, group


def _live(state: Asked, pool: Pool, group: TaskGroup | None) -> dict[str, Any]:
    """A fixed number of queries, however many replicas serve it."""
    return {
        **around(state),
        "pool": pool,
        "group": group,
        "tiles": group_tiles(state.subject, state.range.now),
        "shares": replica_shares(state.subject, state.range.table),
        "revisions": revisions_in_force(group, pool.pk),
    }
