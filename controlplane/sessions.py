"""Sessions: sealed in the database, and over when nobody asked for anything."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from django.http import HttpRequest, HttpResponse

from controlplane.sealing import seal, unseal

Handler = Callable[[HttpRequest], HttpResponse]
NOTED_EVERY_S = 300  # seconds between writes of a session that is in use
_KEY = "seen_at"


class SealedSerializer:
    """A session as it is kept: it may hold a secret that is about to be confirmed, so a copy of the database must not
    tell it.
    """

    def dumps(self, session: dict[str, Any]) -> bytes:
        """Seal."""
        return seal(json.dumps(session, separators=(",", ":")).encode("latin-1"))

    def loads(self, sealed: bytes) -> Any:
        """Unseal; a session that cannot be read is taken for an empty one by Django."""
        return json.loads(unseal(sealed))


class IdleSessionMiddleware:
    """A session ends ``SESSION_COOKIE_AGE`` after the last request that a person made: pages that refresh themselves
    keep nobody signed in.
    """

    def __init__(self, get_response: Handler) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Note, now and then, that somebody is there."""
        response = self.get_response(request)
        session = request.session
        is_theirs = session.accessed and "HX-Request" not in request.headers and "_auth_user_id" in session
        if is_theirs and time.time() - session.get(_KEY, 0) >= NOTED_EVERY_S:
            note_presence(request)
        return response


def note_presence(request: HttpRequest) -> None:
    """Somebody is there: the session goes on."""
    request.session[_KEY] = int(time.time())
