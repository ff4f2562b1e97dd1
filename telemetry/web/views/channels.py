"""Notification channels, the log of deliveries, and the heartbeat."""

from __future__ import annotations

from functools import partial
from uuid import UUID

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from controlplane.errors import DecryptionError
from controlplane.web.base import (
    confirm_page,
    current_user,
    errors_as_messages,
    first_page,
    form_page,
    int_parameter,
    is_refresh,
    render_live,
    viewable,
)
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
from telemetry.services.notifications.heartbeats import heartbeat, masked_url, remove_heartbeat, set_heartbeat
from telemetry.services.notifications.outbox import deliveries, filter_deliveries, replay
from telemetry.web.forms import ChannelForm, HeartbeatForm

CHANNELS = "telemetry:channels"
MAX_NEWEST = 20  # deliveries on the pages of channels
PAGE = 50
PREVIEW = "preview"  # the button that shows what the entered settings send, and saves nothing
FILTERS = ("channel", "state", "kind", "alert")
UNREADABLE = "its settings cannot be decrypted with this server's keys: remove it and add it again"


@require_GET
def channel_list(request: HttpRequest) -> HttpResponse:
    """Channels, the heartbeat and the newest deliveries."""
    newest = list(deliveries()[:MAX_NEWEST])
    if is_refresh(request):
        return render(request, "telemetry/deliveries_rows.html", {"deliveries": newest})
    rows = [{"channel": row, "kind": KINDS[row.kind].label, "target": _target(row)} for row in channels()]
    beat = heartbeat()
    context = {
        "deliveries": newest,
        "channels": rows,
        "heartbeat": beat,
        "heartbeat_target": masked_url(beat) if beat else "",
    }
    return render(request, "telemetry/channels.html", context)


def _target(channel: Channel) -> str:
    """Where notifications go, without secrets."""
    try:
        return str(public_config(channel)["target"])
    except DecryptionError:
        return UNREADABLE


@sensitive_post_parameters()
@never_cache
@require_http_methods(["GET", "POST"])
def channel_new(request: HttpRequest) -> HttpResponse:
    """Choose a kind, then add a channel. A generated secret is shown once, in the response."""
    kind = KINDS.get(request.GET.get("kind", ""))
    if kind is None:
        return render(request, "telemetry/channel_kinds.html", {"kinds": KINDS.values()})
    form = ChannelForm(kind, request.POST or None)
    if form.is_valid() and PREVIEW not in request.POST:
        with form.service_errors():
            name, matchers = form.cleaned_data["name"], form.cleaned_data["matchers"]
            channel = create_channel(
                name,
                kind=kind.name,
                config=form.config(),
                matchers=matchers,
                topics=form.topics(),
                by=current_user(request),
            )
            secret = None if form.config().get("secret") else reveal_secret(channel)
            test = test_send(channel) if "test" in request.POST else None
            made = {"channel": channel, "secret": secret, "test": test, "result": "was added"}
            return render(request, "telemetry/channel_made.html", made)
    context = {"form": form, "kind": kind, "preview": form.preview()}
    return render(request, "telemetry/channel.html", context, status=422 if form.errors else 200)


@sensitive_post_parameters()
@never_cache
@require_http_methods(["GET", "POST"])
def channel_edit(request: HttpRequest, channel_id: int) -> HttpResponse:
    """Change a channel. Empty secrets stay as they are."""
    channel = get_object_or_404(Channel.objects.select_related("owner"), pk=channel_id)
    kind = KINDS[channel.kind]
    try:
        stored = public_config(channel)
    except DecryptionError:
        messages.error(request, f"Channel {channel.name}: {UNREADABLE}.")
        return redirect(CHANNELS)
    initial = {"name": channel.name, "matchers": "\n".join(channel.matchers)} | dict.fromkeys(channel.topics, True)
    form = ChannelForm(kind, request.POST or None, stored=stored, initial=initial).editing(channel)
    if form.is_valid() and PREVIEW not in request.POST:
        selected = request.POST.getlist("remove")
        removed = {field.name: None for field in form.removable() if field.name in selected}
        with form.service_errors(), form.locked():
            channel = update_channel(
                channel,
                name=form.cleaned_data["name"],
                config=form.config() | removed,
                matchers=form.cleaned_data["matchers"],
                topics=form.topics(),
                by=current_user(request),
            )
            if any(field.make and field.name in removed for field in kind.fields):
                new_secret = {"channel": channel, "secret": reveal_secret(channel), "result": "was changed"}
                return render(request, "telemetry/channel_made.html", new_secret)
            messages.success(request, f"Channel {channel.name} was changed.")
            return redirect("telemetry:channel", channel.pk)
    context = {
        "form": form,
        "kind": kind,
        "preview": form.preview(),
        "channel": channel,
        "target": stored["target"],
        "newest": list(filter_deliveries(deliveries(), channel=channel.name)[:MAX_NEWEST]),
        "rotates": "previous_secret" in {field.name for field in kind.fields},
    }
    return render(request, "telemetry/channel.html", context, status=422 if form.errors else 200)


