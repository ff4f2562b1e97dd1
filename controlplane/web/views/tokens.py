"""API tokens: one's own, and for admins everybody's."""

from __future__ import annotations

from datetime import timedelta

from django.contrib import messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from controlplane.access.asker import asker_of
from controlplane.errors import ControlPlaneError
from controlplane.models import ApiToken, Role, Scope
from controlplane.services.access.tokens import create_token, revoke_token
from controlplane.web.doors import refusals_as_messages, signed_in
from controlplane.web.forms.tokens import TokenForm


@never_cache
@require_http_methods(["GET", "POST"])
def tokens(request: HttpRequest) -> HttpResponse:
    """The list, and a form for a new one; its text is shown once, in the answer."""
    form, text = TokenForm(request.POST or None), None
    if request.method == "POST" and form.is_valid():
        filled, user = form.cleaned_data, signed_in(request)
        expires_at = timezone.now() + timedelta(days=filled["days"]) if filled["days"] else None
        try:
            _, text = create_token(
                user, name=filled["name"], scopes=[Scope(filled["scope"])], expires_at=expires_at, by=user
            )
        except ControlPlaneError as error:
            form.refuse(error)
        else:
            form = TokenForm()
    context = {"tokens": _shown(request), "form": form, "text": text}
    return render(request, "controlplane/tokens.html", context, status=422 if form.errors else 200)


@require_POST
def token_revoke(request: HttpRequest, token_id: int) -> HttpResponse:
    """End a token now."""
    token = get_object_or_404(_shown(request), pk=token_id)
    with refusals_as_messages(request):
        revoke_token(token, by=signed_in(request))
        messages.success(request, f"Token {token.name} does not work any more.")
    return redirect("controlplane:tokens")


def _shown(request: HttpRequest) -> QuerySet[ApiToken]:
    rows = ApiToken.objects.select_related("user")
    return rows if asker_of(request).may(Role.ADMIN, None) else rows.filter(user=signed_in(request))
