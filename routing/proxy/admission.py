"""What a request that was let in may be: its key's models and task groups, the caps of its pool, its tenant's salt.

It may leave with another body: with its tenant's ``cache_salt``, or with a length where a cap asks for one. Every other
body goes on byte by byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from routing.core.caps import check_caps, length_to_add
from routing.core.matching import Matcher
from routing.core.request import ParsedBody
from routing.core.splice import with_member
from routing.proxy.errors import RefusalError
from routing.schema import Caps, RouterConfig
from routing.strategies.placement import PlacementRequest

if TYPE_CHECKING:
    from routing.proxy.access import Grant
    from routing.proxy.request import Request

_DEFAULT = Caps()


class Admission:
    """One configuration's rules for requests. ``is_idle``: they concern nothing but ``n`` and ``best_of``."""

    def __init__(self, config: RouterConfig) -> None:
        self._matcher = Matcher(config)
        self._caps = {
            (pool.name, group.name if group else ""): group.caps if group and group.caps else pool.caps
            for pool in config.pools
            for group in (None, *pool.groups)
        }
        self.is_idle = config.access is None and all(caps == _DEFAULT for caps in self._caps.values())

    def admitted(self, request: Request, parsed: ParsedBody | None, wanted: PlacementRequest) -> PlacementRequest:
        """The request as it is placed, its body as it is sent; RefusalError or BodyError for what may not be.

        ``parsed`` is None where there is no prompt.
        """
        grant = request.grant
        if grant is not None:
            wanted = self._in_scope(grant, wanted, has_prompt=parsed is not None)
        if parsed is None:
            return wanted
        pool = self._matcher.pool(wanted.model)
        group = self._matcher.group(pool, wanted.group)
        caps = self._caps[pool.name, group.name if group else ""]
        check_caps(parsed, caps)
        if caps.max_tokens is not None and (length := length_to_add(parsed, caps.max_tokens)):
            request.body = with_member(request.body, *length)
        if grant is not None:
            wanted = _salted(grant, request, wanted)
        return wanted

    def _in_scope(self, grant: Grant, wanted: PlacementRequest, *, has_prompt: bool) -> PlacementRequest:
        if grant.models is not None and has_prompt and wanted.model not in grant.models:
            what = "names no model" if wanted.model is None else f"names the model {wanted.model[:256]!r}"
            raise RefusalError(403, f"the request {what}, which its API key may not use", param="model")
        if grant.groups is None:
            return wanted
        pool = self._matcher.pool(wanted.model)
        names = (wanted.group,) if wanted.group else grant.groups
        group = next((name for name in names if name in grant.groups and self._matcher.group(pool, name)), None)
        if group is None:
            raise RefusalError(403, "the request is of no task group that its API key may use")
        return replace(wanted, group=group)


def _salted(grant: Grant, request: Request, wanted: PlacementRequest) -> PlacementRequest:
    """The request under its tenant's salt: no cached block and no placement key in common with anybody else's."""
    salt = grant.salt(wanted.prompt.salt)
    if salt is None:
        return wanted
    request.body = with_member(request.body, "cache_salt", salt)
    session = None if wanted.session_key is None else f"{salt} {wanted.session_key}"
    return replace(wanted, prompt=replace(wanted.prompt, salt=salt), session_key=session)
