"""What a request that was let in may be: its key's models and task groups, the caps of its pool, its tenant's salt.

It may leave with another body: with its tenant's ``cache_salt``, with a length where a cap asks for one, or with the
model's own name in place of an alias. Every other body goes on byte by byte.

``/v1/models`` as the router answers it: every name of every pool that a client may use.

From a client's request to what placing it needs, and from what placing refuses to what the client gets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec

from routing.balancing.matching import Models, TaskGroupMatcher
from routing.balancing.request import BodyReading, PlacementRequest, read_body
from routing.http.errors import RejectedRequestError
from routing.http.response import LocalResponse
from routing.limits.caps import check_caps, length_to_add, may_exceed_defaults
from routing.prompt.bodies import BODIES, ParsedBody
from routing.prompt.canonical import CanonicalPrompt
from routing.prompt.rewrite import with_member, with_members
from routing.schema import Caps, PoolConfig, RouterConfig
from routing.types import BodyError, NoReplicaError, RoutingError, UnknownModelError

if TYPE_CHECKING:
    from routing.http.auth import Grant
    from routing.http.request import Request


_DEFAULT: Final = Caps()


class Admission:
    """One configuration's rules for requests. ``is_idle``: they concern only those that ``may_exceed_defaults``."""

    def __init__(self, config: RouterConfig, models: Models, matcher: TaskGroupMatcher) -> None:
        self._models = models
        self._matcher = matcher
        self._caps = {
            (pool.name, group.name if group else ""): group.caps.over(pool.caps) if group and group.caps else pool.caps
            for pool in config.pools
            for group in (None, *pool.groups)
        }
        has_aliases = any(pool.aliases for pool in config.pools)
        self.is_idle = (
            config.access is None and not has_aliases and all(caps == _DEFAULT for caps in self._caps.values())
        )

    def admitted(
        self, request: Request, parsed: ParsedBody | None, placement_request: PlacementRequest
    ) -> PlacementRequest:
        """The request as it is placed, its body as it is sent; RejectedRequestError or BodyError for what may not be.

        ``parsed`` is None where there is no prompt.
        """
        grant = request.grant
        if grant is not None:
            placement_request = _with_key(grant, placement_request)
            if parsed is not None:
                self._check_model(grant, placement_request.model)
        if parsed is None and (grant is None or grant.groups is None):
            return placement_request
        served = self._models.resolve(placement_request.model)
        group, _ = self._matcher.group(served, placement_request)
        if placement_request.key_groups is not None and group is None:
            raise RejectedRequestError(403, "the request is of no task group that its API key may use")
        if parsed is None:
            return placement_request
        caps = self._caps[served.pool.name, group.name if group else ""]
        check_caps(parsed, caps)
        values: dict[str, str | int] = {}
        if caps.max_tokens is not None and (length := length_to_add(parsed, caps.max_tokens)):
            values[length[0]] = length[1]
        if placement_request.model is not None and placement_request.model != served.name:
            values["model"] = served.name
        if placement_request.tenant:
            values["cache_salt"] = placement_request.tenant
        if values:
            _put_in(request, values)
        return placement_request

    def _check_model(self, grant: Grant, model: str | None) -> None:
        """A key for some models is good under their aliases too; RejectedRequestError for all others."""
        if grant.models is None or model in grant.models or self._stands_for(model) in grant.models:
            return
        what = "names no model" if model is None else f"names the model {model[:256]!r}"
        raise RejectedRequestError(403, f"the request {what}, which its API key may not use", param="model")

    def _stands_for(self, model: str | None) -> str | None:
        try:
            return None if model is None else self._models.resolve(model).name
        except UnknownModelError:
            return None


def _put_in(request: Request, values: dict[str, str | int]) -> None:
    """Let the request's body have these members."""
    if request.layout is not None:
        request.body, request.layout = with_members(request.body, values, request.layout)
        return
    for name, value in values.items():
        request.body = with_member(request.body, name, value)


def _with_key(grant: Grant, placement_request: PlacementRequest) -> PlacementRequest:
    """The request under its key, and under its tenant's salt: nothing of it in common with anybody else's."""
    salt = grant.salt(placement_request.prompt.salt)
    prompt = placement_request.prompt if salt is None else placement_request.prompt.salted(salt)
    named = placement_request.model, placement_request.group, placement_request.session_key
    is_plain = placement_request.is_plain
    return PlacementRequest(
        *named, prompt, tenant=salt or "", key=grant.name, key_groups=grant.groups, is_plain=is_plain
    )


def models_answer(config: RouterConfig, grant: Grant | None) -> LocalResponse | None:
    """The models that one may use; None if a pool takes any: then its replicas know them and we do not."""
    if any(not pool.models for pool in config.pools):
        return None
    cards = [card for pool in config.pools for card in _cards(pool) if _may_use(grant, card)]
    return LocalResponse(200, msgspec.json.encode({"object": "list", "data": cards}))


def _cards(pool: PoolConfig) -> Iterator[dict[str, Any]]:
    """In vLLM's words: an alias has another model as its root, an adapter the model that it adapts as its parent."""
    for model in pool.models:
        yield _card(model, model)
    for alias in pool.aliases:
        yield _card(alias.name, alias.model)
    for adapter in pool.adapters:
        yield _card(adapter.name, adapter.name, adapter.model)


def _card(name: str, root: str, parent: str | None = None) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "warmpath", "root": root, "parent": parent}


def _may_use(grant: Grant | None, card: dict[str, Any]) -> bool:
    """A key for a model is good for its aliases too."""
    return grant is None or grant.models is None or card["id"] in grant.models or card["root"] in grant.models


PROMPT_PATHS: Final = {path.encode(): path for path in BODIES}
NO_PROMPT: Final = CanonicalPrompt(b"", 0, 0, [])
RETRY_AFTER_S: Final = 1  # seconds a client is asked to wait when the router cannot serve it now


def admitted_request(request: Request, admission: Admission, reading: BodyReading | None = None) -> PlacementRequest:
    """What there is to place of a client's request; RejectedRequestError or RoutingError for what may not be sent.

    ``reading``: of its body, where that was read before.
    """
    head = request.head
    prompt_path = PROMPT_PATHS.get(head.path)
    if prompt_path is None:
        placement_request = PlacementRequest(None, head.task_group, head.session_id, NO_PROMPT, is_plain=True)
        return placement_request if admission.is_idle else admission.admitted(request, None, placement_request)
    if reading is None:
        reading = read_body(prompt_path, request.body)
    parsed = reading.body
    request.omits_usage, request.layout = reading.omits_usage, reading.layout
    named = parsed.model, head.task_group, head.session_id or reading.session_key
    placement_request = PlacementRequest(*named, reading.prompt, is_plain=reading.is_plain)
    if admission.is_idle and not may_exceed_defaults(parsed):
        return placement_request
    return admission.admitted(request, parsed, placement_request)


def refusal_of(error: RoutingError) -> RejectedRequestError:
    """The client's fault is a 400 or 404; no replica is a 503 that may be tried again."""
    if isinstance(error, BodyError):
        return RejectedRequestError(400, str(error), param=error.param)
    if isinstance(error, UnknownModelError):
        return RejectedRequestError(404, str(error), param="model", kind="NotFoundError")
    if isinstance(error, NoReplicaError):
        return RejectedRequestError(503, str(error), retry_after_s=RETRY_AFTER_S)
    return RejectedRequestError(500, str(error))