@never_cache
@require_POST
def channel_rotate(request: HttpRequest, channel_id: int) -> HttpResponse:
    """Add a new signing secret, and keep the previous one until it is removed. The new one is shown once."""
    channel = get_object_or_404(Channel, pk=channel_id)
    secret = ""
    with errors_as_messages(request):
        secret = rotate_secret(channel, by=current_user(request))
    if not secret:
        return redirect(CHANNELS)
    context = {"channel": channel, "secret": secret, "rotated": True, "result": "has a new secret"}
    return render(request, "telemetry/channel_made.html", context)


@require_POST
def channel_test(request: HttpRequest, channel_id: int) -> HttpResponse:  # noqa: ARG001 - as every view
    """Send a test notification and show its delivery."""
    return redirect("telemetry:delivery", test_send(get_object_or_404(Channel, pk=channel_id)).pk)


@require_POST
def channel_switch(request: HttpRequest, channel_id: int) -> HttpResponse:
    """Disable or enable a channel. Notifications wait while it is disabled."""
    channel = get_object_or_404(Channel, pk=channel_id)
    with errors_as_messages(request):
        channel = update_channel(channel, enabled=not channel.enabled, by=current_user(request))
        messages.success(request, f"Channel {channel.name} is now {'enabled' if channel.enabled else 'disabled'}.")
    return redirect(CHANNELS)


@require_http_methods(["GET", "POST"])
def channel_remove(request: HttpRequest, channel_id: int) -> HttpResponse:
    """Remove a channel."""
    channel = get_object_or_404(Channel, pk=channel_id)
    return confirm_page(
        request,
        partial(delete_channel, channel, by=current_user(request)),
        back=CHANNELS,
        title=f"Remove channel {channel.name}",
        text="No more notifications are sent to it. Waiting notifications and its delivery log are deleted.",
        action="Remove channel",
        done=f"Channel {channel.name} was removed.",
    )


@require_GET
def delivery_list(request: HttpRequest) -> HttpResponse:
    """A page of deliveries that match the filters, newest first."""
    filters = {name: request.GET.get(name, "") for name in FILTERS}
    before, alert = int_parameter(request, "before"), int_parameter(request, "alert")
    words = {name: filters[name] for name in ("channel", "state", "kind")}
    rows = filter_deliveries(viewable(request, deliveries()), before=before, alert=alert, **words)
    page, last = first_page(rows, PAGE)
    context = {
        "deliveries": page,
        "older_cursor": last and last.number,
        "has_newer": before is not None,
        "channels": viewable(request, Channel.objects.order_by("name")),
        "states": NotificationState.choices,
        "kinds": NotificationKind.choices,
        "filters": filters,
        "filtered": any(request.GET.get(name) for name in (*FILTERS, "before")),
    }
    return render(request, "telemetry/deliveries.html", context)


@require_GET
def delivery(request: HttpRequest, notification_id: UUID) -> HttpResponse:
    """One notification: its content, and every attempt with the receiver's response."""
    notification = get_object_or_404(deliveries(), pk=notification_id)
    return render_live(request, "telemetry/delivery.html", {"notification": notification})


@require_POST
def delivery_replay(request: HttpRequest, notification_id: UUID) -> HttpResponse:
    """Send a notification again with the same id, by which the receiver detects a duplicate."""
    notification = get_object_or_404(Notification, pk=notification_id)
    with errors_as_messages(request):
        replay(notification, timezone.now())
        messages.success(request, "The notification is sent again with the same id.")
    return redirect("telemetry:delivery", notification.pk)


@sensitive_post_parameters()
@never_cache
@require_http_methods(["GET", "POST"])
def heartbeat_edit(request: HttpRequest) -> HttpResponse:
    """Set or change the heartbeat."""
    beat = heartbeat()
    form = HeartbeatForm(request.POST or None, initial={"every_s": beat.every_s if beat else 60}).editing(beat)
    if form.is_valid():
        with form.service_errors(), form.locked():
            set_heartbeat(**form.cleaned_data, by=current_user(request))
            messages.success(request, "The heartbeat is now sent while telemetry works.")
            return redirect(CHANNELS)
    return form_page(
        request,
        form,
        title="Heartbeat",
        about="A request that is sent to an external monitoring service at an interval. The service raises its alarm "
        "when the heartbeat stops. It is not sent while scraping, evaluation or delivery is late.",
        action="Save",
        back=CHANNELS,
        back_label="Channels",
        remove=reverse("telemetry:heartbeat-remove") if beat else "",
    )


@require_http_methods(["GET", "POST"])
def heartbeat_remove(request: HttpRequest) -> HttpResponse:
    """Remove the heartbeat."""
    return confirm_page(
        request,
        partial(remove_heartbeat, by=current_user(request)),
        back=CHANNELS,
        title="Remove the heartbeat",
        text="The heartbeat stops, and the monitoring service raises its alarm unless you disable it there first.",
        action="Remove heartbeat",
        done="The heartbeat was removed.",
    )
