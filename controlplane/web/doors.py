"""What views share: who asks, and how a refusal is shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from django.contrib import messages
from django.contrib.auth.models import User
from django.db.models import Model, QuerySet
from django.http import HttpRequest

from controlplane.access.asker import asker_of
from controlplane.access.gate import needed_here
from controlplane.access.scope import visible
from controlplane.errors import ControlPlaneError

Row = TypeVar("Row", bound=Model)


def signed_in(request: HttpRequest) -> User:
    """The user; the middleware lets nobody else in."""
    if not isinstance(request.user, User):
        raise TypeError("LoginRequiredMiddleware admits users only")
    return request.user


def within(request: HttpRequest, rows: QuerySet[Row]) -> QuerySet[Row]:
    """Those of the rows for which the role that this page needs is held."""
    return visible(asker_of(request).at_least(needed_here(request)), rows)


def mine(request: HttpRequest, rows: QuerySet[Row]) -> QuerySet[Row]:
    """Those of the rows that the asker may see."""
    return visible(asker_of(request), rows)


@contextmanager
def refusals_as_messages(request: HttpRequest) -> Iterator[None]:
    """Show a service's refusal on the next page; nothing was changed."""
    try:
        yield
    except ControlPlaneError as error:
        messages.error(request, f"{error} Nothing was changed.")
