"""TTFT histograms of a subject by either clock, figures of a task group, and the revisions that place its requests.

Routers measure TTFT of streamed responses only, whose first byte is the first token; for others they measure the
latency of the whole response. A TTFT of routers therefore comes with the share of responses that it covers. Engines
measure all requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import F, Q

from controlplane.models import Event, EventKind, PolicyRevision, Pool, RevisionState, TaskGroup
from telemetry.metrics.histograms import Merged, share_at_most
from telemetry.metrics.rates import accounted_ratio, ratio
from telemetry.metrics.windows import GroupRow, Window
from telemetry.services.figures.overview import Fleet, Kind, Subject, group_rows
from telemetry.storage import sums
from telemetry.storage.dimension_sums import route_sums, total


@dataclass(frozen=True, slots=True)
class ShareWithin:
    """Share of requests with a TTFT up to a bucket edge, which makes it exact; all None while unknown."""

    ratio: float | None = None
    edge_s: float | None = None
    source: str | None = None  # "router" or "engine"


def router_ttft(subject: Subject, window: Window, *, whole: bool = False) -> dict[datetime, Merged]:
    """Router TTFT by step. One query."""
    by = _KEY_OF_KIND.get(subject.kind)
    return _merged_for(subject, sums.router_ttft(subject.pool_names(), window, by=by, whole=whole))


def latency(subject: Subject, window: Window, *, streamed: bool, whole: bool = False) -> dict[datetime, Merged]:
    """Router latency of whole responses by step. One query."""
    by, pools = _KEY_OF_KIND.get(subject.kind), subject.pool_names()
    return _merged_for(subject, sums.router_latency(pools, window, streamed=streamed, by=by, whole=whole))


_KEY_OF_KIND = {Kind.GROUP: "group", Kind.REPLICA: "replica"}


def _merged_for(subject: Subject, found: dict[tuple[Any, datetime], Merged]) -> dict[datetime, Merged]:
    """Histograms of the subject by step."""
    if subject.kind in _KEY_OF_KIND and subject.pool is not None:
        name = subject.group if subject.replica is None else subject.replica.name
        found = {key: part for key, part in found.items() if key[0] == (subject.pool.name, name)}
    return sums.merged_by_start(found)


def ttft_of_reuse(subject: Subject, window: Window, reuse: str) -> dict[datetime, Merged]:
    """Router TTFT by step, of responses with at least half of the prompt cached ("hit") or less ("miss"). One query."""
    found = sums.router_ttft(subject.pool_names(), window, by="reuse")
    matching = {
        key: part
        for key, part in found.items()
        if key[0][2] == reuse and (subject.group is None or key[0][1] == subject.group)
    }
    return sums.merged_by_start(matching)


def engine_ttft(subject: Subject, window: Window, *, whole: bool = False) -> dict[datetime, Merged]:
    """Engine TTFT by step; empty for a task group, which engines do not know. At most two queries."""
    if subject.kind is Kind.GROUP:
        return {}
    if subject.replica is None:
        return sums.merged_by_start(sums.pools_engine_ttft(subject.pool_names(), window, whole=whole))
    return sums.merged_by_start(sums.engine_ttft([subject.replica.pk], window, whole=whole))


def ttft(subject: Subject, window: Window, *, whole: bool = False) -> tuple[str, dict[datetime, Merged]]:
    """(clock, TTFT by step): of the routers if they observed requests, else of the engines."""
    merged = router_ttft(subject, window, whole=whole)
    return ("router", merged) if merged else ("engine", engine_ttft(subject, window, whole=whole))


def edge_up_to(objective_s: float, parts: Iterable[Merged]) -> float | None:
    """The largest edge up to the objective that all histograms share; None without one."""
    layouts = {part.buckets.edges for part in parts}
    common = set.intersection(*map(set, layouts)) if layouts else set()
    return max((edge for edge in common if edge <= objective_s), default=None)


def share_within(subject: Subject, window: Window, objective_s: float) -> ShareWithin:
    """Share of requests within the largest bucket edge up to the objective."""
    source, merged = ttft(subject, window, whole=True)
    total_histogram = sums.merge_histograms(merged.values())
    edge = edge_up_to(objective_s, merged.values())
    if total_histogram is None or edge is None:
        return ShareWithin()
    return ShareWithin(share_at_most(total_histogram.buckets, edge), edge, source)


REPLICA_COUNTERS = (  # that ``ReplicaShare`` is computed from
    "requests",
    "ok_requests",
    "usage_reported",
    "replica_error_requests",
    "router_error_requests",
    "prompt_tokens",
    "cached_tokens",
)


@dataclass(frozen=True, slots=True)
class ReplicaShare:
    """One replica's part of a task group's requests; ``name`` is "" for requests without a replica."""

    name: str
    share_ratio: float | None  # of the group's requests
    requests: int | None
    hit_rate_ratio: float | None  # of responses that report it
    failed_ratio: float | None
    accounted_ratio: float | None  # share of its successful responses that the hit rate covers


def group_tiles(subject: Subject, window: Window) -> GroupRow:
    """Figures of a task group: its row in the table of its pool. 5 queries."""
    rows = group_rows(Fleet(subject), window)
    unknown = GroupRow(subject.group or "", subject.pool.name if subject.pool else "")
    return next((row for row in rows if row.name == subject.group), unknown)


def has_requests(subject: Subject, window: Window) -> bool:
    """Whether routers counted requests of a task group. One query."""
    return bool(route_sums(subject.pool_names(), window, ("requests",), group=subject.group, whole=True))


def replica_shares(subject: Subject, window: Window) -> list[ReplicaShare]:
    """Requests of a task group by replica, largest share first. One query."""
    rows = route_sums(subject.pool_names(), window, REPLICA_COUNTERS, by=("replica",), group=subject.group, whole=True)
    requests = total(rows, "requests")
    shares = [
        ReplicaShare(
            row.key[0],
            ratio(row.get("requests"), requests),
            row.get("requests"),
            ratio(row.get("cached_tokens"), row.get("prompt_tokens")),
            ratio(
                (row.get("replica_error_requests") or 0) + (row.get("router_error_requests") or 0), row.get("requests")
            ),
            accounted_ratio(row.get("usage_reported"), row.get("ok_requests")),
        )
        for row in rows
    ]
    return sorted(shares, key=lambda share: -(share.requests or 0))


def active_revisions(group: TaskGroup | None, pool_id: int) -> list[PolicyRevision]:
    """The active revision of a group's own policy, else of its pool's; a canary is before it. One query."""
    rows = PolicyRevision.objects.filter(
        policy__pool=pool_id, state__in=(RevisionState.LIVE, RevisionState.CANARY)
    ).select_related("policy")
    own = [row for row in rows if group is not None and row.policy.group_id == group.pk]
    chosen = own if any(row.state == RevisionState.LIVE for row in own) else []
    return sorted(chosen or [row for row in rows if row.policy.group_id is None], key=lambda row: row.state)


def policies_in_use(pools: Sequence[Pool]) -> list[PolicyRevision]:
    """The active revision of each policy of some pools, by pool; those of task groups after their pool's. One query."""
    live = PolicyRevision.objects.filter(policy__pool__in=list(pools), state=RevisionState.LIVE)
    order = "policy__pool__name", F("policy__group__name").asc(nulls_first=True)
    return list(live.select_related("policy__pool", "author").order_by(*order))


