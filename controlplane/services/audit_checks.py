"""Looking after the audit log: is it still what it was?"""

from __future__ import annotations

from datetime import datetime, timedelta

from django.db import transaction

from controlplane.models import AuditCheck, AuditEntry, EventKind
from controlplane.services.audit_log import FIRST, BrokenChainError, verify_chain
from controlplane.services.events import record_event

EVERY = timedelta(hours=23, minutes=30)  # asked every hour: a day that a worker slept through is made good
KEPT = timedelta(days=400)


def check_audit_daily(now: datetime) -> AuditCheck | None:
    """The day's look, if it was not taken yet; None otherwise."""
    last = last_check()
    return check_audit(now) if last is None or now - last.at >= EVERY else None


@transaction.atomic
def check_audit(now: datetime) -> AuditCheck:
    """Walk the chain, note what was found, and say so in the timeline if it is broken."""
    before = AuditCheck.objects.filter(fault="").first()
    try:
        entries, digest = verify_chain()
        fault = _rewritten(before)
    except BrokenChainError as error:
        entries, digest, fault = 0, FIRST, str(error)
    if fault:
        record_event(EventKind.AUDIT_BROKEN, f"The audit log was tampered with. {fault}", detail={"fault": fault})
    AuditCheck.objects.filter(at__lt=now - KEPT).delete()
    return AuditCheck.objects.create(at=now, entries=entries, digest=digest, fault=fault[:500])


def last_check() -> AuditCheck | None:
    """The newest look; None before the first."""
    return AuditCheck.objects.first()


def _rewritten(before: AuditCheck | None) -> str:
    """What became of the entry that was the newest at the last look; "" where it is as it was."""
    if before is None or before.entries == 0:
        return ""
    digest = AuditEntry.objects.filter(number=before.entries).values_list("digest", flat=True).first()
    if digest is None:
        return f"Entry {before.entries} is missing: it was the newest on {before.at:%Y-%m-%d}."
    return "" if digest == before.digest else f"Everything from some entry up to {before.entries} was written anew."
