"""Admission: checks a request against its API key and its caps, prepares it for placement, and lists models.

A request may get another body: with its tenant's ``cache_salt``, with a length that a cap requires, or with the model's
own name in place of an alias. Every other body is forwarded byte by byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from routing.balancing.request import (
    BodyReading,
    Models,
    PlacementRequest,
    TaskGroupMatcher,
    check_caps,
    length_to_add,
    may_exceed_defaults,
    read_body,
)
from routing.health.checks import ReportedModel
from routing.http.response import LocalResponse, RejectedRequestError
from routing.paths import DataPath, Endpoint, ParsedBody
from routing.prompt.canonical import CanonicalPrompt
from routing.prompt.forms import read_form
from routing.prompt.parsing import raw_member, session_key_in, with_member, with_members
from routing.proxy.resources import ResponseIds, response_named_by
from routing.response_cache.keys import Scope
from routing.schema import Caps, RouterConfig
from routing.types import BodyError, NoReplicaError, RoutingError, UnknownModelError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from routing.balancing.placement import Decision
    from routing.http.auth import Grant
    from routing.http.request import Request, RequestHead


RESPONSES: Final = DataPath.RESPONSES.endpoint
NO_PROMPT: Final = CanonicalPrompt(b"", 0, 0, [])
RETRY_AFTER_S: Final = 1  # sent to clients when the router cannot serve a request now
_DEFAULT: Final = Caps()


class SessionKeys:
    """A pool's ``session_keys``: the headers and body fields that name the session of a request."""

    def __init__(self, keys: Sequence[str]) -> None:
        parts = [key.partition(":") for key in keys]
        self._parts = [(kind == "header", name.lower().encode(), name) for kind, _, name in parts]

    def find(self, head: RequestHead, body: ParsedBody | None) -> str | None:
        """The session key of a request; None if it has none."""
        for is_header, header, field in self._parts:
            key: str | None = None
            if is_header:
                key = head.header(header)
            elif body is not None:
                key = session_key_in(body, field)
            if key is not None:
                return key
        return None


class Admission:
    """The admission rules of one configuration.

    ``is_trivial``: the rules concern only requests that ``may_exceed_defaults``.
    """

    def __init__(self, config: RouterConfig, models: Models, matcher: TaskGroupMatcher) -> None:
        self.response_ids = ResponseIds(config)
        self._models = models
        self._matcher = matcher
        self._caps = {
            (pool.name, group.name if group else ""): group.caps.over(pool.caps) if group and group.caps else pool.caps
            for pool in config.pools
            for group in (None, *pool.groups)
        }
        self._session_keys = {
            pool.name: SessionKeys(pool.session_keys) for pool in config.pools if pool.session_keys is not None
        }
        self.paths = {pool.name: frozenset(map(str, pool.paths)) for pool in config.pools if pool.paths is not None}
        has_aliases = any(pool.aliases for pool in config.pools)
        self.is_trivial = (
            config.access is None and not has_aliases and all(caps == _DEFAULT for caps in self._caps.values())
        )

    def session_key(
        self, head: RequestHead, body: ParsedBody | None, model: str | None, default: str | None
    ) -> str | None:
        """The session key as the pool of a model sets it; ``default`` if the pool does not."""
        pool = self._pool_of(model) if self._session_keys else None
        keys = None if pool is None else self._session_keys.get(pool)
        return default if keys is None else keys.find(head, body)

    def cache_scope(self, request: Request, placement: PlacementRequest) -> Scope | None:
        """What a cached response of a request is limited to; None if it belongs to no task group."""
        model = self._models.resolve(placement.model)
        group, _ = self._matcher.group(model, placement)
        if group is None:
            return None
        return Scope.of(request, model.pool.name, group.name, model.name or "")

    def check_path(self, path: str, model: str | None) -> None:
        """RejectedRequestError if the pool of a model does not serve this path."""
        pool = self._pool_of(model)
        paths = None if pool is None else self.paths.get(pool)
        if paths is not None and path not in paths:
            raise RejectedRequestError(404, f"pool {pool!r} does not serve {path}")

    def _pool_of(self, model: str | None) -> str | None:
        """The pool that serves a model; None if none does, which placement reports."""
        try:
            return self._models.resolve(model).pool.name
        except UnknownModelError:
            return None

    def apply(self, request: Request, parsed: ParsedBody | None, placement: PlacementRequest) -> PlacementRequest:
        """Check a request, and change its body if a rule requires that; RejectedRequestError or BodyError.

        ``parsed`` is None if the request has no prompt.
        """
        grant = request.grant
        if grant is not None:
            placement = _with_key(grant, placement)
            if parsed is not None or placement.pinned is not None:
                self._check_model(grant, placement.model)
        if parsed is None and (grant is None or grant.groups is None):
            return placement
        model = self._models.resolve(placement.model)
        group, _ = self._matcher.group(model, placement)
        if placement.key_groups is not None and group is None:
            raise RejectedRequestError(403, "the request matches no task group that its API key may use")
        if parsed is None:
            return placement
        caps = self._caps[model.pool.name, group.name if group else ""]
        check_caps(parsed, caps)
        members: dict[str, str | int] = {}
        if caps.max_tokens is not None and (length := length_to_add(parsed, caps.max_tokens)):
            members[length[0]] = length[1]
        if placement.model is not None and placement.model != model.name:
            members["model"] = model.name
        if placement.tenant:
            members["cache_salt"] = placement.tenant
        _set_members(request, members)
        return placement

    def _check_model(self, grant: Grant, model: str | None) -> None:
        """A key for a model is valid for its aliases too; RejectedRequestError for all other models."""
        if grant.models is None or model in grant.models:
            return
        try:
            if model is not None and self._models.resolve(model).name in grant.models:
                return
        except UnknownModelError:
            pass
        problem = "names no model" if model is None else f"names the model {model[:256]!r}"
        raise RejectedRequestError(403, f"the request {problem}, which its API key may not use", param="model")


