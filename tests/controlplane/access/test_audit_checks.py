"""The daily check of the audit log."""

from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection

from controlplane.models import AuditCheck, AuditEntry, Event
from controlplane.services.audit_log import ZERO_DIGEST, append_entry, check_audit, check_audit_daily, digest_of
from controlplane.tasks import check_audit_log

NIGHT = datetime(2026, 11, 21, 3, 0, tzinfo=UTC)
pytestmark = pytest.mark.django_db


@pytest.fixture
def entries():
    return [append_entry("a", f"entry {number}") for number in range(4)]


def execute_without_trigger(statement, *values):
    with connection.cursor() as cursor:
        cursor.execute("alter table controlplane_auditentry disable trigger audit_append_only")
        cursor.execute(statement, values)
        cursor.execute("alter table controlplane_auditentry enable trigger audit_append_only")


def test_a_check_records_the_newest_digest(entries):
    check = check_audit(NIGHT)
    assert (check.fault, check.entries, check.digest) == ("", 4, entries[-1].digest)
    assert not Event.objects.filter(kind="audit_broken").exists()


def test_an_altered_entry_raises_an_event(entries):
    execute_without_trigger("update controlplane_auditentry set summary = 'nothing' where number = 2")
    check = check_audit(NIGHT)
    assert check.fault == "Entry 2 was changed: nothing"
    assert Event.objects.get(kind="audit_broken").summary.startswith("The audit log was tampered with. Entry 2")
    assert AuditEntry.objects.count() == 4


def test_a_rewritten_chain_is_detected_by_the_previous_check(entries):
    check_audit(NIGHT)
    previous = ZERO_DIGEST
    for entry in AuditEntry.objects.order_by("number"):
        entry.summary, entry.previous = f"harmless {entry.number}", previous
        entry.digest = previous = digest_of(entry)
        execute_without_trigger(
            "update controlplane_auditentry set summary = %s, previous = %s, digest = %s where number = %s",
            *(entry.summary, entry.previous, entry.digest, entry.number),
        )
    assert "were rewritten" in check_audit(NIGHT + timedelta(days=1)).fault


def test_a_truncated_log_is_detected(entries):
    check_audit(NIGHT)
    execute_without_trigger("delete from controlplane_auditentry where number > 2")
    assert "Entry 4 is missing" in check_audit(NIGHT + timedelta(days=1)).fault


def test_the_log_is_checked_once_a_day(entries):
    assert check_audit_daily(NIGHT) is not None
    assert check_audit_daily(NIGHT + timedelta(hours=1)) is None
    assert check_audit_daily(NIGHT + timedelta(days=1)) is not None
    check_audit_log()
    assert AuditCheck.objects.count() >= 2


def test_the_page_shows_the_result_of_the_check(client, entries, here, user_with):
    client.force_login(user_with("admin", everywhere=True))
    assert "Verified" not in client.get("/audit/").text
    check_audit(NIGHT)
    assert "Verified" in client.get("/audit/").text
    assert "WARMPATH_DATABASE_OWNER_URL" in client.get("/audit/").text, "tests run as a superuser"
    execute_without_trigger("delete from controlplane_auditentry where number = 1")
    check_audit(NIGHT + timedelta(days=1))
    assert "The audit log was tampered with:" in client.get("/audit/").text
