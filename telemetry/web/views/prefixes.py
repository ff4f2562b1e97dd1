"""Prefixes: the hottest openings as an icicle, how warm each is and where it lives; the same as a table behind it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from telemetry.lab.prefix_tree import Node
from telemetry.services.lab.decisions import collected
from telemetry.services.lab.prefixes import hottest_prefixes
from telemetry.web.asking import asked
from telemetry.web.ranges import PRESETS

_HASH = re.compile(r"[0-9a-f]{16}")
WARMTHS = 10  # steps of colour
LISTED_LEVELS = 2  # unless all are asked for


@dataclass(frozen=True, slots=True)
class Cell:
    """A node as the page draws it."""

    node: Node
    level: int  # 1 for the first
    share_ratio: float  # of all tokens
    part_ratio: float  # of the tokens of what it continues
    warmth: str  # class of its colour: w0 to w9, or "unknown"
    length_tokens: int  # of this run of blocks
    cells: tuple[Cell, ...]

    @property
    def group(self) -> str:
        """The task group of most of its requests."""
        return self.node.groups.most_common(1)[0][0]


@require_GET
def prefixes(request: HttpRequest) -> HttpResponse:
    """The tree of what is asked for, or below one of its nodes. At most seven queries."""
    state = asked(request)
    below = request.GET.get("below", "")
    tree = hottest_prefixes(state.subject, state.range.window, below=below if _HASH.fullmatch(below) else "")
    cells = tuple(_cells(tree.root, tree.root.tokens, 1))
    every = list(_flat(cells))
    rows = every if request.GET.get("rows") == "all" else [cell for cell in every if cell.level <= LISTED_LEVELS]
    context = {
        "asked": state,
        "presets": PRESETS,
        "tree": tree,
        "cells": cells,
        "rows": rows,
        "deeper": len(every) - len(rows),
        "rest_ratio": 1 - sum(cell.share_ratio for cell in cells) if tree.root.tokens else None,
        "below": below,
        "collected": collected(),
    }
    return render(request, "telemetry/prefixes.html", context)


def _cells(node: Node, tokens: int, level: int) -> Iterator[Cell]:
    for child in node.children:
        yield Cell(
            child,
            level,
            child.tokens / tokens if tokens else 0.0,
            child.tokens / node.tokens if node.tokens else 0.0,
            warmth(child.hit_rate_ratio),
            child.depth_tokens - node.depth_tokens,
            tuple(_cells(child, tokens, level + 1)),
        )


def warmth(hit_rate_ratio: float | None) -> str:
    """The colour of a hit rate."""
    return "unknown" if hit_rate_ratio is None else f"w{min(int(hit_rate_ratio * WARMTHS), WARMTHS - 1)}"


def _flat(cells: tuple[Cell, ...]) -> Iterator[Cell]:
    for cell in cells:
        yield cell
        yield from _flat(cell.cells)
