"""What routers decided, request by request: lists of it, and one of them with its neighbours.

Theory of operation. Decisions are partitioned by day and keyed by their time first, so every question here names a
span of time. Lists in order of time stop as soon as they are full. Lists in order of a figure have to read the whole
span, so they read at most the newest ``MOST_RANKED`` rows of it and say how far that reached.

The hottest prefixes of a span of time: what routers decided, as a tree.

What keeps the prompts of each task group from sharing more of the caches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

import msgspec
from django.db.models import Count, F, Max, Min, Q, QuerySet, Sum
from django.db.models.functions import Mod

from telemetry.lab.prefix_tree import MOST_BLOCKS, Node, Passage, tree_of
from telemetry.lint import Finding, Opening, lint
from telemetry.metrics.windows import Window
from telemetry.models import Decision, DecisionCursor
from telemetry.services.figures.overview import Subject
from telemetry.storage.dimension_sums import coverage, route_sums
from telemetry.storage.responses import newest_prompt_structures

MOST_RANKED = 50_000  # rows that a list in order of a figure reads
AROUND = timedelta(minutes=30)  # in which a decision's prefix is looked for, before and after
NEIGHBOURS = 6
_HEAVY = ("blocks", "positions", "candidates", "opening")


class Order(StrEnum):
    """What stands first in a list."""

    NEWEST = "newest"
    SLOWEST = "slowest"  # to the first token
    RECOMPUTED = "recomputed"  # tokens that the cache did not have
    MISJUDGED = "misjudged"  # the prediction that the answer contradicts most


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which decisions; what is "" or None does not narrow."""

    subject: Subject
    window: Window
    order: Order = Order.NEWEST
    reason: str = ""
    outcome: str = ""  # "ok", "failed"
    request_id: str = ""
    before: tuple[datetime, int, str, int] | None = None  # of the newest: only what is older than this one


@dataclass(frozen=True, slots=True)
class Found:
    """A list; ``since`` is how far back it reached, where that is less than what was asked for."""

    rows: list[Decision]
    more: bool = False
    since: datetime | None = None


def decisions(wanted: Wanted, *, limit: int) -> Found:
    """A list without blocks, candidates and openings. Two queries; three in order of a figure."""
    rows = _among(wanted)
    if wanted.order is Order.NEWEST or wanted.request_id:
        ordered = rows.order_by("-at", "-router_id", "-boot", "-seq")
        if wanted.before is not None:
            ordered = ordered.filter(_older_than(*wanted.before))
        found = list(ordered.defer(*_HEAVY).select_related("router")[: limit + 1])
        return Found(found[:limit], more=len(found) > limit)
    since = _reach(rows)
    figured = rows.filter(at__gte=since) if since else rows
    return Found(list(_ranked(figured, wanted.order).defer(*_HEAVY).select_related("router")[:limit]), since=since)


def decision(at: datetime, router_id: int, boot: str, seq: int) -> Decision | None:
    """One of them, whole. A query."""
    return Decision.objects.filter(at=at, router_id=router_id, boot=boot, seq=seq).select_related("router").first()


def of_the_same_prefix(one: Decision) -> list[Decision]:
    """Its neighbours in time with the same tier-1 prefix, ascending, itself among them. Two queries."""
    if one.prefix is None:
        return [one]
    near = Decision.objects.filter(pool=one.pool, prefix=one.prefix).defer(*_HEAVY).select_related("router")
    earlier = near.filter(at__gte=one.at - AROUND, at__lt=one.at).order_by("-at")[:NEIGHBOURS]
    later = near.filter(at__gt=one.at, at__lte=one.at + AROUND).order_by("at")[:NEIGHBOURS]
    return [*reversed(earlier), one, *later]


@dataclass(frozen=True, slots=True)
class Collected:
    """How completely decisions are collected."""

    routers: int
    at: datetime | None  # the latest collection
    dropped: int  # ever: gone from a router before they were asked for
    failing: list[str]  # why some routers told nothing


def collected() -> Collected:
    """What the cursors say. Two queries."""
    sums = DecisionCursor.objects.aggregate(routers=Count("pk"), at=Max("at"), dropped=Sum("dropped"))
    failing = DecisionCursor.objects.filter(router__lost_at=None).exclude(reason="").values_list("reason", flat=True)
    return Collected(sums["routers"], sums["at"], sums["dropped"] or 0, sorted(set(failing)))


def reasons(subject: Subject, window: Window) -> dict[str, int]:
    """How often each reason decided, of the newest ``MOST_RANKED`` rows, the commonest first. Two queries."""
    rows = _among(Wanted(subject, window))
    since = _reach(rows)
    counted = (rows.filter(at__gte=since) if since else rows).values("reason").annotate(n=Count("at")).order_by("-n")
    return {row["reason"]: row["n"] for row in counted}


def _among(wanted: Wanted) -> QuerySet[Decision]:
    subject, window = wanted.subject, wanted.window
    rows = Decision.objects.filter(at__gt=window.start, at__lte=window.end)
    names = subject.pool_names()
    if names is not None:
        rows = rows.filter(pool__in=names)
    if subject.group is not None:
        rows = rows.filter(group=subject.group)
    if subject.replica is not None:
        rows = rows.filter(replica=subject.replica.name)
    if wanted.reason:
        rows = rows.filter(reason=wanted.reason)
    if wanted.request_id:
        rows = rows.filter(request_id=wanted.request_id)
    if wanted.outcome:
        went_well = Q(status__gte=200, status__lt=400)
        rows = rows.filter(went_well) if wanted.outcome == "ok" else rows.exclude(went_well)
    return rows


