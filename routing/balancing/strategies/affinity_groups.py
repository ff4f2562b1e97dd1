"""Replicas of its own for each hot opening, as many as its share of the traffic; the others share the rest.

Theory of operation. Openings are counted with decay. One with at least ``hot_ratio`` of the requests owns the first
replicas of its home order that no hotter one owns, in proportion to its share; one replica at least stays for all
others. Where some requests may use other replicas than the rest, as an adapter's do, they have a plan of their own. A
plan is looked at again every ``REVIEW`` requests and changes slowly: an opening stays hot until it falls
below ``COOL`` of the ratio, and gains or loses a replica only where its share is well off its number, as
``core/traffic`` has it, because every change makes somebody cold. On its own replicas a hot opening is warm
everywhere, so there conversations are spread: the tier-2 key picks one by a jump hash, which moves few of them when
replicas are added or taken away (Lamping and Veach, "A Fast, Minimal Memory, Consistent Hash Algorithm", 2014). Where
that one has more work than the least loaded by more than the whole prompt, moving is cheaper even if everything was
cached. A conversation with more than ``CROWD`` of a replica's traffic is warm everywhere too, and goes to the least
loaded. Any other opening goes by its home order among the rest.
"""

from __future__ import annotations

from typing import Final

from routing.balancing.allocation import FEW, Shares, stepped
from routing.balancing.candidates import Candidates, work_of
from routing.balancing.hash_ring import HashRing, bounded_choice
from routing.balancing.replicas import GroupReplicas
from routing.balancing.strategies.strategy import Keys
from routing.schema import AffinityGroupsSettings
from routing.types import Choice, PrefixHash, Reason, TargetId

REVIEW: Final = 64  # requests between two looks at the plan
COOL: Final = 0.7  # of the ratio that made an opening hot, below which it no longer is
PLANS: Final = 8  # sets of replicas with a plan of their own: as many adapters, and those of a health that has passed
CROWD: Final = 0.1  # of a replica's traffic, above which a conversation is none: all who share the opening begin alike
_WORD: Final = (1 << 64) - 1


class Plan:
    """Which of some replicas are whose."""

    __slots__ = ("due", "hot", "owned", "rest", "sizes")

    def __init__(
        self, sizes: dict[PrefixHash, int], owned: dict[PrefixHash, Candidates], rest: Candidates | None, due: int
    ) -> None:
        self.sizes = sizes  # replicas of each hot opening, the hottest first
        self.hot = sum(sizes.values())  # of all hot openings
        self.owned = owned  # these replicas
        self.rest = rest  # those of all other openings; None: all of them
        self.due = due  # the request from which on it is looked at again


