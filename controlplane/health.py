"""Whether the web application can do its work. Open to all, and says no more than that."""

from django.contrib.auth.decorators import login_not_required
from django.db import DatabaseError, connection
from django.db.migrations.executor import MigrationExecutor
from django.http import HttpRequest, HttpResponse, JsonResponse


@login_not_required
def healthz(_request: HttpRequest) -> HttpResponse:
    """Alive; asks nothing of anybody."""
    return HttpResponse("ok\n", content_type="text/plain")


@login_not_required
def readyz(_request: HttpRequest) -> HttpResponse:
    """200 when the database answers and has every migration; 503 with the reason otherwise."""
    reason = _not_ready_because()
    if reason:
        return JsonResponse({"status": "not_ready", "reason": reason}, status=503)
    return JsonResponse({"status": "ready"})


def _not_ready_because() -> str | None:
    try:
        executor = MigrationExecutor(connection)
        missing = executor.migration_plan(executor.loader.graph.leaf_nodes())
    except DatabaseError:
        return "the database does not answer"
    return f"{len(missing)} migrations are not applied" if missing else None
