"""Base of every REST view: rate limits, one transaction per change, idempotency keys and dry runs.

Theory of operation. A request that may change something runs in one transaction. Inside it, the ``Idempotency-Key`` is
looked up, ``If-Match`` is compared under the row's lock, one service is called, and the response is stored. All of it
is committed together or not at all, and tasks are woken only after the commit. ``?dry_run=true`` does the same and
rolls the transaction back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import islice
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

from controlplane.api.exceptions import BodyTooLargeError, LengthRequiredError
from controlplane.models import ApiToken
from controlplane.request_origin import client_address, rate_limit_network
from controlplane.services import idempotency, rates

_REPLAYED_HEADERS = ("ETag", "Location", "Cache-Control")
_IDEMPOTENCY_KEY = re.compile(r"[!-~]{1,255}")
_TAG = re.compile(r'(W/)?("[^"]*")')
_ABSENT = object()
MAX_DIFFERENCES = 200  # in one response
_BOOLEANS = {"true": True, "1": True, "": True, "false": False, "0": False}


class TransactionalView(APIView):
    """A view whose changes run once, in one transaction, or as a dry run."""

    max_body_bytes: ClassVar[int] = 1_048_576
    shown_once: ClassVar[tuple[str, ...]] = ()  # fields of a response that hold a new secret
    allowance: rates.Allowance | None = None  # of the client; None where requests are not counted

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        """DRF's ``dispatch``, with ``respond`` in place of the plain call of the method's handler."""
        self.args, self.kwargs = args, kwargs
        self.headers = self.default_response_headers
        self.request = drf_request = self.initialize_request(request, *args, **kwargs)
        try:
            self._check_body_size(drf_request)
            self.initial(drf_request, *args, **kwargs)
            response = self.respond(drf_request)
        except Exception as error:  # noqa: BLE001 - every exception becomes a problem document
            response = self.handle_exception(error)
        self.response = self.finalize_response(drf_request, response, *args, **kwargs)
        return self.response

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Authenticate, count the request against its rate limit, then check permissions. Throttled above the limit.

        PermissionDenied for plain HTTP where pages redirect to HTTPS, because the token was already sent in the clear.
        """
        if self.lacks_https(request):
            raise PermissionDenied("Use HTTPS. Revoke the token that was sent: others may have read it.")
        try:
            self.perform_authentication(request)
        except AuthenticationFailed:
            self._charge_address(request)
            raise
        if owner := _owner_of(request):
            self._charge(owner, settings.API_RATE)
        elif request.auth is None:
            self._charge_address(request)
        super().initial(request, *args, **kwargs)

    def lacks_https(self, request: Request) -> bool:
        """Whether the request is rejected because it came over plain HTTP."""
        return settings.SECURE_SSL_REDIRECT and not request.is_secure()

    def finalize_response(self, request: Request, response: Response, *args: Any, **kwargs: Any) -> Response:
        """DRF's ``finalize_response``, with rate limit headers."""
        final: Response = super().finalize_response(request, response, *args, **kwargs)
        if self.allowance:
            final["RateLimit-Limit"] = str(self.allowance.limit)
            final["RateLimit-Remaining"] = str(max(self.allowance.remaining, 0))
            final["RateLimit-Reset"] = str(self.allowance.reset_s)
        return final

    def respond(self, request: Request) -> Response:
        """Read, change in a transaction, or run a change without committing it."""
        if request.method in SAFE_METHODS:
            return self.perform(request)
        if query_flag(request, "dry_run"):
            return self._dry_run(request)
        with transaction.atomic():
            return self._perform_once(request)

    def perform(self, request: Request) -> Response:
        """Call the handler of the request's method."""
        method = (request.method or "").lower()
        handler = getattr(self, method, None) if method in self.http_method_names else None
        response: Response = (handler or self.http_method_not_allowed)(request, *self.args, **self.kwargs)
        return response

    def current_state(self) -> Mapping[str, Any] | None:
        """The representation of the object in the URL; None where the URL names no object or it does not exist."""
        return None

    def object_in(self, response: Response) -> Mapping[str, Any] | None:  # noqa: ARG002 - viewsets read it
        """The representation of an object in a response; None where the response shows something else."""
        return None

    def _perform_once(self, request: Request) -> Response:
        """Perform the request, or replay the response that is stored under its idempotency key."""
        keyed_request = _keyed_request(request)
        if keyed_request is None:
            return self.perform(request)
        if stored := idempotency.find_record(keyed_request):
            body = idempotency.body_of(stored)
            headers = {**stored.headers, "Idempotency-Replayed": "true"}
            return Response(json.loads(body) if body else None, status=stored.status, headers=headers)
        response = self.perform(request)
        if response.status_code >= 500:
            return response  # something beyond the database failed, and a repetition may succeed
        headers = {name: response[name] for name in _REPLAYED_HEADERS if response.has_header(name)}
        body = b"" if response.data is None else JSONRenderer().render(response.data)
        idempotency.save_record(keyed_request, status=response.status_code, headers=headers, body=body)
        return response

    def _dry_run(self, request: Request) -> Response:
        """Perform the request, describe its outcome, and roll it back. A new secret is shown as null."""
        with idempotency.recorded_changes() as changes, transaction.atomic():
            before = self.current_state()
            response = self.perform(request)
            connection.check_constraints()
            result = response.data
            if isinstance(result, dict):
                result = {name: None if name in self.shown_once else value for name, value in result.items()}
            plan = {
                "dry_run": True,
                "status": response.status_code,
                "result": result,
                "changes": differences(before, self.current_state() or self.object_in(response)),
                "effect": _effect(changes),
            }
            transaction.set_rollback(True)
        return Response(plan, headers={"Dry-Run": "true"})

    def _check_body_size(self, request: Request) -> None:
        if request.headers.get("Transfer-Encoding"):
            raise LengthRequiredError
        length = request.headers.get("Content-Length") or "0"
        if not length.isdigit() or int(length) > self.max_body_bytes:
            raise BodyTooLargeError(self.max_body_bytes)

    def _charge_address(self, request: Request) -> None:
        address = client_address(request._request)  # noqa: SLF001 - the request as the server gave it
        self._charge(f"address:{rate_limit_network(address)}", settings.API_RATE_UNAUTHENTICATED)

    def _charge(self, owner: str, limit: int) -> None:
        self.allowance = rates.request_counter().charge(owner, limit)
        if self.allowance and self.allowance.remaining < 0:
            raise Throttled(self.allowance.reset_s, f"More than {limit} requests in this minute.")


