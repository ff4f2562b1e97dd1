"""The hit-rate ladder: from all that the traffic would allow down to what was delivered, and what is lost at each step.

ALGORITHMS K. All terms are tokens of the same prompts:

    reachable   W  reuse with one cache that never forgets
    capacity    C  with the fleet's whole room as one cache, least recently used first out
    split       R  with that room split by replica, and placement as good as we know how
    best        B  what the best replica held at the time, as requests were really placed
    predicted   Q  what the chosen replica held
    delivered   E  what engines reported

What theory says holds by construction: a replica's blocks were all seen before (W), the chosen one is one of those
compared (B >= Q), what lay in the split caches was within reach of a placement (R >= B), and one cache of the whole
room can be run as if it were split (C >= R). R and C are replays of a heuristic and of LRU, so they are raised to the
term below where they fall short. E is measured, not replayed: it may be above Q.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import sqrt

FEW_REQUESTS = 100  # below which a ladder says little
WIDE_DOUBT_RATIO = 0.03  # of the prompts' tokens: sampling alone may move a term by so much


@dataclass(slots=True)
class Sums:
    """Additions over requests, in tokens but for the counts."""

    requests: int = 0
    prompt_tokens: float = 0.0
    reachable: float = 0.0
    capacity: float = 0.0
    split: float = 0.0
    best: float = 0.0
    predicted: float = 0.0
    doubt: float = 0.0  # standard error of ``predicted``, because blocks were sampled
    reported_requests: int = 0
    reported_tokens: float = 0.0  # of the prompts whose answers said how much was cached
    delivered: float = 0.0
    prompt_squares: float = 0.0  # sum over requests of the prompt's tokens squared
    reachable_squares: float = 0.0  # of the reachable tokens squared
    reachable_products: float = 0.0  # of the reachable tokens times the prompt's tokens


ADDED = tuple(one.name for one in fields(Sums))


def reachable_error(sums: Sums) -> float | None:
    """Standard error of reachable / prompt tokens, 0 to 1; None for fewer than two requests.

    Two independent parts: spatial sampling of blocks (``doubt``), and the number of requests. The second is that of a
    ratio estimator (Cochran, "Sampling Techniques", 1977, section 6.3), which takes requests as independent.
    """
    count, total = sums.requests, sums.prompt_tokens
    if count < 2 or not total:
        return None
    ratio = min(max(sums.reachable / total, 0.0), 1.0)
    squares = sums.reachable_squares - 2 * ratio * sums.reachable_products + ratio**2 * sums.prompt_squares
    if sums.prompt_squares:
        variance = count / (count - 1) * max(squares, 0.0) / total**2
    else:  # bins that an earlier release stored: requests of equal length at worst
        variance = ratio * (1 - ratio) / count
    return sqrt(variance + (sums.doubt / total) ** 2)


@dataclass(frozen=True, slots=True)
class Loss:
    """What one step down costs."""

    key: str  # workload, capacity, fragmentation, index, load, stale
    tokens: float
    ratio: float  # of the prompts' tokens


@dataclass(frozen=True, slots=True)
class Ladder:
    """One window's ladder, in tokens; None is unknown."""

    prompt_tokens: float
    reachable: float | None
    capacity: float | None
    split: float | None
    best: float | None
    predicted: float | None
    delivered: float | None
    requests: int
    sample_ratio: float
    reported_ratio: float = 0.0  # part of the prompts' tokens whose answers said how much was cached
    doubt_tokens: float = 0.0  # standard error of the replayed terms, because blocks were sampled
    reason: str = ""  # why terms are unknown

    @property
    def terms(self) -> tuple[tuple[str, float | None], ...]:
        """From the top down."""
        return tuple((name, getattr(self, name)) for name in TERMS)

    def ratio(self, tokens: float | None) -> float | None:
        """Of the prompts' tokens."""
        return tokens / self.prompt_tokens if tokens is not None and self.prompt_tokens else None

    def losses(self) -> list[Loss]:
        """Each step whose both ends are known, from the top down; none is below 0."""
        above: float | None = self.prompt_tokens
        found = []
        for name, below in self.terms:
            if above is not None and below is not None and self.prompt_tokens:
                lost = max(0.0, above - below)
                found.append(Loss(LOSSES[name], lost, lost / self.prompt_tokens))
            above = below
        return found

    @property
    def surplus_ratio(self) -> float:
        """By how much engines delivered more than the replay found on the chosen replica, of the prompts' tokens."""
        if self.delivered is None or self.predicted is None or not self.prompt_tokens:
            return 0.0
        return max(0.0, self.delivered - self.predicted) / self.prompt_tokens

    @property
    def is_thin(self) -> bool:
        """Whether it rests on too little to act on."""
        return self.requests < FEW_REQUESTS or self.doubt_tokens > WIDE_DOUBT_RATIO * self.prompt_tokens


LOSSES = {
    "reachable": "workload",
    "capacity": "capacity",
    "split": "fragmentation",
    "best": "index",
    "predicted": "load",
    "delivered": "stale",
}
TERMS = tuple(LOSSES)


def ladder_from(sums: Sums, *, sample_ratio: float, reason: str = "") -> Ladder:
    """The ladder of these sums. With a ``reason`` all that needs the caches' sizes is unknown.

    Answers that reported nothing count with the mean of those that did.
    """

    def known(tokens: float) -> float | None:
        return min(max(tokens, 0.0), sums.prompt_tokens) if sums.requests else None

    def sized(tokens: float) -> float | None:
        return None if reason else known(tokens)

    delivered = sums.delivered * sums.prompt_tokens / sums.reported_tokens if sums.reported_tokens else None
    return Ladder(
        sums.prompt_tokens,
        known(sums.reachable),
        sized(sums.capacity),
        sized(sums.split),
        sized(sums.best),
        sized(sums.predicted),
        delivered,
        sums.requests,
        sample_ratio,
        sums.reported_tokens / sums.prompt_tokens if sums.prompt_tokens else 0.0,
        sums.doubt,
        reason,
    )
