"""Bringing one router to a snapshot."""

from __future__ import annotations

import httpx
from django.utils import timezone

from controlplane.models import ConfigSnapshot, Router

from .client import Ack, Nack, Running, Unreachable, push_document, read_running
from .signing import wants_renewal


def deliver(
    http: httpx.Client, router: Router, desired: ConfigSnapshot, document: bytes, token: str
) -> Ack | Nack | Unreachable:
    """Push, unless the router already runs it; touches no database, so it may run in any thread.

    A router that is only silent, and ran the right thing when last heard of, is asked first: most often that is
    still so, and the answer is its sign of life. One whose signature wants to be renewed gets the document again.
    """
    if router.runs(desired.number, desired.sha256) and not wants_renewal(router, timezone.now()):
        match read_running(http, router.admin_url, token=token):
            case Running(desired.number, desired.sha256, signature):
                return Ack(desired.number, desired.sha256, signature)
            case Unreachable() as away:
                return away
    return push_document(http, router.admin_url, document, token=token)
