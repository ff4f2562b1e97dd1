"""Channels: where alerts are sent, whether they arrive, and a way to try.

Deliveries: every message to every channel with each attempt at it, and sending one again.

The heartbeat: who outside is told that all is well, and how often.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from controlplane.access.actor import actor_of, visible
from controlplane.errors import ConflictError, ControlPlaneError, DecryptionError
from controlplane.web.base import errors_as_messages, signed_in
from controlplane.web.forms.base import Form
from controlplane.web.tables import int_parameter
from telemetry.channels import KINDS
from telemetry.models import Channel, Notification, NotificationKind, NotificationState
from telemetry.services.notifications.channels import (
    channels,
    create_channel,
    delete_channel,
    public_config,
    reveal_secret,
    rotate_secret,
    test_send,
    update_channel,
)
from telemetry.services.notifications.heartbeats import (
    MAX_S,
    MIN_S,
    heartbeat,
    remove_heartbeat,
    set_heartbeat,
    target,
)
from telemetry.services.notifications.outbox import deliveries, narrowed, replay
from telemetry.web.forms import ChannelForm

NEWEST = 20  # messages below the list
UNREADABLE = "its stored settings cannot be opened with this server's keys: remove it and add it again"


@require_GET
def channel_list(request: HttpRequest) -> HttpResponse:
    """Every channel with its health, and the newest deliveries; a refresh leaves out the frame."""
    newest = list(deliveries()[:NEWEST])
    if request.headers.get("HX-Request") == "true":
        return render(request, "telemetry/deliveries_rows.html", {"deliveries": newest})
    rows = [
        {"channel": channel, "kind": KINDS[channel.kind].label, "target": _target(channel)} for channel in channels()
    ]
    context: dict[str, Any] = {
        "deliveries": newest,
        "channels": rows,
        "heartbeat": heartbeat(),
    }
    if context["heartbeat"]:
        context["heartbeat_target"] = target(context["heartbeat"])
    return render(request, "telemetry/channels.html", context)


@sensitive_post_parameters()
@never_cache
@require_http_methods(["GET", "POST"])
def channel_new(request: HttpRequest) -> HttpResponse:
    """Choose a kind, then add a channel; a secret that was made for it is shown once, in this answer."""
    kind = KINDS.get(request.GET.get("kind", ""))
    if kind is None:
        return render(request, "telemetry/channel_kinds.html", {"kinds": KINDS.values()})
    form = ChannelForm(kind, request.POST or None)
    if request.method == "POST" and form.is_valid():
        try:
            channel = create_channel(
                form.cleaned_data["name"],
                kind=kind.name,
                config=form.config(),
                matchers=form.cleaned_data["matchers"],
                by=signed_in(request),
            )
        except ControlPlaneError as error:
            form.refuse(error)
        else:
            made = None if form.config().get("secret") else reveal_secret(channel)
            test = test_send(channel) if "test" in request.POST else None
            return render(request, "telemetry/channel_made.html", {"channel": channel, "secret": made, "test": test})
    return render(request, "telemetry/channel.html", {"form": form, "kind": kind}, status=422 if form.errors else 200)


@sensitive_post_parameters()
@never_cache
@require_http_methods(["GET", "POST"])
def channel_edit(request: HttpRequest, channel_id: int) -> HttpResponse:
    """Change a channel; secrets are not shown, and stay where nothing is given."""
    channel = get_object_or_404(Channel.objects.select_related("owner"), pk=channel_id)
    kind = KINDS[channel.kind]
    try:
        shown = public_config(channel)
    except DecryptionError:
        messages.error(request, f"Channel {channel.name}: {UNREADABLE}.")
        return redirect("telemetry:channels")
    initial = {"name": channel.name, "matchers": "\n".join(channel.matchers)}
    form = ChannelForm(kind, request.POST or None, shown=shown, initial=initial)
    if request.method == "POST" and form.is_valid():
        removed = _taken_away(request, form)
        try:
            channel = update_channel(
                channel,
                name=form.cleaned_data["name"],
                config=form.config() | removed,
                matchers=form.cleaned_data["matchers"],
                by=signed_in(request),
            )
        except ControlPlaneError as error:
            form.refuse(error)
        else:
            if any(field.make and field.name in removed for field in kind.fields):
                shown_once = {"channel": channel, "secret": reveal_secret(channel), "replaced": True}
                return render(request, "telemetry/channel_made.html", shown_once)
            messages.success(request, f"Channel {channel.name} was changed.")
            return redirect("telemetry:channel", channel.pk)
    context = {"form": form, "kind": kind, "channel": channel, "target": shown["target"]}
    context["newest"] = list(narrowed(deliveries(), channel=channel.name)[:NEWEST])
    context["rotates"] = "previous_secret" in {field.name for field in kind.fields}
    return render(request, "telemetry/channel.html", context, status=422 if form.errors else 200)


def _taken_away(request: HttpRequest, form: ChannelForm) -> dict[str, None]:
    ticked = request.POST.getlist("remove")
    return {field.name: None for field in form.removable() if field.name in ticked}


@never_cache
@require_POST
def channel_rotate(request: HttpRequest, channel_id: int) -> HttpResponse:
    """Sign with a fresh secret beside the former one; it is shown once, in this answer."""
    channel = get_object_or_404(Channel, pk=channel_id)
    secret = ""
    with errors_as_messages(request):
        secret = rotate_secret(channel, by=signed_in(request))
    if not secret:
        return redirect("telemetry:channels")
    return render(request, "telemetry/channel_made.html", {"channel": channel, "secret": secret, "rotated": True})


@require_POST
def channel_test(request: HttpRequest, channel_id: int) -> HttpResponse:  # noqa: ARG001 - as every view
    """Send a test message; how it went, and what was answered, stands on the delivery's page."""
    notification = test_send(get_object_or_404(Channel, pk=channel_id))
    return redirect("telemetry:delivery", notification.pk)


