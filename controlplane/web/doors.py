"""What views share: who asks, and how a refusal is shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.contrib import messages
from django.contrib.auth.models import User
from django.http import HttpRequest

from controlplane.errors import ControlPlaneError


def signed_in(request: HttpRequest) -> User:
    """The user; the middleware lets nobody else in."""
    if not isinstance(request.user, User):
        raise TypeError("LoginRequiredMiddleware admits users only")
    return request.user


@contextmanager
def refusals_as_messages(request: HttpRequest) -> Iterator[None]:
    """Show a service's refusal on the next page; nothing was changed."""
    try:
        yield
    except ControlPlaneError as error:
        messages.error(request, f"{error} Nothing was changed.")
