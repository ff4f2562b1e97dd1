"""The decision that a request would get now, without anything being sent."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from routing.core.types import PrefixHash, RoutingError
from routing.placement.decision import Decision
from routing.proxy.decisions.record import Record, shown_hash
from routing.proxy.exchanges.placing import PROMPT_PATHS, admitted_request, refusal_of
from routing.proxy.http.errors import RefusalError
from routing.proxy.http.request import Head, Request
from routing.proxy.router import Router
from routing.proxy.serving import Serving


class ExplainRequest(Struct):
    """A request to explain: what a client would have sent."""

    path: str
    body: msgspec.Raw
    headers: dict[str, str] = {}
    key: str | None = None  # the name of its API key


def explain(router: Router, asked: bytes) -> dict[str, Any]:
    """The decision as JSON; RefusalError if the request gets none, or if ``asked`` is none."""
    try:
        return _explained(router, msgspec.json.decode(asked, type=ExplainRequest))
    except RoutingError as error:
        raise refusal_of(error) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RefusalError(422, str(error)) from None


def _explained(router: Router, request: ExplainRequest) -> dict[str, Any]:
    serving = router.serving
    if serving is None:
        raise RefusalError(503, "no configuration yet")
    path = request.path.encode()
    if path not in PROMPT_PATHS:
        raise RefusalError(422, "path: not one that carries a prompt")
    if len(memoryview(request.body)) > serving.limits.max_body_bytes:
        raise RefusalError(413, "body: larger than a client's may be")
    asked = _as_request(request, serving)
    placement_request = admitted_request(asked, serving.admission)
    decision = serving.placement.decide(placement_request, router.health)
    record = Record.of(decision, asked.request_id)
    return record.as_json() | {
        "model": decision.served.model,
        "adapter": decision.served.adapter or None,
        "trial": serving.placement.verdict(decision, placement_request),
        "tokens_per_byte": decision.keys.ratio.tokens_per_byte,
        "tier1": _tier1(decision, serving.placement.tier1_hashes(decision, placement_request)),
        "group_replicas": _group_replicas(decision),
        "refused": decision.choice.refused,
        "bound": decision.choice.bound,
        "candidates": decision.explained().as_json(),
    }


def _as_request(asked: ExplainRequest, serving: Serving) -> Request:
    """The request that a client would have sent; RefusalError for a key that nobody has."""
    headers = {name.lower(): value for name, value in asked.headers.items()}
    head = Head(b"POST", asked.path.encode(), http11=True)
    head.session_id = headers.get("x-session-id") or None
    head.task_group = headers.get("x-task-group") or None
    request = Request(head, bytes(asked.body), headers.get("x-request-id", ""))
    if asked.key is not None:
        request.grant = serving.access.named(asked.key) if serving.access else None
        if request.grant is None:
            raise RefusalError(422, f"key: no API key is named {asked.key[:64]!r}")
    return request


def _group_replicas(decision: Decision) -> dict[str, Any] | None:
    """The set that follows the group's traffic, and its part of that; None where the configuration says the set."""
    route = decision.route
    if not route.follows_traffic or route.shares is None:
        return None
    return {"share_ratio": route.shares.share(route.group), "replicas": route.shares.replicas(route.group)}


def _tier1(decision: Decision, by_group: dict[str, PrefixHash | None]) -> dict[str, Any]:
    """Where the opening ended and its hash, and which hash each task group would have to claim to get this request."""
    return {
        "rule": decision.route.tier1,
        "bytes": decision.keys.tier1_bytes,
        "hash": shown_hash(decision.keys.tier1),
        "hash_by_group": {group: shown_hash(found) for group, found in by_group.items()},
    }
