"""Requests: what routers decided, and one decision explained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from controlplane.access.actor import actor_of, visible
from controlplane.models import Pool
from telemetry.lint import PromptStructure
from telemetry.metrics.windows import cacheable_tokens
from telemetry.models import Decision
from telemetry.services.lab import decisions
from telemetry.services.lab.decisions import DecisionQuery, Order
from telemetry.web.ranges import PRESETS, Asked, asked
from telemetry.web.reasons import MATCHES, place_of, read_place, reason_sentence, verdict_of

PAGE = 50
ORDERS = (
    (Order.NEWEST, "Newest"),
    (Order.SLOWEST, "Slowest"),
    (Order.RECOMPUTED, "Most recomputed"),
    (Order.MISJUDGED, "Most overrated"),
)


@require_GET
def request_list(request: HttpRequest) -> HttpResponse:
    """Requests of the newest or the worst first, narrowed as the URL says. At most eight queries."""
    state = asked(request)
    wanted = _wanted(request, state)
    found = decisions.decisions(wanted, limit=PAGE)
    context = {
        "asked": state,
        "presets": PRESETS,
        "rows": found.rows,
        "since": found.since,
        "more": place_of(found.rows[-1]) if found.more else None,
        "later": wanted.before is not None,
        "orders": ORDERS,
        "wanted": wanted,
        "reasons": decisions.reasons(state.subject, state.range.window),
        "collected": decisions.collection_status(),
    }
    return render(request, "telemetry/requests.html", context)


@require_GET
def request_detail(request: HttpRequest, place: str) -> HttpResponse:
    """One decision explained: candidates, what was predicted, what was delivered. At most five queries."""
    at, router_id, boot, seq = read_place(place) or _nothing()
    one = decisions.decision(at, router_id, boot, seq) or _nothing()
    pool = visible(actor_of(request), Pool.objects.all()).filter(name=one.pool).first() or _nothing()
    context = {
        "one": one,
        "pool": pool,
        "candidates": candidates_of(one),
        "reason": reason_sentence(one.reason),
        "match": MATCHES.get(one.matched_by, one.matched_by),
        "verdict": verdict_of(one),
        "prompt": prompt_of(one),
        "opening": PromptStructure.read(one.opening) if one.opening else None,
        "neighbours": decisions.with_same_prefix(one),
    }
    return render(request, "telemetry/request.html", context)


def _nothing() -> Any:
    raise Http404("There is no such request (any more).")


def _wanted(request: HttpRequest, state: Asked) -> DecisionQuery:
    params = request.GET
    order = params.get("order", "")
    return DecisionQuery(
        state.subject,
        state.range.window,
        Order(order) if order in list(Order) else Order.NEWEST,
        reason=params.get("reason", "")[:32],
        outcome=params.get("outcome", "") if params.get("outcome") in {"ok", "failed"} else "",
        request_id=params.get("id", "").strip()[:64],
        before=read_place(params.get("cursor", "")),
    )


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that could have had the request, as its load was then."""

    name: str
    chosen: bool
    running: int
    waiting_tokens: int
    hit_tokens: int | None  # predicted there; None where the strategy does not ask, or it was not kept
    cost: float | None  # as the strategy compares it: the least is chosen


def candidates_of(one: Decision) -> list[Candidate]:
    """The chosen one first, then by cost and load; [] where they were not kept."""
    found = [
        Candidate(
            str(it.get("replica", "")),
            it.get("replica") == one.replica,
            int(it.get("running", 0)),
            int(it.get("waiting_tokens", 0)),
            it.get("hit_tokens"),
            it.get("cost"),
        )
        for it in one.candidates or ()
        if isinstance(it, dict)
    ]
    return sorted(found, key=lambda it: (not it.chosen, it.cost is None, it.cost or 0.0, it.running, it.name))


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's tokens, as parts of it from its beginning: each 0 to 1, of what the engine counted."""

    cached_ratio: float | None
    predicted_ratio: float | None
    block_limit_ratio: float | None  # the last token is always computed, and hits end on a block (H7)


def prompt_of(one: Decision) -> Prompt:
    """What of a prompt came from the cache, what was expected, and the block rounding limit (H7)."""
    tokens, estimate = one.prompt_tokens, one.prompt_tokens_estimate
    return Prompt(
        cached_ratio=one.cached_tokens / tokens if tokens and one.cached_tokens is not None else None,
        predicted_ratio=min(1.0, one.hit_tokens / estimate) if one.hit_tokens is not None and estimate else None,
        block_limit_ratio=cacheable_tokens(tokens, one.block_tokens) / tokens if tokens and one.block_tokens else None,
    )
