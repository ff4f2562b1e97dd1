"""Affinity groups: gives each very frequent (hot) prefix its own replicas, by its share of traffic.

Theory of operation. Requests are counted by tier-1 prefix, with decay. A prefix with at least ``hot_ratio`` of the
requests owns the first replicas in its ring order that no hotter prefix owns, in proportion to its share; at least one
replica remains for all other prefixes. Requests that may use other replicas, such as those of an adapter, have a plan
of their own. A plan is reviewed every ``REVIEW`` requests and changes slowly, because every change leaves prefixes
without cache: a prefix remains hot until its share falls below ``COOL`` times the ratio, and it gains or loses a
replica only if its share is well above or below its number (``allocation.next_size``).

A hot prefix is cached on all of its replicas, so conversations are spread over them: the tier-2 key picks one by jump
hash, which moves few keys when replicas are added or removed (Lamping and Veach, "A Fast, Minimal Memory, Consistent
Hash Algorithm", 2014). If that replica has more work than the least loaded by more than the whole prompt, moving costs
less even if the whole prompt was cached. A conversation with more than ``CROWD`` of a replica's traffic is cached
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

REVIEW: Final = 64  # requests between two reviews of a plan
COOL: Final = 0.7  # of the ratio that makes a prefix hot; below it, it no longer is
PLANS: Final = 8  # cached plans, one for each set of replicas: those of adapters, and of recent health epochs
CROWD: Final = 0.1  # of a replica's traffic: a larger "conversation" is many conversations that begin alike
_WORD: Final = (1 << 64) - 1


class Plan:
    """Which replicas belong to which hot prefix."""

    __slots__ = ("hot", "owned", "rest", "review_at", "sizes")

    def __init__(
        self, sizes: dict[PrefixHash, int], owned: dict[PrefixHash, Candidates], rest: Candidates | None, review_at: int
    ) -> None:
        self.sizes = sizes  # number of replicas of each hot prefix, the hottest first
        self.hot = sum(sizes.values())  # replicas of all hot prefixes
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
            return self._among(owned, plan.hot, keys)
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

    def _among(self, owned: Candidates, hot: int, keys: Keys) -> Choice:
        """The conversation's replica, or the least loaded if so much more work waits there that moving costs less."""
        idlest, conversation = owned.order.least_loaded(), keys.tier2
        if conversation is None:
            return Choice(idlest, Reason.HOT)
        if self._conversations.share(conversation) * hot > CROWD:  # a share of the traffic of all hot replicas
            return Choice(idlest, Reason.HOT)
        preferred = owned.members[jump_hash(conversation, len(owned))].target
        if work_of(owned.by_name[preferred]) - work_of(owned.by_name[idlest]) <= keys.prompt_tokens:
            return Choice(preferred, Reason.HOT)
        return Choice(idlest, Reason.SPILL, (preferred,))

    # --- the plan ---

    def _plan_for(self, candidates: Candidates) -> Plan:
        """The plan for these replicas, made or reviewed if due."""
        plan = self._plans.get(candidates)
        if plan is None or plan.review_at <= self._requests:
            if plan is None and len(self._plans) >= PLANS:
                self._plans.clear()
            plan = self._plans[candidates] = self._review(candidates, plan)
        self._latest = plan
        return plan

    def _review(self, candidates: Candidates, before: Plan | None) -> Plan:
        """A plan by the current shares; a new set of replicas starts from the sizes of the latest plan."""
        sizes = self._sizes(len(candidates), (before or self._latest).sizes)
        review_at = self._requests + REVIEW
        if before is not None and sizes == before.sizes:
            return Plan(sizes, before.owned, before.rest, review_at)
        assigned: set[TargetId] = set()
        owned = {}
        for prefix, size in sizes.items():
            free = [target for target in self._ring.walk(prefix) if target in candidates and target not in assigned]
            assigned.update(free[:size])
            owned[prefix] = candidates.subset(free[:size])
        others = [target for target in candidates if target not in assigned]
        rest = candidates.subset(others) if assigned and others else None
        return Plan(sizes, owned, rest, review_at)

    def _sizes(self, targets: int, before: dict[PrefixHash, int]) -> dict[PrefixHash, int]:
        """Number of replicas of each hot prefix, the hottest first; one is left for any other prefixes."""
        hot_ratio = self._settings.hot_ratio
        sizes: dict[PrefixHash, int] = {}
        shares = self._shares.above(COOL * hot_ratio)
        left = targets if 1.0 - sum(share for _, share in shares) < MIN_SHARE / targets else targets - 1
        for key, share in shares:
            prefix = PrefixHash(key)
            size = before.get(prefix)
            if left < 1 or (size is None and share < hot_ratio):
                continue
            sizes[prefix] = min(next_size(size or 0, share * targets), left)
            left -= sizes[prefix]
        return sizes


def _untried(part: Candidates | None, candidates: Candidates) -> Candidates | None:
    """The part of a plan that is among the candidates: all of it, unless the request failed at some before; or None."""
    if part is None or candidates is candidates.unfiltered:
        return part if part is not None and part.loads else None
    untried = [target for target in part if target in candidates]
    return part.subset(untried) if untried else None


def jump_hash(key: int, buckets: int) -> int:
    """A number from 0 to below ``buckets`` (>= 1); with one more bucket, only 1 / buckets of all keys move."""
    chosen, following = 0, 0
    while following < buckets:
        chosen = following
        key = (key * 2862933555777941757 + 1) & _WORD
        following = int((chosen + 1) * ((1 << 31) / ((key >> 33) + 1)))
    return chosen