class AffinityGroups:
    """Divide the replicas among hot openings and the rest."""

    def __init__(self, ring: HashRing[TargetId], settings: AffinityGroupsSettings) -> None:
        self._ring = ring
        self._settings = settings
        self._shares = Shares(settings.half_life)
        self._conversations = Shares(settings.half_life)
        self._requests = 0
        self._plans: dict[Candidates, Plan] = {}
        self._latest = Plan({}, {}, None, 0)

    @classmethod
    def build(cls, settings: AffinityGroupsSettings, replicas: GroupReplicas, _seed: int) -> AffinityGroups:
        """The strategy for one group."""
        return cls(replicas.ring, settings)

    def choose(self, keys: Keys, candidates: Candidates) -> Choice:
        """One of a hot opening's own replicas, else the opening's home among the rest."""
        opening = keys.tier1
        if opening is None:
            return Choice(candidates.order.least_loaded(), Reason.NO_KEY)
        plan = self._plan_for(candidates.whole)
        owned = _untried(plan.owned.get(opening), candidates)
        if owned is not None:
            return self._among(owned, plan.hot, keys)
        rest = _untried(plan.rest, candidates)
        return bounded_choice(
            self._ring.walk(opening),
            candidates if rest is None else rest,
            self._settings.load_factor,
            self._settings.min_bound,
        )

    def count_request(self, keys: Keys) -> None:
        """One more request of its opening, and where that is hot, of its conversation."""
        opening = keys.tier1
        if opening is None:
            return
        self._shares.count(opening)
        self._requests += 1
        if opening in self._latest.sizes and (conversation := keys.tier2) is not None:
            self._conversations.count(conversation)

    def carry_over(self, before: AffinityGroups) -> None:
        """Go on from the traffic that was counted, and from how many replicas each hot opening had."""
        self._shares, self._conversations = before._shares, before._conversations
        self._requests, self._latest = before._requests, before._latest

    def plan(self) -> dict[PrefixHash, list[TargetId]]:
        """The replicas of each hot opening, the hottest first, as the latest request's are."""
        return {opening: list(owned) for opening, owned in self._latest.owned.items()}

    def _among(self, owned: Candidates, hot: int, keys: Keys) -> Choice:
        """The conversation's replica, or the least loaded where so much more waits there that moving costs less."""
        idlest, conversation = owned.order.least_loaded(), keys.tier2
        if conversation is None:
            return Choice(idlest, Reason.HOT)
        if self._conversations.share(conversation) * hot > CROWD:  # counted among those of all hot openings
            return Choice(idlest, Reason.HOT)
        home = owned.members[jump(conversation, len(owned))].target
        if work_of(owned.by_name[home]) - work_of(owned.by_name[idlest]) <= keys.prompt_tokens:
            return Choice(home, Reason.HOT)
        return Choice(idlest, Reason.SPILL, (home,))

    # --- the plan ---

    def _plan_for(self, candidates: Candidates) -> Plan:
        """The plan of these replicas, made or looked at again where that is due."""
        plan = self._plans.get(candidates)
        if plan is None or plan.due <= self._requests:
            if plan is None and len(self._plans) >= PLANS:
                self._plans.clear()
            plan = self._plans[candidates] = self._reviewed(candidates, plan)
        self._latest = plan
        return plan

    def _reviewed(self, candidates: Candidates, before: Plan | None) -> Plan:
        """Give hot openings as many replicas as their share; who had none before begins with the latest numbers."""
        sizes = self._wanted(len(candidates), (before or self._latest).sizes)
        due = self._requests + REVIEW
        if before is not None and sizes == before.sizes:
            return Plan(sizes, before.owned, before.rest, due)
        taken: set[TargetId] = set()
        owned = {}
        for opening, size in sizes.items():
            mine = [target for target in self._ring.walk(opening) if target in candidates and target not in taken]
            taken.update(mine[:size])
            owned[opening] = candidates.only(mine[:size])
        others = [target for target in candidates if target not in taken]
        rest = candidates.only(others) if taken and others else None
        return Plan(sizes, owned, rest, due)

    def _wanted(self, targets: int, had: dict[PrefixHash, int]) -> dict[PrefixHash, int]:
        """Replicas of each hot opening, the hottest first; together they leave one for the others, if any come."""
        hot_ratio = self._settings.hot_ratio
        sizes: dict[PrefixHash, int] = {}
        shares = self._shares.above(COOL * hot_ratio)
        left = targets if 1.0 - sum(share for _, share in shares) < FEW / targets else targets - 1
        for key, share in shares:
            opening = PrefixHash(key)
            before = had.get(opening)
            if left < 1 or (before is None and share < hot_ratio):
                continue
            sizes[opening] = min(stepped(before or 0, share * targets), left)
            left -= sizes[opening]
        return sizes


def _untried(part: Candidates | None, candidates: Candidates) -> Candidates | None:
    """The part of a plan that is among the candidates: all of it, unless some refused this request before; or None."""
    if part is None or candidates is candidates.whole:
        return part if part is not None and part.loads else None
    untried = [target for target in part if target in candidates]
    return part.only(untried) if untried else None


def jump(key: int, buckets: int) -> int:
    """A number from 0 to below ``buckets`` (>= 1); with one bucket more, only 1 / buckets of all keys move."""
    chosen, following = 0, 0
    while following < buckets:
        chosen = following
        key = (key * 2862933555777941757 + 1) & _WORD
        following = int((chosen + 1) * ((1 << 31) / ((key >> 33) + 1)))
    return chosen
