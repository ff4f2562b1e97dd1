"""Helpers of all views: permissions, forms, confirmations, partial refreshes, sorting, paging and CSV."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from django.contrib import messages
from django.contrib.auth.models import User
from django.db.models import Model, Q, QuerySet
from django.forms import Form
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render, resolve_url

from controlplane.access.actor import actor_of, visible
from controlplane.access.middleware import required_role
from controlplane.errors import ControlPlaneError
from controlplane.web.tags import spreadsheet_safe

Row = TypeVar("Row", bound=Model)
Item = TypeVar("Item")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def current_user(request: HttpRequest) -> User:
    """The signed-in user; ``LoginRequiredMiddleware`` admits nobody else."""
    if not isinstance(request.user, User):
        raise TypeError("LoginRequiredMiddleware admits users only")
    return request.user


def viewable(request: HttpRequest, rows: QuerySet[Row]) -> QuerySet[Row]:
    """The rows that the user may see."""
    return visible(actor_of(request), rows)


def manageable(request: HttpRequest, rows: QuerySet[Row]) -> QuerySet[Row]:
    """The rows for which the user holds the role that this page requires."""
    return visible(actor_of(request).at_least(required_role(request)), rows)


@contextmanager
def errors_as_messages(request: HttpRequest) -> Iterator[None]:
    """Show a service's error on the next page."""
    try:
        yield
    except ControlPlaneError as error:
        messages.error(request, f"{error} Nothing was changed.")


def form_page(
    request: HttpRequest, form: Form, *, title: str, action: str, back: str, back_label: str, **context: Any
) -> HttpResponse:
    """Render a page with one form; the status is 422 if the form has errors."""
    context |= {"form": form, "title": title, "action": action, "back": resolve_url(back), "back_label": back_label}
    return render(request, "controlplane/form.html", context, status=422 if form.errors else 200)


def confirm_page(
    request: HttpRequest,
    service: Callable[[], object],
    *,
    back: str,
    title: str,
    text: str,
    action: str,
    done: str,
    cancel: str = "",
    warning: str = "",
    danger: bool = True,
) -> HttpResponse:
    """Ask for confirmation; on POST call the service and redirect to ``back``, a URL or the name of one.

    ``text`` says what will happen, ``action`` is the button's label and ``done`` the message afterwards.
    """
    if request.method == "POST":
        with errors_as_messages(request):
            service()
            messages.success(request, done)
        return redirect(back)
    context = {"title": title, "text": text, "action": action, "warning": warning, "danger": danger}
    return render(request, "controlplane/confirm.html", {**context, "back": resolve_url(cancel or back)})


def is_refresh(request: HttpRequest) -> bool:
    """Whether htmx requests only a part of the page."""
    return request.headers.get("HX-Request") == "true"


def render_live(
    request: HttpRequest, template: str, context: dict[str, Any], *, partial: bool | None = None, status: int = 200
) -> HttpResponse:
    """Render a page, or only its ``live`` block for a refresh. The template extends ``layout``."""
    layout = "partial.html" if (is_refresh(request) if partial is None else partial) else "base.html"
    return render(request, template, {**context, "layout": layout}, status=status)


def int_parameter(request: HttpRequest, name: str) -> int | None:
    """A non-negative integer of the query string; None if it is missing or not a 63-bit integer."""
    text = request.GET.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def first_page(rows: QuerySet[Row], size: int) -> tuple[list[Row], Row | None]:
    """The first ``size`` rows, and the last of them if more rows follow."""
    page = list(rows[: size + 1])
    return page[:size], page[size - 1] if len(page) > size else None


def cursor_after(row: Any) -> str:
    """A cursor to the rows after this one in a list ordered by ``-at``, ``-pk``."""
    return f"{(row.at - _EPOCH) // timedelta(microseconds=1)}-{row.pk}"


def rows_after(cursor: str) -> Q | None:
    """The filter for the rows after a cursor; None if the cursor is malformed."""
    micros, _, number = cursor.partition("-")
    if not all(part.isascii() and part.isdigit() and len(part) < 19 for part in (micros, number)):
        return None
    try:
        at = _EPOCH + timedelta(microseconds=int(micros))
    except OverflowError:
        return None
    return Q(at__lte=at) & (Q(at__lt=at) | Q(pk__lt=int(number)))


@dataclass(frozen=True, slots=True)
class Sort:
    """A column and a direction."""

    key: str
    descending: bool = False

    def apply(self, rows: Iterable[Item]) -> list[Item]:
        """Sort the rows; unknown values come last in either direction."""
        rows = list(rows)
        known = [row for row in rows if getattr(row, self.key) is not None]
        unknown = [row for row in rows if getattr(row, self.key) is None]
        return sorted(known, key=self._value, reverse=self.descending) + unknown

    def _value(self, row: Any) -> Any:
        value = getattr(row, self.key)
        return value.lower() if isinstance(value, str) else value


def requested_sort(request: HttpRequest, keys: Sequence[str], *, param: str = "sort") -> Sort:
    """The sort of ``?sort=name`` or ``?sort=-name``; by the first key for anything else."""
    text = request.GET.get(param, "")
    key = text.removeprefix("-")
    return Sort(key, descending=text.startswith("-")) if key in keys else Sort(keys[0])


class _Echo:
    """A file whose ``write`` returns its argument, for ``csv.writer``."""

    def write(self, text: str) -> str:
        return text


def csv_response(filename: str, rows: Iterable[Iterable[Any]], *, stream: bool = True) -> HttpResponseBase:
    """Rows as a CSV file. Text that a spreadsheet would take for a formula is quoted; None is empty."""
    writer = csv.writer(_Echo())
    lines = (
        writer.writerow([spreadsheet_safe(cell) if isinstance(cell, str) else cell for cell in row]) for row in rows
    )
    response_class = StreamingHttpResponse if stream else HttpResponse
    response = response_class(lines, content_type="text/csv; charset=utf-8")
    response["Content-Disposition"] = f'attachment; filename="{filename}"'
    return response
