"""Queries on stored placement decisions: lists and single decisions, the tree of shared prefixes, and prompt lint.

Theory of operation. Decisions are partitioned by day and keyed by time first, so every query has a time span. Lists in
order of time stop when they are full. Lists in order of another column read at most the newest ``MAX_RANKED`` rows of
the span and report how far back these reach.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

import msgspec
from django.db.models import Count, F, Max, Min, Q, QuerySet, Sum
from django.db.models.functions import Mod

from controlplane.models import Pool
from telemetry.lab.prefix_tree import MAX_BLOCKS, Node, RequestPath, build_tree
from telemetry.lint.findings import Finding, lint
from telemetry.lint.structure import PromptStructure
from telemetry.metrics.windows import Window
from telemetry.models import Decision, DecisionCursor
from telemetry.services.figures.overview import Subject
from telemetry.storage import sums
from telemetry.storage.dimension_sums import coverage, newest_prompt_structures, route_sums

MIN_ID_CHARS, MAX_FOUND = 4, 6  # of a search by request id
_ID = re.compile(r"[\w.:-]*[0-9][\w.:-]*")
MAX_RANKED = 50_000  # rows read by a list in another order than time
NEIGHBOUR_SPAN = timedelta(minutes=30)  # span before and after a decision with its neighbours
MAX_NEIGHBOURS = 6  # on each side
_LARGE_COLUMNS = ("blocks", "positions", "candidates", "prompt_structure")


class Order(StrEnum):
    """Sort order of a list."""

    NEWEST = "newest"
    SLOWEST = "slowest"  # TTFT
    RECOMPUTED = "recomputed"  # uncached tokens
    OVER_PREDICTED = "misjudged"  # predicted minus reported cached tokens


@dataclass(frozen=True, slots=True)
class DecisionQuery:
    """Filter and order of a list; "" and None do not filter."""

    subject: Subject
    window: Window
    order: Order = Order.NEWEST
    reason: str = ""
    outcome: str = ""  # "ok", "failed"
    request_id: str = ""
    prefix: int | None = None  # tier-1
    before: tuple[datetime, int, str, int] | None = None  # with NEWEST: only decisions older than this key


@dataclass(frozen=True, slots=True)
class DecisionList:
    """A list; ``since`` is the oldest time it covers, if that is later than the window's start."""

    rows: list[Decision]
    more: bool = False
    since: datetime | None = None


def decisions(query: DecisionQuery, *, limit: int) -> DecisionList:
    """A list without the large columns. Two queries; three in another order than time."""
    rows = _filtered(query)
    if query.order is Order.NEWEST or query.request_id:
        ordered = rows.order_by("-at", "-router_id", "-boot", "-seq")
        if query.before is not None:
            ordered = ordered.filter(_older_than(*query.before))
        rows_plus_one = list(ordered.defer(*_LARGE_COLUMNS).select_related("router")[: limit + 1])
        return DecisionList(rows_plus_one[:limit], more=len(rows_plus_one) > limit)
    since = _oldest_ranked_at(rows)
    recent = rows.filter(at__gte=since) if since else rows
    return DecisionList(
        list(_ranked(recent, query.order).defer(*_LARGE_COLUMNS).select_related("router")[:limit]), since=since
    )


def decision(at: datetime, router_id: int, boot: str, seq: int) -> Decision | None:
    """One decision with all columns. One query."""
    return Decision.objects.filter(at=at, router_id=router_id, boot=boot, seq=seq).select_related("router").first()


def requests_of_id(pools: QuerySet[Pool], request_id: str) -> list[Decision]:
    """The newest decisions of some pools whose request id is or ends with a text, among the newest ``MAX_RANKED``.

    No query for a text that is too short for an id, else three.
    """
    if len(request_id) < MIN_ID_CHARS or not _ID.fullmatch(request_id):
        return []
    rows = Decision.objects.filter(pool__in=list(pools.values_list("name", flat=True)))
    oldest = _oldest_ranked_at(rows)
    recent = rows.filter(at__gte=oldest) if oldest else rows
    return list(recent.filter(request_id__endswith=request_id).order_by("-at").defer(*_LARGE_COLUMNS)[:MAX_FOUND])


