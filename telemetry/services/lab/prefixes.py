"""The hottest prefixes of a span of time: what routers decided, as a tree."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.db.models import Count, F, Min
from django.db.models.functions import Mod

from telemetry.lab.prefix_tree import MOST_BLOCKS, Node, Passage, tree_of
from telemetry.metrics.windows import Window
from telemetry.models import Decision
from telemetry.services.figures.subjects import Subject

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
