"""Sign-in at an identity provider (OpenID Connect), on top of allauth's views."""

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
from controlplane.accounts.single_sign_on import render_sign_in_rejected
from controlplane.services.access.users import disconnect_single_sign_on
from controlplane.web.base import current_user, errors_as_messages

log = logging.getLogger(__name__)


@never_cache
@login_not_required
@require_http_methods(["GET", "POST"])
def start(request: HttpRequest, provider_id: str) -> HttpResponse:
    """Show a confirmation on GET; on POST redirect to the provider.

    The redirect is a page with a meta refresh: browsers apply ``form-action`` of the content security policy to every
    redirect after a form, and the provider's further redirects are unknown here.
    """
    if not provider_name():
        raise Http404
    try:
        response = cast("HttpResponse", views.login(request, provider_id))
    except (RequestException, LookupError, ValueError) as error:
        log.warning("The identity provider is unreachable: %s", error)
        return render_sign_in_rejected(
            request, "The identity provider cannot be reached. Sign in with a password, or try again.", 502
        )
    if response.status_code != 302:
        return response
    return render(request, "account/leaving.html", {"url": response["Location"], "name": provider_name()})


@never_cache
@login_not_required
@require_GET
def callback(request: HttpRequest, provider_id: str) -> HttpResponse:
    """Handle the provider's redirect back."""
    if not provider_name():
        raise Http404
    try:
        return cast("HttpResponse", views.callback(request, provider_id))
    except (RequestException, LookupError, ValueError) as error:
        log.warning("The identity provider's response is invalid: %s", error)
        return render_sign_in_rejected(request, "The identity provider did not confirm who you are. Try again.", 502)


@login_not_required
@require_GET
def cancelled(request: HttpRequest) -> HttpResponse:
    """The user cancelled at the provider."""
    reason = "You cancelled the sign-in at the identity provider."
    return render(request, "account/single_sign_on_rejected.html", {"reason": reason}, status=403)


@require_GET
def no_password(request: HttpRequest) -> HttpResponse:
    """Tell a user of an identity provider that they cannot set a password; replaces allauth's page for it.

    A password would remain valid after the provider disables the account.
    """
    messages.info(request, "Your account has no password. An admin can set one.")
    return redirect("mfa_index")


@require_POST
def disconnect(request: HttpRequest) -> HttpResponse:
    """Disconnect the user's account from the provider."""
    if not is_recently_authenticated(request):
        messages.error(request, "Confirm your identity first. Nothing was changed.")
        return redirect("account_reauthenticate")
    with errors_as_messages(request):
        disconnect_single_sign_on(current_user(request))
        messages.success(request, "You now sign in with your password only.")
    return redirect("mfa_index")
