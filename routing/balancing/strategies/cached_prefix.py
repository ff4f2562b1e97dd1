"""The lowest cost, in tokens or seconds, by estimated cached blocks: ``lowest_cost`` and ``least_ttft``.

Theory of operation. The cost at a replica is ``remaining + STEP_S * rate * running + price *
uncached``, in tokens, divided by the replica's speed. With a price of 1 that is the time to this request's own first
token. Prefilling tokens that another replica has cached also costs other requests: those that find no idle replica wait
behind it, and the blocks that it evicts from a full cache may be requested again. The price therefore rises to
``alpha`` with the greater of two shares: the share of busy replicas, to the power of ``CHOICES``, because a next
request only waits if all replicas that it can choose from are busy; and the share of old cached blocks that are used
again before they are evicted. So an idle fleet with free cache prefills a long new prefix at several replicas at once,
and a busy or crowded one avoids copies.

The cost always grows with the load and falls with the cached tokens, so the minimum is found among few candidates. If
few replicas have the longest cached prefix, and one of them costs less than an idle replica without it would at any
price, no other candidate is examined. Otherwise up to ``MAX_COMPARED`` candidates are all compared. If there are more,
only the prompt's preferred replica and a shortlist are compared: the least loaded of all, and of the replicas with the
longest and the next shorter cached prefix up to ``MAX_HOLDERS`` each with the least work. Work is kept in classes by
powers of two, each a mask of replicas, so the holders with the least work are found by a few conjunctions. If a class
has more of them than needed, consecutive bits are taken from a position that the key determines, so that each has the
same chance and routers agree.

A candidate with the least cost that had more than its share of recent requests may yield the request
(``RecentShares``).

Costs within ``TIE_S``, and within the error of measured rates, count as equal. If no prompt waits at the cheapest
candidate, so do costs within a part of the prompt's own prefill: the requests that run there matter little beside it,
and each router sees only part of them. Among equals a key decides, the first block that no replica has cached, so that
every router prefers the same replica for a new prompt or a new branch of a known one. That is the nearest replica on
the hash ring, so that a change of the fleet moves few keys. If the nearest one is not among the equals, it is the one
whose name has the highest hash with the key.

The key of a prompt whose first image, sound or file is not cached as part of a prefix is that of this attachment, and
costs within ``MEDIA_TOKENS`` are equal then: the same attachment goes to the same replica after any text, where the
engine's encoder cache has it.

If there are other routers (``UnrecordedHits``), the key is one that all of them compute alike, the session's if a
header names it, and the preferred replica is the prompt's *common replica*. What other routers usually have sent there
is expected to be cached, so every router sends a prompt that it has not recorded to the same replica. A busy common
replica yields like any other, and because all routers have the same key, they choose the same next one. Decision
records predict only what this router has recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from xxhash import xxh3_64_intdigest

from routing.balancing.block_index import ALL_BITS
from routing.balancing.candidates import EXCESS_TOKENS, Candidate, Candidates, Choice
from routing.balancing.hash_ring import HashRing
from routing.balancing.load_tracker import Load
from routing.balancing.replicas import GroupReplicas
from routing.balancing.residency import HIT_WEIGHT, Match, Residency, ShareByTokens, UnrecordedHits
from routing.balancing.strategies.holders import MAX_COMPARED, shortlist
from routing.balancing.strategies.strategy import Estimate, Keys, Strategy
from routing.schema import CostSettings
from routing.types import PrefixHash, Reason, TargetId

CHOICES: Final = 3  # number of replicas that a next request is assumed to choose from
STEP_S: Final = 0.005  # prefill time that a running request counts as: more moves short conversations too readily
TIE_S: Final = 0.003  # of prefill time; less than a running request counts as, and less than the error of estimates
HIT: Final = Reason.HIT  # an enum's attributes are slow to look up
TIE_RATIO: Final = 0.1  # of a prompt's own prefill, which is more than several running requests count as
MAX_TIE_TOKENS: Final = 600.0
NO_KEY: Final = 0  # of a prompt without a key: any replica may be the preferred one
MEDIA_TOKENS: Final = 512.0  # prefill that takes about as long as encoding an image
RATE_ERROR: Final = 0.02  # of a cost by measured rates: equal replicas measure this differently


class CostQuery:
    """One prompt and its candidates. Made for each request that has no sole holder."""

    def __init__(
        self,
        match: Match,
        key: int,
        prompt_tokens: int,
        candidates: Candidates,
        ring: HashRing[TargetId],
        preferred: TargetId | None = None,
    ) -> None:
        self.match = match  # cached prefixes by replica
        self.key = key  # determines the preferred replica
        self.prompt_tokens = prompt_tokens  # estimated; cached tokens may exceed it
        self.candidates = candidates
        self.common_bit = 0  # of the common replica; 0 if there is none
        # Of the unrecorded tokens at the common replica: the share expected to be cached, and what of it a cost counts.
        self.expected_ratio = self.counted_ratio = 0.0
        self.common_hits: ShareByTokens | None = None  # where that share was learnt
        self.tie_tokens = 0.0  # by which costs may differ and count as equal, besides ``CostRule``'s own limits
        self._ring = ring
        self._preferred = preferred

    @property
    def preferred(self) -> TargetId | None:
        """The key's nearest candidate on the ring, if one is near."""
        if self._preferred is None:
            self._preferred = self._ring.nearest(self.key, self.candidates.by_name)
        return self._preferred

    def hit_tokens(self, member: Candidate) -> int:
        """Predicted cached tokens of the prompt at a candidate."""
        tokens = self.match.tokens(member.bit, self.prompt_tokens)
        if member.bit == self.common_bit:
            tokens += int(self.expected_ratio * (self.prompt_tokens - tokens))
        return tokens

    def set_common_replica(self, hits: UnrecordedHits) -> None:
        """Make the preferred replica the common one, which has cached what other routers usually send there."""
        match, preferred = self.match, self.preferred
        if preferred is None or match.common_key_at is None:
            return
        self.common_bit = self.candidates.by_name[preferred].bit
        self.common_hits = hits.of_recorded if match.blocks > match.common_key_at else hits.of_new
        unrecorded_tokens = self.prompt_tokens - match.tokens(self.common_bit, self.prompt_tokens)
        self.expected_ratio = self.common_hits.ratio(unrecorded_tokens)
        self.counted_ratio = min(1.0, HIT_WEIGHT * self.expected_ratio)


