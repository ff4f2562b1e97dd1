"""The audit log: who changed what, from where and why."""

from __future__ import annotations

import csv
from collections.abc import Iterator

from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from controlplane.database.roles import can_alter_audit
from controlplane.models import AuditEntry, EventKind
from controlplane.models.audit import AUDIT_FIELDS
from controlplane.request_origin import forwarded_for_missing
from controlplane.services.access.sign_ins import SIGN_IN_FAILED, SIGNED_IN
from controlplane.services.audit_log import latest_audit_check
from controlplane.web.tags import spreadsheet_safe

PAGE = 50
COLUMNS = (*(name for name in AUDIT_FIELDS if name not in {"before", "after", "previous"}), "digest")  # of the CSV
SIGN_INS = ((SIGNED_IN, "Signed in"), (SIGN_IN_FAILED, "Sign-in refused"))


@require_GET
def audit(request: HttpRequest) -> HttpResponse:
    """A page of entries, narrowed as asked; older ones by a plain link."""
    entries, before = _asked(request), request.GET.get("before", "")
    if before.isascii() and before.isdigit() and len(before) < 19:
        entries = entries.filter(number__lt=int(before))
    page = list(entries[: PAGE + 1])
    context = {
        "entries": page[:PAGE],
        "more": page[PAGE - 1].number if len(page) > PAGE else None,
        "kinds": [*EventKind.choices, *SIGN_INS],
        "kind": request.GET.get("kind", ""),
        "actor": request.GET.get("actor", ""),
        "filtered": bool(request.GET),
        "check": latest_audit_check(),
        "is_open": can_alter_audit(),
        "addresses_hidden": forwarded_for_missing.is_set(),
    }
    return render(request, "controlplane/audit.html", context)


@require_GET
def audit_csv(request: HttpRequest) -> StreamingHttpResponse:
    """The same entries, all of them, as CSV."""
    writer = csv.writer(_Echo())
    entries = _asked(request).iterator(chunk_size=1000)

    def lines() -> Iterator[str]:
        yield writer.writerow(COLUMNS)  # what _Echo returns
        for entry in entries:
            yield writer.writerow([spreadsheet_safe(str(getattr(entry, name))) for name in COLUMNS])

    response = StreamingHttpResponse(lines(), content_type="text/csv; charset=utf-8")
    response["Content-Disposition"] = 'attachment; filename="audit.csv"'
    return response


class _Echo:
    """A file that hands back what is written to it."""

    def write(self, text: str) -> str:
        return text


def _asked(request: HttpRequest) -> QuerySet[AuditEntry]:
    entries = AuditEntry.objects.order_by("-number")
    kind, actor = request.GET.get("kind", ""), request.GET.get("actor", "")
    if "\0" in kind + actor:  # PostgreSQL looks for no such value
        return entries.none()
    if kind:
        entries = entries.filter(kind=kind)
    return entries.filter(actor=actor) if actor else entries
