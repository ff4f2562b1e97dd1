"""After a change of the secret key, all secrets are re-encrypted and the former key can be removed."""

import pytest
from allauth.mfa.models import Authenticator
from allauth.mfa.recovery_codes.internal.auth import RecoveryCodes
from allauth.mfa.totp.internal.auth import TOTP
from django.apps import apps
from django.core.management import CommandError, call_command
from django.db import IntegrityError, connection, transaction
from django.db.models import BinaryField

from controlplane.encryption import decrypt
from controlplane.errors import DecryptionError
from controlplane.models import AuditEntry, ConfigSnapshot, Scope
from controlplane.services.access.tokens import create_token, find_token
from controlplane.services.fleet.replicas import add_replica, update_replica
from controlplane.services.secret_rotation import encrypted_fields
from controlplane.services.snapshots import newest_snapshot, snapshot_document
from telemetry.models import Channel
from telemetry.models.decision import ReplayState
from telemetry.services.notifications.channels import create_channel

NEW = "a-new-key-for-tests-only-" * 3
pytestmark = pytest.mark.django_db


@pytest.fixture
def secrets_at_rest(replica, operator):
    """A fleet, a channel, a second factor and a token."""
    create_channel("on-call", config={"url": "https://hooks.example/x"})
    TOTP.activate(operator, "JBSWY3DPEHPK3PXPJBSWY3DPEHPK3PXP")
    RecoveryCodes.activate(operator)
    return create_token(operator, name="deploy", scopes=[Scope.READ])[1]


def decrypted_secrets():
    """Every stored secret, decrypted with the current keys."""
    encrypted_values = {
        (model, field, row.pk): getattr(row, field)
        for model, field in encrypted_fields()
        for row in model.objects.all()
    }
    return {key: decrypt(encrypted) for key, encrypted in encrypted_values.items() if encrypted is not None}


def test_rotated_secrets_need_only_the_new_key(secrets_at_rest, settings, capsys):
    plain, codes = decrypted_secrets(), Authenticator.objects.get(type="recovery_codes").wrap().generate_codes()
    assert len(plain) >= 3
    former, settings.SECRET_KEY = settings.SECRET_KEY, NEW
    settings.SECRET_KEY_FALLBACKS = [former]
    call_command("rotate_secrets")
    assert find_token(secrets_at_rest) is not None, "used once while both keys are configured"
    settings.SECRET_KEY_FALLBACKS = []
    assert decrypted_secrets() == plain
    assert Authenticator.objects.get(type="recovery_codes").wrap().generate_codes() == codes
    assert Authenticator.objects.get(type="totp").wrap().validate_code("000000") in {True, False}
    assert find_token(secrets_at_rest) is not None
    assert snapshot_document(newest_snapshot())
    assert AuditEntry.objects.filter(kind="secrets_rotated").count() == 1
    assert "controlplane.FleetSecret.encrypted" in capsys.readouterr().out


def test_rotation_is_idempotent(secrets_at_rest, settings):
    former, settings.SECRET_KEY = settings.SECRET_KEY, NEW
    settings.SECRET_KEY_FALLBACKS = [former]
    call_command("rotate_secrets")
    before = [bytes(row.encrypted) for row in ConfigSnapshot.objects.all()]
    call_command("rotate_secrets")
    assert [bytes(row.encrypted) for row in ConfigSnapshot.objects.all()] == before
    assert AuditEntry.objects.filter(kind="secrets_rotated").count() == 1


def test_a_missing_former_key_is_reported(secrets_at_rest, settings):
    settings.SECRET_KEY = NEW
    with pytest.raises(CommandError, match="WARMPATH_SECRET_KEY_FALLBACKS"):
        call_command("rotate_secrets")


def test_every_encrypted_field_is_rotated():
    ours = [model for model in apps.get_models() if model._meta.app_label in {"controlplane", "telemetry"}]
    binary = {
        (model, field.name) for model in ours for field in model._meta.concrete_fields if isinstance(field, BinaryField)
    }
    binary -= {(ReplayState, "state")}  # model caches: keyed hashes of blocks, and no secret
    assert binary == {(model, field) for model, field in encrypted_fields() if model in ours}
    assert len(binary) >= 4


def test_snapshots_are_immutable_except_their_encryption(secrets_at_rest):
    for change in ("document = '{}'", "number = number + 100", "sha256 = ''", "encrypted = '', reason = 'x'"):
        with pytest.raises(IntegrityError, match="never changes"), transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(f"update controlplane_configsnapshot set {change}")
    with connection.cursor() as cursor:
        cursor.execute("update controlplane_configsnapshot set encrypted = encrypted")


def test_after_the_loss_of_the_key_the_fleet_can_be_changed_again(secrets_at_rest, replica, operator, settings, capsys):
    update_replica(replica, api_key="a-key-of-an-engine")
    pool = replica.pool
    before, settings.SECRET_KEY = newest_snapshot(), NEW
    with pytest.raises(DecryptionError):
        add_replica(pool, name="gpu-new", url="http://10.0.0.77:8000")

    call_command("rotate_secrets", "--discard-unreadable")

    replica.refresh_from_db()
    assert (replica.api_key_encrypted, replica.api_key_set_at) == (None, None)
    newest = newest_snapshot()
    assert newest.number == before.number + 1
    assert replica.url.encode() in snapshot_document(newest)
    add_replica(pool, name="gpu-new", url="http://10.0.0.77:8000", api_key="entered-again")
    assert newest_snapshot().number == newest.number + 1
    assert Channel.objects.count() == 1
    assert Authenticator.objects.count() == 2, "a second factor is never removed without naming its user"
    assert find_token(secrets_at_rest) is None
    output = capsys.readouterr().out
    assert "1  controlplane.Replica.api_key_encrypted" in output
    assert "1  controlplane.FleetSecret.encrypted" in output
    assert AuditEntry.objects.filter(kind="secrets_rotated").count() == 1


def test_discarding_keeps_every_secret_that_a_configured_key_decrypts(secrets_at_rest, replica, settings):
    update_replica(replica, api_key="a-key-of-an-engine")
    plain, number = decrypted_secrets(), newest_snapshot().number
    former, settings.SECRET_KEY = settings.SECRET_KEY, NEW
    settings.SECRET_KEY_FALLBACKS = [former]

    call_command("rotate_secrets", "--discard-unreadable")

    assert decrypted_secrets() == plain
    assert newest_snapshot().number == number
    assert not AuditEntry.objects.filter(kind="secrets_rotated").exists()
