"""Sessions: encrypted in the database, listed for whoever they are of, and over when nobody asked for anything."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from django.conf import settings
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse

from controlplane.encryption import decrypt, encrypt
from controlplane.request_origin import client_address
from controlplane.services.access.people import record_session

Handler = Callable[[HttpRequest], HttpResponse]
NOTED_EVERY_S = 300  # seconds between writes of a session that is in use
_SEEN, _BEGAN, _LISTED = "seen_at", "began_at", "listed_as"


class SealedSerializer:
    """A session as it is kept: it may hold a secret that is about to be confirmed, so a copy of the database must not
    tell it.
    """

    def dumps(self, session: dict[str, Any]) -> bytes:
        """Seal."""
        return encrypt(json.dumps(session, separators=(",", ":")).encode("latin-1"))

    def loads(self, encrypted: bytes) -> Any:
        """Unseal; a session that cannot be read is taken for an empty one by Django."""
        return json.loads(decrypt(encrypted))


class SessionEndMiddleware:
    """A session ends ``SESSION_COOKIE_AGE`` after the last request that a person made (pages that refresh themselves
    keep nobody signed in), and ``SESSION_LONGEST_S`` after they signed in, whatever they did since.
    """

    def __init__(self, get_response: Handler) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Note, now and then, that somebody is there; end what lasted too long."""
        response = self.get_response(request)
        session = request.session
        if not session.accessed or "_auth_user_id" not in session:
            return response
        if time.time() - session.setdefault(_BEGAN, int(time.time())) >= settings.SESSION_LONGEST_S:
            session.flush()
        elif "HX-Request" not in request.headers and time.time() - session.get(_SEEN, 0) >= NOTED_EVERY_S:
            note_presence(request)
        return response


def begin_session(request: HttpRequest, user: User) -> None:
    """Somebody signed in: a new session, to be listed."""
    request.session[_BEGAN] = int(time.time())
    note_presence(request, user)


def note_presence(request: HttpRequest, user: User | None = None) -> None:
    """Somebody is there: the session goes on, and is listed under the key that it has now."""
    who = user or getattr(request, "user", None)
    if not isinstance(who, User):  # shut out meanwhile
        return
    session = request.session
    session[_SEEN] = int(time.time())
    if session.session_key is None:
        session.save()
    former, session[_LISTED] = session.get(_LISTED, ""), session.session_key
    agent = request.headers.get("User-Agent", "")
    record_session(who, session.session_key or "", former=former, address=client_address(request), agent=agent)
