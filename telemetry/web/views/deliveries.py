"""Deliveries: every message to every channel with each attempt at it, and sending one again."""

from __future__ import annotations

from uuid import UUID

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.http import require_GET, require_POST

from controlplane.access.asker import asker_of
from controlplane.access.scope import visible
from controlplane.errors import ConflictError
from controlplane.web.paging import number_asked
from telemetry.models import Channel, Notification, NotificationKind, NotificationState
from telemetry.services.notifications.deliveries import deliveries, narrowed, replay

PAGE = 50
FILTERS = ("channel", "state", "kind", "alert")


@require_GET
def delivery_list(request: HttpRequest) -> HttpResponse:
    """A page of messages, narrowed as asked; older ones by a plain link."""
    asker = asker_of(request)
    asked = {name: request.GET.get(name, "") for name in FILTERS}
    before = number_asked(request, "before")
    found = narrowed(visible(asker, deliveries()), before=before, alert=number_asked(request, "alert"), **_words(asked))
    page = list(found[: PAGE + 1])
    context = {
        "deliveries": page[:PAGE],
        "more": page[PAGE - 1].number if len(page) > PAGE else None,
        "later": before is not None,
        "channels": visible(asker, Channel.objects.order_by("name")),
        "states": NotificationState.choices,
        "kinds": NotificationKind.choices,
        "asked": asked,
        "filtered": any(request.GET.get(name) for name in (*FILTERS, "before")),
    }
    return render(request, "telemetry/deliveries.html", context)


def _words(asked: dict[str, str]) -> dict[str, str]:
    return {name: asked[name] for name in ("channel", "state", "kind")}


@require_GET
def delivery(request: HttpRequest, notification_id: UUID) -> HttpResponse:
    """One message: what it says, each attempt, and what the receiver answered; a refresh leaves out the frame."""
    found = get_object_or_404(deliveries(), pk=notification_id)
    refresh = request.headers.get("HX-Request") == "true"
    return render(request, f"telemetry/delivery{'_live' if refresh else ''}.html", {"one": found})


@require_POST
def delivery_replay(request: HttpRequest, notification_id: UUID) -> HttpResponse:
    """Send a message again under the same id, by which the receiver knows a duplicate."""
    notification = get_object_or_404(Notification, pk=notification_id)
    try:
        replay(notification, timezone.now())
    except ConflictError as error:
        messages.error(request, str(error))
    else:
        messages.success(request, "The message is sent again under the same id.")
    return redirect("telemetry:delivery", notification.pk)
