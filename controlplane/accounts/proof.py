"""How long ago somebody last proved who they are. What cannot be undone asks for a fresh proof."""

from __future__ import annotations

import time

from django.http import HttpRequest

PROOF_S = 900  # seconds that a proof is fresh
CLOCKS_APART_S = 60  # that a provider's clock may be ahead of ours
_KEY = "proved_at"


def note_proof(request: HttpRequest, *, at: float | None = None) -> None:
    """They just did, or did ``at`` a moment that the identity provider named: by password, by code, or there."""
    request.session[_KEY] = time.time() if at is None else at


def is_fresh(request: HttpRequest) -> bool:
    """Whether the last proof of this session is fresh."""
    return bool(-CLOCKS_APART_S <= time.time() - request.session.get(_KEY, 0) < PROOF_S)
