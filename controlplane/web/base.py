"""What views share: who asks, and how a refusal is shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from django.contrib import messages
from django.contrib.auth.models import User
from django.db.models import Model, QuerySet
from django.forms import Form
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse

from controlplane.access.actor import actor_of, visible
from controlplane.access.middleware import required_role
from controlplane.errors import ControlPlaneError
from controlplane.web.forms.base import SectionedForm

Row = TypeVar("Row", bound=Model)


def signed_in(request: HttpRequest) -> User:
    """The user; the middleware lets nobody else in."""
    if not isinstance(request.user, User):
        raise TypeError("LoginRequiredMiddleware admits users only")
    return request.user


def within(request: HttpRequest, rows: QuerySet[Row]) -> QuerySet[Row]:
    """Those of the rows for which the role that this page needs is held."""
    return visible(actor_of(request).at_least(required_role(request)), rows)


def mine(request: HttpRequest, rows: QuerySet[Row]) -> QuerySet[Row]:
    """Those of the rows that the actor may see."""
    return visible(actor_of(request), rows)


def form_page(
    request: HttpRequest, form: Form, *, title: str, action: str, back: str, back_label: str, **more: Any
) -> HttpResponse:
    """A page that is a form and no more; 422 where something in it is wrong. ``more`` goes into the page as it is."""
    context = {"form": form, "title": title, "action": action, "back": reverse(back), "back_label": back_label, **more}
    template = "controlplane/sections.html" if isinstance(form, SectionedForm) else "controlplane/form.html"
    return render(request, template, context, status=422 if form.errors else 200)


@contextmanager
def errors_as_messages(request: HttpRequest) -> Iterator[None]:
    """Show a service's refusal on the next page; nothing was changed."""
    try:
        yield
    except ControlPlaneError as error:
        messages.error(request, f"{error} Nothing was changed.")
