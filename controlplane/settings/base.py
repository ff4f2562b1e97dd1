"""Settings shared by all environments; ``dev``, ``test`` and ``production`` add theirs."""

from pathlib import Path

from django.core.exceptions import ImproperlyConfigured

from controlplane.settings import env
from controlplane.settings.sign_in import *  # noqa: F403 - a part of this file

ROOT = Path(__file__).resolve().parent.parent.parent
DATA_DIR = Path(env.text("DATA_DIR", str(ROOT / ".warmpath"))).resolve()

# --- Django ---------------------------------------------------------------------------------------------

INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django.contrib.postgres",
    "django_htmx",
    "django_filters",
    "rest_framework",
    "drf_spectacular",
    "allauth",
    "allauth.account",
    "allauth.mfa",
    "allauth.socialaccount",
    "allauth.socialaccount.providers.openid_connect",
    "controlplane",
    "telemetry",
]

MIDDLEWARE = [
    "controlplane.middleware.StreamingMiddleware",
    "controlplane.middleware.RequestCountMiddleware",
    "controlplane.middleware.RequestIdMiddleware",
    "django.middleware.security.SecurityMiddleware",
    "controlplane.middleware.ContentSecurityPolicyMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "controlplane.middleware.CacheControlMiddleware",  # after static files, which have their own Cache-Control
    "django.contrib.sessions.middleware.SessionMiddleware",
    "controlplane.accounts.sessions.SessionEndMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.auth.middleware.LoginRequiredMiddleware",  # views require sign-in unless they opt out
    "controlplane.access.middleware.AccessMiddleware",  # checks the table of roles
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
    "allauth.account.middleware.AccountMiddleware",
]

ROOT_URLCONF = "controlplane.urls"
ASGI_APPLICATION = "controlplane.asgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [ROOT / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "controlplane.web.navigation.navigation",
                "telemetry.web.pages.telemetry_status_context",
            ],
            "builtins": ["controlplane.web.tags", "telemetry.web.tags"],
        },
    },
]

STATIC_URL = "static/"
STATICFILES_DIRS = [ROOT / "static"]
STATICFILES_FINDERS = ["django.contrib.staticfiles.finders.FileSystemFinder"]  # no files of packages are used
STATIC_ROOT = Path(env.text("STATIC_ROOT", str(ROOT / "staticfiles")))
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "controlplane.static_files.StaticFiles"},
}

DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
LANGUAGE_CODE = "en"
USE_I18N = False
TIME_ZONE = "UTC"
USE_TZ = True
CONN_MAX_AGE = 0  # under ASGI, a persistent connection belongs to a thread that may never run again

# --- browser security ---------------------------------------------------------------------------------

X_FRAME_OPTIONS = "DENY"
SECURE_REFERRER_POLICY = "same-origin"

# Plotly needs style attributes; inline scripts and styles are blocked.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; manifest-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)

# --- REST -----------------------------------------------------------------------------------------------

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "controlplane.api.auth.TokenAuthentication",
        "rest_framework.authentication.SessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["controlplane.api.auth.HasRole"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["controlplane.api.pagination.ShallowJSONParser"],
    "DEFAULT_FILTER_BACKENDS": ["django_filters.rest_framework.DjangoFilterBackend"],
    "DEFAULT_PAGINATION_CLASS": "controlplane.api.pagination.Pages",
    "PAGE_SIZE": 100,
    "DEFAULT_SCHEMA_CLASS": "controlplane.api.schema.OperationSchema",
    "URL_FORMAT_OVERRIDE": None,
    "EXCEPTION_HANDLER": "controlplane.api.exceptions.problem_response",
    "TEST_REQUEST_DEFAULT_FORMAT": "json",
}
SPECTACULAR_SETTINGS = {
    "TITLE": "Warmpath",
    "VERSION": "1",
    "OAS_VERSION": "3.1.1",
    "SCHEMA_PATH_PREFIX": "/api/v1",
    "SERVE_INCLUDE_SCHEMA": False,
    "COMPONENT_SPLIT_REQUEST": True,
    "POSTPROCESSING_HOOKS": [
        "drf_spectacular.hooks.postprocess_schema_enums",
        "controlplane.api.schema.complete",
    ],
    "ENUM_NAME_OVERRIDES": {
        "EventKind": "controlplane.models.EventKind",
        "DiscoveredState": "controlplane.models.DiscoveredState",
        "ReplicaState": "controlplane.models.ReplicaState",
        "RevisionState": "controlplane.models.RevisionState",
        "RolloutState": "controlplane.models.RolloutState",
        "SourceKind": "controlplane.api.serializers.fleet.KIND_CHOICES",
        "SourceStatus": "controlplane.models.SourceStatus",
        "AlertState": "telemetry.models.AlertState",
        "AlertTransition": "telemetry.models.AlertTransition",
        "NotificationKind": "telemetry.models.NotificationKind",
        "NotificationState": "telemetry.models.NotificationState",
        "RuleKind": "telemetry.models.RuleKind",
        "FindingCode": "controlplane.services.policies.publish_checks.FindingCode",
        "Severity": "telemetry.models.Severity",
        "SuppressionReason": "telemetry.models.SuppressionReason",
        "WhatIfState": "telemetry.models.WhatIfState",
    },
}

