"""Configuration snapshots: numbering and freezing what every router should run."""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from django.contrib.auth.models import User
from django.db import connection, transaction

from controlplane.access.actor import roles_of
from controlplane.celery import wake
from controlplane.encryption import decrypt, encrypt
from controlplane.errors import ConflictError, InvalidError
from controlplane.models import ConfigSnapshot, FleetSecret, Pool
from controlplane.push.snapshot import build_config
from routing.schema import ConfigError, dump_snapshot, without_secrets

NUMBERING_LOCK = 0x5741524D  # "WARM": the advisory lock that makes snapshot numbers gapless

_deferred: ContextVar[bool] = ContextVar("snapshot deferred", default=False)


@contextmanager
def single_snapshot(*, reason: str, by: User | None = None) -> Iterator[None]:
    """Freeze all changes of a block as one snapshot at its end, in one transaction with them.

    Intermediate states need not be valid: a name may move from one pool to another although both have it for a moment.
    At the end InvalidError, or ConflictError if another user changed the fleet meanwhile.
    """
    with transaction.atomic():
        first, token = newest_snapshot(), _deferred.set(True)
        try:
            yield
        finally:
            _deferred.reset(token)
        _lock_numbering()
        newest = newest_snapshot()
        if first and newest and newest.number != first.number:
            raise ConflictError(
                "Another user changed the fleet at the same time, so nothing was changed. Reload and try again."
            )
        freeze_snapshot(reason=reason, by=by)


def _lock_numbering() -> None:
    with connection.cursor() as cursor:
        cursor.execute("select pg_advisory_xact_lock(%s)", [NUMBERING_LOCK])


@transaction.atomic
def freeze_snapshot(*, reason: str, by: User | None = None, above: int = 0) -> ConfigSnapshot:
    """Freeze the current rows as the newest snapshot and wake the push. InvalidError if routers would reject it.

    Called last in the transaction of the change: rows are locked before the advisory lock, and the next caller reads
    what this one committed. Without a change there is no new number, unless ``above`` requires a higher one. Within
    ``single_snapshot`` nothing is frozen until the end.
    """
    _lock_numbering()
    newest = newest_snapshot()
    if newest and _deferred.get():
        return newest
    number = max(newest.number if newest else 0, above) + 1
    try:
        frozen = dump_snapshot(build_config(fleet_secret()), number)
    except ConfigError as error:
        raise InvalidError(error.path, _visible_reason(by, error.reason)) from None
    if newest and newest.sha256 == frozen.sha256 and newest.number > above:
        return newest
    snapshot = ConfigSnapshot.objects.create(
        number=number,
        sha256=frozen.sha256,
        document=without_secrets(frozen.config),
        encrypted=encrypt(zlib.compress(frozen.document)),  # its replicas are alike
        reason=reason[:500],
        created_by=by,
    )
    wake("controlplane.tasks.reconcile_routers")
    return snapshot


def _visible_reason(by: User | None, reason: str) -> str:
    """The reason without the names of pools that the user must not see."""
    projects = None if by is None else roles_of(by).projects()
    if projects is not None:
        for name in Pool.objects.exclude(project__in=projects).values_list("name", flat=True):
            reason = reason.replace(f"is already served by pool {name!r}", "cannot be used here; choose another")
            reason = reason.replace(f"pool {name!r}", "another pool")
    return reason


def newest_snapshot() -> ConfigSnapshot | None:
    """The snapshot that every router should run; None before the first pool. A query, without its contents."""
    return ConfigSnapshot.objects.defer("encrypted", "document").order_by("-number").first()


def snapshot_document(snapshot: ConfigSnapshot) -> bytes:
    """The bytes that routers receive, including secrets; DecryptionError if their key is no longer configured."""
    document = decrypt(snapshot.encrypted)
    return document if document.startswith(b"{") else zlib.decompress(document)  # older ones are not compressed


def fleet_secret() -> str:
    """The hash secret, 64 hex digits, generated on first use. Call it with the advisory lock held."""
    row = FleetSecret.objects.first()
    if row is None:
        row = FleetSecret.objects.create(encrypted=encrypt(secrets.token_hex(32).encode()))
    return decrypt(row.encrypted).decode()
