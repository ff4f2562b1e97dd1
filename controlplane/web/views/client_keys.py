"""Client keys, whether they are needed, and the limits that hold for everybody."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from controlplane.errors import ControlPlaneError
from controlplane.models import ClientKey, Project, Replica
from controlplane.services.fleet.client_keys import create_client_key, revoke_client_key, update_client_key
from controlplane.services.fleet.pools import fleet_settings, update_fleet_settings
from controlplane.web.base import errors_as_messages, form_page, mine, signed_in, within
from controlplane.web.forms.fleet import ClientKeyForm, LimitsForm

CLOSING = (
    "From then on routers answer 401 to every request without one of the keys here. What clients send as Authorization "
    "no longer reaches the engines: an engine that asks for a key needs one on its replica. "
    "Tenants, rates and what task groups claim by keys begin to count."
)
OPENING = (
    "From then on routers take requests from anybody who reaches them, with a key or without, and pass on what they "
    "send as Authorization. Keys stay, but limit nothing; task groups are no longer found by them, and the caches of "
    "tenants are shared."
)


@never_cache
@require_http_methods(["GET", "POST"])
def key_list(request: HttpRequest) -> HttpResponse:
    """The keys of one's projects, and a form for a new one; its text is shown once, in the answer."""
    projects = within(request, Project.objects.all())
    form, text = ClientKeyForm(request.POST or None, projects=projects), None
    if request.method == "POST" and form.is_valid():
        try:
            _, text = create_client_key(**form.cleaned_data, by=signed_in(request))
        except ControlPlaneError as error:
            form.refuse(error)
        else:
            form = ClientKeyForm(projects=projects)
    keys = mine(request, ClientKey.objects.select_related("project")).order_by("revoked_at", "project__name", "name")
    context = {"keys": keys, "form": form, "text": text, "settings": fleet_settings()}
    return render(request, "controlplane/client_keys.html", context, status=422 if form.errors else 200)


@require_http_methods(["GET", "POST"])
def key_edit(request: HttpRequest, key_id: int) -> HttpResponse:
    """Change what a key is good for."""
    key = get_object_or_404(ClientKey.objects.select_related("project"), pk=key_id)
    form = ClientKeyForm(request.POST or None, projects=Project.objects.none(), key=key)
    if request.method == "POST" and form.is_valid():
        try:
            update_client_key(key, **form.cleaned_data, by=signed_in(request))
        except ControlPlaneError as error:
            form.refuse(error)
        else:
            messages.success(request, f"Client key {key.full_name} was changed; routers learn of it at once.")
            return redirect("controlplane:client-keys")
    title, back = f"Client key {key.full_name}", "controlplane:client-keys"
    return form_page(request, form, title=title, action="Save", back=back, back_label="Client keys")


@require_http_methods(["GET", "POST"])
def key_revoke(request: HttpRequest, key_id: int) -> HttpResponse:
    """End a key, after saying what will happen."""
    key = get_object_or_404(ClientKey.objects.select_related("project"), pk=key_id)
    if request.method == "POST":
        with errors_as_messages(request):
            revoke_client_key(key, by=signed_in(request))
            messages.success(request, f"Client key {key.full_name} does not work any more.")
        return redirect("controlplane:client-keys")
    context = {
        "back": reverse("controlplane:client-keys"),
        "title": f"Revoke client key {key.full_name}",
        "text": "Routers refuse it with 401 as soon as they know, within seconds; requests that run may finish. "
        "It cannot be brought back: make a new one of the same name, and what task groups claim by it holds again.",
        "action": f"Revoke {key.full_name}",
        "danger": True,
    }
    return render(request, "controlplane/confirm.html", context)


@require_http_methods(["GET", "POST"])
def admission(request: HttpRequest) -> HttpResponse:
    """Let in only clients with a key, or anybody, after saying what will happen."""
    needs_key = not fleet_settings().needs_key
    if request.method == "POST":
        with errors_as_messages(request):
            update_fleet_settings(needs_key=needs_key, by=signed_in(request))
            messages.success(request, f"Clients are let in {'only with' if needs_key else 'without'} a key.")
        return redirect("controlplane:client-keys")
    context = {
        "back": reverse("controlplane:client-keys"),
        "title": "Let in only clients with a key" if needs_key else "Let anybody in",
        "text": CLOSING if needs_key else OPENING,
        "warning": _shut_out() if needs_key else "",
        "action": "Ask for a key" if needs_key else "Let anybody in",
        "danger": True,
    }
    return render(request, "controlplane/confirm.html", context)


@require_http_methods(["GET", "POST"])
def limits(request: HttpRequest) -> HttpResponse:
    """What all routers accept, and how long they wait."""
    form = LimitsForm(request.POST or None, settings=fleet_settings())
    if request.method == "POST" and form.is_valid():
        try:
            update_fleet_settings(**form.cleaned_data, by=signed_in(request))
        except ControlPlaneError as error:
            form.refuse(error)
        else:
            messages.success(request, "The limits were changed; routers learn of them at once.")
            return redirect("controlplane:fleet")
    title = "Limits of the routers"
    return form_page(request, form, title=title, action="Save", back="controlplane:fleet", back_label="Fleet")


def _shut_out() -> str:
    """What is not ready for it."""
    keys = ClientKey.objects.filter(revoked_at=None).count()
    if not keys:
        return "There is no key yet: nobody would be let in."
    keyless = Replica.objects.filter(api_key_encrypted=None).count()
    words = f"{keys} {'key is' if keys == 1 else 'keys are'} let in."
    return f"{words} {keyless} replicas have no engine key; that is right where their engines ask for none."
