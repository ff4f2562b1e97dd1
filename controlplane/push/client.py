"""Talking to a router's admin port. Every outcome is a value: a router that is away is nothing unusual.

Asking a router where it would place a request. What is asked holds a prompt: it is passed on, and kept nowhere.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import httpx
import msgspec
from django.conf import settings

from controlplane.egress import AnswerTooLargeError, fetch, fleet_rules, guarded_client
from controlplane.errors import InvalidError, RouterAwayError
from controlplane.models import Router

DEADLINE_S = 5.0  # a whole push or look
LAST_MOMENT = 253_402_300_799  # of the year 9999, which is the last that a date can be of
MAX_ANSWER_BYTES = 8 << 20  # GET /admin/config answers the configuration


class Signature(msgspec.Struct, frozen=True):
    """What a router says of the signature of what it runs."""

    state: Annotated[str, msgspec.Meta(max_length=20)]
    key: Annotated[str, msgspec.Meta(max_length=16)] | None = None
    expires_at: Annotated[int, msgspec.Meta(ge=0, le=LAST_MOMENT)] | None = None  # seconds since 1970


@dataclass(frozen=True, slots=True)
class Ack:
    """The router runs this configuration."""

    number: int
    sha256: str
    signature: Signature | None = None


@dataclass(frozen=True, slots=True)
class Nack:
    """The router refused a configuration, and runs on with ``running_number`` (None: with nothing)."""

    path: str
    reason: str
    running_number: int | None


@dataclass(frozen=True, slots=True)
class Unreachable:
    """No answer, none that a router would give, or one that the document may come again."""

    reason: str


class Running(msgspec.Struct, frozen=True):
    """What ``GET /admin/config`` says of itself."""

    revision: int | None = None
    sha256: str | None = None
    signature: Signature | None = None


class _Acked(msgspec.Struct, frozen=True):
    revision: Annotated[int, msgspec.Meta(ge=1)]
    sha256: str
    signature: Signature | None = None


class _Nacked(msgspec.Struct, frozen=True):
    reason: str
    path: str = "$"
    running_revision: int | None = None


class _NotNow(msgspec.Struct, frozen=True):
    reason: str


def push_document(http: httpx.Client, admin_url: str, document: bytes, *, token: str) -> Ack | Nack | Unreachable:
    """Send a snapshot's document, and read the acknowledgement or the refusal."""
    status, body = _asked(http, "PUT", admin_url, token, content=document)
    if status == 200 and (acked := _read(body, _Acked)):
        return Ack(acked.revision, acked.sha256, acked.signature)
    if status in {409, 422} and (nacked := _read(body, _Nacked)):
        return Nack(nacked.path, nacked.reason, nacked.running_revision)
    if status == 503 and (later := _read(body, _NotNow)):
        return Unreachable(f"it could not look at it: {later.reason}")
    return _unexpected(status, body)


def read_running(http: httpx.Client, admin_url: str, *, token: str) -> Running | Unreachable:
    """Ask a router what it runs."""
    status, body = _asked(http, "GET", admin_url, token)
    if status == 200 and (running := _read(body, Running)):
        return running
    return _unexpected(status, body)


def _asked(
    http: httpx.Client, method: str, admin_url: str, token: str, content: bytes | None = None
) -> tuple[int | None, bytes]:
    """Status and body; None and the reason where no answer came."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    url = f"{admin_url.rstrip('/')}/admin/config"
    try:
        answer = fetch(
            http, method, url, deadline_s=DEADLINE_S, max_bytes=MAX_ANSWER_BYTES, content=content, headers=headers
        )
    except httpx.HTTPError as error:
        return None, f"{type(error).__name__}: {error}".encode()
    return answer.status, answer.body


def _unexpected(status: int | None, body: bytes) -> Unreachable:
    if status is None:
        return Unreachable(body.decode())
    if status in {401, 403}:
        return Unreachable(f"it answered {status}: its WARMPATH_ROUTER_ADMIN_TOKEN is not ours")
    return Unreachable(f"it answered {status} with something that no router says")


T = TypeVar("T", bound=msgspec.Struct)


def _read(body: bytes, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError):
        return None


EXPLAIN_DEADLINE_S = 5.0
MAX_EXPLANATION_BYTES = 4 << 20  # a candidate takes some 300 bytes


def ask_decision(router: Router, asked: dict[str, Any]) -> dict[str, Any]:
    """The decision that a request would get now; InvalidError for one that the router refuses, RouterAwayError."""
    headers = {"Authorization": f"Bearer {settings.ROUTER_ADMIN_TOKEN}", "Content-Type": "application/json"}
    url, content = f"{router.admin_url.rstrip('/')}/admin/explain", json.dumps(asked).encode()
    try:
        with guarded_client(fleet_rules()) as http:
            answer = fetch(
                http,
                "POST",
                url,
                deadline_s=EXPLAIN_DEADLINE_S,
                max_bytes=MAX_EXPLANATION_BYTES,
                content=content,
                headers=headers,
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