def _older_than(at: datetime, router_id: int, boot: str, seq: int) -> Q:
    same = Q(at=at)
    return Q(at__lt=at) | same & (
        Q(router_id__lt=router_id) | Q(router_id=router_id) & (Q(boot__lt=boot) | Q(boot=boot, seq__lt=seq))
    )


def _reach(rows: QuerySet[Decision]) -> datetime | None:
    """Since when the newest ``MOST_RANKED`` rows are; None where that is all of the window."""
    newest = rows.order_by("-at").values("at")[: MOST_RANKED + 1]
    span = newest.aggregate(first=Min("at"), n=Count("at"))
    return span["first"] if span["n"] > MOST_RANKED else None


def _ranked(rows: QuerySet[Decision], order: Order) -> QuerySet[Decision]:
    if order is Order.SLOWEST:
        return rows.filter(ttft_s__isnull=False).order_by("-ttft_s", "-at")
    told = rows.filter(prompt_tokens__isnull=False, cached_tokens__isnull=False)
    if order is Order.RECOMPUTED:
        return told.annotate(figure=F("prompt_tokens") - F("cached_tokens")).order_by("-figure", "-at")
    judged = told.filter(hit_tokens__isnull=False)
    return judged.annotate(figure=F("hit_tokens") - F("cached_tokens")).order_by("-figure", "-at")


MOST_REQUESTS = 4000  # that a tree is made of


@dataclass(frozen=True, slots=True)
class Tree:
    """The tree; ``root`` is everything. ``every`` is what part of the requests it was made of: one in so many."""

    root: Node
    every: int
    sample_ratio: float | None  # the smallest part of their blocks that requests had; None for no requests
    since: datetime | None


def hottest_prefixes(subject: Subject, window: Window, *, below: str = "") -> Tree:
    """The tree of a subject's prompts, or of those that pass through the node whose hash is ``below``. Two queries."""
    rows = Decision.objects.filter(at__gt=window.start, at__lte=window.end)
    if (names := subject.pool_names()) is not None:
        rows = rows.filter(pool__in=names)
    if subject.group is not None:
        rows = rows.filter(group=subject.group)
    if subject.replica is not None:
        rows = rows.filter(replica=subject.replica.name)
    counted = rows.aggregate(n=Count("at"), ratio=Min("sample_ratio"), since=Min("at"))
    every = max(1, -(-counted["n"] // MOST_REQUESTS))
    some = rows.annotate(turn=Mod(F("seq"), every)).filter(turn=0) if every > 1 else rows
    passages = map(_passage, some.order_by("-at").iterator(chunk_size=1000))
    root = tree_of(one for one in passages if not below or one.passes(below))
    return Tree(root, every, counted["ratio"], counted["since"])


def _passage(one: Decision) -> Passage:
    """The tier-1 prefix is a step of its own where no block is there."""
    places = one.positions if one.positions is not None else range(len(one.blocks))
    steps = [(block, (place + 1) * one.hash_tokens) for block, place in zip(one.blocks, places, strict=False)]
    if not steps and one.prefix is not None:
        steps = [(one.prefix, 0)]
    return Passage(
        tuple(steps[:MOST_BLOCKS]),
        one.group,
        one.replica,
        one.prompt_tokens or one.prompt_tokens_estimate,
        one.prompt_tokens,
        one.cached_tokens,
    )


LOOK_BACK = timedelta(minutes=15)
MOST = 60  # openings of a task group
FEW = 8  # of which nothing is said


@dataclass(frozen=True, slots=True)
class GroupPrompts:
    """One task group's openings, and what was found in them, worst first."""

    pool: str
    group: str  # "": requests of no task group
    openings: int  # that were compared
    messages: int  # of a prompt, at the median
    tokens: int  # estimated, of a prompt, at the median
    requests_per_s: float | None
    findings: tuple[Finding, ...]

    @property
    def is_thin(self) -> bool:
        """Whether there are too few openings to say anything."""
        return self.openings < FEW

    @property
    def tokens_per_day(self) -> float:
        """Lost to the worst finding: what they lose overlaps."""
        return max((it.tokens_per_day or 0.0 for it in self.findings), default=0.0)


def prompts_of(pools: Sequence[str] | None, now: datetime, *, group: str | None = None) -> list[GroupPrompts]:
    """Every task group of some pools (None: all), those that lose most first. 3 queries, 10 ms a group."""
    window = Window(now - LOOK_BACK, now, LOOK_BACK.total_seconds())
    found: dict[tuple[str, str], list[Opening]] = defaultdict(list)
    for pool, name, document in newest_prompt_structures(pools, window, most=MOST, group=group):
        if (opening := Opening.read(msgspec.json.decode(document))) is not None:
            found[pool, name].append(opening)
    paces = _paces(pools, window) if found else {}
    groups = [_prompts(*key, openings, paces.get(key)) for key, openings in found.items()]
    return sorted(groups, key=lambda it: (-it.tokens_per_day, not it.findings, it.pool, it.group))


def _prompts(pool: str, group: str, openings: list[Opening], pace: float | None) -> GroupPrompts:
    middle = len(openings) // 2
    return GroupPrompts(
        pool,
        group,
        len(openings),
        sorted(it.messages for it in openings)[middle],
        sorted(it.length for it in openings)[middle] // 4,
        pace,
        tuple(lint(openings, pace)) if len(openings) >= FEW else (),
    )


def _paces(pools: Sequence[str] | None, window: Window) -> dict[tuple[str, str], float]:
    """Requests a second by pool and task group."""
    covered = next(iter(coverage(window, whole=True)), None)
    if covered is None or not covered.covered_s:
        return {}
    rows = route_sums(pools, window, ("requests",), by=("pool", "group"), whole=True)
    seconds = covered.covered_s / covered.routers
    return {(row.key[0], row.key[1]): (row.get("requests") or 0) / seconds for row in rows}
