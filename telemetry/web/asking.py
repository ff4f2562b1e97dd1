"""What a request of the overview asks for: a pool, a range, the views of its charts. All of it stands in the URL."""

from __future__ import annotations

from dataclasses import dataclass

from django.http import HttpRequest, QueryDict

from controlplane.access.asker import asker_of
from controlplane.access.scope import visible
from controlplane.models import Pool
from telemetry.web.ranges import TimeRange, asked_range


@dataclass(frozen=True, slots=True)
class Asked:
    """The page's state. ``pool`` is None for all pools, and for one that is not there (``error`` says so)."""

    pools: list[Pool]  # that may be asked for
    pool: Pool | None
    among: list[Pool] | None  # whose figures these are; None: all there are, and of what belongs to none
    range: TimeRange
    query: QueryDict
    error: str

    @property
    def urlencoded(self) -> str:
        """The state as a query string, for the page's parts."""
        return self.query.urlencode()


def asked(request: HttpRequest) -> Asked:
    """Read the URL: only pools that the asker may see are there. One query, for them."""
    asker, name = asker_of(request), request.GET.get("pool", "")
    pools = list(visible(asker, Pool.objects.all()))
    pool = next((pool for pool in pools if pool.name == name), None)
    span = asked_range(request.GET)
    error = span.error or (f"There is no pool {name!r} (any more); shown are all." if name and pool is None else "")
    mine = None if asker.projects() is None else pools
    return Asked(pools, pool, [pool] if pool else mine, span, request.GET, error)
