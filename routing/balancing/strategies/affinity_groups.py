"""Affinity groups: gives each very frequent (hot) prefix its own replicas, by its share of traffic.

Theory of operation. Requests are counted by tier-1 prefix, with decay. A prefix with at least ``hot_ratio`` of the
requests owns the first replicas in its ring order that no hotter prefix owns, in proportion to its share; at least one
replica remains for all other prefixes. Requests that may use other replicas, such as those of an adapter, have a plan
of their own. A plan is reviewed every ``REVIEW_REQUESTS`` requests and changes slowly, because every change leaves
prefixes without cache: a prefix remains hot until its share falls below ``COOL_RATIO`` times the ratio, and it gains or
loses a replica only if its share is well above or below its number (``allocation.next_size``).

A hot prefix is cached on all of its replicas, so conversations are spread over them: the tier-2 key picks one by jump
hash, which moves few keys when replicas are added or removed (Lamping and Veach, "A Fast, Minimal Memory, Consistent
Hash Algorithm", 2014). If that replica has more work than the least loaded by more than the whole prompt, moving costs
less even if the whole prompt was cached. A conversation with more than ``CROWD_RATIO`` of a replica's traffic is cached
everywhere too and goes to the least loaded. All other prefixes follow their ring order among the remaining replicas.
"""

from __future__ import annotations

from typing import Final

from routing.balancing.allocation import MIN_SHARE, Shares, next_size
from routing.balancing.candidates import Candidates, Choice, work_of
from routing.balancing.hash_ring import HashRing, bounded_choice
from routing.balancing.strategies.strategy import Keys, Strategy
from routing.schema import AffinityGroupsSettings
from routing.types import PrefixHash, Reason, TargetId

REVIEW_REQUESTS: Final = 64  # requests between two reviews of a plan
COOL_RATIO: Final = 0.7  # of ``hot_ratio``: a hot prefix with a smaller share is no longer hot
MAX_PLANS: Final = 8  # cached plans, one for each set of replicas: those of adapters, and of recent health epochs
CROWD_RATIO: Final = 0.1  # of a replica's traffic: a larger "conversation" is many conversations that begin alike
_WORD_MASK: Final = (1 << 64) - 1


class Plan:
    """Which replicas belong to which hot prefix."""

    __slots__ = ("hot_replicas", "owned", "rest", "review_at", "sizes")

    def __init__(
        self, sizes: dict[PrefixHash, int], owned: dict[PrefixHash, Candidates], rest: Candidates | None, review_at: int
    ) -> None:
        self.sizes = sizes  # number of replicas of each hot prefix, the hottest first
        self.hot_replicas = sum(sizes.values())  # replicas of all hot prefixes
        self.owned = owned  # the replicas of each hot prefix
        self.rest = rest  # the replicas of all other prefixes; None: all
        self.review_at = review_at  # number of requests


