"""Requests: a list of placement decisions, and one decision explained."""

from __future__ import annotations

import re
from typing import Any, TypeVar

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from controlplane.models import Pool, RoutingPolicy
from controlplane.web.base import is_refresh, render_live, viewable
from controlplane.web.navigation import may_open
from telemetry.lab.chains import parse_hash
from telemetry.lint.structure import PromptStructure
from telemetry.services.lab import decisions
from telemetry.services.lab.decisions import DecisionQuery, Order
from telemetry.storage.dimension_sums import response_cache_sums, total
from telemetry.web.decisions import MATCHES, candidates_of, comparison_text, parse_place, place_of, reason_text
from telemetry.web.ranges import PageState, page_state

T = TypeVar("T")
HASH = re.compile("[0-9a-f]{16}")
PAGE = 50
REFRESH_S = 5  # of the newest requests; routers' decisions are collected as often
ORDERS = (
    (Order.NEWEST, "Newest"),
    (Order.SLOWEST, "Slowest"),
    (Order.RECOMPUTED, "Most recomputed"),
    (Order.OVER_PREDICTED, "Most over-predicted"),
)


@require_GET
def request_list(request: HttpRequest) -> HttpResponse:
    """Requests that match the filters, in the selected order. At most ten queries."""
    state = page_state(request)
    query = _query(request, state)
    result = decisions.decisions(query, limit=PAGE)
    subject, is_live = state.subject, state.range.live and query.order is Order.NEWEST and query.before is None
    context = {
        "page_state": state,
        "refresh_s": REFRESH_S if is_live else 0,
        "rows": result.rows,
        "since": result.since,
        "older_cursor": place_of(result.rows[-1]) if result.more else None,
        "has_newer": query.before is not None,
        "orders": ORDERS,
        "query": query,
        "collected": decisions.collection_status(),
    }
    if not is_refresh(request):  # the live part needs none of them
        cached = response_cache_sums(subject.pool_names(), state.range.window, group=subject.group, whole=True)
        context["cached_requests"] = total(cached, "cache_hits")
        context["reasons"] = decisions.reasons(subject, state.range.window)
    return render_live(request, "telemetry/requests.html", context)


def _query(request: HttpRequest, state: PageState) -> DecisionQuery:
    params = request.GET
    order, outcome, prefix = (params.get(name, "") for name in ("order", "outcome", "prefix"))
    return DecisionQuery(
        state.subject,
        state.range.window,
        Order(order) if order in list(Order) else Order.NEWEST,
        reason=params.get("reason", "")[:32],
        outcome=outcome if outcome in {"ok", "failed"} else "",
        request_id=params.get("id", "").strip()[:64],
        prefix=parse_hash(prefix if HASH.fullmatch(prefix) else None),
        before=parse_place(params.get("cursor", "")),
    )


@require_GET
def request_detail(request: HttpRequest, place: str) -> HttpResponse:
    """One decision: candidates, prediction and response. At most six queries."""
    at, router_id, boot, seq = _or_404(parse_place(place))
    decision = _or_404(decisions.decision(at, router_id, boot, seq))
    policies = RoutingPolicy.objects.filter(name=decision.policy)
    context: dict[str, Any] = {
        "decision": decision,
        "policy": viewable(request, policies).filter(pool__name=decision.pool).first(),
        "links_router": may_open(request, "controlplane:routers"),
        "pool": _or_404(viewable(request, Pool.objects.all()).filter(name=decision.pool).first()),
        "candidates": candidates_of(decision),
        "reason": reason_text(decision.reason),
        "match": MATCHES.get(decision.matched_by, decision.matched_by),
        "comparison": comparison_text(decision),
        "structure": PromptStructure.read(decision.prompt_structure) if decision.prompt_structure else None,
        "neighbours": decisions.with_same_prefix(decision),
    }
    return render(request, "telemetry/request.html", context)


def _or_404(value: T | None) -> T:
    if value is None:
        raise Http404("This request does not exist or is no longer stored.")
    return value