class CostRule:
    """Chooses the least cost. Speed is the measured prefill rate if ``by_rate`` (costs in seconds), else the weight."""

    def __init__(
        self, ring: HashRing[TargetId], settings: CostSettings, *, by_rate: bool, hits: UnrecordedHits | None = None
    ) -> None:
        self.ring = ring
        self._hits = hits  # at common replicas; None: there are none
        self.alpha = settings.alpha  # highest price of a token to prefill, relative to a queued token
        self.base_price = min(1.0, settings.alpha)  # its price where prefilling costs no other request anything
        self.by_rate = by_rate

    def sole_holder(self, match: Match, prompt_tokens: int, candidates: Candidates) -> Choice | None:
        """The only candidate with the longest cached prefix, if no other can cost less; most requests end here.

        Gives the same result as ``choose``, without a list of candidates and without the key.
        """
        if self.by_rate or not match.levels or match.common_key_at is not None:
            return None
        member = candidates.by_bit.get(match.levels[-1][1] & candidates.mask)
        if member is None:
            return None
        hit_tokens = match.tokens(member.bit, prompt_tokens)
        uncached = prompt_tokens - hit_tokens
        cost = queued_work(member.load, candidates.clock()) + self.base_price * uncached
        next_tokens = match.levels[-2][2] if len(match.levels) > 1 else 0
        least_of_others = self.base_price * (prompt_tokens - next_tokens) / candidates.greatest_weight  # if one is idle
        if self._tie_limit(cost / member.weight, member, uncached) >= least_of_others:
            return None
        if candidates.recent.excess(member) > 0:
            return None
        return Choice(member.target, HIT, hit_tokens=hit_tokens)

    def choose(
        self, match: Match, key: int, prompt_tokens: int, candidates: Candidates, *, tie_tokens: float = 0.0
    ) -> Choice:
        """The candidate with the least cost; of equals, within ``tie_tokens`` too, the key's preferred replica."""
        query = self._query(match, key, prompt_tokens, candidates)
        query.tie_tokens = tie_tokens
        members = candidates.members if len(candidates.members) <= MAX_COMPARED else self._shortlist(query)
        cheapest = members[0]
        if len(members) > 1:
            cheapest = self._cheapest(members, self._costs(members, query), query)
        chosen = self._rebalance(cheapest, query)
        hit_tokens = match.tokens(chosen.bit, prompt_tokens)
        reason = _reason(match, chosen.bit, hit_tokens, candidates.mask)
        if chosen is not cheapest and reason is Reason.ELSEWHERE:
            reason = Reason.SPREAD
        return _choice(query, chosen, reason, hit_tokens)

    def choose_home(
        self,
        match: Match,
        key: int,
        prompt_tokens: int,
        candidates: Candidates,
        homes: Sequence[TargetId],
        slack_s: float,
    ) -> Choice:
        """The first home with a cost at most ``slack_s`` of prefill above the least, else the same as ``choose``.

        The slack is less by what a home would prefill although the cheapest replica has it cached.
        """
        query = self._query(match, key, prompt_tokens, candidates, homes[0])
        members = candidates.members
        if len(members) > MAX_COMPARED:
            members = [*self._shortlist(query), *[candidates.by_name[home] for home in homes]]
        costs = self._costs(members, query)
        least_cost = min(costs)
        best = members[costs.index(least_cost)]
        slack_tokens = slack_s * (best.load.prefill.measured or best.load.prefill.tokens_per_s)
        best_hit_tokens = query.hit_tokens(best)
        for position, home in enumerate(homes):
            for member, cost in zip(members, costs, strict=True):
                if member.target != home:
                    continue
                missing = max(0, best_hit_tokens - query.hit_tokens(member))
                if cost <= least_cost + (slack_tokens - missing) / best.weight:
                    reason = Reason.SPILL if position else Reason.AFFINITY
                    return _choice(query, member, reason, skipped=tuple(homes[:position]))
        chosen = self._rebalance(self._cheapest(members, costs, query), query)
        if chosen.target == homes[0]:  # of equals
            return _choice(query, chosen, Reason.AFFINITY)
        has_more = query.hit_tokens(chosen) > query.hit_tokens(candidates.by_name[homes[0]])
        return _choice(query, chosen, HIT if has_more else Reason.SPILL, skipped=tuple(homes))

    def estimates(
        self,
        members: Sequence[Candidate],
        match: Match,
        key: int,
        prompt_tokens: int,
        candidates: Candidates,
        preferred: TargetId | None = None,
    ) -> list[Estimate]:
        """Predicted cached tokens and cost at each member; costs are tokens by weight, or seconds by rate."""
        query = self._query(match, key, prompt_tokens, candidates, preferred)
        costs = self._costs(members, query)
        return [Estimate(query.hit_tokens(member), cost) for member, cost in zip(members, costs, strict=True)]

    def _query(
        self, match: Match, key: int, prompt_tokens: int, candidates: Candidates, preferred: TargetId | None = None
    ) -> CostQuery:
        query = CostQuery(match, key, prompt_tokens, candidates, self.ring, preferred)
        if self._hits is not None and match.common_key_at is not None:
            query.set_common_replica(self._hits)
        return query

    def _rebalance(self, cheapest: Candidate, query: CostQuery) -> Candidate:
        """The candidate to which one with an excess of recent requests yields if that costs little; else itself."""
        candidates = query.candidates
        if candidates.recent.excess(cheapest) <= 0:
            return cheapest
        now_s, speed, recent = candidates.clock(), self._speed(cheapest), candidates.recent
        members = candidates.members
        if len(members) > MAX_COMPARED:
            members = [cheapest, *self._shortlist(query, recent.mask_without_excess())]
        costs = self._costs(members, query)
        limit = costs[members.index(cheapest)] + EXCESS_TOKENS * recent.excess(cheapest) / speed
        work = queued_work(cheapest.load, now_s) / speed
        receivers, receiver_costs = [], []
        for member, cost in zip(members, costs, strict=True):
            if (
                cost <= limit
                and queued_work(member.load, now_s) / self._speed(member) <= work
                and recent.excess(member) <= 0
            ):
                receivers.append(member)
                receiver_costs.append(cost)
        return self._cheapest(receivers, receiver_costs, query) if receivers else cheapest

    def _cheapest(self, members: list[Candidate], costs: list[float], query: CostQuery) -> Candidate:
        """The member with the least cost; of equals, the key's preferred replica."""
        least_cost = min(costs)
        cheapest = members[costs.index(least_cost)]
        limit = self._tie_limit(least_cost, cheapest, query.prompt_tokens - query.hit_tokens(cheapest))
        if query.tie_tokens:
            limit = max(limit, least_cost + query.tie_tokens / self._speed(cheapest))
        tied = [member for at, member in enumerate(members) if costs[at] <= limit]
        if len(tied) == 1:
            return cheapest
        preferred = query.preferred
        for member in tied:
            if member.target == preferred:
                return member
        return max(tied, key=lambda member: xxh3_64_intdigest(member.target, query.key))

    def _costs(self, members: Sequence[Candidate], query: CostQuery) -> list[float]:
        """The cost at each member."""
        match, prompt_tokens, by_rate = query.match, query.prompt_tokens, self.by_rate
        levels = match.levels[::-1]
        common_bit, counted_ratio = query.common_bit, query.counted_ratio
        price, now_s = self._price(members, query), query.candidates.clock()
        costs: list[float] = []
        for _target, load, weight, bit, share in members:
            uncached, prefill = prompt_tokens, load.prefill
            rate = prefill.measured or prefill.tokens_per_s
            for _blocks, holders, tokens in levels:
                if holders & bit:
                    uncached -= tokens
                    break
            if bit == common_bit:
                uncached -= int(counted_ratio * uncached)
            if uncached < 0:  # noqa: PLR1730 -- the estimated length fell short, which is too rare to call max for
                uncached = 0
            work = STEP_S * rate * load.running
            if load.waiting_tokens:  # as in queued_work, without two calls for each member
                prefilled, limit = (now_s - load.oldest_since_s) * rate, load.oldest_tokens
                work += load.waiting_tokens - (prefilled if prefilled < limit else limit)  # noqa: FURB136 -- min is a call
            costs.append((work + price * uncached) / (rate * share if by_rate else weight))
        return costs

    def _price(self, members: Sequence[Candidate], query: CostQuery) -> float:
        """The price of a token to prefill, relative to a queued token, by how busy and how crowded the replicas are."""
        candidates = query.candidates
        if len(members) == len(candidates.members):
            busy = 0
            for member in members:
                if member.load.waiting_tokens:
                    busy += 1
            busy_ratio = busy / len(members)
        else:
            busy_ratio = candidates.order.busy_ratio
        return self.base_price + (self.alpha - self.base_price) * max(busy_ratio**CHOICES, query.match.reuse_ratio)

    def _shortlist(self, query: CostQuery, allowed: int = ALL_BITS) -> list[Candidate]:
        """The candidates to compare if there are many, with the prompt's preferred replica if it is near."""
        preferred = query.preferred
        chosen = shortlist(query.match, query.key, query.candidates, allowed)
        return chosen if preferred is None else [*chosen, query.candidates.by_name[preferred]]

    def _tie_limit(self, least_cost: float, member: Candidate, uncached: int) -> float:
        """The cost up to which others count as equal to the least, at a member that would prefill ``uncached``."""
        prefill = member.load.prefill
        tie = 0.0 if member.load.waiting_tokens else min(TIE_RATIO * uncached, MAX_TIE_TOKENS)
        if self.by_rate:
            return least_cost * (1 + RATE_ERROR) + TIE_S + tie / self._speed(member)
        return least_cost + (TIE_S * (prefill.measured or prefill.tokens_per_s) + tie) / member.weight

    def _speed(self, member: Candidate) -> float:
        """What a member's work is divided by: tokens/s by rate, else its weight."""
        return member.load.prefill.tokens_per_s * member.share if self.by_rate else member.weight


