"""Errors as ``application/problem+json`` (RFC 9457). This module alone turns errors into HTTP statuses."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from django.contrib.auth.decorators import login_not_required
from django.core.exceptions import BadRequest, ObjectDoesNotExist, PermissionDenied
from django.db import DataError, InterfaceError, OperationalError
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.template import loader
from django.views.decorators.csrf import csrf_exempt
from rest_framework import exceptions
from rest_framework.response import Response

from controlplane.database.base import is_disk_full
from controlplane.errors import (
    ConflictError,
    ControlPlaneError,
    FaultedRevisionError,
    GoneError,
    IdempotencyKeyReusedError,
    InvalidError,
    PredictionRequiredError,
    PurgeIncompleteError,
    RequestInProgressError,
    RoleNeededError,
    RouterUnavailableError,
    SelfApprovalError,
    TooManyIdempotencyKeysError,
)

CONTENT_TYPE = "application/problem+json"
URN = "urn:warmpath:problem:"  # followed by a value of PROBLEM_TYPES, which scripts can compare
PROBLEM_TYPES: Mapping[int, str] = {
    400: "malformed",
    401: "unauthenticated",
    403: "forbidden",
    404: "not-found",
    405: "method-not-allowed",
    406: "not-acceptable",
    409: "conflict",
    411: "length-required",
    412: "changed-meanwhile",
    413: "too-large",
    415: "unsupported-media-type",
    422: "invalid",
    428: "precondition-required",
    429: "too-many-requests",
    500: "failed",
    502: "router-away",
    503: "database-away",
}
NOT_FOUND = "There is no such object, or you may not see it."
log = logging.getLogger(__name__)


class PreconditionRequiredError(exceptions.APIException):
    status_code = HTTPStatus.PRECONDITION_REQUIRED
    default_detail = "If-Match is missing. Send the object's ETag, or * for any version. Nothing was changed."


class VersionChangedError(exceptions.APIException):
    """The object is not the version in If-Match. ``members`` are added to the problem document."""

    status_code = HTTPStatus.PRECONDITION_FAILED
    default_detail = "The object was changed since the version in If-Match. Nothing was changed; current shows it."

    def __init__(self, **members: Any) -> None:
        super().__init__()
        self.members = members


class TooManyWaitersError(exceptions.APIException):
    """This process already has the maximum number of clients that wait for events."""

    status_code = HTTPStatus.SERVICE_UNAVAILABLE
    default_detail = (
        "Too many clients wait for events here; try again in a few seconds, or send the request without wait."
    )


class LengthRequiredError(exceptions.APIException):
    status_code = HTTPStatus.LENGTH_REQUIRED
    default_detail = "Send the body with a Content-Length. Nothing was changed."


class BodyTooLargeError(exceptions.APIException):
    status_code = HTTPStatus.REQUEST_ENTITY_TOO_LARGE

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"The body is larger than {limit_bytes} bytes. Nothing was changed.")


# Problem types of errors that share a status with others.
SPECIFIC_TYPES: Mapping[type[Exception], str] = {
    RequestInProgressError: "still-running",
    IdempotencyKeyReusedError: "key-reused",
    TooManyWaitersError: "too-many-waiting",
    PredictionRequiredError: "prediction-required",
    FaultedRevisionError: "faulted-revision",
    PurgeIncompleteError: "purge-incomplete",
}

# The first matching entry applies.
_STATUSES: tuple[tuple[HTTPStatus, tuple[type[Exception], ...]], ...] = (
    (HTTPStatus.UNPROCESSABLE_ENTITY, (exceptions.ValidationError, InvalidError, DataError)),
    (HTTPStatus.NOT_FOUND, (Http404, ObjectDoesNotExist, GoneError)),
    (HTTPStatus.FORBIDDEN, (PermissionDenied, RoleNeededError, SelfApprovalError)),
    (HTTPStatus.CONFLICT, (ConflictError,)),
    (HTTPStatus.TOO_MANY_REQUESTS, (TooManyIdempotencyKeysError,)),
    (HTTPStatus.BAD_GATEWAY, (RouterUnavailableError, PurgeIncompleteError)),
    (HTTPStatus.SERVICE_UNAVAILABLE, (OperationalError, InterfaceError)),
)


def problem_response(error: Exception, context: dict[str, Any]) -> Response:
    """DRF's exception handler: every exception of a view ends here, an unexpected one as a logged 500."""
    request = context["request"]
    status = _status(error)
    if status == HTTPStatus.INTERNAL_SERVER_ERROR:
        log.error("%s %s failed", request.method, request.path, exc_info=error)
    body = _problem(request, status, _detail(error, status), SPECIFIC_TYPES.get(type(error)))
    if errors := list(_errors(error)):
        body["errors"] = errors
    body.update(getattr(error, "members", {}))
    return Response(body, status=status, headers=_headers(error, status), content_type=CONTENT_TYPE)


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Django's 400 handler, for requests such as one with an unknown Host."""
    text = str(exception) if isinstance(exception, BadRequest) else "The request is malformed."
    if request.path.startswith("/api/"):
        return _problem_json(request, 400, text)
    return HttpResponse(f"{text}\n", status=400, content_type="text/plain")


