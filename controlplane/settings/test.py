"""Tests. tests/conftest.py starts servers on demand and fills in their addresses."""

import os

os.environ.setdefault("WARMPATH_DATA_DIR", "/nonexistent")

from controlplane.settings import env
from controlplane.settings.base import *  # noqa: F403 - this file is base plus differences
from controlplane.settings.base import STORAGES

SECRET_KEY = "a-key-for-tests-only-" * 3
ROUTER_ADMIN_TOKEN = "router-token-for-tests"  # noqa: S105 - no secret
ALLOWED_HOSTS = ["127.0.0.1", "localhost", "testserver"]
DATABASES = {"default": env.database("postgresql://postgres@/warmpath?host=/nonexistent")}
DATABASES["default"]["OPTIONS"]["response_timeout_s"] = 120  # of a machine that stalls
CELERY_BROKER_URL = "redis://127.0.0.1:1/0"  # nothing listens there: a wake-up without a broker is not an error
API_RATE = API_RATE_UNAUTHENTICATED = 0  # nothing to count requests in
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
STORAGES["staticfiles"]["BACKEND"] = "django.contrib.staticfiles.storage.StaticFilesStorage"  # nothing is collected
WHITENOISE_USE_FINDERS = True
WHITENOISE_AUTOREFRESH = True
LIVE_PARTS_FRESH_S = 0  # a change is shown at once
PUBLIC_URL = "https://warmpath.example"
WEBHOOK_NETWORKS = env.networks("WEBHOOK_NETWORKS", "127.0.0.0/8,::1/128")
METRICS_NETWORKS = env.networks("METRICS_NETWORKS", "127.0.0.0/8,::1/128")
OIDC_NETWORKS = env.networks("OIDC_NETWORKS", "127.0.0.0/8,::1/128")
