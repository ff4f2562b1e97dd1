"""Signing in at the operator's identity provider.

Theory of operation. allauth walks the authorization code flow with PKCE; every request to the provider goes through
our egress. Who comes back is known by issuer and subject alone: an e-mail address or a name that somebody here has too
means nothing, because at many providers people choose theirs. A newcomer is let in if a group brings them a role.
Somebody who has an account here connects the two while signed in.
"""

from __future__ import annotations

from typing import Any

import requests
from allauth.core.exceptions import ImmediateHttpResponse
from allauth.socialaccount.adapter import DefaultSocialAccountAdapter
from allauth.socialaccount.models import SocialAccount, SocialLogin
from django.conf import settings
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse

from controlplane.egress import guarded_session, provider_rules
from controlplane.services.access.people import record_first_single_sign_on, roles_of_groups
from controlplane.services.access.sign_ins import record_sign_in_failure


class SingleSignOnAdapter(DefaultSocialAccountAdapter):  # type: ignore[misc]  # allauth ships no types
    """Who may come in, and as whom."""

    def get_requests_session(self) -> requests.Session:
        """Discovery, tokens, keys and userinfo are asked for under the rules of egress."""
        return guarded_session(provider_rules())

    def pre_social_login(self, request: HttpRequest, sociallogin: SocialLogin) -> None:
        """Refuse an answer that does not hold together; forget e-mail addresses, so that nothing is matched by them."""
        sociallogin.email_addresses = []
        if reason := _refusal(sociallogin.account.extra_data):
            raise ImmediateHttpResponse(refused(request, reason))

    def is_open_for_signup(self, request: HttpRequest, sociallogin: SocialLogin) -> bool:
        """Whether a group brings a newcomer any role."""
        if roles_of_groups(groups_of(sociallogin)):
            return True
        raise ImmediateHttpResponse(refused(request, "None of your groups has a role here. Ask an admin of Warmpath."))

    def save_user(self, request: HttpRequest, sociallogin: SocialLogin, form: Any = None) -> User:
        """A person without a password of ours."""
        person: User = super().save_user(request, sociallogin, form)
        record_first_single_sign_on(person)
        return person

    def get_connect_redirect_url(self, request: HttpRequest, socialaccount: SocialAccount) -> str:  # noqa: ARG002 - allauth's
        """Back to the page that one's account is looked after on."""
        return reverse("mfa_index")

    def on_authentication_error(self, request: HttpRequest, provider: Any, **_: Any) -> None:  # noqa: ARG002 - allauth's
        """The provider refused, or what it answered cannot be believed."""
        raise ImmediateHttpResponse(refused(request, "It did not say who you are. Try again."))


def refused(request: HttpRequest, reason: str, status: int = 403) -> HttpResponse:
    """The page for somebody who does not come in by single sign-on."""
    record_sign_in_failure("", detail=" by single sign-on")
    return render(request, "account/single_sign_on_refused.html", {"reason": reason}, status=status)


def groups_of(sociallogin: SocialLogin) -> list[str]:
    """The groups that the provider named, in the ID token or at userinfo."""
    claims = sociallogin.account.extra_data
    said = [claims.get(part, {}).get(settings.OIDC_GROUPS_CLAIM, []) for part in ("id_token", "userinfo")]
    return [str(group) for groups in said for group in ([groups] if isinstance(groups, str) else groups)]


def authenticated_at(sociallogin: SocialLogin) -> float | None:
    """When the provider last asked this person who they are, in seconds since 1970; None where it does not say."""
    at = sociallogin.account.extra_data.get("id_token", {}).get("auth_time")
    return float(at) if isinstance(at, int | float) else None


def _refusal(claims: dict[str, Any]) -> str:
    """Why an answer is not believed; "" where it is."""
    token, userinfo = claims.get("id_token") or {}, claims.get("userinfo") or {}
    if token.get("iss", "").rstrip("/") != settings.OIDC_ISSUER:
        return "The answer is not of the issuer that is configured."
    if not token.get("sub") or userinfo.get("sub", token["sub"]) != token["sub"]:
        return "The provider's answers are about two people."
    return ""