def queued_work(load: Load, now_s: float) -> float:
    """Tokens of work before a request that is sent now, including the steps of running requests."""
    prefill = load.prefill
    rate = prefill.measured or prefill.tokens_per_s
    if load.waiting_tokens:
        return STEP_S * rate * load.running + load.remaining_tokens(now_s)
    return STEP_S * rate * load.running


def _choice(
    query: CostQuery,
    chosen: Candidate,
    reason: Reason,
    hit_tokens: int | None = None,
    skipped: tuple[TargetId, ...] = (),
) -> Choice:
    if hit_tokens is None:
        hit_tokens = query.match.tokens(chosen.bit, query.prompt_tokens)
    if chosen.bit != query.common_bit:
        return Choice(chosen.target, reason, skipped, hit_tokens=hit_tokens)
    unrecorded = int(query.expected_ratio * (query.prompt_tokens - hit_tokens))
    return Choice(chosen.target, reason, skipped, hit_tokens, query.common_hits, unrecorded)


def _reason(match: Match, bit: int, hit_tokens: int, mask: int) -> Reason:
    """ELSEWHERE if another candidate has more of the prompt cached, so that load decided; else HIT or COLD."""
    for _blocks, holders, _tokens in reversed(match.levels):
        if holders & bit:
            break
        if holders & mask:
            return Reason.ELSEWHERE
    return Reason.HIT if hit_tokens else Reason.COLD


