"""One request and its answer: what holds at every address, whatever it is about.

Theory of operation. A request that may change something runs in one transaction. In it an ``Idempotency-Key`` is
looked up, the version that the client looked at is compared under the row's lock, one service is called, and the
answer is kept; they are committed together or not at all, and only then is anybody woken. With ``?dry_run=true`` the
very same happens and the transaction is rolled back.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from django.conf import settings
from django.contrib.auth.models import User
from django.db import connection, transaction
from django.http import HttpRequest, HttpResponseBase
from rest_framework.exceptions import AuthenticationFailed, ParseError, PermissionDenied, Throttled, ValidationError
from rest_framework.permissions import SAFE_METHODS
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.api import deprecations
from controlplane.api.exceptions import LengthRequired, TooLarge
from controlplane.api.preconditions import differences
from controlplane.models import ApiToken, IdempotencyRecord
from controlplane.request_origin import client_address
from controlplane.services import idempotency, rates

MAX_BODY_BYTES = 1_048_576
_REPEATED = ("ETag", "Location", "Cache-Control")  # headers that a repeated answer has too
_KEY = re.compile(r"[!-~]{1,255}")
_CHOICES = {"true": True, "1": True, "": True, "false": False, "0": False}


class Exchange(APIView):
    """A view whose changes are made once, in one transaction, or only rehearsed."""

    max_body_bytes: ClassVar[int] = MAX_BODY_BYTES
    shown_once: ClassVar[tuple[str, ...]] = ()  # fields of an answer that hold a new secret
    allowance: rates.Allowance | None = None  # of whoever asks; None where nobody counts

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        """DRF's own, with ``answer`` around the method that does the work."""
        self.args, self.kwargs = args, kwargs
        self.headers = self.default_response_headers
        self.request = asked = self.initialize_request(request, *args, **kwargs)
        try:
            check_size(asked, self.max_body_bytes)
            self.initial(asked, *args, **kwargs)
            answer = self.answer(asked)
        except Exception as error:  # noqa: BLE001 - every exception becomes an answer
            answer = self.handle_exception(error)
        self.response = self.finalize_response(asked, answer, *args, **kwargs)
        return self.response

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Find out who asks, count it, and go on as DRF does; Throttled for one request too many in a minute.

        PermissionDenied, before anything is looked at, for plain HTTP where pages are sent on to HTTPS.
        """
        if settings.SECURE_SSL_REDIRECT and not request.is_secure():
            raise PermissionDenied("This is for HTTPS alone. Revoke the token that was sent: others may have read it.")
        try:
            self.perform_authentication(request)
        except AuthenticationFailed:
            self._count_stranger(request)
            raise
        if who := owner_of(request):
            self._count(who, settings.API_RATE)
        elif request.auth is None:
            self._count_stranger(request)
        super().initial(request, *args, **kwargs)

    def finalize_response(self, request: Request, response: Response, *args: Any, **kwargs: Any) -> Response:
        """DRF's own, and what is left of the minute's requests."""
        answer: Response = super().finalize_response(request, response, *args, **kwargs)
        if self.allowance:
            answer["RateLimit-Limit"] = str(self.allowance.limit)
            answer["RateLimit-Remaining"] = str(max(self.allowance.remaining, 0))
            answer["RateLimit-Reset"] = str(self.allowance.reset_s)
        for name, value in _deprecation(request).items():
            answer.setdefault(name, value)
        return answer

    def _count_stranger(self, request: Request) -> None:
        address = client_address(request._request)  # noqa: SLF001 - the request as the server gave it
        self._count(f"address:{_neighbourhood(address)}", settings.API_RATE_UNAUTHENTICATED)

    def _count(self, who: str, limit: int) -> None:
        self.allowance = rates.counter().charge(who, limit)
        if self.allowance and self.allowance.remaining < 0:
            raise Throttled(self.allowance.reset_s, f"More than {limit} requests in this minute.")

    def answer(self, request: Request) -> Response:
        """Read; or change, in a transaction; or rehearse a change."""
        if request.method in SAFE_METHODS:
            return self.perform(request)
        if is_rehearsal(request):
            return self.rehearse(request)
        with transaction.atomic():
            return self.perform_once(request)

    def perform_once(self, request: Request) -> Response:
        """Do it, unless it was done before under the same key."""
        asked = _may_be_repeated(request)
        if asked is None:
            return self.perform(request)
        if kept := idempotency.find_record(asked):
            return _repeated(kept)
        answer = self.perform(request)
        headers = {name: answer[name] for name in _REPEATED if answer.has_header(name)}
        body = b"" if answer.data is None else JSONRenderer().render(answer.data)
        idempotency.save_record(asked, status=answer.status_code, headers=headers, body=body)
        return answer

    def perform(self, request: Request) -> Response:
        """Let the method do its work."""
        method = (request.method or "").lower()
        known = method in self.http_method_names
        handler = getattr(self, method, self.http_method_not_allowed) if known else self.http_method_not_allowed
        answer: Response = handler(request, *self.args, **self.kwargs)
        return answer

    def rehearse(self, request: Request) -> Response:
        """Do it, say what came of it, and undo it."""
        with idempotency.recorded_changes() as made, transaction.atomic():
            before = self.present()
            would_be = self.perform(request)
            connection.check_constraints()
            after = self.present() or self.shown(would_be)
            plan = {
                "dry_run": True,
                "status": would_be.status_code,
                "result": self._without_secrets(would_be.data),
                "changes": differences(before, after),
                "effect": _effect(made),
            }
            transaction.set_rollback(True)
        return Response(plan, headers={"Dry-Run": "true"})

    def present(self) -> Mapping[str, Any] | None:
        """The object that the address names, as it is shown now; None where it names none or that is gone."""
        return None

    def shown(self, answer: Response) -> Mapping[str, Any] | None:  # noqa: ARG002 - doors read it
        """The object that an answer shows; None where it shows something else."""
        return None

    def _without_secrets(self, data: Any) -> Any:
        """A secret that will never be is not shown."""
        if not isinstance(data, dict):
            return data
        return {name: None if name in self.shown_once else value for name, value in data.items()}


def check_size(request: Request, most: int) -> None:
    """TooLarge, or LengthRequired for a body that does not say how long it is."""
    if request.headers.get("Transfer-Encoding"):
        raise LengthRequired
    length = request.headers.get("Content-Length") or "0"
    if not length.isdigit() or int(length) > most:
        raise TooLarge(most)


def is_rehearsal(request: Request) -> bool:
    """Whether ``?dry_run=`` asks for one."""
    return switch(request, "dry_run")


def switch(request: Request, name: str) -> bool:
    """Whether the query turns something on; a ValidationError for what is neither true nor false."""
    given = request.query_params.get(name)
    if given is None:
        return False
    if given.lower() not in _CHOICES:
        raise ValidationError({name: ["Expected true or false. Nothing was changed."]})
    return _CHOICES[given.lower()]


def owner_of(request: Request) -> str | None:
    """Whose requests these are: a token's, or a person's with a session; None for a router."""
    if isinstance(request.auth, ApiToken):
        return f"token:{request.auth.pk}"
    return f"user:{request.user.pk}" if isinstance(request.user, User) else None


def _deprecation(request: Request) -> dict[str, str]:
    """What tells the caller that this will go."""
    match = request.resolver_match
    if not deprecations.DEPRECATIONS or match is None:
        return {}
    body = getattr(request, "_full_data", None)  # what was read already: nothing is read for this
    said = {*request.query_params, *(body if isinstance(body, dict) else ())}
    named: Mapping[str, Any] = getattr(match, "captured_kwargs", None) or {}  # which the stubs do not know
    return deprecations.told(request.method or "", request.path, len(named), said)


def _neighbourhood(address: str) -> str:
    """Whose limit an address counts against: its own, or for IPv6 that of its /64, which is one customer's."""
    try:
        known = ipaddress.ip_address(address)
    except ValueError:
        return "unknown"
    return address if known.version == 4 else str(ipaddress.ip_network((address, 64), strict=False))


