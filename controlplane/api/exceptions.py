"""Errors as answers: ``application/problem+json`` (RFC 9457) for every refusal, and for what went wrong with us.

This module alone turns errors into statuses.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

from django.contrib.auth.decorators import login_not_required
from django.core.exceptions import ObjectDoesNotExist, PermissionDenied
from django.db import DataError, InterfaceError, OperationalError
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.template import loader
from django.views.decorators.csrf import csrf_exempt
from rest_framework import exceptions
from rest_framework.response import Response
from rest_framework.views import set_rollback

from controlplane.database.base import is_disk_full
from controlplane.errors import (
    ConflictError,
    ControlPlaneError,
    GoneError,
    InvalidError,
    KeyReusedError,
    OwnPublicationError,
    RouterAwayError,
    TooManyKeysError,
    UnfinishedError,
)

CONTENT_TYPE = "application/problem+json"
URN = "urn:warmpath:problem:"  # and one of the words below: what scripts may tell problems apart by
WORDS: Mapping[int, str] = {
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
log = logging.getLogger(__name__)


class PreconditionRequired(exceptions.APIException):
    """A change that does not say which version it is of."""

    status_code = HTTPStatus.PRECONDITION_REQUIRED
    default_detail = (
        "Say which version you looked at: send If-Match with the object's ETag, or * for whatever it is now. "
        "Nothing was changed."
    )


class ChangedMeanwhile(exceptions.APIException):
    """The object is no longer what the client looked at; ``more`` shows what it is now."""

    status_code = HTTPStatus.PRECONDITION_FAILED
    default_detail = "This was changed since you looked at it, and stays as it is; current shows it."

    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.more = more


class TooManyWaiting(exceptions.APIException):
    """Every seat for those who wait is taken; each holds a connection, so there is an end to them."""

    status_code = HTTPStatus.SERVICE_UNAVAILABLE
    default_detail = "Too many clients are waiting for events here; try again in a few seconds, or ask without waiting."


class LengthRequired(exceptions.APIException):
    """A body of unknown length."""

    status_code = HTTPStatus.LENGTH_REQUIRED
    default_detail = "Send the body with a Content-Length. Nothing was changed."


class TooLarge(exceptions.APIException):
    """A body that nothing here needs."""

    status_code = HTTPStatus.REQUEST_ENTITY_TOO_LARGE

    def __init__(self, most: int) -> None:
        super().__init__(f"The body is larger than {most} bytes. Nothing was changed.")


# Where the status alone does not say it.
FINER: Mapping[type[Exception], str] = {
    UnfinishedError: "still-running",
    KeyReusedError: "key-reused",
    TooManyWaiting: "too-many-waiting",
}


def problem_response(error: Exception, context: dict[str, Any]) -> Response:
    """DRF's exception handler: every exception of a view ends here, an unforeseen one as a 500 in the log."""
    request = context["request"]
    status = _status(error)
    if status == HTTPStatus.INTERNAL_SERVER_ERROR:
        log.error("%s %s failed", request.method, request.path, exc_info=error)
    set_rollback()
    body = problem(
        status,
        _detail(error, status),
        request_id=_request_id(request),
        word=FINER.get(type(error)),
        faults=list(_faults(error)),
    )
    body.update(getattr(error, "more", {}))
    return Response(body, status=status, headers=_headers(error, status), content_type=CONTENT_TYPE)


def problem(
    status: int,
    detail: str,
    *,
    request_id: str | None,
    word: str | None = None,
    faults: list[dict[str, str]] | None = None,
) -> dict[str, Any]:
    """A problem document; ``errors`` holds ``{"pointer", "detail"}`` pairs, a pointer being ``#/path/0/field``."""
    body: dict[str, Any] = {
        "type": URN + (word or WORDS.get(status, "failed")),
        "title": HTTPStatus(status).phrase,
        "status": int(status),
        "detail": detail,
        "request_id": request_id,
    }
    if faults:
        body["errors"] = faults
    return body


def malformed(request: HttpRequest, exception: Exception) -> HttpResponse:  # noqa: ARG001 - the signature is Django's
    """400 for what Django itself refuses to look at, such as a Host that is not ours."""
    if request.path.startswith("/api/"):
        body = problem(HTTPStatus.BAD_REQUEST, "This request cannot be read.", request_id=_request_id(request))
        return JsonResponse(body, status=HTTPStatus.BAD_REQUEST, content_type=CONTENT_TYPE)
    return HttpResponse("This request cannot be read.\n", status=HTTPStatus.BAD_REQUEST, content_type="text/plain")


