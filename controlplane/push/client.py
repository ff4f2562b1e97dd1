"""Client of a router's admin port, and the signatures of the configurations that it sends.

Theory of operation. A document is signed when it is sent, not when it is frozen. The signature holds for
``WARMPATH_CONFIG_VALID_H`` hours, and the control plane renews it at half that time by sending the same number again
to routers that check signatures. An attacker who recorded a document cannot use it after that time, not even against a
router without a newer configuration. A router whose control plane is down keeps its configuration.

An unreachable router is normal, so functions return it as a value instead of raising.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any, TypeVar

import httpx
import msgspec
from django.conf import settings
from django.db.models import Q
from django.utils import timezone

from controlplane import encryption
from controlplane.egress import ResponseTooLargeError, fetch, fleet_rules, guarded_client
from controlplane.errors import InvalidError, RouterUnavailableError
from controlplane.models import ConfigSnapshot, Router
from routing.schema import CachePurge, PurgeResult, key_id, sign_document

DEADLINE_S = 5.0  # of one whole request
PURGE_DEADLINE_S = 13.0  # more than a router needs, and less than the database's limit on an idle transaction
MAX_TIMESTAMP = 253_402_300_799  # end of the year 9999, the latest that a datetime can hold
MAX_RESPONSE_BYTES = 8 << 20  # GET /admin/config returns the whole configuration
MAX_EXPLANATION_BYTES = 4 << 20  # a candidate takes about 300 bytes
CHECKED_STATES = ("verified", "expired", "unsigned")  # signature states reported by routers that check signatures


class Signature(msgspec.Struct, frozen=True):
    """State of the signature of the configuration that a router runs, as the router reports it."""

    state: Annotated[str, msgspec.Meta(max_length=20)]
    key: Annotated[str, msgspec.Meta(max_length=16)] | None = None
    expires_at: Annotated[int, msgspec.Meta(ge=0, le=MAX_TIMESTAMP)] | None = None  # Unix time


@dataclass(frozen=True, slots=True)
class Ack:
    """The router runs this configuration."""

    number: int
    sha256: str
    signature: Signature | None = None


@dataclass(frozen=True, slots=True)
class Nack:
    """The router rejected a configuration and keeps running ``running_number`` (None: no configuration)."""

    path: str
    reason: str
    running_number: int | None


@dataclass(frozen=True, slots=True)
class Unreachable:
    """No response, an unexpected response, or a temporary failure; the push is retried."""

    reason: str


class RunningConfig(msgspec.Struct, frozen=True):
    """Response of ``GET /admin/config``, as far as it is read."""

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


def deliver(
    http: httpx.Client, router: Router, desired: ConfigSnapshot, document: bytes, token: str
) -> Ack | Nack | Unreachable:
    """Push a snapshot unless the router already runs it. Uses no database, so it may run in any thread.

    A router that is only overdue, and last reported this snapshot, is read first: usually it still runs the snapshot,
    and the response proves that it is up. A router whose signature needs renewal gets the document again.
    """
    if router.runs(desired.number, desired.sha256) and not needs_renewal(router, timezone.now()):
        match read_running(http, router.admin_url, token=token):
            case RunningConfig(desired.number, desired.sha256, signature):
                return Ack(desired.number, desired.sha256, signature)
            case Unreachable() as unreachable:
                return unreachable
    return push_document(http, router.admin_url, document, token=token)


def push_document(http: httpx.Client, admin_url: str, document: bytes, *, token: str) -> Ack | Nack | Unreachable:
    """Send a snapshot's document and read the acknowledgement or rejection."""
    status, body = _request_config(http, "PUT", admin_url, token, content=document)
    if status == 200 and (acked := _decode(body, _Acked)):
        return Ack(acked.revision, acked.sha256, acked.signature)
    if status in {409, 422, 503} and (nacked := _decode(body, _Nacked)):
        if status == 503:
            return Unreachable(f"the router could not process it: {nacked.reason}")
        return Nack(nacked.path, nacked.reason, nacked.running_revision)
    return _unexpected(status, body)


def read_running(http: httpx.Client, admin_url: str, *, token: str) -> RunningConfig | Unreachable:
    """Read which configuration a router runs."""
    status, body = _request_config(http, "GET", admin_url, token)
    if status == 200 and (running := _decode(body, RunningConfig)):
        return running
    return _unexpected(status, body)


