"""The audit log records every change with its origin, and tampering is detected."""

import threading

import pytest
from django.core.management import CommandError, call_command
from django.db import IntegrityError, InternalError, connection, connections, transaction
from rest_framework.test import APIClient

from controlplane.models import AuditEntry, Scope
from controlplane.services.access.tokens import create_token
from controlplane.services.audit_log import ZERO_DIGEST, BrokenChainError, append_entry, verify_chain
from controlplane.services.fleet.replicas import set_replica_state
from tests.controlplane.access.conftest import create_project_with_objects


@pytest.fixture
def stored_projects(db):
    """Stored by each test that needs it, because other tests start with an empty log."""
    return (create_project_with_objects("here", 1),)


def test_an_audit_entry_has_actor_token_origin_and_values(here, user_with):
    token, text = create_token(user_with("editor"), name="deploy", scopes=[Scope.WRITE])
    script = APIClient(REMOTE_ADDR="192.0.2.7")
    script.credentials(HTTP_AUTHORIZATION=f"Bearer {text}", HTTP_X_REQUEST_ID="req-1")
    script.patch("/api/v1/pools/here-pool", {"description": "new"}, headers={"If-Match": "*"})
    entry = AuditEntry.objects.first()
    assert (entry.kind, entry.actor, entry.token) == ("pool_changed", "editor-false", token.key_id)
    assert (entry.address, entry.request_id) == ("192.0.2.7", "req-1")
    assert (entry.project, entry.pool) == ("here", "here-pool")
    assert (entry.before["description"], entry.after["description"]) == ("", "new")


def test_an_audit_entry_has_the_reason(client, here, user_with):
    client.force_login(user_with("approver"))
    client.post(f"/policies/{here.policy.pk}/publish/{here.draft.pk}/", {"reason": "agents share a prompt"})
    entry = AuditEntry.objects.get(kind="policy_published", pool="here-pool", actor="approver-false")
    assert entry.reason == "agents share a prompt"


def test_the_address_is_taken_from_a_declared_proxy_only(client, here, user_with, settings):
    client.force_login(user_with("operator"))
    for is_declared, address in ((False, "127.0.0.1"), (True, "198.51.100.4")):
        settings.BEHIND_TLS_PROXY = is_declared
        state = "disabled" if is_declared else "draining"
        path = f"/fleet/replicas/{here.replica.pk}/state/{state}/"
        client.post(path, headers={"X-Forwarded-For": "203.0.113.9, 198.51.100.4"})
        assert AuditEntry.objects.first().address == address


def test_observed_events_are_not_audited(here):
    from controlplane.models import EventKind
    from controlplane.services.events import record_event

    before = AuditEntry.objects.count()
    record_event(EventKind.REPLICA_DOWN, "It is down.", replica=here.replica)
    assert AuditEntry.objects.count() == before


@pytest.mark.django_db
def test_entries_are_chained_by_digest():
    first, second = append_entry("a", "one"), append_entry("b", "two", before={"x": 1}, after={"x": 2})
    assert (first.number, first.previous) == (1, ZERO_DIGEST)
    assert (second.number, second.previous) == (2, first.digest)
    assert verify_chain() == (2, second.digest)


@pytest.mark.django_db
def test_entries_cannot_be_updated_or_deleted():
    append_entry("a", "one")
    for statement in ("update controlplane_auditentry set summary = 'other'", "delete from controlplane_auditentry"):
        with pytest.raises((IntegrityError, InternalError)), transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(statement)
    assert AuditEntry.objects.get().summary == "one"


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("statement", "fault"),
    [
        ("update controlplane_auditentry set summary = 'other' where number = 2", "Entry 2 was changed"),
        ("update controlplane_auditentry set actor = 'eve' where number = 3", "Entry 3 was changed"),
        ("update controlplane_auditentry set after = '{\"x\": 9}' where number = 2", "Entry 2 was changed"),
        ("delete from controlplane_auditentry where number = 2", "Entry 2 is missing"),
        ("delete from controlplane_auditentry where number = 1", "Entry 1 is missing"),
    ],
)
def test_tampering_is_detected_and_the_entry_is_named(statement, fault):
    for number in range(3):
        append_entry("a", f"number {number}", after={"x": number})
    with connection.cursor() as cursor:
        cursor.execute("alter table controlplane_auditentry disable trigger audit_append_only")
        cursor.execute(statement)
        cursor.execute("alter table controlplane_auditentry enable trigger audit_append_only")
    with pytest.raises(BrokenChainError, match=fault):
        verify_chain()
    with pytest.raises(CommandError, match=fault):
        call_command("verify_audit")


@pytest.mark.django_db
def test_verify_audit_prints_the_newest_digest(capsys):
    entry = append_entry("a", "one")
    call_command("verify_audit")
    assert entry.digest in capsys.readouterr().out


@pytest.mark.django_db(transaction=True)
def test_concurrent_writers_leave_no_gap():
    def write(number):
        try:
            for _ in range(5):
                append_entry("a", f"by {number}")
        finally:
            connections.close_all()

    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(timeout=30)
    assert verify_chain()[0] == 20


def test_sign_ins_and_failures_are_audited_without_typed_text(client, here, user_with):
    user_with("viewer")
    client.post("/accounts/login/", {"login": "viewer-false", "password": "wrong wrong wrong"})
    client.post("/accounts/login/", {"login": "hunter2hunter2", "password": "x"})
    client.post("/accounts/login/", {"login": "viewer-false", "password": "a long enough password"})
    entries = list(AuditEntry.objects.filter(kind__contains="sign").order_by("number").values_list("kind", "summary"))
    assert entries == [
        ("sign_in_refused", "Sign-in as viewer-false failed."),
        ("sign_in_refused", "Sign-in as an unknown user failed."),
        ("signed_in", "viewer-false signed in."),
    ]


def test_the_page_is_filtered_and_exported(client, here, user_with):
    admin, operator = user_with("admin", everywhere=True), user_with("operator")
    set_replica_state(here.replica, "draining", by=operator)
    client.force_login(admin)
    page = client.get("/audit/", {"actor": "operator-false"}).content.decode()
    assert "is now draining" in page
    assert "was created" not in page
    exported = b"".join(client.get("/audit.csv", {"kind": "replica_state_changed"}).streaming_content).decode()
    assert [line.split(",")[3] for line in exported.splitlines()] == ["actor", "operator-false"]
    assert client.get("/audit/", {"actor": "\0"}).status_code == 400


def test_exported_cells_are_not_formulas(client, here, user_with):
    append_entry("a", "=cmd()")
    client.force_login(user_with("admin", everywhere=True))
    exported = b"".join(client.get("/audit.csv", {"kind": "a"}).streaming_content).decode()
    assert "'=cmd()" in exported
