"""The local stack of ``make run``: loopback, plain HTTP, embedded servers unless URLs of external servers are set."""

from django.core.exceptions import ImproperlyConfigured

from controlplane.settings import env
from controlplane.settings.base import *  # noqa: F403 - this file is base plus differences
from controlplane.settings.base import DATA_DIR
from controlplane.stack import paths

DEBUG = env.flag("DEBUG", default=False)
SECRET_KEY = env.text("SECRET_KEY", "") or paths.secret(DATA_DIR, "secret_key")
ROUTER_ADMIN_TOKEN = env.text("ROUTER_ADMIN_TOKEN", "") or paths.secret(DATA_DIR, "router_admin_token")
CONFIG_SIGNING_KEY = env.text("CONFIG_SIGNING_KEY", "") or paths.secret(DATA_DIR, "config_signing_key")
ALLOWED_HOSTS = env.words("ALLOWED_HOSTS", "127.0.0.1,localhost,[::1]")
if DEBUG and (remote_hosts := sorted(set(ALLOWED_HOSTS) - {"127.0.0.1", "localhost", "[::1]"})):
    raise ImproperlyConfigured(
        f"WARMPATH_DEBUG: debug pages show settings and code, so it needs WARMPATH_ALLOWED_HOSTS to name only "
        f"this machine; it names {', '.join(remote_hosts)}"
    )

DATABASES = {"default": env.database(env.text("DATABASE_URL", paths.postgres_url(DATA_DIR)), pool=8)}
_embedded_owner = "" if env.text("DATABASE_URL", "") else paths.postgres_url(DATA_DIR, "postgres")
if owner := env.text("DATABASE_OWNER_URL", _embedded_owner):
    DATABASE_OWNER = env.database(owner)
CELERY_BROKER_URL = env.text("REDIS_URL", paths.valkey_url(DATA_DIR))

STATIC_ROOT = DATA_DIR / "static"  # collected by prepare_stack
WHITENOISE_USE_FINDERS = WHITENOISE_AUTOREFRESH = DEBUG
METRICS_NETWORKS = env.networks("METRICS_NETWORKS", "127.0.0.0/8,::1/128")
BEHIND_TLS_PROXY = False  # X-Forwarded-* headers are ignored
PUBLIC_URL = env.text("PUBLIC_URL", f"http://127.0.0.1:{env.text('WEB_PORT', '8000')}").rstrip("/")
WEBHOOK_NETWORKS = env.networks("WEBHOOK_NETWORKS", "127.0.0.0/8,::1/128")
OIDC_NETWORKS = env.networks("OIDC_NETWORKS", "127.0.0.0/8,::1/128")
