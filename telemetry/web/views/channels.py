"""Channels: where alerts are sent, whether they arrived, and a way to try."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from controlplane.errors import ControlPlaneError, SealBrokenError
from controlplane.web.doors import signed_in
from telemetry.models import Channel, Notification
from telemetry.services.channels import (
    channels,
    create_channel,
    delete_channel,
    deliveries,
    public_config,
    reveal_secret,
    test_send,
    update_channel,
)
from telemetry.services.outbox import replay
from telemetry.web.forms import ChannelForm


@require_GET
def channel_list(request: HttpRequest) -> HttpResponse:
    """Every channel, and the newest deliveries with each attempt; a refresh leaves out the frame."""
    refresh = request.headers.get("HX-Request") == "true"
    context = {"deliveries": deliveries()}
    if refresh:
        return render(request, "telemetry/deliveries.html", context)
    rows = [{"channel": channel, "target": _target(channel)} for channel in channels()]
    return render(request, "telemetry/channels.html", {**context, "channels": rows})


@sensitive_post_parameters("url", "secret")
@never_cache
@require_http_methods(["GET", "POST"])
def channel_new(request: HttpRequest) -> HttpResponse:
    """Add a webhook; a secret that was made for it is shown once, in this answer."""
    form = ChannelForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        filled = {name: value for name, value in form.cleaned_data.items() if value}
        try:
            channel = create_channel(filled.pop("name"), config=filled, by=signed_in(request))
        except ControlPlaneError as error:
            form.refuse(error)
        else:
            secret = None if "secret" in filled else reveal_secret(channel)
            return render(request, "telemetry/channel_made.html", {"channel": channel, "secret": secret})
    return render(request, "telemetry/channel_new.html", {"form": form}, status=422 if form.errors else 200)


@require_POST
def channel_test(request: HttpRequest, channel_id: int) -> HttpResponse:
    """Send a test message; how it went stands in the log."""
    channel = get_object_or_404(Channel, pk=channel_id)
    test_send(channel)
    messages.success(request, f"A test is on its way to {channel.name}; the log below says how it went.")
    return redirect("telemetry:channels")


@require_POST
def channel_switch(request: HttpRequest, channel_id: int) -> HttpResponse:
    """Switch a channel off or on again; what is due for it waits meanwhile."""
    channel = get_object_or_404(Channel, pk=channel_id)
    channel = update_channel(channel, enabled=not channel.enabled, by=signed_in(request))
    messages.success(request, f"Channel {channel.name} is now {'on' if channel.enabled else 'off'}.")
    return redirect("telemetry:channels")


@require_http_methods(["GET", "POST"])
def channel_remove(request: HttpRequest, channel_id: int) -> HttpResponse:
    """Remove a channel, after saying what will happen."""
    channel = get_object_or_404(Channel, pk=channel_id)
    if request.method == "POST":
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


@require_POST
def delivery_replay(request: HttpRequest, notification_id: UUID) -> HttpResponse:
    """Send a message again under the same id, by which the receiver knows a duplicate."""
    notification = get_object_or_404(Notification, pk=notification_id)
    replay(notification, timezone.now())
    messages.success(request, "The message is sent again under the same id.")
    return redirect("telemetry:channels")


def _target(channel: Channel) -> str:
    """Where it goes, as far as that may be shown."""
    try:
        shown = public_config(channel)
    except SealBrokenError:
        return "its stored settings cannot be opened with this server's keys: remove it and add it again"
    return f"{shown['scheme']}://{shown['host']}/..."
