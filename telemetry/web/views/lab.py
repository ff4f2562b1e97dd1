"""Hit-rate breakdown, prefixes and prompts: where cached tokens are lost, and what would bring more."""

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

from controlplane.models import Pool
from controlplane.web.base import render_live, viewable
from telemetry.lab.breakdown import LOSS_TEXTS, Breakdown, Loss, actionable_losses, caveats, summary
from telemetry.lab.prefix_tree import Node
from telemetry.lab.worth import Assessment, CacheVerdict, RoutingVerdict
from telemetry.models import DecisionCursor
from telemetry.services.lab.breakdowns import breakdown_of, breakdowns_by_group, curve_of, worth_of
from telemetry.services.lab.decisions import LINT_WINDOW, MIN_PROMPTS, collection_status, hottest_prefixes, lint_prompts
from telemetry.web.breakdown_figures import breakdown_figure, curve_figure, curve_summary, steps_of
from telemetry.web.ranges import PageState, page_state

ADVICE_PAGES = {
    "task-groups": ("controlplane:task-groups", "Task groups"),
    "fleet": ("controlplane:fleet", "Fleet"),
    "policies": ("controlplane:policies", "Policies"),
    "events": ("telemetry:events", "Events"),
}
VERDICT_TONES: dict[str, str] = {
    RoutingVerdict.WORTH: "good",
    RoutingVerdict.BORDERLINE: "warn",
    CacheVerdict.ONE_REPLICA: "good",
    CacheVerdict.FLEET: "good",
    CacheVerdict.THRASHING: "bad",
}
_HASH = re.compile(r"[0-9a-f]{16}")
COLOURS = 10  # of hit rates
LISTED_LEVELS = 2  # of the tree in the table, unless all are requested


@require_GET
def breakdown(request: HttpRequest) -> HttpResponse:
    """The hit-rate breakdown of a pool or task group. A fixed number of queries."""
    state = page_state(request, needs_pool=True)
    pool = state.subject.pool
    context: dict[str, Any] = {"page_state": state, "pool": pool}
    if pool is not None:
        context |= _breakdown(state, pool)
    return render(request, "telemetry/breakdown.html", context)


@require_GET
@gzip_page  # the response contains no secret
def figure(request: HttpRequest, slug: str) -> HttpResponse:
    """The figure that breakdown.js draws: ``steps`` or ``curve``."""
    state = page_state(request, needs_pool=True)
    pool = state.subject.pool
    if pool is not None and slug == "steps":
        breakdown = breakdown_of(pool, state.range.window, state.subject.group)
        if breakdown is not None:
            return JsonResponse(breakdown_figure(breakdown))
    if pool is not None and slug == "curve":
        curve = curve_of(pool)
        if curve is not None and curve.points:
            return JsonResponse(curve_figure(curve))
    raise Http404("There is no data for this chart.")


def _breakdown(state: PageState, pool: Pool) -> dict[str, Any]:
    window, group = state.range.window, state.subject.group
    breakdown, curve = breakdown_of(pool, window, group), curve_of(pool)
    context: dict[str, Any] = {
        "breakdown": breakdown,
        "group": group,
        "groups": [(row, *_largest_loss(row.breakdown)) for row in breakdowns_by_group(pool, window)],
        "curve": curve,
        "curve_summary": curve_summary(curve) if curve else "",
    }
    if breakdown is None:
        failing = DecisionCursor.objects.exclude(reason="").filter(router__lost_at=None).first()
        return context | {"failing": failing}
    worth = worth_of(pool, window, curve)
    verdicts = [
        (title, verdict, VERDICT_TONES.get(verdict.verdict or "", ""), _next_step(verdict, pool))
        for title, verdict in (("Prefix routing", worth.routing), ("Cache size", worth.caches))
    ]
    steps = [(step, _link(step.text.page) if step.text else None) for step in steps_of(breakdown)]
    return context | {"summary": summary(breakdown), "notes": caveats(breakdown), "steps": steps, "verdicts": verdicts}


def _largest_loss(breakdown: Breakdown) -> tuple[Loss | None, str]:
    """The largest loss that can be reduced, with its label."""
    loss = next(iter(actionable_losses(breakdown.losses())), None)
    return loss, LOSS_TEXTS[loss.key].label if loss else ""


def _next_step(verdict: Assessment, pool: Pool) -> tuple[str, str] | None:
    """URL and label of the page where to act on a verdict; None if there is nothing to do."""
    pages = {
        "what-if": (f"{reverse('telemetry:what-ifs')}?pool={pool.name}", "What-if"),
        "prompts": (f"{reverse('telemetry:prompts')}?pool={pool.name}", "Prompts"),
        "capacity": (f"{reverse('telemetry:capacity')}?pool={pool.name}", "Capacity and cost"),
    }
    return pages.get(verdict.page)


def _link(page: str) -> tuple[str, str]:
    route, label = ADVICE_PAGES[page]
    return reverse(route), label


@dataclass(frozen=True, slots=True)
class Cell:
    """A node of the prefix tree as the page draws it."""

    node: Node
    level: int  # 1 for the first
    share_ratio: float  # of all tokens
    part_ratio: float  # of the parent's tokens
    hit_rate_class: str  # CSS class: w0 to w9, or "unknown"
    cells: tuple[Cell, ...]

    @property
    def group(self) -> str:
        """The task group of most of its requests."""
        return self.node.groups.most_common(1)[0][0]


@require_GET
def prefixes(request: HttpRequest) -> HttpResponse:
    """The tree of the most frequent prefixes, or the part below one node. At most seven queries."""
    state = page_state(request)
    below = request.GET.get("below", "")
    tree = hottest_prefixes(state.subject, state.range.window, below=below if _HASH.fullmatch(below) else "")
    cells = tuple(_cells(tree.root, tree.root.tokens, 1))
    all_cells = list(_flat(cells))
    show_all = request.GET.get("rows") == "all"
    rows = [cell for cell in all_cells if show_all or cell.level <= LISTED_LEVELS]
    pool = state.subject.pool or (state.pools[0] if len(state.pools) == 1 else None)
    context = {
        "page_state": state,
        "kv_bytes": pool and pool.kv_bytes_per_token,
        "tree": tree,
        "cells": cells,
        "rows": rows,
        "deeper": len(all_cells) - len(rows),
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
            hit_rate_class(child.hit_rate_ratio),
            tuple(_cells(child, tokens, level + 1)),
        )


def hit_rate_class(hit_rate_ratio: float | None) -> str:
    """The CSS class of a hit rate's colour."""
    return "unknown" if hit_rate_ratio is None else f"w{min(int(hit_rate_ratio * COLOURS), COLOURS - 1)}"


def _flat(cells: tuple[Cell, ...]) -> Iterator[Cell]:
    for cell in cells:
        yield cell
        yield from _flat(cell.cells)


@require_GET
def prompt_list(request: HttpRequest) -> HttpResponse:
    """What prevents prompts of each task group from sharing cached prefixes, the largest loss first."""
    pools = list(viewable(request, Pool.objects.all()).values_list("name", flat=True))
    name = request.GET.get("pool", "")
    is_known = name in pools
    context = {
        "groups": lint_prompts([name] if is_known else pools, timezone.now()),
        "pools": pools,
        "pool": name if is_known else "",
        "unknown_pool": "" if is_known else name,
        "min_prompts": MIN_PROMPTS,
        "minutes": int(LINT_WINDOW.total_seconds() // 60),
    }
    return render_live(request, "telemetry/prompts.html", context)
