"""The daily check of the audit log."""

from datetime import UTC, datetime, timedelta
from unittest.mock import patch

import pytest
from django.db import DatabaseError, connection
from django.utils import timezone

from controlplane.models import AuditCheck, AuditEntry, Event
from controlplane.services.audit_log import (
    ZERO_DIGEST,
    append_entry,
    check_audit,
    check_audit_daily,
    digest_of,
    verify_chain,
)
from controlplane.tasks import check_audit_log

NIGHT = datetime(2026, 11, 21, 3, 0, tzinfo=UTC)
NOW = timezone.now()  # where the database compares with its own clock
pytestmark = pytest.mark.django_db


@pytest.fixture
def entries():
    return [append_entry("a", f"entry {number}") for number in range(4)]


def write_log(ages):
    """Append an entry of each age in days, oldest first, as if that day were today."""
    for age in ages:
        with patch("controlplane.services.audit_log.timezone.now", lambda age=age: NOW - timedelta(days=age)):
            append_entry("a", f"{age} days old")


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


def test_entries_expire_after_their_retention_and_the_chain_stays_verifiable(settings):
    settings.AUDIT_RETENTION_DAYS = 400
    write_log([900, 450, 401, 399, 3])
    third = AuditEntry.objects.get(number=3)

    check_audit_daily(NOW)

    assert list(AuditEntry.objects.order_by("number").values_list("number", flat=True)) == [4, 5, 6]
    expiry = AuditEntry.objects.get(number=6)
    assert (expiry.kind, expiry.after["number"], expiry.after["digest"]) == ("audit_expired", 3, third.digest)
    before = NOW - timedelta(days=400)
    assert expiry.summary == f"Entries 1 to 3 of the audit log expired: they are older than {before:%Y-%m-%d}."
    assert Event.objects.filter(kind="audit_expired").count() == 1
    for day in (1, 2, 390):  # and another expiry, whose entry replaces the first one
        assert check_audit_daily(NOW + timedelta(days=day)).fault == ""
    assert verify_chain()[0] == AuditEntry.objects.first().number
    assert AuditEntry.objects.order_by("number").first().number == 5


def test_a_quiet_or_a_broken_log_does_not_expire(settings):
    write_log([900, 800])
    assert check_audit_daily(NOW).fault == ""
    assert AuditEntry.objects.count() == 2, "the newest entry is the chain's end"
    write_log([1])
    execute_without_trigger("update controlplane_auditentry set summary = 'nothing' where number = 2")
    assert check_audit_daily(NOW + timedelta(days=1)).fault == "Entry 2 was changed: nothing"
    assert AuditEntry.objects.count() == 3


def expire_by_hand(through, before):
    """Delete entries with the owner's rights, and append the entry that a regular expiry appends."""
    last = AuditEntry.objects.get(number=through)
    append_entry("audit_expired", "x", after={"number": through, "digest": last.digest, "before": before.isoformat()})
    execute_without_trigger("delete from controlplane_auditentry where number <= %s", through)


def test_a_deletion_before_its_time_is_detected_though_it_looks_like_an_expiry(settings):
    write_log([500, 300])
    check_audit(NOW - timedelta(days=299))  # knows two entries: the others are younger
    write_log([200, 100, 3])

    expire_by_hand(4, before=NOW - timedelta(days=400))
    assert check_audit(NOW).fault == "Entries up to 4 were deleted before they expired."


@pytest.mark.parametrize(
    ("after", "fault"),
    [
        (
            {"number": 2, "digest": "0" * 64, "before": "2025-01-01T00:00:00+00:00"},
            "Entry 3 does not contain the digest",
        ),
        ({"number": 1, "digest": "0" * 64, "before": "2025-01-01T00:00:00+00:00"}, "Entry 2 is missing"),
        ({"number": 2, "before": "never"}, "Entries up to 2 were deleted before they expired."),
        (None, "Entry 2 is missing"),
    ],
)
def test_entries_that_are_missing_without_a_true_expiry_are_a_fault(entries, after, fault):
    append_entry("audit_expired", "x", after=after)
    execute_without_trigger("delete from controlplane_auditentry where number <= 2")
    assert check_audit(NOW).fault.startswith(fault)


def test_the_database_deletes_no_entry_of_the_last_90_days():
    append_entry("a", "now")
    with pytest.raises(DatabaseError, match="an entry of the audit log never changes"), connection.cursor() as cursor:
        cursor.execute("select controlplane_expire_audit(1)")


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
