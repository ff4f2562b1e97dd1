"""Pools. Each change says first what will happen."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods

from controlplane.errors import ControlPlaneError
from controlplane.models import Pool, Project
from controlplane.services.fleet.pools import create_pool, remove_pool, update_pool
from controlplane.services.fleet.served_models import unnamed_warning
from controlplane.web.doors import form_page, refusals_as_messages, signed_in, within
from controlplane.web.forms.pools import PoolForm, PoolSettingsForm


@require_http_methods(["GET", "POST"])
def pool_new(request: HttpRequest) -> HttpResponse:
    """A pool of its own for models that other replicas do not serve."""
    form = PoolForm(within(request, Project.objects.all()), request.POST or None)
    if request.method == "POST" and form.is_valid():
        try:
            pool = create_pool(**form.cleaned_data, by=signed_in(request))
        except ControlPlaneError as error:
            form.refuse(error)
        else:
            messages.success(request, f"Pool {pool.name} was created. Add its first replica.")
            if warning := unnamed_warning(pool):
                messages.warning(request, warning)
            return redirect("controlplane:replica-new", pool_id=pool.pk)
    return form_page(
        request, form, title="Add a pool", action="Add the pool", back="controlplane:fleet", back_label="Fleet"
    )


@require_http_methods(["GET", "POST"])
def pool_edit(request: HttpRequest, pool_id: int) -> HttpResponse:
    """What routers do about a pool: its names, health checks, caps and limits."""
    pool = get_object_or_404(Pool.objects.select_related("project"), pk=pool_id)
    form = PoolSettingsForm(request.POST or None, pool=pool)
    if request.method == "POST" and form.is_valid():
        try:
            update_pool(pool, **form.cleaned_data, by=signed_in(request))
        except ControlPlaneError as error:
            form.refuse(error)
        else:
            messages.success(request, f"Pool {pool.name} was changed; routers learn of it at once.")
            return redirect("controlplane:fleet")
    title = f"Pool {pool.name}"
    return form_page(request, form, title=title, action="Save", back="controlplane:fleet", back_label="Fleet")


@require_http_methods(["GET", "POST"])
def pool_remove(request: HttpRequest, pool_id: int) -> HttpResponse:
    """Remove an empty pool."""
    pool = get_object_or_404(Pool, pk=pool_id)
    if request.method == "POST":
        with refusals_as_messages(request):
            remove_pool(pool, by=signed_in(request))
            messages.success(request, f"Pool {pool.name} was removed.")
        return redirect("controlplane:fleet")
    context = {
        "back": reverse("controlplane:fleet"),
        "title": f"Remove pool {pool.name}",
        "text": "Requests for its models are refused from then on. A pool with replicas or task groups stays.",
        "action": "Remove the pool",
        "danger": True,
    }
    return render(request, "controlplane/confirm.html", context)