def _set_members(request: Request, members: dict[str, str | int]) -> None:
    if request.model_span is not None:
        _set_model_of_form(request, request.model_span, members.get("model"))
        return
    if members and request.layout is not None:
        request.body, request.layout = with_members(request.body, members, request.layout)
        return
    for name, value in members.items():
        request.body = with_member(request.body, name, value)


def _set_model_of_form(request: Request, span: tuple[int, int], model: str | int | None) -> None:
    """Forms have no member for a salt or a length, so only the model is set."""
    if model is not None:
        start, end = span
        request.body = b"".join((request.body[:start], str(model).encode(), request.body[end:]))


def _with_key(grant: Grant, placement: PlacementRequest) -> PlacementRequest:
    """Add the key and its tenant's salt, which separates the prompt's cache from that of other tenants."""
    salt = grant.salt(placement.prompt.salt)
    return PlacementRequest(
        placement.model,
        placement.group,
        placement.session_key,
        placement.prompt if salt is None else placement.prompt.with_salt(salt),
        tenant=salt or "",
        key=grant.name,
        key_groups=grant.groups,
        is_plain=placement.is_plain,
        pinned=placement.pinned,
        is_conversation=placement.is_conversation,
    )


def admit_request(request: Request, admission: Admission, reading: BodyReading | None = None) -> PlacementRequest:
    """Read, check and prepare a client's request for placement; RejectedRequestError or RoutingError.

    ``reading``: of its body, if another process read it.
    """
    head = request.head
    endpoint = head.endpoint
    if endpoint is None:
        return _admit_bare(request, admission)
    if endpoint.is_form:
        return _admit_form(request, endpoint, admission)
    if reading is None:
        reading = read_body(endpoint.path, request.body)
    parsed = reading.body
    request.omits_usage, request.layout = reading.omits_usage, reading.layout
    session_key = admission.session_key(head, parsed, parsed.model, head.session_id or reading.session_key)
    placement = PlacementRequest(
        parsed.model,
        head.task_group,
        session_key,
        reading.prompt,
        is_plain=reading.is_plain,
        # fields of bodies may have one value for all conversations: ``user``, ``prompt_cache_key``
        is_conversation=session_key is not None and session_key == head.session_id,
    )
    if reading.previous_id is not None:
        placement.pinned, _ = admission.response_ids.find(reading.previous_id, request.grant)
    if endpoint is RESPONSES and request.layout is None:
        raw_member(request.body, "request_id")  # BodyError now, not when ``with_response_id`` sets it
    return _apply(admission, request, endpoint, parsed, placement)


def _admit_form(request: Request, endpoint: Endpoint, admission: Admission) -> PlacementRequest:
    head = request.head
    form = read_form(head.content_type, request.body)
    request.model_span = form.model_span
    parsed = form.body
    is_plain = parsed.stream is not True
    session_key = admission.session_key(head, None, parsed.model, head.session_id)
    placement = PlacementRequest(parsed.model, head.task_group, session_key, NO_PROMPT, is_plain=is_plain)
    return _apply(admission, request, endpoint, parsed, placement)


def _apply(
    admission: Admission, request: Request, endpoint: Endpoint, parsed: ParsedBody, placement: PlacementRequest
) -> PlacementRequest:
    """Apply the rules of the configuration; whether the pool serves the path comes last, after the key's scope."""
    if not admission.is_trivial or may_exceed_defaults(parsed):
        placement = admission.apply(request, parsed, placement)
    if admission.paths:
        admission.check_path(endpoint.path, placement.model)
    return placement


