"""Production: every setting without a safe default is required."""

from django.core.exceptions import ImproperlyConfigured

from controlplane.settings import env
from controlplane.settings.base import *  # noqa: F403 - this file is base plus differences
from controlplane.settings.base import CONFIG_SIGNING_KEY

DEBUG = False
SECRET_KEY = env.text("SECRET_KEY")
SECRET_KEY_FALLBACKS = env.words("SECRET_KEY_FALLBACKS")
ALLOWED_HOSTS = env.words("ALLOWED_HOSTS")
CSRF_TRUSTED_ORIGINS = [f"https://{host}" for host in ALLOWED_HOSTS if not host.startswith((".", "*"))]
ROUTER_ADMIN_TOKEN = env.text("ROUTER_ADMIN_TOKEN")

DATABASES = {
    "default": env.database(env.text("DATABASE_URL"), pool=int(env.number("DATABASE_POOL", 16, low=0, high=1000)))
}
if owner := env.text("DATABASE_OWNER_URL", ""):
    DATABASE_OWNER = env.database(owner)
CELERY_BROKER_URL = env.text("REDIS_URL")

SECURE_SSL_REDIRECT = env.flag("SSL_REDIRECT", default=True)
SECURE_REDIRECT_EXEMPT = [
    r"^api/",  # the API rejects plain HTTP instead: a redirected script has already sent its token
    r"^(healthz|readyz|metrics)$",  # probes and scrapes come from inside, not through the proxy
]
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if env.flag("BEHIND_TLS_PROXY", default=False) else None
SECURE_HSTS_SECONDS = 31_536_000
SECURE_HSTS_INCLUDE_SUBDOMAINS = True
SECURE_HSTS_PRELOAD = True
SESSION_COOKIE_SECURE = True
CSRF_COOKIE_SECURE = True
SESSION_COOKIE_NAME = "__Host-sessionid"  # browsers accept the __Host- prefix only over HTTPS from this host
CSRF_COOKIE_NAME = "__Host-csrftoken"

if len(SECRET_KEY) < 50 or len(set(SECRET_KEY)) < 10:
    raise ImproperlyConfigured("WARMPATH_SECRET_KEY: expected at least 50 characters, at least 10 of them different")
if not ALLOWED_HOSTS or "*" in ALLOWED_HOSTS:
    raise ImproperlyConfigured("WARMPATH_ALLOWED_HOSTS: expected the host names of this site")
if 0 < len(CONFIG_SIGNING_KEY) < 32:
    raise ImproperlyConfigured("WARMPATH_CONFIG_SIGNING_KEY: expected at least 32 characters")
if len(ROUTER_ADMIN_TOKEN) < 32:
    raise ImproperlyConfigured("WARMPATH_ROUTER_ADMIN_TOKEN: expected at least 32 characters")
