"""Sign-in: passwords, rate limits, second factors, sessions, and OpenID Connect if an issuer is set."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from django.core.exceptions import ImproperlyConfigured

from controlplane.settings import env

ROLES = ("viewer", "operator", "editor", "approver", "admin")


@dataclass(frozen=True, slots=True)
class GroupRole:
    """Role of the members of one of the provider's groups."""

    group: str
    role: str
    project: str | None  # by name; None: all


def validate_issuer(url: str) -> str:
    """The issuer without a trailing slash; ImproperlyConfigured unless it is https, or http on loopback."""
    parts = urlsplit(url)
    if not parts.hostname or not (parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(parts.hostname))):
        raise ImproperlyConfigured(f"WARMPATH_OIDC_ISSUER: expected https://..., not {url!r}")
    return url.rstrip("/")


def group_roles(items: list[str]) -> tuple[GroupRole, ...]:
    """Parse ``group=role`` and ``group=role@project``; ImproperlyConfigured names an invalid item."""
    roles = []
    for item in items:
        group, _, role_and_project = item.rpartition("=")
        role, _, project = role_and_project.partition("@")
        if not group.strip() or role not in ROLES:
            raise ImproperlyConfigured(
                "WARMPATH_OIDC_GROUP_ROLES: expected group=role or group=role@project, separated by commas, "
                f"with a role out of {', '.join(ROLES)}, not {item!r}"
            )
        roles.append(GroupRole(group.strip(), role, project or None))
    return tuple(roles)


def providers(issuer: str) -> dict[str, Any]:
    """Providers for allauth. The provider id is derived from the issuer: users of another issuer are other users."""
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
            # The provider asks users again after this time, and reports when they last signed in.
            "auth_params": {"max_age": str(12 * 3600)},
        },
    }
    return {"openid_connect": {"APPS": [app], "OAUTH_PKCE_ENABLED": True}}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


OIDC_ISSUER = validate_issuer(url) if (url := env.text("OIDC_ISSUER", "")) else ""
OIDC_GROUPS_CLAIM = env.text("OIDC_GROUPS_CLAIM", "groups")
OIDC_GROUP_ROLES = group_roles(env.words("OIDC_GROUP_ROLES"))
OIDC_NETWORKS = env.networks("OIDC_NETWORKS")  # private networks of the provider
SOCIALACCOUNT_PROVIDERS = providers(OIDC_ISSUER)
SOCIALACCOUNT_ADAPTER = "controlplane.accounts.single_sign_on.SingleSignOnAdapter"


AUTHENTICATION_BACKENDS = ["allauth.account.auth_backends.AuthenticationBackend"]
LOGIN_URL = "account_login"
LOGIN_REDIRECT_URL = "/"
ACCOUNT_ADAPTER = "controlplane.accounts.passwords.AccountAdapter"
ACCOUNT_LOGIN_METHODS = {"username"}
ACCOUNT_SIGNUP_FIELDS = ["username*", "password1*", "password2*"]
ACCOUNT_EMAIL_VERIFICATION = "none"
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 12}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
    {"NAME": "controlplane.accounts.passwords.GuessableWordsValidator"},
]

# --- limits on failed sign-ins, see controlplane/accounts/sign_in_methods.py ---------------------

SIGN_IN_LOCK_S = 900  # seconds for which a failure counts
SIGN_IN_FAILURES = 5  # per user name and address, and per user's second factor
SIGN_IN_FAILURES_OF_ADDRESS = 50
SIGN_IN_FAILURES_OF_NAME = 50  # over all addresses, from devices unknown for this user
KNOWN_DEVICE_S = 180 * 86_400  # since its last sign-in
ACCOUNT_RATE_LIMITS = {
    "login_failed": f"{SIGN_IN_FAILURES_OF_ADDRESS}/{SIGN_IN_LOCK_S}s/ip,{SIGN_IN_FAILURES}/{SIGN_IN_LOCK_S}s/key",
    "login_failed_name": f"{SIGN_IN_FAILURES_OF_NAME}/{SIGN_IN_LOCK_S}s/key",
    "login": "60/m/ip",
}
# In PostgreSQL, so that all processes share the counts. Cached values may be lost at any time.
CACHES = {
    "default": {
        "BACKEND": "django.core.cache.backends.db.DatabaseCache",
        "LOCATION": "controlplane_cache",  # created by a migration
        "OPTIONS": {"MAX_ENTRIES": 100_000},
    }
}

# --- the second factor ------------------------------------------------------------------------------------

MFA_ADAPTER = "controlplane.accounts.sign_in_methods.SecondFactorAdapter"
MFA_SUPPORTED_TYPES = ["totp", "recovery_codes"]
MFA_TOTP_ISSUER = "Warmpath"
MFA_TOTP_TOLERANCE = 1  # steps of 30 s of clock difference
MFA_RECOVERY_CODES_SHOW_ONCE = True
# A user with one of these roles in any project needs a second factor.
REQUIRE_TOTP_FOR = frozenset(env.words("REQUIRE_TOTP_FOR")) - {"none"}
if unknown := sorted(REQUIRE_TOTP_FOR - set(ROLES)):
    raise ImproperlyConfigured(
        f"WARMPATH_REQUIRE_TOTP_FOR: expected roles out of {', '.join(ROLES)}, or none, not {', '.join(unknown)}"
    )

# --- sessions ---------------------------------------------------------------------------------------------

SESSION_SERIALIZER = "controlplane.accounts.sessions.EncryptedSerializer"
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
SESSION_COOKIE_AGE = ACCOUNT_SESSION_COOKIE_AGE = 12 * 3600  # idle seconds
SESSION_MAX_S = 7 * 24 * 3600  # seconds since sign-in
ACCOUNT_SESSION_REMEMBER = True
CSRF_COOKIE_SAMESITE = "Lax"
MESSAGE_STORAGE = "django.contrib.messages.storage.session.SessionStorage"  # no extra cookie
