"""Bringing every secret at rest under the present key.

Theory of operation. What is sealed is found by convention: every binary field called ``sealed`` or ``..._sealed``, of
any package, and the secrets of second factors. Each is opened with whichever key opens it and sealed under the present
one, a row at a time and under its lock, so that it can run while everything serves and be run again after it was cut
short. Two things cannot be brought along: sessions, whose people sign in again once the former key is gone, and tokens,
of which only a digest is kept: each moves over when it is next used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from allauth.mfa.models import Authenticator
from django.apps import apps
from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import BinaryField, Model

from controlplane.encryption import reseal
from controlplane.models import EventKind
from controlplane.services.events import record_event

FACTOR_SECRETS = ("secret", "seed")  # in Authenticator.data


def rotate_secrets(*, by: User | None = None) -> dict[str, int]:
    """Seal everything under the present key; how many secrets were brought over, by kind. SealBrokenError names none.

    What is sealed under it already is left as it is.
    """
    moved = {
        f"{model._meta.label}.{field}": _rotate(model, _field_resealer(field))  # noqa: SLF001 - Django's name for it
        for model, field in sealed_fields()
    }
    moved[f"{Authenticator._meta.label}.data"] = _rotate(Authenticator, _reseal_factor)  # noqa: SLF001 - as above
    if total := sum(moved.values()):
        summary = f"{total} secrets at rest were sealed under the present key."
        record_event(EventKind.SECRETS_ROTATED, summary, by=by, detail={"after": moved})
    return moved


def sealed_fields() -> Iterator[tuple[type[Model], str]]:
    """Where secrets are sealed."""
    for model in apps.get_models():
        for field in model._meta.concrete_fields:  # noqa: SLF001 - Django's documented way to a model's fields
            if isinstance(field, BinaryField) and (field.name == "sealed" or field.name.endswith("_sealed")):
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
        sealed = getattr(row, field)
        again = None if sealed is None else reseal(sealed)
        return {} if again is None else {field: again}

    return change


def _reseal_factor(row: Authenticator) -> dict[str, Any]:
    found = {name: reseal(row.data[name].encode()) for name in FACTOR_SECRETS if name in row.data}
    changed = {name: sealed.decode() for name, sealed in found.items() if sealed is not None}
    return {"data": row.data | changed} if changed else {}