def match_prompt(residency: Residency, keys: Keys) -> Match:
    """How much of a prompt each replica has cached; makes the estimate of its length as good as what is known of it."""
    match = residency.match(keys.chain, keys.block_tokens)
    if match.surplus_tokens:
        keys.add_surplus(match.surplus_tokens)
    return match


def preferred_key(chain: Sequence[int], match: Match, tier1: PrefixHash | None) -> int:
    """The key of a prompt's preferred replica: its first uncached block, else its last; tier 1 of a short prompt."""
    return chain[min(match.blocks, len(chain) - 1)] if chain else tier1 or NO_KEY


def _preference(keys: Keys, match: Match) -> tuple[int, float]:
    """The key of the preferred replica, and the additional cost in tokens at which that one still counts as cheapest.

    The key is that of the first attachment if no cached prefix includes it; else the one of the common replica if there
    are other routers, which is the conversation's key if a header names it; else ``preferred_key``.
    """
    media = keys.media
    if media is not None and match.blocks <= media.block:
        return media.key, MEDIA_TOKENS
    chain = keys.chain
    if chain and match.common_key_at is not None:
        conversation = keys.conversation
        return (chain[min(match.common_key_at, len(chain) - 1)] if conversation is None else conversation), 0.0
    return preferred_key(chain, match, None if chain else keys.tier1), 0.0


