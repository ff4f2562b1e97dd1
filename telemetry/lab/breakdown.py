"""The hit-rate breakdown: from the reachable hit rate down to the delivered one, the loss of each step, and its text.

All terms are tokens of the same prompts:

    reachable  hits of one unbounded cache
    capacity   hits of one LRU cache as large as all replicas' caches together
    split      hits with that capacity split by replica, and near-optimal placement
    best       cached tokens on the best replica at the time, with the actual placement
    predicted  cached tokens on the chosen replica
    delivered  cached tokens that engines reported

Each term is at most the one above it:

- reachable >= capacity: an unbounded cache contains all blocks that were used before.
- capacity >= split: one large cache can be used as if it were split.
- split >= best: some placement reaches what the split caches contain.
- best >= predicted: the chosen replica is one of those compared.

Split and capacity are replays of a heuristic and of LRU, so they are raised to the term below where they fall short.
Delivered is measured, not replayed, and may be above predicted, but not above reachable: what engines delivered could
be reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from math import sqrt
from typing import NamedTuple

MINUTE = timedelta(minutes=1)
BIN = timedelta(minutes=5)


def bin_start(at: datetime) -> datetime:
    """Start of the bin that contains ``at``."""
    return datetime.fromtimestamp(at.timestamp() // BIN.total_seconds() * BIN.total_seconds(), UTC)


MIN_REQUESTS = 100  # for a meaningful breakdown
MAX_REACHABLE_ERROR = 0.05  # standard error of a reachable hit rate (0 to 1) that is shown
MAX_ERROR_RATIO = 0.03  # of the prompt tokens: standard error from sampling in a meaningful breakdown


@dataclass(slots=True)
class Sums:
    """Sums over requests, in tokens except for the counts."""

    requests: int = 0
    prompt_tokens: float = 0.0
    reachable: float = 0.0
    capacity: float = 0.0
    split: float = 0.0
    best: float = 0.0
    predicted: float = 0.0
    sampling_error: float = 0.0  # standard error of ``predicted`` from sampling of blocks
    reported_requests: int = 0
    reported_tokens: float = 0.0  # of prompts whose responses report cached tokens
    delivered: float = 0.0
    prompt_squares: float = 0.0  # sum of squared prompt tokens
    reachable_squares: float = 0.0  # sum of squared reachable tokens
    reachable_products: float = 0.0  # sum of reachable tokens times prompt tokens

    @property
    def delivered_of_all(self) -> float | None:
        """Delivered tokens, if responses without usage are like those with; None if no response reports any."""
        return self.delivered * self.prompt_tokens / self.reported_tokens if self.reported_tokens else None

    @property
    def reachable_ratio(self) -> float:
        """Reachable / prompt tokens, 0 to 1. What engines delivered could be reached, also where a replay missed it."""
        reachable = max(self.reachable, self.delivered_of_all or 0.0)
        return min(max(reachable / self.prompt_tokens, 0.0), 1.0) if self.prompt_tokens else 0.0


SUM_FIELDS = tuple(column.name for column in fields(Sums))


def reachable_error(sums: Sums) -> float | None:
    """Standard error of reachable / prompt tokens, 0 to 1; None for fewer than two requests.

    Combines two independent parts: sampling of blocks (``sampling_error``), and the number of requests, by a ratio
    estimator (Cochran, "Sampling Techniques", 1977, section 6.3) that assumes independent requests.
    """
    count, total = sums.requests, sums.prompt_tokens
    if count < 2 or not total:
        return None
    ratio = sums.reachable_ratio
    squares = sums.reachable_squares - 2 * ratio * sums.reachable_products + ratio**2 * sums.prompt_squares
    variance = count / (count - 1) * max(squares, 0.0) / total**2
    return sqrt(variance + (sums.sampling_error / total) ** 2)


@dataclass(frozen=True, slots=True)
class Loss:
    """Tokens lost in one step of the breakdown."""

    key: str  # workload, capacity, fragmentation, index, load, stale
    tokens: float
    ratio: float  # of the prompt tokens


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The breakdown of one window, in tokens; None: unknown."""

    prompt_tokens: float
    reachable: float | None
    capacity: float | None
    split: float | None
    best: float | None
    predicted: float | None
    delivered: float | None
    requests: int
    sample_ratio: float
    reported_ratio: float = 0.0  # share of prompt tokens whose responses report cached tokens
    standard_error_tokens: float = 0.0  # standard error of the replayed terms from sampling
    reason: str = ""  # why terms are unknown

    @property
    def terms(self) -> tuple[tuple[str, float | None], ...]:
        """(name, tokens) of each term, from the top."""
        return tuple((name, getattr(self, name)) for name in TERMS)

    def ratio(self, tokens: float | None) -> float | None:
        """Share of the prompt tokens."""
        return tokens / self.prompt_tokens if tokens is not None and self.prompt_tokens else None

    def losses(self) -> list[Loss]:
        """Losses of the steps between two known terms, from the top; each at least 0."""
        above: float | None = self.prompt_tokens
        losses = []
        for name, below in self.terms:
            if above is not None and below is not None and self.prompt_tokens:
                tokens = max(0.0, above - below)
                losses.append(Loss(LOSSES[name], tokens, tokens / self.prompt_tokens))
            above = below
        return losses

    @property
    def surplus_ratio(self) -> float:
        """Share of the prompt tokens that engines delivered beyond the replay's prediction."""
        if self.delivered is None or self.predicted is None or not self.prompt_tokens:
            return 0.0
        return max(0.0, self.delivered - self.predicted) / self.prompt_tokens

    @property
    def is_uncertain(self) -> bool:
        """Whether there are too few requests or samples to act on."""
        return self.requests < MIN_REQUESTS or self.standard_error_tokens > MAX_ERROR_RATIO * self.prompt_tokens


