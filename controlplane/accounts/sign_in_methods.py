"""Which ways in there are, and which one somebody took.

How long ago somebody last proved who they are. What cannot be undone asks for a fresh proof.

The second factor: a time-based code, and recovery codes for the day the phone is gone.
"""

from __future__ import annotations

import time

from allauth.mfa.adapter import DefaultMFAAdapter
from allauth.mfa.models import Authenticator
from allauth.socialaccount.models import SocialAccount
from django.conf import settings
from django.contrib.auth.models import User
from django.http import HttpRequest
from django.urls import reverse
from django.utils.http import urlencode

from controlplane.encryption import decrypt, encrypt

_HERE = "came_by_provider"  # in the session of whoever came so


def note_way(request: HttpRequest) -> None:
    """Somebody came in by the provider, which asks for second factors as it sees fit."""
    request.session[_HERE] = True


def came_by_provider(request: HttpRequest) -> bool:
    """Whether the provider let them in."""
    return bool(request.session.get(_HERE))


def provider_name() -> str:
    """What the provider is called on our pages; "" where there is none."""
    apps = settings.SOCIALACCOUNT_PROVIDERS.get("openid_connect", {}).get("APPS", [])
    return str(apps[0]["name"]) if apps else ""


def sign_in_url(**query: str) -> str:
    """Where going to the provider begins."""
    (app,) = settings.SOCIALACCOUNT_PROVIDERS["openid_connect"]["APPS"]
    address = reverse("openid_connect_login", kwargs={"provider_id": app["provider_id"]})
    return f"{address}?{urlencode(query)}" if query else address


def is_connected(user: User) -> bool:
    """Whether somebody can sign in at the provider. One query."""
    return bool(SocialAccount.objects.filter(user=user).exists())


PROOF_S = 900  # seconds that a proof is fresh
CLOCKS_APART_S = 60  # that a provider's clock may be ahead of ours
_KEY = "proved_at"


def note_proof(request: HttpRequest, *, at: float | None = None) -> None:
    """They just did, or did ``at`` a moment that the identity provider named: by password, by code, or there."""
    request.session[_KEY] = time.time() if at is None else at


def is_fresh(request: HttpRequest) -> bool:
    """Whether the last proof of this session is fresh."""
    return bool(-CLOCKS_APART_S <= time.time() - request.session.get(_KEY, 0) < PROOF_S)


class SecondFactorAdapter(DefaultMFAAdapter):  # type: ignore[misc]  # allauth ships no types
    """Secrets are encrypted in the database; an entry in an authenticator app says the person's name."""

    def get_totp_label(self, user: User) -> str:
        """What the app shows beside the code."""
        return user.get_username()

    def encrypt(self, text: str) -> str:
        """As it is kept."""
        return encrypt(text.encode()).decode()

    def decrypt(self, encrypted_text: str) -> str:
        """As it is used."""
        return decrypt(encrypted_text.encode()).decode()


def has_code(user: User) -> bool:
    """Whether somebody signs in with a code besides the password. One query."""
    return bool(Authenticator.objects.filter(user=user, type=Authenticator.Type.TOTP).exists())
