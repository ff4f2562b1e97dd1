"""Tree of shared prefixes: which prompts share a beginning, how often, with which hit rate, and on which replicas.

Theory of operation. Requests form a trie by the chained hashes of their prompts' blocks. A run of blocks that the same
requests share is one node. Routers sample blocks (a decision's ``sample_ratio``), so the point where two prompts
diverge is known up to the distance between two sampled blocks, 1 / ratio blocks on average: a node's length is a lower
bound, and ``hash_tokens / sample_ratio`` is its uncertainty. A prompt without a sampled block ends at its tier-1
prefix.

A node's tokens are all prompt tokens of the requests that share it. Its hit rate is that of these requests, so it
describes whole prompts that begin with the node, not the node's part of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from telemetry.lab.chains import format_hash
from telemetry.metrics.rates import ratio

MAX_BLOCKS = 256  # of one prompt; later ones are rarely shared
MIN_SHARE = 0.01  # of all tokens; smaller nodes are left out
MAX_CHILDREN = 12
MAX_DEPTH = 8  # levels of nodes


@dataclass(frozen=True, slots=True)
class RequestPath:
    """One request in the tree: (hash, depth in tokens) of each sampled block, in order."""

    steps: tuple[tuple[int, int], ...]
    group: str
    replica: str
    tokens: int
    reported_tokens: int | None  # prompt tokens if the response reports cached tokens, else None
    cached_tokens: int | None

    def contains(self, block: str) -> bool:
        """Whether the prompt has a block with this hash."""
        return any(format_hash(step) == block for step, _ in self.steps)


@dataclass(slots=True)
class Node:
    """Blocks that the same requests share, and the nodes below."""

    hash: str  # of its last block, 16 hex digits
    depth_tokens: int  # from the prompt's beginning to the node's end, estimated
    requests: int = 0
    tokens: int = 0  # of all prompts that share the node
    reported_tokens: int = 0  # of prompts whose responses report cached tokens
    cached_tokens: int = 0
    groups: Counter[str] = field(default_factory=Counter)  # requests by task group
    replicas: Counter[str] = field(default_factory=Counter)  # requests by replica
    children: list[Node] = field(default_factory=list)

    @property
    def hit_rate_ratio(self) -> float | None:
        """Over responses that report cached tokens; None without any."""
        return ratio(self.cached_tokens, self.reported_tokens)

    @property
    def replica_shares(self) -> list[tuple[str, float]]:
        """(replica, share of the node's requests), largest first."""
        return [(name, count / self.requests) for name, count in self.replicas.most_common()]


def build_tree(paths: Iterable[RequestPath]) -> Node:
    """The root of the tree of prefixes that at least two requests share, without small and deep nodes."""
    root = _build(Node("", 0), list(paths), 0)
    _prune(root, root.tokens * MIN_SHARE, 0)
    return root


def _build(node: Node, paths: list[RequestPath], at: int) -> Node:
    """Count the paths of a node and build its children, which diverge at step ``at`` or later.

    The recursion depth is the number of divergences along a prompt, at most ``MAX_BLOCKS``.
    """
    for path in paths:
        node.requests += 1
        node.tokens += path.tokens
        if path.reported_tokens is not None and path.cached_tokens is not None:
            node.reported_tokens += path.reported_tokens
            node.cached_tokens += path.cached_tokens
        node.groups[path.group] += 1
        node.replicas[path.replica] += 1
    by_step: dict[int, list[RequestPath]] = {}
    for path in paths:
        if len(path.steps) > at:
            by_step.setdefault(path.steps[at][0], []).append(path)
    for sharing in by_step.values():
        if len(sharing) > 1:
            end = _shared_until(sharing, at)
            block, depth = sharing[0].steps[end]
            node.children.append(_build(Node(format_hash(block), depth), sharing, end + 1))
    return node


def _shared_until(paths: list[RequestPath], at: int) -> int:
    """The last step that all paths share; they share step ``at``."""
    shortest = min(len(path.steps) for path in paths)
    first = paths[0].steps
    end = at
    while end + 1 < shortest and all(path.steps[end + 1][0] == first[end + 1][0] for path in paths):
        end += 1
    return end


def _prune(node: Node, min_tokens: float, level: int) -> None:
    """Remove nodes that are too small or too deep; sort the others, largest first."""
    kept = [child for child in node.children if child.tokens >= min_tokens] if level < MAX_DEPTH else []
    node.children = sorted(kept, key=lambda child: (-child.tokens, child.hash))[:MAX_CHILDREN]
    for child in node.children:
        _prune(child, min_tokens, level + 1)
