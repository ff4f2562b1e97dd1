"""Up to when what was counted is known of everybody: where a rule's newest window ends.

Theory of operation. A reading at ``t`` tells of the time before ``t``. It is stored a while after, at once for most
replicas and seconds later for those that answer slowly, and shards have their turns one after another. A window that
ended at any moment would have the newest interval of some replicas and not of others: with windows of few intervals
the hit rate of the pool would be that of whoever was read first. Windows therefore end just before the first reading
that is due and not there. A replica that fails has a reading too, which says so; who has had none for longer than two
intervals is not waited for, so a window ends an interval before now at the earliest.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from django.conf import settings
from django.db.models import Min

from telemetry.models import ScrapeState

JUST_BEFORE = timedelta(microseconds=1)  # what is due at a moment is no part of a window that ends before it


def settled_until(now: datetime) -> datetime:
    """The newest moment up to which all who report have reported: now, or up to an interval before. One query."""
    interval = timedelta(seconds=settings.SCRAPE_INTERVAL_S)
    report = ScrapeState.objects.filter(at__gt=now - 2 * interval, at__lte=now)
    behind: datetime | None = report.aggregate(at=Min("at"))["at"]
    return now if behind is None else min(now, behind + interval - JUST_BEFORE)