LOSSES = {
    "reachable": "workload",
    "capacity": "capacity",
    "split": "fragmentation",
    "best": "index",
    "predicted": "load",
    "delivered": "stale",
}
TERMS = tuple(LOSSES)


def breakdown_from(sums: Sums, *, sample_ratio: float, reason: str = "") -> Breakdown:
    """The breakdown of some sums. With a ``reason``, all terms that need cache sizes are unknown.

    Responses without reported cached tokens count with the mean of those that report them.
    """

    def bounded(tokens: float) -> float | None:
        return min(max(tokens, 0.0), sums.prompt_tokens) if sums.requests else None

    def if_sizes_known(tokens: float) -> float | None:
        return None if reason else bounded(tokens)

    return Breakdown(
        sums.prompt_tokens,
        bounded(sums.reachable_ratio * sums.prompt_tokens),
        if_sizes_known(sums.capacity),
        if_sizes_known(sums.split),
        if_sizes_known(sums.best),
        if_sizes_known(sums.predicted),
        sums.delivered_of_all,
        sums.requests,
        sample_ratio,
        sums.reported_tokens / sums.prompt_tokens if sums.prompt_tokens else 0.0,
        sums.sampling_error,
        reason,
    )


MIN_SHOWN_POINTS = 0.5  # percentage points; smaller losses are not listed


class LossText(NamedTuple):
    """Texts for one loss."""

    name: str  # in a sentence: "9 points lost to ..."
    label: str  # on a chart
    about: str
    advice: str
    page: str  # where to act


