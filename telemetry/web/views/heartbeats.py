"""The heartbeat: who outside is told that all is well, and how often."""

from __future__ import annotations

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods

from controlplane.errors import ControlPlaneError
from controlplane.web.doors import signed_in
from controlplane.web.forms.base import Form
from telemetry.services.notifications.heartbeats import (
    LONGEST_S,
    SHORTEST_S,
    heartbeat,
    remove_heartbeat,
    set_heartbeat,
)

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
    every_s = forms.IntegerField(label="Every", help_text=f"Seconds, {SHORTEST_S} to {LONGEST_S:,}.")


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