# --- Celery ----------------------------------------------------------------

SCRAPE_INTERVAL_S = env.number("SCRAPE_INTERVAL_S", 5, low=1, high=300)
ALERT_GROUP_WAIT_S = env.number("ALERT_GROUP_WAIT_S", 10, low=0, high=600)  # before sending, to group alerts
RECONCILE_INTERVAL_S = env.number("RECONCILE_INTERVAL_S", 5, low=1, high=300)

CELERY_BROKER_CONNECTION_MAX_RETRIES = None  # a worker waits for an unavailable broker without limit
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_TRANSPORT_OPTIONS = {"visibility_timeout": 120, "socket_connect_timeout": 2, "socket_timeout": 30}
CELERY_TASK_SERIALIZER = "json"
CELERY_ACCEPT_CONTENT = ["json"]
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_REJECT_ON_WORKER_LOST = True
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_TIMEZONE = "UTC"
CELERY_BEAT_SCHEDULER = "controlplane.celery:OutageLoggingScheduler"


def _every(task: str, seconds: float) -> dict[str, object]:
    """A periodic task that expires when the next is due, so that tasks never queue up behind a slow worker."""
    return {"task": task, "schedule": seconds, "options": {"expires": seconds}}


CELERY_BEAT_SCHEDULE = {
    "scrape": _every("telemetry.tasks.scrape_fleet", SCRAPE_INTERVAL_S),
    "metrics-servers": _every("telemetry.tasks.read_metrics_servers", SCRAPE_INTERVAL_S),
    "versions": _every("telemetry.tasks.check_versions", 30),
    "evaluate": _every("telemetry.tasks.evaluate_alerts", max(SCRAPE_INTERVAL_S, 5)),
    "collect": _every("telemetry.tasks.collect_decisions", 5),
    "breakdowns": _every("telemetry.tasks.compute_breakdowns", 60),
    "what-ifs": _every("telemetry.tasks.run_what_ifs", 5),
    "guard": _every("telemetry.tasks.analyze_rollouts", max(SCRAPE_INTERVAL_S, 5)),
    "deliver": _every("telemetry.tasks.deliver_notifications", 5),
    "refresh": _every("telemetry.tasks.refresh_alerts", 60),
    "heartbeat": _every("telemetry.tasks.send_heartbeat", 5),
    "rollups": _every("telemetry.tasks.roll_up_readings", 30),
    "partitions": _every("telemetry.tasks.maintain_partitions", 3600),
    "reconcile": _every("controlplane.tasks.reconcile_routers", RECONCILE_INTERVAL_S),
    "clean-up": _every("controlplane.tasks.clean_up", 600),
    "audit": _every("controlplane.tasks.check_audit_log", 3600),
    "discover": _every("controlplane.tasks.poll_sources", 5),
}

WATCHDOG = "telemetry.services.self_monitoring.start"  # a dotted path, because this package must not import telemetry

# --- Warmpath -------------------------------------------------------------------------------------------