class AffinityGroups(Strategy):
    """Divides the replicas among hot prefixes and the rest."""

    def __init__(self, ring: HashRing[TargetId], settings: AffinityGroupsSettings) -> None:
        self._ring = ring
        self._settings = settings
        self._shares = Shares(settings.half_life)
        self._conversations = Shares(settings.half_life)
        self._requests = 0
        self._plans: dict[Candidates, Plan] = {}
        self._latest = Plan({}, {}, None, 0)

    def choose(self, keys: Keys, candidates: Candidates) -> Choice:
        """One of a hot prefix's replicas, else the prefix's preferred replica among the rest."""
        prefix = keys.tier1
        if prefix is None:
            return Choice(candidates.order.least_loaded(), Reason.NO_KEY)
        plan = self._plan_for(candidates.unfiltered)
        owned = _untried(plan.owned.get(prefix), candidates)
        if owned is not None:
            return self._choose_among(owned, plan.hot_replicas, keys)
        rest = _untried(plan.rest, candidates)
        return bounded_choice(
            self._ring.walk(prefix),
            candidates if rest is None else rest,
            self._settings.load_factor,
            self._settings.min_bound,
        )

    def count_request(self, keys: Keys) -> None:
        """Count a request for its prefix, and for its conversation if the prefix is hot. Called once per request."""
        prefix = keys.tier1
        if prefix is None:
            return
        self._shares.count(prefix)
        self._requests += 1
        if prefix in self._latest.sizes and (conversation := keys.tier2) is not None:
            self._conversations.count(conversation)

    def carry_over(self, before: AffinityGroups) -> None:
        """Continue with the counted traffic and the numbers of replicas."""
        self._shares, self._conversations = before._shares, before._conversations
        self._requests, self._latest = before._requests, before._latest

    def plan(self) -> dict[PrefixHash, list[TargetId]]:
        """The replicas of each hot prefix, the hottest first, in the plan of the latest request."""
        return {prefix: list(owned) for prefix, owned in self._latest.owned.items()}

    def _choose_among(self, owned: Candidates, hot_replicas: int, keys: Keys) -> Choice:
        """The conversation's replica, or the least loaded if that one has much more work."""
        least_loaded, conversation = owned.order.least_loaded(), keys.tier2
        if conversation is None:
            return Choice(least_loaded, Reason.HOT)
        # The conversation's share is of the traffic of all hot replicas.
        if self._conversations.share(conversation) * hot_replicas > CROWD_RATIO:
            return Choice(least_loaded, Reason.HOT)
        preferred = owned.members[jump_hash(conversation, len(owned))].target
        if work_of(owned.by_name[preferred]) - work_of(owned.by_name[least_loaded]) <= keys.prompt_tokens:
            return Choice(preferred, Reason.HOT)
        return Choice(least_loaded, Reason.SPILL, (preferred,))

    # --- the plan ---

    def _plan_for(self, candidates: Candidates) -> Plan:
        """The plan for these replicas, made or reviewed if due."""
        plan = self._plans.get(candidates)
        if plan is None or plan.review_at <= self._requests:
            if plan is None and len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            plan = self._plans[candidates] = self._review(candidates, plan)
        self._latest = plan
        return plan

    def _review(self, candidates: Candidates, before: Plan | None) -> Plan:
        """A plan by the current shares; a new set of replicas starts from the sizes of the latest plan."""
        sizes = self._sizes(len(candidates), (before or self._latest).sizes)
        review_at = self._requests + REVIEW_REQUESTS
        if before is not None and sizes == before.sizes:
            return Plan(sizes, before.owned, before.rest, review_at)
        assigned: set[TargetId] = set()
        owned = {}
        for prefix, size in sizes.items():
            free = [target for target in self._ring.walk(prefix) if target in candidates and target not in assigned]
            assigned.update(free[:size])
            owned[prefix] = candidates.subset(free[:size])
        other_targets = [target for target in candidates if target not in assigned]
        rest = candidates.subset(other_targets) if assigned and other_targets else None
        return Plan(sizes, owned, rest, review_at)

    def _sizes(self, targets: int, before: dict[PrefixHash, int]) -> dict[PrefixHash, int]:
        """Number of replicas of each hot prefix, the hottest first; one replica remains for any other prefixes."""
        hot_ratio = self._settings.hot_ratio
        sizes: dict[PrefixHash, int] = {}
        shares = self._shares.frequent_keys(COOL_RATIO * hot_ratio)
        remaining = targets if 1.0 - sum(share for _, share in shares) < MIN_SHARE / targets else targets - 1
        for key, share in shares:
            prefix = PrefixHash(key)
            size = before.get(prefix)
            if remaining < 1 or (size is None and share < hot_ratio):
                continue
            sizes[prefix] = min(next_size(size or 0, share * targets), remaining)
            remaining -= sizes[prefix]
        return sizes


def _untried(part: Candidates | None, candidates: Candidates) -> Candidates | None:
    """The candidates in this part of a plan, without replicas at which the request failed; None if none are left."""
    if part is None or candidates is candidates.unfiltered:
        return part if part is not None and part.loads else None
    untried = [target for target in part if target in candidates]
    return part.subset(untried) if untried else None


def jump_hash(key: int, buckets: int) -> int:
    """A number from 0 to below ``buckets`` (>= 1); with one more bucket, only 1 / buckets of all keys move."""
    bucket, next_bucket = 0, 0
    while next_bucket < buckets:
        bucket = next_bucket
        key = (key * 2862933555777941757 + 1) & _WORD_MASK
        next_bucket = int((bucket + 1) * ((1 << 31) / ((key >> 33) + 1)))
    return bucket