LOSS_TEXTS = {
    "workload": LossText(
        "new prompts",
        "New prompts",
        "No earlier prompt contained these tokens, so no cache could have them.",
        "To share more, put constant text first: a date, an id or a shuffled list near the beginning of a prompt makes "
        "everything after it new.",
        "task-groups",
    ),
    "capacity": LossText(
        "capacity",
        "Capacity",
        "These tokens were evicted before their reuse: all caches together are too small to keep them until then.",
        "See the effect of cache size below: more replicas, more memory for KV blocks, or CPU offload.",
        "fleet",
    ),
    "fragmentation": LossText(
        "duplication",
        "Duplicates",
        "Several replicas cache the same prefixes, which leaves less capacity for others.",
        "Use a shared cache tier, or assign task groups to replicas of their own, so that each caches fewer prefixes.",
        "task-groups",
    ),
    "index": LossText(
        "spreading",
        "Spreading",
        "Requests went to replicas without their prefix, so no replica cached what one could have.",
        "Choose a strategy that keeps each prefix on one replica, such as lowest_cost or prefix_hash.",
        "policies",
    ),
    "load": LossText(
        "placement",
        "Placement",
        "Another replica had more of the prompt cached than the chosen one.",
        "Choose a cache-aware strategy. If there is one, this is the cost of balancing load: add replicas, or raise "
        "alpha (lowest_cost) or slack_s.",
        "policies",
    ),
    "stale": LossText(
        "stale caches",
        "Stale",
        "The chosen replica should have had these tokens cached, but its engine did not find them.",
        "Check for restarts and preemptions of replicas; otherwise running requests and outputs use the cache.",
        "events",
    ),
}


def points(ratio: float) -> str:
    """A ratio as percentage points."""
    return f"{100 * ratio:.0f}"


def actionable_losses(losses: Sequence[Loss]) -> list[Loss]:
    """Losses that configuration can reduce, largest first."""
    shown = [loss for loss in losses if loss.key != "workload" and 100 * loss.ratio >= MIN_SHOWN_POINTS]
    return sorted(shown, key=lambda loss: -loss.tokens)


def summary(breakdown: Breakdown) -> str:
    """One sentence, such as: Hit rate 52 % of 71 % reachable: 9 points lost to capacity, 6 to spreading."""
    reachable, delivered = breakdown.ratio(breakdown.reachable), breakdown.ratio(breakdown.delivered)
    if reachable is None:
        return "No requests in this range."
    top = f"{points(reachable)} % reachable"
    if delivered is None:
        replayed = breakdown.ratio(breakdown.predicted)
        if replayed is None:
            return f"Hit rate unknown of {top}: no response reports its cached tokens."
        text = f"Predicted hit rate {points(replayed)} % of {top} (no response reports its cached tokens)"
    else:
        text = f"Hit rate {points(delivered)} % of {top}"
    if breakdown.reason:
        return f"{text}; the causes of the rest are unknown."
    losses = actionable_losses(breakdown.losses())
    if not losses:
        return f"{text}: no significant loss."
    parts = [f"{points(loss.ratio)} to {LOSS_TEXTS[loss.key].name}" for loss in losses]
    lost = ", ".join(parts).replace(" to ", " points lost to ", 1)
    surplus = f"; {points(breakdown.surplus_ratio)} more delivered than replayed"
    return f"{text}: {lost}{surplus if 100 * breakdown.surplus_ratio >= MIN_SHOWN_POINTS else ''}."


def caveats(breakdown: Breakdown) -> list[str]:
    """Sentences on the limits of the breakdown's accuracy; [] for none."""
    texts = []
    if breakdown.reason:
        texts.append(breakdown.reason)
    if breakdown.requests < MIN_REQUESTS:
        texts.append(f"Only {breakdown.requests} requests were replayed: too few for a decision.")
    if breakdown.sample_ratio < 1 and breakdown.prompt_tokens:
        margin = 2 * 100 * breakdown.standard_error_tokens / breakdown.prompt_tokens  # 95 %: two standard errors
        texts.append(
            f"1 of {1 / breakdown.sample_ratio:.0f} block hashes was replayed: "
            f"terms are within {margin:.1f} points (95 %)."
        )
    if breakdown.delivered is None:
        texts.append("No response reports cached tokens. Start vLLM with --enable-prompt-tokens-details.")
    elif breakdown.reported_ratio < 0.95:
        texts.append(
            f"Responses for {points(breakdown.reported_ratio)} % of the prompt tokens report cached tokens; the "
            "delivered hit rate is theirs."
        )
    if breakdown.surplus_ratio > 0.005:
        texts.append(
            f"Engines delivered {points(breakdown.surplus_ratio)} points more than the replay: they also cache outputs "
            "and use smaller blocks."
        )
    return texts