@require_POST
def channel_switch(request: HttpRequest, channel_id: int) -> HttpResponse:
    """Switch a channel off or on again; what is due for it waits meanwhile."""
    channel = get_object_or_404(Channel, pk=channel_id)
    with errors_as_messages(request):
        channel = update_channel(channel, enabled=not channel.enabled, by=signed_in(request))
        messages.success(request, f"Channel {channel.name} is now {'on' if channel.enabled else 'off'}.")
    return redirect("telemetry:channels")


@require_http_methods(["GET", "POST"])
def channel_remove(request: HttpRequest, channel_id: int) -> HttpResponse:
    """Remove a channel, after saying what will happen."""
    channel = get_object_or_404(Channel, pk=channel_id)
    if request.method == "POST":
        with errors_as_messages(request):
            delete_channel(channel, by=signed_in(request))
            messages.success(request, f"Channel {channel.name} was removed.")
        return redirect("telemetry:channels")
    context: dict[str, Any] = {
        "title": f"Remove channel {channel.name}",
        "text": "Alerts are no longer sent there; what is still to be sent, and its delivery log, go with it.",
        "action": "Remove the channel",
        "danger": True,
        "back": reverse("telemetry:channels"),
    }
    return render(request, "controlplane/confirm.html", context)


def _target(channel: Channel) -> str:
    """Where it goes, as far as that may be shown."""
    try:
        return str(public_config(channel)["target"])
    except DecryptionError:
        return UNREADABLE


PAGE = 50
FILTERS = ("channel", "state", "kind", "alert")


@require_GET
def delivery_list(request: HttpRequest) -> HttpResponse:
    """A page of messages, narrowed as asked; older ones by a plain link."""
    actor = actor_of(request)
    asked = {name: request.GET.get(name, "") for name in FILTERS}
    before = int_parameter(request, "before")
    found = narrowed(
        visible(actor, deliveries()), before=before, alert=int_parameter(request, "alert"), **_words(asked)
    )
    page = list(found[: PAGE + 1])
    context = {
        "deliveries": page[:PAGE],
        "more": page[PAGE - 1].number if len(page) > PAGE else None,
        "later": before is not None,
        "channels": visible(actor, Channel.objects.order_by("name")),
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


ADDRESS = "As the service that watches gave it. It is kept encrypted and never shown again."


class HeartbeatForm(Form):
    """Where to, and how often."""

    url = forms.CharField(
        label="URL",
        required=False,
        max_length=2048,
        widget=forms.TextInput({"autocomplete": "off", "inputmode": "url", "spellcheck": "false"}),
        help_text=ADDRESS,
    )
    every_s = forms.IntegerField(label="Every", help_text=f"Seconds, {MIN_S} to {MAX_S:,}.")


@sensitive_post_parameters()
@never_cache
@require_http_methods(["GET", "POST"])
def heartbeat_edit(request: HttpRequest) -> HttpResponse:
    """Set it, or change it; an address left empty stays."""
    found = heartbeat()
    form = HeartbeatForm(request.POST or None, initial={"every_s": found.every_s if found else 60})
    if request.method == "POST" and form.is_valid():
        try:
            set_heartbeat(**form.cleaned_data, by=signed_in(request))
        except ControlPlaneError as error:
            form.refuse(error)
        else:
            messages.success(request, "The heartbeat is sent from now on, while all is well.")
            return redirect("telemetry:channels")
    context = {"form": form, "heartbeat": found}
    return render(request, "telemetry/heartbeat.html", context, status=422 if form.errors else 200)


@require_http_methods(["GET", "POST"])
def heartbeat_remove(request: HttpRequest) -> HttpResponse:
    """Send it no more, after saying what will happen."""
    if request.method == "POST":
        remove_heartbeat(by=signed_in(request))
        messages.success(request, "No heartbeat is sent any more.")
        return redirect("telemetry:channels")
    context = {
        "title": "Remove the heartbeat",
        "text": "Nothing is sent any more. Whoever listens will take that for an outage: tell them first.",
        "action": "Remove the heartbeat",
        "danger": True,
        "back": reverse("telemetry:channels"),
    }
    return render(request, "controlplane/confirm.html", context)
