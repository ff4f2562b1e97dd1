"""A ladder in words: one sentence for all of it, and for each loss what it is and what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from telemetry.lab.ladder import Ladder, Loss

SHOWN_POINTS = 0.5  # of 100: what is less is not worth a word


class Words(NamedTuple):
    """What is said of one loss."""

    name: str  # in a list: "9 lost to ..."
    label: str  # of its step on a chart
    about: str
    advice: str
    to: str  # where to do that: a page's name


LOSSES = {
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
    first, *others = [f"{points(loss.ratio)} {{}}to {LOSSES[loss.key].name}" for loss in told]
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