def with_same_prefix(decision: Decision) -> list[Decision]:
    """The decision and its neighbours in time with the same tier-1 prefix, ascending. Two queries."""
    if decision.prefix is None:
        return [decision]
    neighbours = (
        Decision.objects.filter(pool=decision.pool, prefix=decision.prefix)
        .defer(*_LARGE_COLUMNS)
        .select_related("router")
    )
    earlier = neighbours.filter(at__gte=decision.at - NEIGHBOUR_SPAN, at__lt=decision.at).order_by("-at")[
        :MAX_NEIGHBOURS
    ]
    later = neighbours.filter(at__gt=decision.at, at__lte=decision.at + NEIGHBOUR_SPAN).order_by("at")[:MAX_NEIGHBOURS]
    return [*reversed(earlier), decision, *later]


@dataclass(frozen=True, slots=True)
class CollectionStatus:
    """Completeness of the stored decisions."""

    routers: int
    at: datetime | None  # the latest collection
    dropped: int  # since installation: overwritten in a router before they were read
    failing: list[str]  # reasons of routers that cannot be read


def collection_status() -> CollectionStatus:
    """Status over all routers. Two queries."""
    sums = DecisionCursor.objects.aggregate(routers=Count("pk"), at=Max("at"), dropped=Sum("dropped"))
    failing = DecisionCursor.objects.filter(router__lost_at=None).exclude(reason="").values_list("reason", flat=True)
    return CollectionStatus(sums["routers"], sums["at"], sums["dropped"] or 0, sorted(set(failing)))


def reasons(subject: Subject, window: Window) -> dict[str, int]:
    """Number of decisions by reason in the newest ``MAX_RANKED`` rows, most frequent first. Two queries."""
    rows = _filtered(DecisionQuery(subject, window))
    since = _oldest_ranked_at(rows)
    counted = (rows.filter(at__gte=since) if since else rows).values("reason").annotate(n=Count("at")).order_by("-n")
    return {row["reason"]: row["n"] for row in counted}


def _filtered(query: DecisionQuery) -> QuerySet[Decision]:
    subject, window = query.subject, query.window
    filters = {
        "pool__in": subject.pool_names(),
        "group": subject.group,
        "replica": subject.replica and subject.replica.name,
        "reason": query.reason or None,
        "request_id": query.request_id or None,
        "prefix": query.prefix,
    }
    rows = Decision.objects.filter(at__gt=window.start, at__lte=window.end)
    rows = rows.filter(**{name: value for name, value in filters.items() if value is not None})
    if query.outcome:
        succeeded = Q(status__gte=200, status__lt=400)
        rows = rows.filter(succeeded) if query.outcome == "ok" else rows.exclude(succeeded)
    return rows


def _older_than(at: datetime, router_id: int, boot: str, seq: int) -> Q:
    same = Q(at=at)
    return Q(at__lt=at) | same & (
        Q(router_id__lt=router_id) | Q(router_id=router_id) & (Q(boot__lt=boot) | Q(boot=boot, seq__lt=seq))
    )


def _oldest_ranked_at(rows: QuerySet[Decision]) -> datetime | None:
    """Oldest time of the newest ``MAX_RANKED`` rows; None if the window has no more."""
    newest = rows.order_by("-at").values("at")[: MAX_RANKED + 1]
    span = newest.aggregate(first=Min("at"), n=Count("at"))
    return span["first"] if span["n"] > MAX_RANKED else None


def _ranked(rows: QuerySet[Decision], order: Order) -> QuerySet[Decision]:
    if order is Order.SLOWEST:
        return rows.filter(ttft_s__isnull=False).order_by("-ttft_s", "-at")
    reported = rows.filter(prompt_tokens__isnull=False, cached_tokens__isnull=False)
    if order is Order.RECOMPUTED:
        return reported.annotate(figure=F("prompt_tokens") - F("cached_tokens")).order_by("-figure", "-at")
    predicted = reported.filter(hit_tokens__isnull=False)
    return predicted.annotate(figure=F("hit_tokens") - F("cached_tokens")).order_by("-figure", "-at")


MAX_TREE_REQUESTS = 4000


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """The tree of shared prefixes, built from one of ``every`` requests."""

    root: Node
    every: int
    sample_ratio: float | None  # smallest sampling ratio of a request's blocks; None: no requests
    since: datetime | None


