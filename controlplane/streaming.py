"""Answers that come piece by piece: exports, and files.

Theory of operation. Views write them as plain iterators. An ASGI server would have Django gather such an answer as a
whole before its first byte leaves, in memory that nobody bounds, and warn of it. So it is handed over as an
asynchronous iterator, of which each step takes one piece out of the view's in the thread that the request has, with
the database connection that the view began with.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import cast

from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, StreamingHttpResponse
from django.http.response import HttpResponseBase

PIECE_BYTES = 65_536  # as many at once are worth the way through a thread


class StreamingMiddleware:
    """Have an ASGI server send what a view yields as it comes. Outermost: what is inside may wrap the iterator."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        """Hand a plain stream over as an asynchronous one."""
        response = self.get_response(request)
        if isinstance(request, ASGIRequest) and isinstance(response, StreamingHttpResponse) and not response.is_async:
            response.streaming_content = pieces(cast("Iterator[bytes]", response.streaming_content))
        return response


async def pieces(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    """The same bytes, at least ``PIECE_BYTES`` at once but for the last."""
    take = sync_to_async(_piece)
    while piece := await take(parts):
        yield piece


def _piece(parts: Iterator[bytes]) -> bytes:
    taken, size = [], 0
    for part in parts:
        taken.append(part)
        size += len(part)
        if size >= PIECE_BYTES:
            break
    return b"".join(taken)
