"""How far joining replicas are that routers warm up before they take traffic, as routers told in their heartbeats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from django.db.models import QuerySet

from controlplane.models import Replica, Router

Told = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class WarmUp:
    """One replica that is kept back, all routers that warm it up together."""

    replica: Replica
    routers: int
    prefixes_done: int
    prefixes: int
    tokens_done: int
    tokens: int  # estimated

    @property
    def ratio(self) -> float:
        """The share that is done, 0 to 1, by tokens; 0 before routers know what to send."""
        return min(1.0, self.tokens_done / self.tokens) if self.tokens else 0.0


def warm_ups(replicas: QuerySet[Replica]) -> list[WarmUp]:
    """Those of the replicas that are warmed up now, by name. A query, and another where there are any.

    A router that is lost tells nothing any more, and neither does its last word.
    """
    told: dict[str, list[Told]] = {}
    for warming in Router.objects.filter(lost_at=None).exclude(warming={}).values_list("warming", flat=True):
        for name, progress in warming.items():
            told.setdefault(name, []).append(progress)
    if not told:
        return []
    rows = replicas.filter(name__in=told).select_related("pool").order_by("name")
    return [_together(replica, told[replica.name]) for replica in rows]


def _together(replica: Replica, told: list[Told]) -> WarmUp:
    def total(what: str) -> int:
        return sum(progress.get(what, 0) for progress in told)

    return WarmUp(replica, len(told), total("prefixes_done"), total("prefixes"), total("tokens_done"), total("tokens"))
