"""Numbering what routers should run."""

from __future__ import annotations

import secrets
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


_held: ContextVar[bool] = ContextVar("changes are gathered", default=False)


@contextmanager
def single_snapshot(*, reason: str, by: User | None = None) -> Iterator[None]:
    """Gather the changes of a block into one configuration, frozen at its end; in one transaction with them.

    Within the block nothing is numbered, and nothing is held against the routers' rules: a name may move from one
    pool to another although both have it for a moment. At the end InvalidError, or ConflictError if somebody else's
    change came in between.
    """
    with transaction.atomic():
        seen, token = newest_snapshot(), _held.set(True)
        try:
            yield
        finally:
            _held.reset(token)
        _take_turn()
        newest = newest_snapshot()
        if seen and newest and newest.number != seen.number:
            raise ConflictError("Somebody else changed the fleet in the same moment; look again. Nothing was changed.")
        freeze_snapshot(reason=reason, by=by)


def _take_turn() -> None:
    """Let nobody else number a configuration until this transaction ends."""
    with connection.cursor() as cursor:
        cursor.execute("select pg_advisory_xact_lock(%s)", [NUMBERING_LOCK])


@transaction.atomic
def freeze_snapshot(*, reason: str, by: User | None = None, above: int = 0) -> ConfigSnapshot:
    """Freeze what the rows say now as the newest snapshot, and wake the push.

    Called last in the transaction of the change, so the two are committed together: rows are locked before the
    advisory lock, never after, and the next caller reads what this one committed. Without a change there is no new
    number, unless ``above`` asks for one that is higher. InvalidError if routers would refuse the result. Within
    ``single_snapshot`` it is left to the end.
    """
    _take_turn()
    newest = newest_snapshot()
    if newest and _held.get():
        return newest
    number = max(newest.number if newest else 0, above) + 1
    try:
        frozen = dump_snapshot(build_config(fleet_secret()), number)
    except ConfigError as error:
        raise InvalidError(error.path, _told_to(by, error.reason)) from None
    if newest and newest.sha256 == frozen.sha256 and newest.number > above:
        return newest
    snapshot = ConfigSnapshot.objects.create(
        number=number,
        sha256=frozen.sha256,
        document=without_secrets(frozen.config),
        encrypted=encrypt(frozen.document),
        reason=reason[:500],
        created_by=by,
    )
    wake("controlplane.tasks.reconcile_routers")
    return snapshot


def _told_to(by: User | None, reason: str) -> str:
    """Why routers would refuse it, without the names of pools that the actor cannot see; the system sees all."""
    projects = None if by is None else roles_of(by).projects()
    if projects is not None:
        for name in Pool.objects.exclude(project__in=projects).values_list("name", flat=True):
            reason = reason.replace(f"pool {name!r}", "another pool")
    return reason


def newest_snapshot() -> ConfigSnapshot | None:
    """What every router should run; None before the first pool exists. A query, without the encrypted bytes."""
    return ConfigSnapshot.objects.defer("encrypted", "document").order_by("-number").first()


def snapshot_document(snapshot: ConfigSnapshot) -> bytes:
    """The very bytes that routers get, secret included; DecryptionError when the key is gone."""
    return decrypt(snapshot.encrypted)


def fleet_secret() -> str:
    """The fleet's hash secret, 64 hex digits; generated the first time. Call it under the advisory lock."""
    row = FleetSecret.objects.first()
    if row is None:
        row = FleetSecret.objects.create(encrypted=encrypt(secrets.token_hex(32).encode()))
    return decrypt(row.encrypted).decode()
