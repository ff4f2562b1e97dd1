"""The methods of all paths, paths that name a model or a stored response, and the ids of stored responses.

A response of ``/v1/responses`` is stored in the memory of the replica that generated it, under the ``request_id`` of
its request, which the router sets. The id therefore states, without any stored state, the replica, the model, and by a
keyed mark the caller. A request that names a response, by path or as ``previous_response_id``, goes to that replica
while it is eligible. Any router with the same ``hash_secret`` can read the id, also after a restart. Ids of other
callers, and ids without a valid mark, do not exist.
"""

from __future__ import annotations

import hmac
import re
import secrets
from typing import TYPE_CHECKING, Final

from xxhash import xxh3_64_hexdigest

from routing.balancing.replicas import targets_of
from routing.http.response import RejectedRequestError
from routing.schema import RouterConfig, derived_key
from routing.types import TargetId

if TYPE_CHECKING:
    from routing.http.auth import Grant
    from routing.http.request import RequestHead
    from routing.schema import PoolConfig

NONCE_BYTES: Final = 12
MARK_HEX: Final = 32  # digits of a mark: 128 bits

HEALTH: Final = b"/health"
MODELS: Final = b"/v1/models"
POST_ONLY: Final = (b"POST",)
_GET: Final = (b"GET", b"HEAD")
_GET_OR_DELETE: Final = (b"GET", b"DELETE")
_response_path: Final = re.compile(rb"/v1/responses/([A-Za-z0-9_-]{1,128})(/cancel)?").fullmatch
_SEGMENT: Final = rb"[A-Za-z0-9_][A-Za-z0-9._:@+-]*"  # begins with no dot: no segment is . or ..
_model_path: Final = re.compile(
    rb"/v1/models/(?=.{1,512}$)(" + _SEGMENT + rb"(?:(?:/|%2[Ff])" + _SEGMENT + rb")*)"
).fullmatch
_escaped_slash: Final = re.compile(r"%2[Ff]").sub
_own_id: Final = re.compile(
    rf"resp_((?P<nonce>[0-9a-f]{{{2 * NONCE_BYTES}}})(?P<target>[0-9a-f]{{16}})(?P<model>[0-9a-f]{{16}}))"
    rf"(?P<mark>[0-9a-f]{{{MARK_HEX}}})"
).fullmatch


def methods_of(head: RequestHead) -> tuple[bytes, ...] | None:
    """The methods of a request's path; None if there is no such path."""
    if head.endpoint is not None:
        return POST_ONLY
    path = head.path
    if path in {HEALTH, MODELS} or _model_path(path) is not None:
        return _GET
    response = _response_path(path)
    if response is None:
        return None
    return POST_ONLY if response[2] else _GET_OR_DELETE


def response_named_by(path: bytes) -> str | None:
    """The id of the stored response that a path names."""
    match = _response_path(path)
    return None if match is None else match[1].decode()


def model_named_by(path: bytes) -> str | None:
    """The model that a path names."""
    match = _model_path(path)
    return None if match is None else _escaped_slash("/", match[1].decode())


class ResponseIds:
    """Makes and reads the ids of stored responses, under one configuration."""

    def __init__(self, config: RouterConfig) -> None:
        self._secret = derived_key(config.hash_secret, "ids of stored responses")
        self._targets = {
            xxh3_64_hexdigest(target.id): (target.id, pool)
            for pool in config.pools
            for replica in pool.replicas
            for target in targets_of(replica)
        }

    def new_id(self, target: TargetId, model: str | None, grant: Grant | None) -> str:
        """The id of a response that a replica will store. ``model``: as its request names it."""
        text = secrets.token_hex(NONCE_BYTES) + xxh3_64_hexdigest(target) + xxh3_64_hexdigest(model or "")
        return f"resp_{text}{self._mark(text, grant)}"

    def find(self, response_id: str, grant: Grant | None) -> tuple[TargetId, str | None]:
        """Where a response is stored, and its model; RejectedRequestError if the caller has none with this id."""
        match = _own_id(response_id)
        if match is None or not hmac.compare_digest(self._mark(match[1], grant), match["mark"]):
            raise not_found(response_id)
        target, pool = self._targets.get(match["target"], (None, None))
        if target is None or pool is None:
            raise not_found(response_id)
        return target, _model_of(match["model"], pool, grant, response_id)

    def _mark(self, text: str, grant: Grant | None) -> str:
        """Binds an id to its caller: the tenant of the API key, else the key; without keys there is one caller."""
        caller = "" if grant is None else f"key {grant.name}" if grant.tenant is None else f"tenant {grant.tenant}"
        return hmac.digest(self._secret, f"{text} {caller}".encode(), "sha256").hex()[:MARK_HEX]


def _model_of(digest: str, pool: PoolConfig, grant: Grant | None, response_id: str) -> str | None:
    """The model with this digest, among those that the pool serves and the key permits; None: the default."""
    names = [name for name, _ in pool.names]
    if not pool.models and grant is not None:
        names += grant.models or ()
    model = next((name for name in names if xxh3_64_hexdigest(name) == digest), None)
    is_open = not pool.models and (grant is None or grant.models is None)  # any other name is this pool's too
    if model is None and not is_open and digest != xxh3_64_hexdigest(""):
        raise not_found(response_id)
    return model


def not_found(response_id: str) -> RejectedRequestError:
    """The error for an unknown id, with vLLM's message."""
    message = f"Response with id '{response_id[:128]}' not found."
    return RejectedRequestError(404, message, param="response_id", kind="invalid_request_error")
