"""Whether the web application can do its work. Open to all, and says no more than that."""

from django.contrib.auth.decorators import login_not_required
from django.db import DatabaseError, connection
from django.db.migrations.executor import MigrationExecutor
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.utils import timezone

from controlplane.services.worker_liveness import is_late, worker_silence_s


@login_not_required
def healthz(_request: HttpRequest) -> HttpResponse:
    """Alive; asks nothing of anybody."""
    return HttpResponse("ok\n", content_type="text/plain")


@login_not_required
def readyz(request: HttpRequest) -> HttpResponse:
    """200 when the database answers and has every migration; 503 with the reason otherwise.

    ``worker`` says whether scheduled work runs: "ok", "late" or "never_seen". It does not make a web process unready,
    because pages are most needed then; ``?require=worker`` asks for 503 in that case.
    """
    reason = _not_ready_because()
    worker = None if reason else _worker_state()
    if not reason and worker != "ok" and "worker" in request.GET.getlist("require"):
        reason = "no worker was seen lately: nothing is scraped, evaluated or pushed to routers"
    if reason:
        return JsonResponse({"status": "not_ready", "reason": reason}, status=503)
    return JsonResponse({"status": "ready", "worker": worker})


def _worker_state() -> str:
    silence_s = worker_silence_s(timezone.now())
    if silence_s is None:
        return "never_seen"
    return "late" if is_late(silence_s) else "ok"


def _not_ready_because() -> str | None:
    try:
        executor = MigrationExecutor(connection)
        missing = executor.migration_plan(executor.loader.graph.leaf_nodes())
    except DatabaseError:
        return "the database does not answer"
    return f"{len(missing)} migrations are not applied" if missing else None