@csrf_exempt
@login_not_required
def endpoint_not_found(request: HttpRequest) -> JsonResponse:
    """404 for every URL below ``/api/`` without a view."""
    return _problem_json(request, 404, "No endpoint has this URL.")


def server_error(request: HttpRequest) -> HttpResponse:
    """Django's 500 handler, for exceptions outside views: 503 while the database is unavailable, 500 otherwise."""
    error = sys.exc_info()[1]
    status = 503 if isinstance(error, OperationalError | InterfaceError) else 500
    if request.path.startswith("/api/"):
        return _problem_json(request, status, _detail(error if isinstance(error, Exception) else Exception(), status))
    template = loader.get_template(f"{status}.html")
    if status == HTTPStatus.INTERNAL_SERVER_ERROR:
        with suppress(Exception):  # the menu may fail as the page did
            return HttpResponse(template.render(request=request), status=status)
    return HttpResponse(template.render(), status=status)


def pointer(path: str) -> str:
    """A JSON path such as ``$.pools[0].name`` as the fragment pointer ``#/pools/0/name``."""
    steps = path.removeprefix("$").replace("[", ".").replace("]", "").split(".")
    return "#" + "".join(f"/{step}" for step in steps if step)


def _problem_json(request: HttpRequest, status: int, detail: str) -> JsonResponse:
    return JsonResponse(_problem(request, status, detail), status=status, content_type=CONTENT_TYPE)


def _problem(request: Any, status: int, detail: str, problem_type: str | None = None) -> dict[str, Any]:
    return {
        "type": URN + (problem_type or PROBLEM_TYPES.get(status, "failed")),
        "title": HTTPStatus(status).phrase,
        "status": int(status),
        "detail": detail,
        "request_id": getattr(getattr(request, "_request", request), "id", None),
    }


def _status(error: Exception) -> int:
    if isinstance(error, exceptions.APIException) and not isinstance(error, exceptions.ValidationError):
        return error.status_code
    matches = (status for status, kinds in _STATUSES if isinstance(error, kinds))
    return next(matches, HTTPStatus.INTERNAL_SERVER_ERROR)


def _detail(error: Exception, status: int) -> str:
    if is_disk_full(error):
        return "The database's disk is full: nothing can be changed until there is space. Reading works."
    if isinstance(error, ControlPlaneError):
        return str(error)
    if isinstance(error, exceptions.ValidationError):
        return "The request is invalid; errors names each invalid field."
    if isinstance(error, exceptions.APIException):
        return str(error.detail)
    if isinstance(error, DataError):  # such as a NUL in a name that is looked up
        return "The request holds a value that the database cannot store or look up."
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return "The database does not respond. Routers continue to serve; try again in a few seconds."
    if status == HTTPStatus.INTERNAL_SERVER_ERROR:
        return "An internal error. The log names this request's id."
    return NOT_FOUND


def _errors(error: Exception) -> Iterator[dict[str, str]]:
    if isinstance(error, InvalidError):
        for fault in error.faults:
            yield {"pointer": pointer(fault.path), "detail": fault.reason}
    elif isinstance(error, exceptions.ValidationError):
        yield from _nested_errors(error.detail, "#")


def _nested_errors(detail: Any, path: str) -> Iterator[dict[str, str]]:
    """DRF's nested error details as JSON pointers with a text; ``non_field_errors`` belong to the object itself."""
    if isinstance(detail, dict):
        for name, inner in detail.items():
            yield from _nested_errors(inner, path if name == "non_field_errors" else f"{path}/{name}")
    elif isinstance(detail, list):
        for position, inner in enumerate(detail):
            is_nested = isinstance(inner, dict | list)
            yield from _nested_errors(inner, f"{path}/{position}" if is_nested else path)
    else:
        yield {"pointer": path, "detail": str(detail)}


def _headers(error: Exception, status: int) -> dict[str, str]:
    headers: dict[str, str] = {}
    if isinstance(error, RequestInProgressError):
        headers["Retry-After"] = "2"
    elif status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers["Retry-After"] = "5"
    if challenge := getattr(error, "auth_header", None):
        headers["WWW-Authenticate"] = challenge
    if wait_s := getattr(error, "wait", None):
        headers["Retry-After"] = str(int(wait_s))
    return headers
