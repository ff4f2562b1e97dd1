"""The site's URLs, and the health probes, which need no sign-in."""

from django.contrib.auth.decorators import login_not_required
from django.db import DatabaseError, connection
from django.db.migrations.executor import MigrationExecutor
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import include, path, re_path
from django.utils import timezone

from controlplane.api.exceptions import endpoint_not_found
from controlplane.database.schema_check import schema_fault
from controlplane.isolation import is_late, worker_silence_s
from controlplane.web.urls import account_urlpatterns

handler400 = "controlplane.api.exceptions.bad_request"
handler500 = "controlplane.api.exceptions.server_error"


@login_not_required
def healthz(_request: HttpRequest) -> HttpResponse:
    """Liveness: 200 without any dependency."""
    return HttpResponse("ok\n", content_type="text/plain")


@login_not_required
def readyz(request: HttpRequest) -> HttpResponse:
    """Readiness: 200 when the database responds and has every migration; 503 with the reason otherwise.

    ``worker`` says whether scheduled work runs: "ok", "late" or "never_seen". A missing worker leaves a web process
    ready, because pages are needed then; ``?require=worker`` makes it a 503.
    """
    reason = _not_ready_reason()
    worker = None if reason else _worker_state()
    if not reason and worker != "ok" and "worker" in request.GET.getlist("require"):
        reason = "no worker has reported recently: nothing is scraped, evaluated or pushed to routers"
    if reason:
        return JsonResponse({"status": "not_ready", "reason": reason}, status=503)
    return JsonResponse({"status": "ready", "worker": worker})


def _worker_state() -> str:
    silence_s = worker_silence_s(timezone.now())
    if silence_s is None:
        return "never_seen"
    return "late" if is_late(silence_s) else "ok"


def _not_ready_reason() -> str | None:
    try:
        executor = MigrationExecutor(connection)
        missing = executor.migration_plan(executor.loader.graph.leaf_nodes())
        if missing:
            return f"{len(missing)} migrations are not applied"
        return _schema_fault()
    except DatabaseError:
        return "the database does not respond"


_is_schema_right = False


def _schema_fault() -> str | None:
    """What is wrong with the schema; checked until it is right, once in each process."""
    global _is_schema_right  # noqa: PLW0603 - what this process has found
    if _is_schema_right:
        return None
    fault = schema_fault()
    _is_schema_right = fault is None
    return fault


urlpatterns = [
    path("healthz", healthz),
    path("readyz", readyz),
    path("accounts/", include(account_urlpatterns)),
    path("api/v1/", include("controlplane.api.urls")),
    path("api/v1/", include("telemetry.api.urls")),
    re_path("^api/", endpoint_not_found),
    path("", include("controlplane.web.urls")),
    path("", include("telemetry.web.urls")),
]