DATABASE_OWNER: dict[str, object] = {}  # connection of migrations; {}: the same as for everything else
BEHIND_TLS_PROXY = env.flag("BEHIND_TLS_PROXY", default=False)  # whose X-Forwarded-* headers are trusted
# REST requests per minute of a token or user, and of an unauthenticated address; 0: no limit.
API_RATE = int(env.number("API_RATE", 1200, low=0, high=1_000_000))
API_RATE_UNAUTHENTICATED = int(env.number("API_RATE_UNAUTHENTICATED", 60, low=0, high=1_000_000))
ROUTER_ADMIN_TOKEN = env.text("ROUTER_ADMIN_TOKEN", "")  # shared by the control plane and its routers
CONFIG_SIGNING_KEY = env.text("CONFIG_SIGNING_KEY", "")  # signs configurations; "": derived from SECRET_KEY
CONFIG_VALID_H = int(env.number("CONFIG_VALID_H", 168, low=1, high=8760))  # validity of a signature
METRICS_TOKEN = env.text("METRICS_TOKEN", "")  # /metrics needs this token, or an address in METRICS_NETWORKS
METRICS_NETWORKS = env.networks("METRICS_NETWORKS")
READINGS_RETENTION_DAYS = int(env.number("READINGS_RETENTION_DAYS", 3, low=1, high=3650))
ROLLUP_RETENTION_DAYS = {  # by resolution in seconds
    60: int(env.number("ROLLUP_1M_RETENTION_DAYS", 14, low=1, high=3650)),
    300: int(env.number("ROLLUP_5M_RETENTION_DAYS", 60, low=1, high=3650)),
    3600: int(env.number("ROLLUP_1H_RETENTION_DAYS", 400, low=1, high=3650)),
}
ROLLUP_RETENTION_DAYS[21_600] = ROLLUP_RETENTION_DAYS[3600]  # small enough to share a setting
EVENTS_RETENTION_DAYS = int(env.number("EVENTS_RETENTION_DAYS", 90, low=1, high=3650))
ALERTS_RETENTION_DAYS = int(env.number("ALERTS_RETENTION_DAYS", 180, low=7, high=3650))  # and messages
AUDIT_RETENTION_DAYS = int(env.number("AUDIT_RETENTION_DAYS", 400, low=90, high=36_500))  # high: for ever
CONFIGURATIONS_RETENTION_DAYS = int(env.number("CONFIGURATIONS_RETENTION_DAYS", 30, low=1, high=3650))
DECISIONS_RETENTION_H = int(env.number("DECISIONS_RETENTION_H", 24, low=1, high=24 * 90))
DECISIONS_BLOCKS_PER_S = env.number("DECISIONS_BLOCKS_PER_S", 2000, low=1, high=1_000_000)  # stored, over all routers
DECISIONS_ROWS_PER_S = env.number("DECISIONS_ROWS_PER_S", 1000, low=1, high=100_000)
# Networks of replicas and routers. Link-local and metadata addresses are always denied.
FLEET_NETWORKS = env.networks(
    "FLEET_NETWORKS", "127.0.0.0/8,::1/128,10.0.0.0/8,172.16.0.0/12,192.168.0.0/16,100.64.0.0/10,fc00::/7"
)
FLEET_CA_FILE = env.authorities("FLEET_CA_FILE")  # certificate authorities of replicas and routers; "": the system's
DISCOVERY_DIR = env.text("DISCOVERY_DIR", "")  # directory of file discovery; "": disabled
# Private networks that alert channels may use, at any port; public addresses are always allowed, at standard ports.
WEBHOOK_NETWORKS = env.networks("WEBHOOK_NETWORKS")
LIVE_PARTS_FRESH_S = 4.0  # how old a live part of a page may be; tabs request it every 5 s
PUBLIC_URL = env.text("PUBLIC_URL", "").rstrip("/")  # of this site, for links in messages; "": no links

LOG_FORMAT = env.text("LOG_FORMAT", "line")
if LOG_FORMAT not in {"line", "json"}:
    raise ImproperlyConfigured(f"WARMPATH_LOG_FORMAT: expected line or json, not {LOG_FORMAT}")
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "line": {"format": "{levelname:.1s} {name}: {message}", "style": "{"},
        "json": {"()": "controlplane.request_origin.JsonFormatter"},
    },
    "filters": {"one_line_refusals": {"()": "controlplane.request_origin.OneLineRefusals"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": LOG_FORMAT}},
    "root": {"handlers": ["stderr"], "level": env.text("LOG_LEVEL", "INFO")},
    "loggers": {
        "django.request": {"filters": ["one_line_refusals"]},
        "httpx": {"level": "WARNING"},
        "httpcore": {"level": "WARNING"},
        "celery.worker.strategy": {"level": "WARNING"},  # one line per periodic task is noise
        "celery.app.trace": {"level": "WARNING"},
        "celery.worker.request": {"level": "WARNING"},  # as is one per expired task
        "celery.beat": {"level": "WARNING"},
        "psycopg.pool": {"level": "ERROR"},  # controlplane.celery logs an outage once
    },
}
