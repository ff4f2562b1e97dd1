"""Affinity groups: gives each very frequent (hot) prefix its own replicas, by its share of traffic.

Theory of operation. The work of requests, their uncached tokens, is counted by tier-1 prefix, with decay. A prefix with
at least ``hot_ratio`` of it owns the first replicas in its ring order that no hotter prefix owns, in proportion to its
share; at least one replica remains for all other prefixes. Owned replicas are the homes of the prefix's requests, in an
order by conversation; the home of any other prefix is the first of the other replicas in its ring order. Requests that
may use other replicas, such as those of an adapter, have a plan of their own. A plan is reviewed every
``REVIEW_REQUESTS`` requests and changes slowly, because every change leaves prefixes without cache: a prefix remains
hot until its share falls below ``COOL_RATIO`` times the ratio, and it gains or loses a replica only if its share is
well above or below its number (``next_size``).

Shares are of work, not of requests, which differ by a factor of 1,000 in what they leave to prefill. Instead of
reducing every sum with every request, the weight of a request grows: after ``half_life`` requests it has doubled. When
weights become large, all are scaled down together. At most ``2 * MAX_KEYS`` prefixes are counted; then only the
``MAX_KEYS`` greatest remain. One with a share above 1 / ``MAX_KEYS`` is never dropped.
"""

from __future__ import annotations

from heapq import nlargest
from typing import Final, NamedTuple

from routing.balancing.candidates import REQUEST_TOKENS, Candidates
from routing.balancing.replicas import GroupReplicas
from routing.balancing.strategies.homes import HomeStrategy, homes_among
from routing.balancing.strategies.strategy import Keys
from routing.schema import AffinityGroupsSettings
from routing.types import PrefixHash, TargetId

REVIEW_REQUESTS: Final = 64  # requests between two reviews of a plan
COOL_RATIO: Final = 0.7  # of ``hot_ratio``: a hot prefix with a smaller share is no longer hot
MAX_PLANS: Final = 8  # cached plans, one for each set of replicas: those of adapters, and of recent health epochs
MAX_KEYS: Final = 256
_MAX_WEIGHT: Final = 1e100


class Shares:
    """Shares of keys in the work of recent requests."""

    def __init__(self, half_life: float) -> None:
        self._growth = 2.0 ** (1.0 / half_life)  # half_life in requests, > 0
        self._weight = 1.0  # of the next request
        self._total = 0.0
        self._weights: dict[int, float] = {}  # by key

    def __len__(self) -> int:
        return len(self._weights)

    def count(self, key: int, uncached_tokens: float) -> None:
        """Count one request, which leaves this many tokens to prefill."""
        weights, weight = self._weights, (REQUEST_TOKENS + uncached_tokens) * self._weight
        weights[key] = weights.get(key, 0.0) + weight
        self._total += weight
        self._weight *= self._growth
        if len(weights) > 2 * MAX_KEYS:
            self._weights = dict(nlargest(MAX_KEYS, weights.items(), key=lambda item: item[1]))
        if self._weight > _MAX_WEIGHT:
            unit, self._weight = self._weight, 1.0
            self._total /= unit
            self._weights = {key: weight / unit for key, weight in self._weights.items()}

    def frequent_keys(self, min_share: float) -> list[tuple[int, float]]:
        """Keys with at least this share (0 to 1), and their shares, the largest first."""
        min_weight = max(min_share * self._total, self._total / MAX_KEYS)
        frequent = [(key, weight / self._total) for key, weight in self._weights.items() if weight >= min_weight]
        return sorted(frequent, key=lambda item: (-item[1], item[0]))


# Most of a fraction is rounded down: allocated keys get hits, while the remaining traffic needs most of the prefill.
GAIN_MARGIN: Final = 0.75  # replicas by which a share must exceed the current number for one more
LOSS_MARGIN: Final = 0.5  # replicas by which a share must fall below the current number for one less
MIN_SHARE: Final = 0.1  # in replicas' worth of work; a key with less needs no replica of its own


def next_size(current: int, share: float) -> int:
    """Number of replicas for a ``share`` in replicas' worth of work, at least 1. ``current``: the number so far."""
    if current and current - LOSS_MARGIN <= share < current + GAIN_MARGIN:
        return current
    return max(1, int(share + 1 - GAIN_MARGIN))


class Plan(NamedTuple):
    """Which replicas belong to which hot prefix."""

    sizes: dict[PrefixHash, int]  # number of replicas of each hot prefix, the hottest first
    owned: dict[PrefixHash, dict[TargetId, None]]  # the replicas of each hot prefix, in its ring order
    assigned: frozenset[TargetId]  # all of these
    review_at: int  # number of requests


class AffinityGroups(HomeStrategy):
    """Divides the replicas among hot prefixes and the rest."""

    def __init__(self, replicas: GroupReplicas, settings: AffinityGroupsSettings) -> None:
        super().__init__(replicas, settings)
        self._hot_ratio = settings.hot_ratio
        self._shares = Shares(settings.half_life)
        self._requests = 0
        self._plans: dict[Candidates, Plan] = {}
        self._latest = Plan({}, {}, frozenset(), 0)

    def _homes(self, key: PrefixHash, keys: Keys, candidates: Candidates) -> list[TargetId]:
        """The replicas of a hot prefix, else the first of the others in the prefix's ring order."""
        plan = self._plan_for(candidates.unfiltered)
        owned = plan.owned.get(key)
        if owned is not None and (homes := homes_among(owned, keys.tier2, candidates, self._ring)):
            return homes
        for target in self._eligible(key, candidates):
            if target not in plan.assigned:
                return [target]
        return super()._homes(key, keys, candidates)

    def preferred_count(self, prefix: PrefixHash) -> int | None:
        """As many as a hot prefix owns."""
        return len(self._latest.owned.get(prefix, ())) or 1

    def count_request(self, keys: Keys, uncached_tokens: int) -> None:
        """Count a request's work for its prefix."""
        if keys.tier1 is not None:
            self._shares.count(keys.tier1, uncached_tokens)
            self._requests += 1

    def carry_over(self, before: AffinityGroups) -> None:
        """Continue with the counted traffic and the numbers of replicas."""
        self._shares = before._shares
        self._requests, self._latest = before._requests, before._latest

    def plan(self) -> dict[PrefixHash, list[TargetId]]:
        """The replicas of each hot prefix, the hottest first, in the plan of the latest request."""
        return {prefix: list(owned) for prefix, owned in self._latest.owned.items()}

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
            return Plan(sizes, before.owned, before.assigned, review_at)
        assigned: set[TargetId] = set()
        owned: dict[PrefixHash, dict[TargetId, None]] = {}
        for prefix, size in sizes.items():
            free = [target for target in self._ring.walk(prefix) if target in candidates and target not in assigned]
            assigned.update(free[:size])
            owned[prefix] = dict.fromkeys(free[:size])
        return Plan(sizes, owned, frozenset(assigned), review_at)

    def _sizes(self, targets: int, before: dict[PrefixHash, int]) -> dict[PrefixHash, int]:
        """Number of replicas of each hot prefix, the hottest first; one replica remains for any other prefixes."""
        hot_ratio = self._hot_ratio
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
