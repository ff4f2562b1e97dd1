"""Which ways in there are, and which one somebody took."""

from __future__ import annotations

from allauth.socialaccount.models import SocialAccount
from django.conf import settings
from django.contrib.auth.models import User
from django.http import HttpRequest
from django.urls import reverse
from django.utils.http import urlencode

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
