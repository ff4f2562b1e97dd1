"""Client keys, whether requests need one, and the limits of all routers."""

from __future__ import annotations

from functools import partial

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from controlplane.models import ClientKey, Project, Replica
from controlplane.services.fleet.client_keys import create_client_key, revoke_client_key, update_client_key
from controlplane.services.fleet.pools import fleet_settings, update_fleet_settings
from controlplane.web.base import confirm_page, current_user, form_page, manageable, viewable
from controlplane.web.forms.fleet import ClientKeyForm, LimitsForm

KEYS = "controlplane:client-keys"
REQUIRED = (
    "Routers then respond with 401 to every request without one of these keys, and no longer pass the client's "
    "Authorization header to engines: set an API key on each replica whose engine requires one. Tenants, rate limits "
    "and task groups of keys apply."
)
OPTIONAL = (
    "Routers then accept requests from every client that reaches them, and pass the client's Authorization header to "
    "engines. Keys are kept, but rate limits, tenants and task groups of keys no longer apply."
)


@never_cache
@require_http_methods(["GET", "POST"])
def key_list(request: HttpRequest) -> HttpResponse:
    """The keys of the user's projects, and a form for a new one, whose secret is shown once in the response."""
    projects = manageable(request, Project.objects.all())
    form, text = ClientKeyForm(request.POST or None, projects=projects), None
    if form.is_valid():
        with form.service_errors():
            _, text = create_client_key(**form.cleaned_data, by=current_user(request))
            form = ClientKeyForm(projects=projects)
    keys = viewable(request, ClientKey.objects.select_related("project")).order_by(
        "revoked_at", "project__name", "name"
    )
    context = {"keys": keys, "form": form, "text": text, "settings": fleet_settings()}
    return render(request, "controlplane/client_keys.html", context, status=422 if form.errors else 200)


@require_http_methods(["GET", "POST"])
def key_edit(request: HttpRequest, key_id: int) -> HttpResponse:
    """Change a key's permissions and limits."""
    key = get_object_or_404(ClientKey.objects.select_related("project"), pk=key_id)
    form = ClientKeyForm(request.POST or None, projects=Project.objects.none(), key=key).editing(key)
    if form.is_valid():
        with form.service_errors(), form.locked():
            update_client_key(key, **form.cleaned_data, by=current_user(request))
            messages.success(request, f"Client key {key.full_name} was changed. Routers receive the change in seconds.")
            return redirect(KEYS)
    title = f"Client key {key.full_name}"
    return form_page(request, form, title=title, action="Save", back=KEYS, back_label="Client keys")


@require_http_methods(["GET", "POST"])
def key_revoke(request: HttpRequest, key_id: int) -> HttpResponse:
    """Revoke a key."""
    key = get_object_or_404(ClientKey.objects.select_related("project"), pk=key_id)
    return confirm_page(
        request,
        partial(revoke_client_key, key, by=current_user(request)),
        back=KEYS,
        title=f"Revoke client key {key.full_name}",
        text="Routers reject it with 401 within seconds; running requests finish. A revoked key cannot be restored. "
        "A new key of the same name gets the task groups that refer to this one.",
        action=f"Revoke {key.full_name}",
        done=f"Client key {key.full_name} was revoked.",
    )


@require_http_methods(["GET", "POST"])
def admission(request: HttpRequest) -> HttpResponse:
    """Require a client key, or accept requests without one."""
    needs_key = not fleet_settings().needs_key
    return confirm_page(
        request,
        partial(update_fleet_settings, needs_key=needs_key, by=current_user(request)),
        back=KEYS,
        title="Require a client key" if needs_key else "Accept requests without a key",
        text=REQUIRED if needs_key else OPTIONAL,
        warning=_missing_keys() if needs_key else "",
        action="Require a key" if needs_key else "Accept all requests",
        done=f"Requests {'now need' if needs_key else 'no longer need'} a client key.",
    )


@require_http_methods(["GET", "POST"])
def limits(request: HttpRequest) -> HttpResponse:
    """Limits and timeouts of all routers."""
    row = fleet_settings()
    form = LimitsForm(request.POST or None, settings=row).editing(row)
    if form.is_valid():
        with form.service_errors(), form.locked():
            update_fleet_settings(**form.cleaned_data, by=current_user(request))
            messages.success(request, "The limits were changed. Routers receive the change within seconds.")
            return redirect("controlplane:fleet")
    return form_page(request, form, title="Router limits", action="Save", back="controlplane:fleet", back_label="Fleet")


def _missing_keys() -> str:
    """What would fail once keys are required."""
    keys = ClientKey.objects.filter(revoked_at=None).count()
    if not keys:
        return "There is no client key yet: every request would be rejected."
    keyless = Replica.objects.filter(api_key_encrypted=None).count()
    return (
        f"{keys} client {'key exists' if keys == 1 else 'keys exist'}. {keyless} replicas have no engine API key, "
        "which is correct only if their engines require none."
    )