def _may_be_repeated(request: Request) -> idempotency.IdempotentRequest | None:
    """What identifies a POST with a key; None for any other request. ParseError for a key of no use."""
    key, owner = request.headers.get("Idempotency-Key"), owner_of(request)
    if key is None or owner is None or request.method != "POST":
        return None
    key = key.strip().strip('"')
    if not _KEY.fullmatch(key):
        raise ParseError("Idempotency-Key: expected 1 to 255 visible ASCII characters.")
    said = json.dumps([request.get_full_path(), request.data], sort_keys=True, default=str)
    return idempotency.IdempotentRequest(owner, key, said)


def _repeated(kept: IdempotencyRecord) -> Response:
    body = idempotency.body_of(kept)
    headers = {**kept.headers, "Idempotency-Replayed": "true"}
    return Response(json.loads(body) if body else None, status=kept.status, headers=headers)


def _effect(made: list[Any]) -> dict[str, Any]:
    """What routers and the timeline would see. ``configuration`` is null where routers would notice nothing."""
    numbered = idempotency.configurations(made)
    configuration = None
    if numbered:
        before, after = numbered
        configuration = {
            "before": before.number if before else None,
            "after": after.number,
            "changes": differences(before.document if before else {}, after.document),
        }
    events = [{"kind": row.kind, "summary": row.summary} for row in idempotency.events(made)]
    return {"configuration": configuration, "events": events}
