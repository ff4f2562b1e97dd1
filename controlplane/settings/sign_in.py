"""How people sign in, and for how long."""

from django.core.exceptions import ImproperlyConfigured

from . import env
from .oidc import ROLES

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
    {"NAME": "controlplane.accounts.passwords.OwnWordsValidator"},
]

# --- who guesses: controlplane/accounts/throttle.py says how it is counted --------------------------------

SIGN_IN_LOCK_S = 900  # seconds that a failure counts
SIGN_IN_FAILURES = 5  # of one name from one address, and of one person's second factor
SIGN_IN_FAILURES_OF_ADDRESS = 50
SIGN_IN_FAILURES_OF_NAME = 50  # from all addresses together, of devices that this person never signed in with
KNOWN_DEVICE_S = 180 * 86_400  # after its last sign-in
ACCOUNT_RATE_LIMITS = {
    "login_failed": f"{SIGN_IN_FAILURES_OF_ADDRESS}/{SIGN_IN_LOCK_S}s/ip,{SIGN_IN_FAILURES}/{SIGN_IN_LOCK_S}s/key",
    "login_failed_name": f"{SIGN_IN_FAILURES_OF_NAME}/{SIGN_IN_LOCK_S}s/key",
    "login": "60/m/ip",
}
# In PostgreSQL, so that every process counts the same. What is kept here may be lost at any time.
CACHES = {
    "default": {
        "BACKEND": "django.core.cache.backends.db.DatabaseCache",
        "LOCATION": "controlplane_cache",  # made by migration 0006_sign_in
        "OPTIONS": {"MAX_ENTRIES": 100_000},
    }
}

# --- the second factor ------------------------------------------------------------------------------------

MFA_ADAPTER = "controlplane.accounts.second_factor.SecondFactorAdapter"
MFA_SUPPORTED_TYPES = ["totp", "recovery_codes"]
MFA_TOTP_ISSUER = "Warmpath"
MFA_TOTP_TOLERANCE = 1  # steps of 30 s that a phone's clock may be off
MFA_RECOVERY_CODES_SHOW_ONCE = True
# Whoever holds one of these roles anywhere gets nowhere without a second factor.
REQUIRE_TOTP_FOR = frozenset(env.words("REQUIRE_TOTP_FOR")) - {"none"}
if unknown := sorted(REQUIRE_TOTP_FOR - set(ROLES)):
    raise ImproperlyConfigured(
        f"WARMPATH_REQUIRE_TOTP_FOR: expected roles out of {', '.join(ROLES)}, or none, not {', '.join(unknown)}"
    )

# --- sessions ---------------------------------------------------------------------------------------------

SESSION_SERIALIZER = "controlplane.sessions.SealedSerializer"
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
SESSION_COOKIE_AGE = ACCOUNT_SESSION_COOKIE_AGE = 12 * 3600  # seconds without a request of the person's own
SESSION_LONGEST_S = 7 * 24 * 3600  # seconds from signing in, used or not
ACCOUNT_SESSION_REMEMBER = True
CSRF_COOKIE_SAMESITE = "Lax"
MESSAGE_STORAGE = "django.contrib.messages.storage.session.SessionStorage"  # no cookie of their own