def query_flag(request: Request, name: str) -> bool:
    """A boolean query parameter, false where it is missing. ValidationError for any other value."""
    value = request.query_params.get(name)
    if value is None:
        return False
    if value.lower() not in _BOOLEANS:
        raise ValidationError({name: ["Expected true or false. Nothing was changed."]})
    return _BOOLEANS[value.lower()]


def _owner_of(request: Request) -> str | None:
    """The owner of rate limits and idempotency keys: a token, or a user with a session; None for a router."""
    if isinstance(request.auth, ApiToken):
        return f"token:{request.auth.pk}"
    return f"user:{request.user.pk}" if isinstance(request.user, User) else None


def _keyed_request(request: Request) -> idempotency.IdempotentRequest | None:
    """The identity of a POST with an idempotency key; None for other requests. ParseError for a malformed key."""
    key, owner = request.headers.get("Idempotency-Key"), _owner_of(request)
    if key is None or owner is None or request.method != "POST":
        return None
    key = key.strip().strip('"')
    if not _IDEMPOTENCY_KEY.fullmatch(key):
        raise ParseError("Idempotency-Key: expected 1 to 255 visible ASCII characters.")
    fingerprint = json.dumps([request.get_full_path(), request.data], sort_keys=True, default=str)
    return idempotency.IdempotentRequest(owner, key, fingerprint)


def _effect(changes: list[Any]) -> dict[str, Any]:
    """The next configuration and the events that a dry run made; no configuration where routers see no change."""
    configuration = None
    if numbered := idempotency.configurations(changes):
        before, after = numbered
        configuration = {
            "before": before.number if before else None,
            "after": after.number,
            "changes": differences(before.document if before else {}, after.document),
        }
    events = [{"kind": row.kind, "summary": row.summary} for row in idempotency.events(changes)]
    return {"configuration": configuration, "events": events}


# --- If-Match, and differences of JSON ----------------------------------------------------------------------


def has_if_match(request: Request) -> bool:
    return "If-Match" in request.headers


def if_match_holds(request: Request, tag: str) -> bool:
    """Whether ``If-Match`` names this version, or any (``*``). Weak tags never match."""
    value = request.headers.get("If-Match", "")
    return value.strip() == "*" or any(not weak and listed == tag for weak, listed in _TAG.findall(value))


def differences(before: Any, after: Any) -> list[dict[str, Any]]:
    """``{"pointer", "before", "after"}`` for each different value, null for a missing one; at most 200.

    Lists of objects with names are compared by name, other lists as one value.
    """
    return list(islice(_differences(before, after, "#"), MAX_DIFFERENCES))


def _differences(before: Any, after: Any, path: str) -> Iterator[dict[str, Any]]:
    if before == after:
        return
    old, new = _members_by_name(before), _members_by_name(after)
    if old is None or new is None:
        yield {
            "pointer": path,
            "before": None if before is _ABSENT else before,
            "after": None if after is _ABSENT else after,
        }
        return
    for name in {**old, **new}:
        step = str(name).replace("~", "~0").replace("/", "~1")
        yield from _differences(old.get(name, _ABSENT), new.get(name, _ABSENT), f"{path}/{step}")


def _members_by_name(value: Any) -> dict[str, Any] | None:
    """The members of an object, or of a list of objects with names; None for anything else."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list) and value and all(isinstance(item, dict) and "name" in item for item in value):
        return {item["name"]: item for item in value}
    return None
