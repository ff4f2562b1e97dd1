"""Prompts as a tree: what they share, how often, how warm it is, where it lives.

Theory of operation. Requests are laid into a trie by the hashes of their prompts' blocks; hashes are chained, so that
one hash names everything before it too. A run of blocks that the same requests pass through is one node. Routers thin
the blocks out (a decision's ``sample_ratio``), so where two prompts part is known up to the distance between two blocks
that are there, 1 / ratio blocks on average: a node's length is a lower bound, and ``hash_tokens / sample_ratio`` says
how far it may be off. A prompt none of whose blocks is there stays at its tier-1 prefix.

A node's tokens are all prompt tokens of the requests that pass through it: its part of the work. Its hit rate is that
of these requests (H16), so it says how warm the prompts that begin like this are, not how warm this part of them is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from telemetry.lab.chains import shown
from telemetry.metrics.rates import ratio

MOST_BLOCKS = 256  # of one prompt: what is behind is seldom shared
LEAST_SHARE = 0.01  # of all tokens: what is less is not told apart
MOST_CHILDREN = 12
DEEPEST = 8  # levels of nodes


@dataclass(frozen=True, slots=True)
class Passage:
    """One request's way through the tree: (hash, depth in tokens) of each block from its beginning on."""

    steps: tuple[tuple[int, int], ...]
    group: str
    replica: str
    tokens: int
    told_tokens: int | None  # None where its answer told nothing of the cache
    cached_tokens: int | None

    def passes(self, block: str) -> bool:
        """Whether it has a block of this hash."""
        return any(shown(step) == block for step, _ in self.steps)


@dataclass(slots=True)
class Node:
    """Some blocks that the same requests begin with, and what follows."""

    hash: str  # of its last block, as people copy it
    depth_tokens: int  # from the prompt's beginning to its end, estimated
    requests: int = 0
    tokens: int = 0  # of all prompts that begin like this
    told_tokens: int = 0  # of those whose answers said what came from the cache
    cached_tokens: int = 0
    groups: Counter[str] = field(default_factory=Counter)  # requests by task group
    replicas: Counter[str] = field(default_factory=Counter)  # requests by replica
    children: list[Node] = field(default_factory=list)

    @property
    def hit_rate_ratio(self) -> float | None:
        """Of the answers that told; None where none did."""
        return ratio(self.cached_tokens, self.told_tokens)

    @property
    def homes(self) -> list[tuple[str, float]]:
        """Replicas by their share of its requests, the greatest first."""
        return [(name, count / self.requests) for name, count in self.replicas.most_common()]


def tree_of(passages: Iterable[Passage]) -> Node:
    """The root, whose children are the ways that more than one request went; little ones and deep ones left out."""
    root = _grown(Node("", 0), list(passages), 0)
    _pruned(root, root.tokens * LEAST_SHARE, 0)
    return root


def _grown(node: Node, passages: list[Passage], at: int) -> Node:
    """Count the passages through a node and grow its children: those that part at step ``at`` or later.

    Recursion is as deep as prompts part, each time by a part of the requests: at most ``MOST_BLOCKS``.
    """
    for one in passages:
        node.requests += 1
        node.tokens += one.tokens
        if one.told_tokens is not None and one.cached_tokens is not None:
            node.told_tokens += one.told_tokens
            node.cached_tokens += one.cached_tokens
        node.groups[one.group] += 1
        node.replicas[one.replica] += 1
    by_step: dict[int, list[Passage]] = {}
    for one in passages:
        if len(one.steps) > at:
            by_step.setdefault(one.steps[at][0], []).append(one)
    for together in by_step.values():
        if len(together) > 1:  # what one request alone has is no prefix
            end = _shared_until(together, at)
            block, depth = together[0].steps[end]
            node.children.append(_grown(Node(shown(block), depth), together, end + 1))
    return node


def _shared_until(passages: list[Passage], at: int) -> int:
    """The last step that all of them have; they share step ``at``."""
    shortest = min(len(one.steps) for one in passages)
    first = passages[0].steps
    end = at
    while end + 1 < shortest and all(one.steps[end + 1][0] == first[end + 1][0] for one in passages):
        end += 1
    return end


def _pruned(node: Node, least_tokens: float, level: int) -> None:
    """Leave out what is too little to show, and what lies too deep; the greatest first."""
    kept = [child for child in node.children if child.tokens >= least_tokens] if level < DEEPEST else []
    node.children = sorted(kept, key=lambda child: (-child.tokens, child.hash))[:MOST_CHILDREN]
    for child in node.children:
        _pruned(child, least_tokens, level + 1)