def explain_placement(router: Router, request: dict[str, Any]) -> dict[str, Any]:
    """Ask a router for the placement decision that a request would get now.

    The request holds a prompt: it is passed on and never stored. InvalidError if the router rejects the request,
    RouterUnavailableError if the router does not respond.
    """
    url = f"{router.admin_url.rstrip('/')}/admin/explain"
    content, headers = json.dumps(request).encode(), _headers(settings.ROUTER_ADMIN_TOKEN)
    limits: dict[str, Any] = {"deadline_s": DEADLINE_S, "max_bytes": MAX_EXPLANATION_BYTES}
    try:
        with guarded_client(fleet_rules()) as http:
            response = fetch(http, "POST", url, content=content, headers=headers, **limits)
        decision = msgspec.json.decode(response.body)
    except (httpx.HTTPError, ResponseTooLargeError, msgspec.DecodeError) as error:
        raise RouterUnavailableError(router.name, f"no usable response ({type(error).__name__})") from None
    if not isinstance(decision, dict):
        decision = {}
    elif response.status == 200:
        return decision
    reason = str(decision.get("error", ""))
    if response.status in {400, 404, 413, 422} and reason:
        raise InvalidError("$.body", reason)
    raise RouterUnavailableError(router.name, reason or f"unexpected status {response.status}")


def purge_responses(http: httpx.Client, admin_url: str, purge: CachePurge, *, token: str) -> PurgeResult | Unreachable:
    """Make a router remove entries of its response caches. Uses no database, so it may run in any thread."""
    url, content = f"{admin_url.rstrip('/')}/admin/response-cache/purge", msgspec.json.encode(purge)
    limits: dict[str, Any] = {"deadline_s": PURGE_DEADLINE_S, "max_bytes": MAX_RESPONSE_BYTES}
    try:
        response = fetch(http, "POST", url, content=content, headers=_headers(token), **limits)
    except httpx.HTTPError as error:
        return Unreachable(f"no response ({type(error).__name__})")
    if response.status == 404:
        return Unreachable("its release cannot purge response caches")
    if response.status in {200, 503} and (result := _decode(response.body, PurgeResult)):
        return result
    return _unexpected(response.status, response.body)


def _request_config(
    http: httpx.Client, method: str, admin_url: str, token: str, content: bytes | None = None
) -> tuple[int | None, bytes]:
    """(status, body); (None, error text) if there was no response."""
    url = f"{admin_url.rstrip('/')}/admin/config"
    limits: dict[str, Any] = {"deadline_s": DEADLINE_S, "max_bytes": MAX_RESPONSE_BYTES}
    try:
        response = fetch(http, method, url, content=content, headers=_headers(token), **limits)
    except httpx.HTTPError as error:
        return None, f"{type(error).__name__}: {error}".encode()
    return response.status, response.body


def _headers(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}


def _unexpected(status: int | None, body: bytes) -> Unreachable:
    if status is None:
        return Unreachable(body.decode())
    if status in {401, 403}:
        return Unreachable(f"status {status}: the router has another WARMPATH_ROUTER_ADMIN_TOKEN")
    return Unreachable(f"status {status} with an unexpected body")


T = TypeVar("T", bound=msgspec.Struct)


def _decode(body: bytes, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


# --- signatures -------------------------------------------------------------------------------------------


def sign(document: bytes, now: datetime) -> bytes:
    """A snapshot's document with a signature that is valid from ``now`` on."""
    private, issued_at = encryption.private_key(_signing_secret()), int(now.timestamp())
    return sign_document(
        document,
        key=signing_key_id(),
        issued_at=issued_at,
        expires_at=issued_at + int(_validity().total_seconds()),
        sign=private.sign,
    )


def public_key() -> str:
    """Key with which routers check signatures: 64 hex digits."""
    return encryption.public_key(_signing_secret())


def signing_key_id() -> str:
    """Id of the current signing key, as signed documents name it."""
    return key_id(public_key())


def needs_renewal(router: Router, now: datetime) -> bool:
    """Whether a router checks signatures, and its signature has another key or is past half of its validity."""
    if router.signature_state not in CHECKED_STATES:
        return False
    expires_at = router.signature_expires_at
    return router.signature_key != signing_key_id() or expires_at is None or expires_at < now + _validity() / 2


def needing_renewal(now: datetime) -> Q:
    """``needs_renewal`` as a condition on rows."""
    current = Q(signature_key=signing_key_id(), signature_expires_at__gte=now + _validity() / 2)
    return Q(signature_state__in=CHECKED_STATES) & ~current


def _validity() -> timedelta:
    return timedelta(hours=settings.CONFIG_VALID_H)


def _signing_secret() -> str:
    return settings.CONFIG_SIGNING_KEY or settings.SECRET_KEY
