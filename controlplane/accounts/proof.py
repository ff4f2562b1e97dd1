"""How long ago somebody last proved who they are. What cannot be undone asks for a fresh proof."""

from __future__ import annotations

import time

from django.http import HttpRequest

PROOF_S = 900  # seconds that a proof is fresh
_KEY = "proved_at"


def note_proof(request: HttpRequest) -> None:
    """They just did: by signing in, or again by password, by code, or at the identity provider."""
    request.session[_KEY] = time.time()


def is_fresh(request: HttpRequest) -> bool:
    """Whether the last proof of this session is fresh."""
    return bool(0 <= time.time() - request.session.get(_KEY, 0) < PROOF_S)