MAX_PERIODS = 50  # the newest ones
Period = tuple[datetime, datetime, str]


def policy_periods(pool: Pool, group: str | None, window: Window) -> list[Period]:
    """(start, end, label) of the revisions that placed a pool's or a task group's requests, newest first. Two queries.

    A revision that has an event of its activation is named with its number.
    """
    live = PolicyRevision.objects.filter(policy__pool=pool, state=RevisionState.LIVE).select_related("policy")
    own_or_pools = live.filter(Q(policy__group=None) | Q(policy__group__name=group or None))
    revision = own_or_pools.order_by(F("policy__group").asc(nulls_last=True)).first()
    if revision is None:
        return []
    events = Event.objects.filter(
        pool=pool, kind=EventKind.POLICY_PUBLISHED, detail__policy=revision.policy.name
    ).order_by("-at")
    periods: list[Period] = []
    end, earlier = window.end, f"{revision.strategy} r{revision.number}"
    # Without an event in time, the first one after the window says which strategy it replaced.
    for event in list(events.filter(at__lt=window.end)[:MAX_PERIODS]) or events.reverse()[:1]:
        start = min(max(event.at, window.start), window.end)
        periods.append((start, end, f"{event.detail['after']['strategy']} r{event.detail['revision']}"))
        end, earlier = start, (event.detail.get("before") or {}).get("strategy", "")
    start = max(window.start, pool.created_at)
    if start < end and earlier and len(periods) < MAX_PERIODS:
        periods.append((start, end, earlier))
    return [period for period in periods if period[0] < period[1]]