def hottest_prefixes(subject: Subject, window: Window, *, below: str = "") -> PrefixTree:
    """The tree of a subject's prompts, or of those with the block hash ``below``. Two queries."""
    rows = _filtered(DecisionQuery(subject, window))
    counted = rows.aggregate(n=Count("at"), ratio=Min("sample_ratio"), since=Min("at"))
    every = max(1, -(-counted["n"] // MAX_TREE_REQUESTS))
    sampled = rows.annotate(remainder=Mod(F("seq"), every)).filter(remainder=0) if every > 1 else rows
    paths = map(_path_of, sampled.order_by("-at").iterator(chunk_size=1000))
    root = build_tree(path for path in paths if not below or path.contains(below))
    return PrefixTree(root, every, counted["ratio"], counted["since"])


def _path_of(decision: Decision) -> RequestPath:
    """Path of a request; without sampled blocks, its only step is the tier-1 prefix."""
    blocks, hash_tokens = decision.blocks, decision.hash_tokens
    positions = decision.positions if decision.positions is not None else range(len(blocks))
    steps = [(block, (position + 1) * hash_tokens) for block, position in zip(blocks, positions, strict=False)]
    if not steps and decision.prefix is not None:
        steps = [(decision.prefix, 0)]
    return RequestPath(
        tuple(steps[:MAX_BLOCKS]),
        decision.group,
        decision.replica,
        decision.prompt_tokens or decision.prompt_tokens_estimate,
        decision.prompt_tokens,
        decision.cached_tokens,
    )


LINT_WINDOW = timedelta(minutes=15)
MAX_PROMPTS = 60  # of a task group
MIN_PROMPTS = 8  # for findings


@dataclass(frozen=True, slots=True)
class GroupPrompts:
    """Prompt structures of one task group and their lint findings, worst first."""

    pool: str
    group: str  # "": requests of no task group
    prompts: int  # number of compared prompts
    messages: int  # median of a prompt
    tokens: int  # estimated median of a prompt
    requests_per_s: float | None
    findings: tuple[Finding, ...]

    @property
    def has_too_few_prompts(self) -> bool:
        """Whether there are too few prompts for findings."""
        return self.prompts < MIN_PROMPTS

    @property
    def tokens_per_day(self) -> float:
        """Tokens lost per day to the worst finding; losses of several findings overlap."""
        return max((finding.tokens_per_day or 0.0 for finding in self.findings), default=0.0)


def lint_prompts(pools: Sequence[str] | None, now: datetime, *, group: str | None = None) -> list[GroupPrompts]:
    """Every task group of some pools (None: all), largest loss first. 3 queries, 10 ms per group."""
    window = Window(now - LINT_WINDOW, now, LINT_WINDOW.total_seconds())
    structures: dict[tuple[str, str], list[PromptStructure]] = defaultdict(list)
    for pool, name, document, tokens, block in newest_prompt_structures(pools, window, most=MAX_PROMPTS, group=group):
        prompt = PromptStructure.read(msgspec.json.decode(document), prompt_tokens=tokens, block_tokens=block)
        if prompt is not None:
            structures[pool, name].append(prompt)
    rates = _request_rates(pools, window) if structures else {}
    groups = [_prompts(*key, prompts, rates.get(key)) for key, prompts in structures.items()]
    return sorted(groups, key=lambda item: (-item.tokens_per_day, not item.findings, item.pool, item.group))


def _prompts(pool: str, group: str, prompts: list[PromptStructure], rate: float | None) -> GroupPrompts:
    middle = len(prompts) // 2
    return GroupPrompts(
        pool,
        group,
        len(prompts),
        sorted(prompt.messages for prompt in prompts)[middle],
        sorted(prompt.length for prompt in prompts)[middle] // 4,
        rate,
        tuple(lint(prompts, rate)) if len(prompts) >= MIN_PROMPTS else (),
    )


def _request_rates(pools: Sequence[str] | None, window: Window) -> dict[tuple[str, str], float]:
    """Requests per second by (pool, task group)."""
    covered = coverage(window, whole=True)
    rows = route_sums(pools, window, ("requests",), by=("pool", "group"), whole=True)
    rates = {(row.key[0], row.key[1]): sums.per_second(row.get("requests"), covered) for row in rows}
    return {key: rate for key, rate in rates.items() if rate is not None}
