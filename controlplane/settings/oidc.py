"""Signing in at an identity provider of the operator's own, by OpenID Connect. Off without an issuer."""

import ipaddress
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from django.core.exceptions import ImproperlyConfigured

from . import env

ROLES = ("viewer", "operator", "editor", "approver", "admin")


@dataclass(frozen=True, slots=True)
class GroupRole:
    """What the members of one of the provider's groups may do."""

    group: str
    role: str
    project: str | None  # by name; None: all


def issuer_of(url: str) -> str:
    """An issuer as providers write it; ImproperlyConfigured unless nobody on the way can pretend to be it."""
    parts = urlsplit(url)
    if not parts.hostname or not (parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(parts.hostname))):
        raise ImproperlyConfigured(f"WARMPATH_OIDC_ISSUER: expected https://..., not {url!r}")
    return url.rstrip("/")


def group_roles(words: list[str]) -> tuple[GroupRole, ...]:
    """What ``group=role`` and ``group=role@project`` say; ImproperlyConfigured names the one that is wrong."""
    found = []
    for word in words:
        group, _, what = word.rpartition("=")
        role, _, project = what.partition("@")
        if not group.strip() or role not in ROLES:
            raise ImproperlyConfigured(
                "WARMPATH_OIDC_GROUP_ROLES: expected group=role or group=role@project, separated by commas, "
                f"with a role out of {', '.join(ROLES)}, not {word!r}"
            )
        found.append(GroupRole(group.strip(), role, project or None))
    return tuple(found)


def providers(issuer: str) -> dict[str, Any]:
    """What allauth reads. A provider's name is made of its issuer: people of another one are other people."""
    if not issuer:
        return {}
    app = {
        "provider_id": re.sub(r"[^a-z0-9.]+", "-", issuer.partition("://")[2].lower()),
        "name": env.text("OIDC_NAME", "single sign-on"),
        "client_id": env.text("OIDC_CLIENT_ID"),
        "secret": env.text("OIDC_CLIENT_SECRET", ""),
        "settings": {
            "server_url": issuer,
            "scope": env.words("OIDC_SCOPES", "openid,profile,email"),
            # Whoever was not asked for so long is asked again, and the provider says when that was.
            "auth_params": {"max_age": str(12 * 3600)},
        },
    }
    return {"openid_connect": {"APPS": [app], "OAUTH_PKCE_ENABLED": True}}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


OIDC_ISSUER = issuer_of(url) if (url := env.text("OIDC_ISSUER", "")) else ""
OIDC_GROUPS_CLAIM = env.text("OIDC_GROUPS_CLAIM", "groups")
OIDC_GROUP_ROLES = group_roles(env.words("OIDC_GROUP_ROLES"))
OIDC_NETWORKS = env.networks("OIDC_NETWORKS")  # private networks that the provider may be in
SOCIALACCOUNT_PROVIDERS = providers(OIDC_ISSUER)
SOCIALACCOUNT_ADAPTER = "controlplane.accounts.single_sign_on.SingleSignOnAdapter"