def _admit_bare(request: Request, admission: Admission) -> PlacementRequest:
    """Admit a request without a body: for the list of models, a model, or a stored response."""
    head, response_id = request.head, response_named_by(request.head.path)
    placement = PlacementRequest(None, head.task_group, head.session_id, NO_PROMPT, is_plain=True)
    if response_id is not None:
        placement.pinned, placement.model = admission.response_ids.find(response_id, request.grant)
    if not admission.is_trivial:
        placement = admission.apply(request, None, placement)
    if response_id is not None:
        admission.check_path(RESPONSES.path, placement.model)
    return placement


def with_response_id(request: Request, admission: Admission, decision: Decision, model: str | None) -> bytes:
    """The body of a request to ``RESPONSES``, with an id for the response that the engine may store.

    ``model``: as the request names it. An id of the client's own is replaced.
    """
    response_id = admission.response_ids.new_id(decision.target.id, model, request.grant)
    if request.layout is None:
        return with_member(request.body, "request_id", response_id)
    return with_members(request.body, {"request_id": response_id}, request.layout)[0]


def rejection_of(error: RoutingError) -> RejectedRequestError:
    """A client's mistake is a 400 or 404; a lack of replicas is a 503 that may be retried."""
    if isinstance(error, BodyError):
        return RejectedRequestError(400, str(error), param=error.param)
    if isinstance(error, UnknownModelError):
        return RejectedRequestError(404, str(error), param="model", kind="NotFoundError")
    if isinstance(error, NoReplicaError):
        return RejectedRequestError(503, str(error), retry_after_s=RETRY_AFTER_S)
    return RejectedRequestError(500, str(error))


Reported = Mapping[str, Sequence[ReportedModel]]  # by replica


def models_response(config: RouterConfig, grant: Grant | None, reported: Reported) -> LocalResponse | None:
    """``/v1/models``: the models that a client may use, as vLLM lists them; None if none is known yet.

    They are those of the configuration, and those that replicas report of a pool that accepts any model. An alias has
    its model as ``root``, an adapter has the model that it adapts as ``parent``.
    """
    cards = list(_model_cards(config, grant, reported).values())
    if not cards and _serves_others(config, grant):
        return None
    return LocalResponse(200, msgspec.json.encode({"object": "list", "data": cards}))


def model_response(config: RouterConfig, grant: Grant | None, reported: Reported, name: str) -> LocalResponse | None:
    """``/v1/models/NAME``, as in the list of models; None for an unknown name if a pool accepts any model."""
    card = _model_cards(config, grant, reported).get(name)
    if card is not None:
        return LocalResponse(200, msgspec.json.encode(card))
    if _serves_others(config, grant):
        return None
    raise rejection_of(UnknownModelError(name))


def _serves_others(config: RouterConfig, grant: Grant | None) -> bool:
    """Whether a client may use models that no pool names."""
    return any(not pool.models for pool in config.pools) and (grant is None or grant.models is None)


def _model_cards(config: RouterConfig, grant: Grant | None, reported: Reported) -> dict[str, dict[str, Any]]:
    """By id; models of the configuration come first."""
    cards: dict[str, dict[str, Any]] = {}
    for pool in sorted(config.pools, key=lambda pool: not pool.models):
        known = [model for replica in pool.replicas for model in reported.get(replica.name, ())]
        lengths = _shortest(known)
        names: list[tuple[str, str, str | None]] = [(name, name, None) for name in pool.models]
        names += [(alias.name, alias.model, None) for alias in pool.aliases]
        names += [(adapter.name, adapter.name, adapter.model) for adapter in pool.adapters]
        if not pool.models:
            names += [(model.id, model.root or model.id, model.parent) for model in known]
        for name, root, parent in names:
            length = next((lengths[key] for key in (name, root, parent) if key in lengths), None)
            cards.setdefault(name, _model_card(name, root, parent, length))
    if grant is not None and (models := grant.models) is not None:
        cards = {name: card for name, card in cards.items() if name in models or card["root"] in models}
    return cards


def _shortest(models: Iterable[ReportedModel]) -> dict[str | None, int]:
    """The smallest ``max_model_len`` that replicas report of each model: what all of them accept."""
    lengths: dict[str | None, int] = {}
    for model in models:
        if (length := model.max_model_len) is not None:
            lengths[model.id] = min(length, lengths.get(model.id, length))
    return lengths


def _model_card(name: str, root: str, parent: str | None, max_model_len: int | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "warmpath",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
    }
