"""The ladder: how far is the hit rate from the reachable share, where is it lost, and what would more room bring?

Prefixes: the hottest openings as an icicle, how warm each is and where it lives; the same as a table behind it.

Prompts: what keeps those of each task group from sharing more of the caches.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.gzip import gzip_page
from django.views.decorators.http import require_GET

from controlplane.access.actor import actor_of, visible
from controlplane.models import Pool
from telemetry.lab.ladder import LOSS_TEXTS, Ladder, Loss, actionable_losses, caveats, summary
from telemetry.lab.prefix_tree import Node
from telemetry.models import DecisionCursor
from telemetry.services.lab.decisions import LINT_WINDOW, MIN_PROMPTS, collection_status, hottest_prefixes, lint_prompts
from telemetry.services.lab.ladders import curve_of, ladder_of, ladders_by_group
from telemetry.web.ladder_figures import curve_figure, curve_sentence, ladder_figure, steps_of
from telemetry.web.ranges import PRESETS, Asked, asked

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
    steps = [(step, _link(step.words.page) if step.words else None) for step in steps_of(found)]
    return told | {"sentence": summary(found), "notes": caveats(found), "steps": steps}


def _worst(ladder: Ladder) -> tuple[Loss | None, str]:
    """The loss that a task group could do most about, with its name; None where there is none to speak of."""
    found = next(iter(actionable_losses(ladder.losses())), None)
    return found, LOSS_TEXTS[found.key].label if found else ""


def _link(to: str) -> tuple[str, str]:
    name, label = NEXT[to]
    return reverse(name), label


_HASH = re.compile(r"[0-9a-f]{16}")
WARMTHS = 10  # steps of colour
LISTED_LEVELS = 2  # unless all are asked for


@dataclass(frozen=True, slots=True)
class Cell:
    """A node as the page draws it."""

    node: Node
    level: int  # 1 for the first
    share_ratio: float  # of all tokens
    part_ratio: float  # of the tokens of what it continues
    warmth: str  # class of its colour: w0 to w9, or "unknown"
    length_tokens: int  # of this run of blocks
    cells: tuple[Cell, ...]

    @property
    def group(self) -> str:
        """The task group of most of its requests."""
        return self.node.groups.most_common(1)[0][0]


@require_GET
def prefixes(request: HttpRequest) -> HttpResponse:
    """The tree of what is asked for, or below one of its nodes. At most seven queries."""
    state = asked(request)
    below = request.GET.get("below", "")
    tree = hottest_prefixes(state.subject, state.range.window, below=below if _HASH.fullmatch(below) else "")
    cells = tuple(_cells(tree.root, tree.root.tokens, 1))
    every = list(_flat(cells))
    rows = every if request.GET.get("rows") == "all" else [cell for cell in every if cell.level <= LISTED_LEVELS]
    context = {
        "asked": state,
        "presets": PRESETS,
        "tree": tree,
        "cells": cells,
        "rows": rows,
        "deeper": len(every) - len(rows),
        "rest_ratio": 1 - sum(cell.share_ratio for cell in cells) if tree.root.tokens else None,
        "below": below,
        "collected": collection_status(),
    }
    return render(request, "telemetry/prefixes.html", context)


def _cells(node: Node, tokens: int, level: int) -> Iterator[Cell]:
    for child in node.children:
        yield Cell(
            child,
            level,
            child.tokens / tokens if tokens else 0.0,
            child.tokens / node.tokens if node.tokens else 0.0,
            warmth(child.hit_rate_ratio),
            child.depth_tokens - node.depth_tokens,
            tuple(_cells(child, tokens, level + 1)),
        )


def warmth(hit_rate_ratio: float | None) -> str:
    """The colour of a hit rate."""
    return "unknown" if hit_rate_ratio is None else f"w{min(int(hit_rate_ratio * WARMTHS), WARMTHS - 1)}"


def _flat(cells: tuple[Cell, ...]) -> Iterator[Cell]:
    for cell in cells:
        yield cell
        yield from _flat(cell.cells)


@require_GET
def prompt_list(request: HttpRequest) -> HttpResponse:
    """All task groups, those that lose most first; a refresh leaves out the frame."""
    pools = list(visible(actor_of(request), Pool.objects.all()).values_list("name", flat=True))
    asked = request.GET.get("pool", "")
    named = [asked] if asked in pools else pools
    groups = lint_prompts(named, timezone.now())
    context = {
        "groups": groups,
        "pools": pools,
        "pool": asked if asked in pools else "",
        "gone": asked if asked and asked not in pools else "",
        "few": MIN_PROMPTS,
        "minutes": int(LINT_WINDOW.total_seconds() // 60),
    }
    refresh = request.headers.get("HX-Request") == "true"
    return render(request, "telemetry/prompts_live.html" if refresh else "telemetry/prompts.html", context)
