"""Paging by plain links: from the last one that was shown, so that what comes in meanwhile moves nothing."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from django.db.models import Q
from django.http import HttpRequest

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def number_asked(request: HttpRequest, param: str) -> int | None:
    """A number in the address; None where there is none, or something that is no number of ours."""
    text = request.GET.get(param, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def cursor_after(row: Any) -> str:
    """Where a list by ``-at``, ``-pk`` goes on after this row."""
    return f"{(row.at - _EPOCH) // timedelta(microseconds=1)}-{row.pk}"


def beyond(cursor: str) -> Q | None:
    """The rows after a place in such a list; None for a text that is no place."""
    moment, _, number = cursor.partition("-")
    if not all(part.isascii() and part.isdigit() and len(part) < 19 for part in (moment, number)):
        return None
    try:
        at = _EPOCH + timedelta(microseconds=int(moment))
    except OverflowError:
        return None
    return Q(at__lte=at) & (Q(at__lt=at) | Q(pk__lt=int(number)))