class LowestCost(Strategy):
    """Sends each request to the replica with the lowest cost, by queued work and uncached tokens."""

    def __init__(self, replicas: GroupReplicas, settings: CostSettings, *, by_rate: bool) -> None:
        self._rule = CostRule(replicas.ring, settings, by_rate=by_rate, hits=replicas.residency.unrecorded_hits)
        self._residency = replicas.residency

    def preferred_count(self, _prefix: PrefixHash) -> int | None:
        """One: whichever replica is sent a prefix becomes its replica, so the ring order divides the prefixes."""
        return 1

    def choose(self, keys: Keys, candidates: Candidates) -> Choice:
        """The candidate with the lowest cost."""
        match = match_prompt(self._residency, keys)
        sole = self._rule.sole_holder(match, keys.prompt_tokens, candidates)
        if sole is not None:
            return sole
        key, tie_tokens = _preference(keys, match)
        return self._rule.choose(match, key, keys.prompt_tokens, candidates, tie_tokens=tie_tokens)

    def estimate(self, keys: Keys, candidates: Candidates, targets: Sequence[TargetId]) -> list[Estimate]:
        """Predicted cached tokens and cost of some candidates."""
        match = match_prompt(self._residency, keys)
        key, _ = _preference(keys, match)
        members = [candidates.by_name[name] for name in targets]
        return self._rule.estimates(members, match, key, keys.prompt_tokens, candidates)
