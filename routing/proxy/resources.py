"""Paths that name a model or a stored response, and which replica stores a response.

A response of ``/v1/responses`` is stored in the memory of the replica that generated it. A request that names it, by
path or as ``previous_response_id``, goes to that replica while it is eligible. Ids that this process has not
seen, such as those of another worker or from before a restart, are looked for at one replica after the other, within
the retry budget; but not for keys that are limited to a tenant or to some models, because the response may be
another's.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from routing.http.response import RejectedRequestError
from routing.types import TargetId

if TYPE_CHECKING:
    from routing.http.auth import Grant

MAX_RESPONSES: Final = 32_768  # ids that are kept, the latest: 10 MiB
_SEARCHED_BYTES: Final = 4096  # the id is one of the first members of a response

_METHODS_OF_RESPONSE: Final = (b"GET", b"DELETE")
_METHODS_OF_CANCEL: Final = (b"POST",)
_METHODS_OF_MODEL: Final = (b"GET", b"HEAD")
_response_path: Final = re.compile(rb"/v1/responses/([A-Za-z0-9_-]{1,128})(/cancel)?").fullmatch
_SEGMENT: Final = rb"[A-Za-z0-9_][A-Za-z0-9._:@+-]*"  # begins with no dot: no segment is . or ..
_model_path: Final = re.compile(
    rb"/v1/models/(?=.{1,512}$)(" + _SEGMENT + rb"(?:(?:/|%2[Ff])" + _SEGMENT + rb")*)"
).fullmatch
_escaped_slash: Final = re.compile(r"%2[Ff]").sub
_response_id: Final = re.compile(rb'"id" ?: ?"([A-Za-z0-9_-]{1,128})"').search


def methods_of(path: bytes) -> tuple[bytes, ...] | None:
    """The methods of a path that names a model or a stored response; None for any other path."""
    response = _response_path(path)
    if response is not None:
        return _METHODS_OF_CANCEL if response[2] else _METHODS_OF_RESPONSE
    return None if _model_path(path) is None else _METHODS_OF_MODEL


def response_named_by(path: bytes) -> str | None:
    """The id of the stored response that a path names."""
    match = _response_path(path)
    return None if match is None else match[1].decode()


def model_named_by(path: bytes) -> str | None:
    """The model that a path names."""
    match = _model_path(path)
    return None if match is None else _escaped_slash("/", match[1].decode())


class StoredResponse:
    """The replica that stores a response, and the model and tenant of its request."""

    __slots__ = ("model", "target", "tenant")

    def __init__(self, target: TargetId, model: str | None, tenant: str | None) -> None:
        self.target = target
        self.model = model  # as its request named it
        self.tenant = tenant


class StoredResponses:
    """The latest stored responses, by id."""

    def __init__(self, max_responses: int = MAX_RESPONSES) -> None:
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._max_responses = max_responses

    def __len__(self) -> int:
        return len(self._responses)

    def add(self, data: bytes, response: StoredResponse) -> None:
        """Keep the id in the first bytes of a response, plain or streamed; nothing if there is none."""
        match = _response_id(data, 0, _SEARCHED_BYTES)
        if match is not None:
            self.remember(match[1].decode(), response)

    def remember(self, response_id: str, response: StoredResponse) -> None:
        """Keep where the response with this id is stored."""
        self._responses[response_id] = response
        if len(self._responses) > self._max_responses:
            self._responses.popitem(last=False)

    def find(self, response_id: str, grant: Grant | None) -> StoredResponse | None:
        """Where a response is stored; None if unknown. RejectedRequestError if it is another tenant's."""
        stored = self._responses.get(response_id)
        if stored is not None and stored.tenant != (None if grant is None else grant.tenant):
            raise not_found(response_id)
        return stored


def not_found(response_id: str) -> RejectedRequestError:
    """The error for an unknown id, with vLLM's message."""
    message = f"Response with id '{response_id[:128]}' not found."
    return RejectedRequestError(404, message, param="response_id", kind="invalid_request_error")