@csrf_exempt
@login_not_required
def no_such_endpoint(request: HttpRequest) -> JsonResponse:
    """404 for every address below ``/api/`` that no view has."""
    body = problem(HTTPStatus.NOT_FOUND, "There is no such address.", request_id=_request_id(request))
    return JsonResponse(body, status=HTTPStatus.NOT_FOUND, content_type=CONTENT_TYPE)


def pointer(path: str) -> str:
    """A JSON path such as ``$.pools[0].name`` as the fragment pointer ``#/pools/0/name``."""
    steps = path.removeprefix("$").replace("[", ".").replace("]", "").split(".")
    return "#" + "".join(f"/{step}" for step in steps if step)


def failed(request: HttpRequest) -> HttpResponse:
    """What no view caught, such as a session that cannot be read: 503 while the database is away, 500 otherwise.

    A problem document below ``/api/``, a page elsewhere.
    """
    error = sys.exc_info()[1]
    status = _status(error) if isinstance(error, OperationalError | InterfaceError) else 500
    if request.path.startswith("/api/"):
        body = problem(
            status,
            _detail(error if isinstance(error, OperationalError) else Exception(), status),
            request_id=_request_id(request),
        )
        return JsonResponse(body, status=status, content_type=CONTENT_TYPE)
    return HttpResponse(loader.get_template(f"{status}.html").render(), status=status)


def _status(error: Exception) -> int:
    if isinstance(error, exceptions.ValidationError | InvalidError | DataError):
        return HTTPStatus.UNPROCESSABLE_ENTITY
    if isinstance(error, exceptions.APIException):
        return error.status_code
    if isinstance(error, Http404 | ObjectDoesNotExist | GoneError):
        return HTTPStatus.NOT_FOUND
    if isinstance(error, PermissionDenied | OwnPublicationError):
        return HTTPStatus.FORBIDDEN
    if isinstance(error, ConflictError):
        return HTTPStatus.CONFLICT
    if isinstance(error, TooManyKeysError):
        return HTTPStatus.TOO_MANY_REQUESTS
    if isinstance(error, RouterAwayError):
        return HTTPStatus.BAD_GATEWAY
    if isinstance(error, OperationalError | InterfaceError):
        return HTTPStatus.SERVICE_UNAVAILABLE
    return HTTPStatus.INTERNAL_SERVER_ERROR


def _detail(error: Exception, status: int) -> str:
    if isinstance(error, TooManyWaiting):
        return str(error.detail)
    if is_disk_full(error):
        return "The database's disk is full: everything can be read, and nothing changed, until there is room."
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return "The database does not answer. Routers keep serving; try again in a few seconds."
    if status == HTTPStatus.INTERNAL_SERVER_ERROR:
        return "Something went wrong here. The log names this request's id."
    if isinstance(error, ControlPlaneError):
        return str(error)
    if isinstance(error, DataError):  # such as a NUL in a name that is looked up
        return "What was sent holds a value that the database cannot store or look up."
    if isinstance(error, exceptions.ValidationError):
        return "What was sent cannot be used; errors says where."
    if isinstance(error, exceptions.APIException):
        return str(error.detail)
    return "There is no such thing, or it is not for you to see."


def _faults(error: Exception) -> Iterator[dict[str, str]]:
    if isinstance(error, InvalidError):
        for fault in error.faults:
            yield {"pointer": pointer(fault.path), "detail": fault.reason}
    elif isinstance(error, exceptions.ValidationError):
        yield from _flattened(error.detail, "#")


def _flattened(detail: Any, path: str) -> Iterator[dict[str, str]]:
    """DRF's nested details as pointers; its ``non_field_errors`` belong to the object itself."""
    if isinstance(detail, dict):
        for name, inner in detail.items():
            yield from _flattened(inner, path if name == "non_field_errors" else f"{path}/{name}")
    elif isinstance(detail, list):
        for position, inner in enumerate(detail):
            nested = isinstance(inner, dict | list)
            yield from _flattened(inner, f"{path}/{position}" if nested else path)
    else:
        yield {"pointer": path, "detail": str(detail)}


def _headers(error: Exception, status: int) -> dict[str, str]:
    headers: dict[str, str] = {}
    if status == HTTPStatus.SERVICE_UNAVAILABLE or isinstance(error, UnfinishedError):
        headers["Retry-After"] = "2" if isinstance(error, UnfinishedError) else "5"
    if challenge := getattr(error, "auth_header", None):
        headers["WWW-Authenticate"] = challenge
    if wait := getattr(error, "wait", None):
        headers["Retry-After"] = str(int(wait))
    return headers


def _request_id(request: Any) -> str | None:
    return getattr(getattr(request, "_request", request), "id", None)
