"""Re-encrypt every secret at rest with the current key.

Theory of operation. Encrypted fields are found by convention: every binary field called ``encrypted`` or
``..._encrypted``, of any package, and the secrets of second factors. Each row is locked, decrypted with whichever key
works and encrypted with the current one, so the command can run during normal operation and be repeated after an
interruption. Two things cannot be re-encrypted: sessions (users sign in again once the former key is removed) and
tokens, of which only a digest is stored (each moves to the current key when it is next used).

If the key is lost, ``discard_unreadable_secrets`` removes what can be entered or generated again, so that the fleet can
be changed again. Channels and second factors stay: their pages say what to do, and a factor is removed user by user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from allauth.mfa.models import Authenticator
from django.apps import apps
from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import BinaryField, Model

from controlplane.encryption import decrypt, reencrypt
from controlplane.errors import DecryptionError
from controlplane.models import EventKind, Pool, Replica
from controlplane.services.events import record_event
from controlplane.services.snapshots import freeze_snapshot

DISPOSABLE = {"controlplane.FleetSecret", "controlplane.IdempotencyRecord", "telemetry.Heartbeat"}
FACTOR_SECRETS = ("secret", "seed")  # keys of Authenticator.data


def rotate_secrets(*, by: User | None = None) -> dict[str, int]:
    """Encrypt all secrets with the current key; the number of changed rows by field. DecryptionError."""
    changed = {
        f"{model._meta.label}.{field}": _rotate(model, partial(_rotate_field, field))  # noqa: SLF001 - Django's name
        for model, field in encrypted_fields()
    }
    changed[f"{Authenticator._meta.label}.data"] = _rotate(Authenticator, _rotate_factor)  # noqa: SLF001 - as above
    if total := sum(changed.values()):
        summary = f"{total} secrets at rest were encrypted with the current key."
        record_event(EventKind.SECRETS_ROTATED, summary, by=by, detail={"after": changed})
    return changed


@transaction.atomic
def discard_unreadable_secrets(*, by: User | None = None) -> dict[str, int]:
    """Remove secrets that no configured key decrypts; the number of them by field, with those that stay.

    Optional ones are removed from their rows; idempotency records, the heartbeat and the fleet's hash secret with their
    rows. If that is lost, a new one is frozen in the next snapshot, which no earlier snapshot can be compared with.
    """
    found: dict[str, int] = {}
    for model, field in encrypted_fields():
        rows = [row for row in model._base_manager.select_for_update() if not _is_readable(getattr(row, field))]  # noqa: SLF001 - all rows
        if rows:
            found[f"{model._meta.label}.{field}"] = len(rows)  # noqa: SLF001 - Django's name
            _discard(model, field, [row.pk for row in rows])
    if found:
        summary = (
            f"{sum(found.values())} secrets at rest cannot be decrypted. Those that can be entered again were removed."
        )
        record_event(EventKind.SECRETS_ROTATED, summary, by=by, detail={"after": found})
        if Pool.objects.exists():
            freeze_snapshot(reason="Unreadable secrets were removed", by=by)
    return found


def _is_readable(encrypted: bytes | memoryview | None) -> bool:
    try:
        if encrypted is not None:
            decrypt(encrypted)
    except DecryptionError:
        return False
    return True


def _discard(model: type[Model], name: str, keys: list[Any]) -> None:
    rows, field = model._base_manager.filter(pk__in=keys), model._meta.get_field(name)  # noqa: SLF001 - all rows
    if isinstance(field, BinaryField) and field.null:
        rows.update(**{name: None}, **({"api_key_set_at": None} if model is Replica else {}))
    elif model._meta.label in DISPOSABLE:  # noqa: SLF001 - Django's name
        rows.delete()


def encrypted_fields() -> Iterator[tuple[type[Model], str]]:
    """Every model with the name of an encrypted field."""
    for model in apps.get_models():
        for field in model._meta.concrete_fields:  # noqa: SLF001 - Django's documented way to a model's fields
            if isinstance(field, BinaryField) and (field.name == "encrypted" or field.name.endswith("_encrypted")):
                yield model, field.name


def _rotate(model: type[Model], change: Callable[[Any], dict[str, Any]]) -> int:
    """Change the rows that need it, each in its own transaction; their number."""
    manager, count = model._base_manager, 0  # noqa: SLF001 - all rows, also those hidden by the default manager
    for key in list(manager.order_by("pk").values_list("pk", flat=True)):
        with transaction.atomic():
            row = manager.select_for_update().filter(pk=key).first()
            if row is not None and (changed := change(row)):
                manager.filter(pk=key).update(**changed)
                count += 1
    return count


def _rotate_field(field: str, row: Any) -> dict[str, Any]:
    encrypted = getattr(row, field)
    rotated = None if encrypted is None else reencrypt(encrypted)
    return {} if rotated is None else {field: rotated}


def _rotate_factor(row: Authenticator) -> dict[str, Any]:
    rotated = {name: reencrypt(row.data[name].encode()) for name in FACTOR_SECRETS if name in row.data}
    changed = {name: encrypted.decode() for name, encrypted in rotated.items() if encrypted is not None}
    return {"data": row.data | changed} if changed else {}
