"""The ladder's bins of time.

The hit-rate ladder: from all that the traffic would allow down to what was delivered, and what is lost at each step.

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

A ladder in words: one sentence for all of it, and for each loss what it is and what to do next.
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
    """When the bin began that holds this moment."""
    return datetime.fromtimestamp(at.timestamp() // BIN.total_seconds() * BIN.total_seconds(), UTC)


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


SHOWN_POINTS = 0.5  # of 100: what is less is not worth a word


class Words(NamedTuple):
    """What is said of one loss."""

    name: str  # in a list: "9 lost to ..."
    label: str  # of its step on a chart
    about: str
    advice: str
    to: str  # where to do that: a page's name


LOSS_TEXTS = {
    "workload": Words(
        "new prompts",
        "New prompts",
        "These tokens had not been in any prompt before, so no cache could have held them.",
        "If more should be shared, put what stays the same first: a date, an id or a shuffled list near the beginning "
        "of a prompt makes all that follows new.",
        "task-groups",
    ),
    "capacity": Words(
        "capacity",
        "Capacity",
        "These tokens had been computed, and were evicted because all caches together are too small.",
        "Look at the curve below for what more room brings: more replicas, more memory for KV blocks, or a host tier.",
        "fleet",
    ),
    "fragmentation": Words(
        "splitting",
        "Split by replica",
        "The same openings lie in several replicas' caches and leave less room there for others.",
        "A shared tier brings these back; or give task groups replicas of their own, so each holds fewer openings.",
        "task-groups",
    ),
    "index": Words(
        "spreading",
        "Spreading",
        "Prompts went where little was warm, so that no replica had what one could have kept.",
        "Choose a strategy that keeps a prefix on its replica, such as lowest_cost or prefix_hash.",
        "policies",
    ),
    "load": Words(
        "placement",
        "Placement",
        "Another replica held more of the prompt than the one that was chosen.",
        "With a strategy that asks what caches hold it is the price of balance: add replicas, or lower its weight for "
        "load. With one that does not ask, such as round_robin, choose one that does.",
        "policies",
    ),
    "stale": Words(
        "stale caches",
        "Not there",
        "The chosen replica should have had these tokens, and its engine did not find them.",
        "See whether replicas restarted or preempted requests; else running requests and outputs take the room.",
        "events",
    ),
}


def points(ratio: float) -> str:
    """A share as points of 100."""
    return f"{100 * ratio:.0f}"


def worth_saying(losses: Sequence[Loss]) -> list[Loss]:
    """Those below the top that one can do something about here, the largest first."""
    told = [loss for loss in losses if loss.key != "workload" and 100 * loss.ratio >= SHOWN_POINTS]
    return sorted(told, key=lambda loss: -loss.tokens)


def sentence(ladder: Ladder) -> str:
    """The ladder in one sentence, such as: Of 71 points reachable you get 52: 9 lost to capacity, 6 to spreading."""
    reachable, delivered = ladder.ratio(ladder.reachable), ladder.ratio(ladder.delivered)
    if reachable is None:
        return "Nothing was asked in this range."
    top = f"Of {points(reachable)} points reachable"
    if delivered is None:
        replayed = ladder.ratio(ladder.predicted)
        if replayed is None:
            return f"{top}, how much you get is not known: no answer says how much of its prompt was cached."
        got = f"{top} you should get {points(replayed)}, though no answer says how much of its prompt was cached"
    else:
        got = f"{top} you get {points(delivered)}"
    if ladder.reason:
        return f"{got}; what the rest is lost to is not known."
    told = worth_saying(ladder.losses())
    if not told:
        return f"{got}: nothing to speak of is lost on the way."
    first, *others = [f"{points(loss.ratio)} {{}}to {LOSS_TEXTS[loss.key].name}" for loss in told]
    return f"{got}: {', '.join([first.format('lost '), *(other.format('') for other in others)])}."


def doubts(ladder: Ladder) -> list[str]:
    """What keeps it from being exact, or from meaning much; [] for nothing."""
    found = []
    if ladder.reason:
        found.append(ladder.reason)
    if ladder.requests < 100:
        found.append(f"Only {ladder.requests} requests were replayed: too few to act on.")
    if ladder.sample_ratio < 1 and ladder.prompt_tokens:
        off = 200 * ladder.doubt_tokens / ladder.prompt_tokens
        found.append(
            f"One block hash in {1 / ladder.sample_ratio:.0f} was replayed: terms may be {off:.1f} points off (95 %)."
        )
    if ladder.delivered is None:
        found.append("No answer reported cached tokens: see --enable-prompt-tokens-details of vLLM.")
    elif ladder.reported_ratio < 0.95:
        found.append(
            f"Answers with {points(ladder.reported_ratio)} % of the prompt tokens reported how much was cached; "
            "the delivered share is theirs."
        )
    if ladder.surplus_ratio > 0.005:
        found.append(
            f"Engines found {points(ladder.surplus_ratio)} points more than the replay: they also cache outputs, "
            "and compare smaller blocks."
        )
    return found
