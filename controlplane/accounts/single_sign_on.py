"""Single sign-on at the operator's OpenID Connect provider.

Theory of operation. allauth runs the authorization code flow with PKCE; every request to the provider goes through our
egress rules. Returning users are identified by issuer and subject alone: e-mail addresses and names are ignored,
because many providers let users choose theirs. A new user may sign in if one of their groups has a role here. A user
with an existing account connects the two while signed in.
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
from controlplane.services.access.sign_ins import record_sign_in_failure
from controlplane.services.access.users import record_first_single_sign_on, roles_of_groups


class SingleSignOnAdapter(DefaultSocialAccountAdapter):  # type: ignore[misc]  # allauth ships no types
    """Decides who may sign in, and as which user."""

    def get_requests_session(self) -> requests.Session:
        """A session that applies the egress rules to all requests to the provider."""
        return guarded_session(provider_rules())

    def pre_social_login(self, request: HttpRequest, sociallogin: SocialLogin) -> None:
        """Reject inconsistent claims; drop e-mail addresses so that accounts are never matched by them."""
        sociallogin.email_addresses = []
        if problem := _problem_of_claims(sociallogin.account.extra_data):
            raise ImmediateHttpResponse(render_sign_in_rejected(request, problem))

    def is_open_for_signup(self, request: HttpRequest, sociallogin: SocialLogin) -> bool:
        """Whether one of a new user's groups has a role."""
        if roles_of_groups(groups_of(sociallogin)):
            return True
        raise ImmediateHttpResponse(
            render_sign_in_rejected(request, "None of your groups has a role here. Ask an admin of Warmpath.")
        )

    def save_user(self, request: HttpRequest, sociallogin: SocialLogin, form: Any = None) -> User:
        user: User = super().save_user(request, sociallogin, form)
        record_first_single_sign_on(user)
        return user

    def get_connect_redirect_url(self, request: HttpRequest, socialaccount: SocialAccount) -> str:  # noqa: ARG002 - allauth's
        return reverse("mfa_index")

    def on_authentication_error(self, request: HttpRequest, provider: Any, **_: Any) -> None:  # noqa: ARG002 - allauth's
        raise ImmediateHttpResponse(
            render_sign_in_rejected(request, "The provider did not confirm who you are. Try again.")
        )


def render_sign_in_rejected(request: HttpRequest, reason: str, status: int = 403) -> HttpResponse:
    """Record a failed single sign-on and render its page."""
    record_sign_in_failure("", detail=" by single sign-on")
    return render(request, "account/single_sign_on_rejected.html", {"reason": reason}, status=status)


def groups_of(sociallogin: SocialLogin) -> list[str]:
    """The user's groups, from the ID token and the userinfo endpoint."""
    claims = sociallogin.account.extra_data
    lists = [claims.get(part, {}).get(settings.OIDC_GROUPS_CLAIM, []) for part in ("id_token", "userinfo")]
    return [str(group) for groups in lists for group in ([groups] if isinstance(groups, str) else groups)]


def authenticated_at(sociallogin: SocialLogin) -> float | None:
    """Unix time of the user's last authentication at the provider; None where the provider does not report it."""
    at = sociallogin.account.extra_data.get("id_token", {}).get("auth_time")
    return float(at) if isinstance(at, int | float) else None


def _problem_of_claims(claims: dict[str, Any]) -> str:
    """Why the claims are rejected; "" where they are consistent."""
    token, userinfo = claims.get("id_token") or {}, claims.get("userinfo") or {}
    if token.get("iss", "").rstrip("/") != settings.OIDC_ISSUER:
        return "The response is not from the configured issuer."
    if not token.get("sub") or userinfo.get("sub", token["sub"]) != token["sub"]:
        return "The provider's ID token and userinfo name two different users."
    return ""
