"""The way to the identity provider and back; allauth walks it."""

from __future__ import annotations

import logging
from typing import cast

from allauth.socialaccount.providers.openid_connect import views
from django.contrib import messages
from django.contrib.auth.decorators import login_not_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods, require_POST
from requests import RequestException

from controlplane.accounts.sign_in_methods import is_recently_authenticated, provider_name
from controlplane.accounts.single_sign_on import sign_in_rejected
from controlplane.services.access.people import disconnect_single_sign_on
from controlplane.web.base import errors_as_messages, signed_in

log = logging.getLogger(__name__)


@never_cache
@login_not_required
@require_http_methods(["GET", "POST"])
def begin(request: HttpRequest, provider_id: str) -> HttpResponse:
    """Ask for a click, then go to the provider.

    By a page that goes on by itself: browsers apply ``form-action`` to every redirect that follows a form, and where a
    provider sends people on the way is not ours to know.
    """
    if not provider_name():
        raise Http404
    try:
        answer = cast("HttpResponse", views.login(request, provider_id))
    except (RequestException, LookupError, ValueError) as error:
        log.warning("The identity provider cannot be asked: %s", error)
        return sign_in_rejected(
            request, "The identity provider cannot be reached. Sign in with a password, or try again.", 502
        )
    if answer.status_code != 302:
        return answer
    return render(request, "account/leaving.html", {"url": answer["Location"], "name": provider_name()})


@never_cache
@login_not_required
@require_GET
def come_back(request: HttpRequest, provider_id: str) -> HttpResponse:
    """What the provider sent somebody back with."""
    if not provider_name():
        raise Http404
    try:
        answer = cast("HttpResponse", views.callback(request, provider_id))
    except (RequestException, LookupError, ValueError) as error:
        log.warning("The identity provider's answer cannot be used: %s", error)
        return sign_in_rejected(request, "The identity provider cannot be asked who you are. Try again.", 502)
    return answer


@login_not_required
@require_GET
def cancelled(request: HttpRequest) -> HttpResponse:
    """Somebody thought better of it, there."""
    return render(request, "account/single_sign_on_refused.html", {"reason": "You did not sign in there."}, status=403)


@require_GET
def no_password(request: HttpRequest) -> HttpResponse:
    """Where somebody without a password is sent who wants to change it: one of their own would outlive the provider's
    word about them.
    """
    messages.info(request, "You have no password here. An admin can set one.")
    return redirect("mfa_index")


@require_POST
def disconnect(request: HttpRequest) -> HttpResponse:
    """Untie one's account from the provider's."""
    if not is_recently_authenticated(request):
        messages.error(request, "Confirm that it is you first. Nothing was changed.")
        return redirect("account_reauthenticate")
    with errors_as_messages(request):
        disconnect_single_sign_on(signed_in(request))
        messages.success(request, "You sign in with your password alone now.")
    return redirect("mfa_index")
