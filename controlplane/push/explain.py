"""Asking a router where it would place a request. What is asked holds a prompt: it is passed on, and kept nowhere."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
from django.conf import settings

from controlplane.egress import AnswerTooLargeError, fetch, fleet_rules, guarded_client
from controlplane.errors import InvalidError, RouterAwayError
from controlplane.models import Router

DEADLINE_S = 5.0
MAX_ANSWER_BYTES = 4 << 20  # a candidate takes some 300 bytes


def ask_decision(router: Router, asked: dict[str, Any]) -> dict[str, Any]:
    """The decision that a request would get now; InvalidError for one that the router refuses, RouterAwayError."""
    headers = {"Authorization": f"Bearer {settings.ROUTER_ADMIN_TOKEN}", "Content-Type": "application/json"}
    url, content = f"{router.admin_url.rstrip('/')}/admin/explain", json.dumps(asked).encode()
    try:
        with guarded_client(fleet_rules()) as http:
            answer = fetch(
                http, "POST", url, deadline_s=DEADLINE_S, max_bytes=MAX_ANSWER_BYTES, content=content, headers=headers
            )
        told = msgspec.json.decode(answer.body)
    except (httpx.HTTPError, AnswerTooLargeError, msgspec.DecodeError) as error:
        raise RouterAwayError(router.name, f"it gave no answer ({type(error).__name__})") from None
    if answer.status == 200 and isinstance(told, dict):
        return told
    reason = str(told.get("error", "")) if isinstance(told, dict) else ""
    if answer.status in {400, 404, 413, 422} and reason:
        raise InvalidError("$.body", reason)
    raise RouterAwayError(router.name, reason or f"it answered {answer.status}")
