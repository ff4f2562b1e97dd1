"""Readings that come after their minute was rolled up: they mark it, and it is made anew.

Theory of operation. Who stores readings takes a lock that storers share, until the transaction ends, and then looks
how far minutes are closed. Who closes minutes takes the lock alone: it waits for all storers that did not see the
new mark, and those that come after it see it. So a reading is either there when its minute is rolled up, or its
minute is marked. Storers wait for the moment that closing takes, and never for the rolling. A mark is taken away
before its bin is made anew: that waits for those who rely on the mark, and who comes later sets another.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from django.db import connection, transaction

from telemetry.models import RollupRepair, RollupState
from telemetry.storage.rollups.columns import RESOLUTIONS_S
from telemetry.storage.rollups.cover import up

FINEST_S = RESOLUTIONS_S[0]
STORING = 0x7770_726F_6C6C  # any number that no other advisory lock of ours has


def mark_late(times: Iterable[datetime]) -> None:
    """Mark the minutes of these readings that are closed; in the transaction that stores them. Two queries."""
    with connection.cursor() as cursor:
        cursor.execute("select pg_advisory_xact_lock_shared(%s)", [STORING])
    closed = RollupState.objects.filter(pk=FINEST_S).values_list("closed_through", flat=True).first()
    late = {up(at, FINEST_S) for at in times if closed is not None and at <= closed}
    mark(FINEST_S, late)


def mark(resolution_s: int, bins: Iterable[datetime]) -> None:
    """Note that these bins are to be made anew. A mark that is there already is held until the transaction ends."""
    repairs = [RollupRepair(resolution_s=resolution_s, at=at) for at in sorted(bins)]
    if repairs:
        key = ["resolution_s", "at"]
        RollupRepair.objects.bulk_create(repairs, update_conflicts=True, unique_fields=key, update_fields=["at"])


@transaction.atomic
def close(through: datetime) -> None:
    """From now on whoever stores a reading of this time or before marks its minute."""
    with connection.cursor() as cursor:
        cursor.execute("select pg_advisory_xact_lock(%s)", [STORING])
    RollupState.objects.update_or_create(pk=FINEST_S, defaults={"closed_through": through})
