"""Re-encrypt every secret at rest with the current key.

Theory of operation. Encrypted fields are found by convention: every binary field called ``encrypted`` or
``..._encrypted``, of any package, and the secrets of second factors. Each row is locked, decrypted with whichever key
works and encrypted with the current one, so the command can run during normal operation and be repeated after an
interruption. Two things cannot be re-encrypted: sessions (people sign in again once the former key is removed) and
tokens, of which only a digest is stored (each moves to the current key when it is next used).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from allauth.mfa.models import Authenticator
from django.apps import apps
from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import BinaryField, Model

from controlplane.encryption import reencrypt
from controlplane.models import EventKind
from controlplane.services.events import record_event

FACTOR_SECRETS = ("secret", "seed")  # in Authenticator.data


def rotate_secrets(*, by: User | None = None) -> dict[str, int]:
    """Seal everything under the present key; how many secrets were brought over, by kind. DecryptionError names none.

    What is encrypted under it already is left as it is.
    """
    moved = {
        f"{model._meta.label}.{field}": _rotate(model, _field_resealer(field))  # noqa: SLF001 - Django's name for it
        for model, field in encrypted_fields()
    }
    moved[f"{Authenticator._meta.label}.data"] = _rotate(Authenticator, _reseal_factor)  # noqa: SLF001 - as above
    if total := sum(moved.values()):
        summary = f"{total} secrets at rest were encrypted under the present key."
        record_event(EventKind.SECRETS_ROTATED, summary, by=by, detail={"after": moved})
    return moved


def encrypted_fields() -> Iterator[tuple[type[Model], str]]:
    """Where secrets are encrypted."""
    for model in apps.get_models():
        for field in model._meta.concrete_fields:  # noqa: SLF001 - Django's documented way to a model's fields
            if isinstance(field, BinaryField) and (field.name == "encrypted" or field.name.endswith("_encrypted")):
                yield model, field.name


def _rotate(model: type[Model], change: Callable[[Any], dict[str, Any]]) -> int:
    """Change the rows that need it, each in a transaction of its own; how many."""
    manager, moved = model._base_manager, 0  # noqa: SLF001 - every row, whatever the default manager shows
    for key in list(manager.order_by("pk").values_list("pk", flat=True)):
        with transaction.atomic():
            row = manager.select_for_update().filter(pk=key).first()
            if row is not None and (changed := change(row)):
                manager.filter(pk=key).update(**changed)
                moved += 1
    return moved


def _field_resealer(field: str) -> Callable[[Any], dict[str, Any]]:
    def change(row: Any) -> dict[str, Any]:
        encrypted = getattr(row, field)
        again = None if encrypted is None else reencrypt(encrypted)
        return {} if again is None else {field: again}

    return change


def _reseal_factor(row: Authenticator) -> dict[str, Any]:
    found = {name: reencrypt(row.data[name].encode()) for name in FACTOR_SECRETS if name in row.data}
    changed = {name: encrypted.decode() for name, encrypted in found.items() if encrypted is not None}
    return {"data": row.data | changed} if changed else {}
