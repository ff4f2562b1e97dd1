"""The audit log: who changed what, when, from where and why."""

from __future__ import annotations

from itertools import chain

from django.conf import settings
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.views.decorators.http import require_GET

from controlplane.database.roles import can_alter_audit
from controlplane.models import AuditEntry, EventKind
from controlplane.models.audit import AUDIT_FIELDS
from controlplane.request_origin import forwarded_for_missing
from controlplane.services.access.sign_ins import SIGN_IN_FAILED, SIGNED_IN
from controlplane.services.audit_log import latest_audit_check
from controlplane.web.base import csv_response, first_page, int_parameter

PAGE = 50
COLUMNS = (*(name for name in AUDIT_FIELDS if name not in {"before", "after", "previous"}), "digest")  # of the CSV
SIGN_INS = ((SIGNED_IN, "Signed in"), (SIGN_IN_FAILED, "Sign-in failed"))


@require_GET
def audit(request: HttpRequest) -> HttpResponse:
    """A page of entries that match the filters, newest first."""
    entries, before = _filtered(request), int_parameter(request, "before")
    page, last = first_page(entries.filter(number__lt=before) if before is not None else entries, PAGE)
    context = {
        "entries": page,
        "older_cursor": last and last.number,
        "kinds": [*EventKind.choices, *SIGN_INS],
        "kind": request.GET.get("kind", ""),
        "actor": request.GET.get("actor", ""),
        "filtered": bool(request.GET),
        "check": latest_audit_check(),
        "retention_days": settings.AUDIT_RETENTION_DAYS,
        "is_alterable": can_alter_audit(),
        "addresses_hidden": forwarded_for_missing.is_set(),
    }
    return render(request, "controlplane/audit.html", context)


@require_GET
def audit_csv(request: HttpRequest) -> HttpResponseBase:
    """All entries that match the filters, as CSV."""
    entries = _filtered(request).iterator(chunk_size=1000)
    rows = ([str(getattr(entry, name)) for name in COLUMNS] for entry in entries)
    return csv_response("audit.csv", chain([COLUMNS], rows))


def _filtered(request: HttpRequest) -> QuerySet[AuditEntry]:
    entries = AuditEntry.objects.order_by("-number")
    kind, actor = request.GET.get("kind", ""), request.GET.get("actor", "")
    if "\0" in kind + actor:  # PostgreSQL rejects such a parameter
        return entries.none()
    if kind:
        entries = entries.filter(kind=kind)
    return entries.filter(actor=actor) if actor else entries
