"""What a request that was let in may be: its key's models and task groups, the caps of its pool, its tenant's salt.

It may leave with another body: with its tenant's ``cache_salt``, with a length where a cap asks for one, or with the
model's own name in place of an alias. Every other body goes on byte by byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from routing.core.groups.matching import Matcher
from routing.core.limits.caps import check_caps, length_to_add
from routing.core.models import Models
from routing.core.prompt.bodies import ParsedBody
from routing.core.prompt.splice import with_member, with_members
from routing.core.request import PlacementRequest
from routing.core.types import UnknownModelError
from routing.proxy.http.errors import RefusalError
from routing.schema import Caps, RouterConfig

if TYPE_CHECKING:
    from routing.proxy.clients.access import Grant
    from routing.proxy.http.request import Request

_DEFAULT: Final = Caps()


class Admission:
    """One configuration's rules for requests. ``is_idle``: they concern only those that ``may_exceed_defaults``."""

    def __init__(self, config: RouterConfig, models: Models, matcher: Matcher) -> None:
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
        """The request as it is placed, its body as it is sent; RefusalError or BodyError for what may not be.

        ``parsed`` is None where there is no prompt.
        """
        grant = request.grant
        if grant is not None:
            placement_request = _with_key(grant, placement_request)
            if parsed is not None:
                self._check_model(grant, placement_request.model)
        if parsed is None and (grant is None or grant.groups is None):
            return placement_request
        served = self._models.served(placement_request.model)
        group, _ = self._matcher.group(served, placement_request)
        if placement_request.key_groups is not None and group is None:
            raise RefusalError(403, "the request is of no task group that its API key may use")
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
        """A key for some models is good under their aliases too; RefusalError for all others."""
        if grant.models is None or model in grant.models or self._stands_for(model) in grant.models:
            return
        what = "names no model" if model is None else f"names the model {model[:256]!r}"
        raise RefusalError(403, f"the request {what}, which its API key may not use", param="model")

    def _stands_for(self, model: str | None) -> str | None:
        try:
            return None if model is None else self._models.served(model).name
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
