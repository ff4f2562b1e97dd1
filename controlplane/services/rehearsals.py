"""What a change would lead to, noted while it is tried in a transaction that is then rolled back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from django.db.models import Model
from django.db.models.signals import post_save
from django.dispatch import receiver

from controlplane.models import ConfigSnapshot, Event

_noted: ContextVar[list[Model] | None] = ContextVar("noted", default=None)


@contextmanager
def noted_changes() -> Iterator[list[Model]]:
    """The events and configurations that this thread records within the block, in their order."""
    made: list[Model] = []
    token = _noted.set(made)
    try:
        yield made
    finally:
        _noted.reset(token)


@receiver(post_save, sender=Event, dispatch_uid="controlplane.noted_event")
@receiver(post_save, sender=ConfigSnapshot, dispatch_uid="controlplane.noted_configuration")
def _note(instance: Model, created: bool, **_: Any) -> None:
    made = _noted.get()
    if created and made is not None:
        made.append(instance)


def configurations(made: list[Model]) -> tuple[ConfigSnapshot | None, ConfigSnapshot] | None:
    """The configuration before the noted changes (None before the first) and after; None if there is no new one."""
    frozen = [row for row in made if isinstance(row, ConfigSnapshot)]
    if not frozen:
        return None
    earlier = ConfigSnapshot.objects.defer("sealed").filter(number__lt=frozen[0].number)
    return earlier.order_by("-number").first(), frozen[-1]


def events(made: list[Model]) -> list[Event]:
    """The noted events."""
    return [row for row in made if isinstance(row, Event)]
