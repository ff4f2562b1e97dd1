"""What a request would cost at each candidate: the work ahead of it, and what it would have to prefill.

Theory of operation. The cost at a replica is ``remaining + STEP_S * rate * running + price * uncached``, in tokens,
divided by the replica's speed. At a price of 1 that is the time to this request's own first token. What it prefills
again although another replica holds it also costs others: whoever finds nobody idle waits behind it, and what it pushes
out of a full cache may be asked for again. So up to ``alpha`` is charged, by the greater of two shares: that of the
replicas that are busy, to the power of ``CHOICES``, because a next request waits only if those it could go to are busy
too; and that of what has lain in the caches for long and is asked for again before it is evicted. An idle fleet with
room thus prefills something long and new at several replicas at once, and a busy or crowded one spares copies.

Whatever the figures are, the cost grows with the load and falls with what the replica holds of the prompt, so the least
is found among few. Where those who hold the longest known prefix are few, and one of them costs less than an idle
replica without it would, at whatever price, nobody else is looked at. Otherwise all are compared where they are no more
than ``MAX_COMPARED``, of more the prompt's home and a shortlist (``cost.py``). Whoever costs least but had more
than its share of late may give the request up (``candidates.py``).

Costs that differ by less than ``TIE_S``, and by less than rates are off, count as equal; where nothing waits at the
cheapest, also those that differ by a part of the prompt's own prefill, for what runs there counts little beside it, and
routers each see a part of it. Among equals a key decides: the first block that nobody holds. So a new prompt, or a new
branch of a known one, has the same home at every router, as long as that is lightly loaded: the nearest on the ring,
among few and among many, so that a fleet that grows or loses somebody moves no more keys than it must. Of equals
without the home, the replica whose name has the highest hash with the key.

Whom to compare where there are too many to compare all of them.

Theory of operation. The cost of a request grows with a replica's load and falls with what it holds of the prompt, so
the least is found among few: the least loaded of all, and of those who hold its longest known prefix, and of those who
hold the next shorter one, up to ``HOLDERS`` with the least work. Work is known in classes by its power of two, each a
mask of replicas, so the lightest holders are found by a few conjunctions, however many hold the prefix. Where a class
has more of them than are wanted, they are taken in the order of their bits from one on that the key names by its rank,
so that each has the same chance, and routers look at the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from xxhash import xxh3_64_intdigest

from routing.balancing.block_index import EVERYBODY
from routing.balancing.candidates import WORTH, Candidate, Candidates
from routing.balancing.hash_ring import HashRing
from routing.balancing.load_tracker import Load
from routing.balancing.residency import Match
from routing.types import Choice, PrefixHash, Reason, TargetId

MAX_COMPARED: Final = 16  # candidates up to which all are compared
HOLDERS: Final = 4  # compared of each of two depths


def shortlist(match: Match, key: int, candidates: Candidates, among: int = EVERYBODY) -> list[Candidate]:
    """Whom to compare, some perhaps twice; of holders only those with their bits in ``among``."""
    chosen = [candidates.by_name[candidates.order.least_loaded()]]
    unseen = candidates.mask & among
    for _blocks, holders in match.levels[:-3:-1]:
        if found := holders & unseen:
            chosen += lightest(found, key, candidates)
            unseen ^= found
    return chosen


def lightest(holders: int, key: int, candidates: Candidates) -> list[Candidate]:
    """Up to ``HOLDERS`` of the candidates with these bits: those with the least work, within a factor of two."""
    by_bit = candidates.by_bit
    if holders.bit_count() <= HOLDERS:
        return [by_bit[bit] for bit in bits_of(holders)]
    chosen: list[int] = []
    for members in candidates.order.classes():
        if found := holders & members:
            chosen += some_bits(found, HOLDERS - len(chosen), key)
            if len(chosen) == HOLDERS:
                break
    return [by_bit[bit] for bit in chosen]


def bits_of(mask: int) -> list[int]:
    """The bits of a mask, the lowest first."""
    bits = []
    while mask:
        bit = mask & -mask
        bits.append(bit)
        mask ^= bit
    return bits


def some_bits(mask: int, count: int, key: int) -> list[int]:
    """So many bits of a mask, or all: consecutive ones from one on that the key names by its rank, and around."""
    has = mask.bit_count()
    if has <= count:
        return bits_of(mask)
    at = _place(mask, key % has)
    bits = []
    above = mask >> at << at
    for _ in range(count):
        above = above or mask
        bit = above & -above
        bits.append(bit)
        above ^= bit
    return bits


def _place(mask: int, rank: int) -> int:
    """The place of a mask's bit of this rank, counted from 0 at the lowest; found by halves."""
    place, width = 0, mask.bit_length()
    while width > 1:
        half = width >> 1
        low = mask & ((1 << half) - 1)
        count = low.bit_count()
        if rank < count:
            mask, width = low, half
        else:
            mask, width = mask >> half, width - half
            rank -= count
            place += half
    return place


CHOICES: Final = 3  # replicas that a next request is taken to choose among
STEP_S: Final = 0.010  # prefill time that a running request counts as: about a step's fixed cost
TIE_S: Final = 0.004  # of prefill time: less than a running request counts, and than the estimates are off
HIT: Final = Reason.HIT  # an enum's attributes are slow to look up
LEEWAY: Final = 0.1  # of a prompt's own prefill: more than some running requests count
MAX_LEEWAY: Final = 600.0  # tokens
LONG: Final = 16_000  # tokens: for 2 s and more nobody else is served there, so the least busy has to do it
NO_KEY: Final = 0  # of a prompt that has none; any home will do
RATE_ERROR: Final = 0.02  # of a cost that goes by measured rates: equal replicas measure so far apart


class Question:
    """Who of these is to have this prompt? One is made for each request that has no sole holder."""

    __slots__ = ("candidates", "key", "match", "prompt_tokens")

    def __init__(self, match: Match, key: int, prompt_tokens: int, candidates: Candidates) -> None:
        self.match = match  # who holds how much of it
        self.key = key  # names its home
        self.prompt_tokens = prompt_tokens  # estimated: those that somebody holds may be more
        self.candidates = candidates

    def hit_tokens(self, member: Candidate) -> int:
        """Tokens of the prompt that a member holds."""
        return self.match.tokens(member.bit, self.prompt_tokens)


class CostRule:
    """Choose the least cost. ``by_rate`` divides by the measured prefill rate, in seconds, else by the weight."""

    __slots__ = ("alpha", "base", "by_rate", "ring")

    def __init__(self, ring: HashRing[TargetId], alpha: float, *, by_rate: bool) -> None:
        self.ring = ring
        self.alpha = alpha  # of a token to prefill, beside one that waits, where that costs others most
        self.base = min(1.0, alpha)  # the same where it costs nobody else anything
        self.by_rate = by_rate

    def sole_holder(self, match: Match, prompt_tokens: int, candidates: Candidates) -> Choice | None:
        """The only one who holds the longest known prefix, where nobody else may cost less; most requests end here.

        What ``choose`` would say as well, without a list of whom to compare, and without the key.
        """
        if self.by_rate or not match.levels:
            return None
        member = candidates.by_bit.get(match.levels[-1][1] & candidates.mask)
        if member is None:
            return None
        hit_tokens = match.longest_tokens(member.bit, prompt_tokens)
        uncached = prompt_tokens - hit_tokens
        cost = work_ahead(member.load, candidates.now_s()) + self.base * uncached
        if self._limit(cost / member.weight, member, uncached) >= self._elsewhere(match, prompt_tokens, candidates):
            return None
        if candidates.recent.excess(member) > 0:
            return None
        return Choice(member.target, HIT, hit_tokens=hit_tokens)

    def choose(self, match: Match, key: int, prompt_tokens: int, candidates: Candidates) -> Choice:
        """The candidate with the least cost, of equal ones the key's home."""
        asked = Question(match, key, prompt_tokens, candidates)
        members, costs = self._compared(asked)
        chosen = cheapest = members[0] if len(members) == 1 else self._cheapest(members, costs, asked)
        if candidates.recent.excess(cheapest) > 0:
            chosen = self._relieved(cheapest, asked)
        hit_tokens = asked.hit_tokens(chosen)
        reason = _reason(match, chosen.bit, hit_tokens, candidates.mask)
        if chosen is not cheapest and reason is Reason.ELSEWHERE:
            reason = Reason.SPREAD
        return Choice(chosen.target, reason, hit_tokens=hit_tokens)

    def costs(
        self, members: Sequence[Candidate], match: Match, prompt_tokens: int, candidates: Candidates
    ) -> list[float]:
        """Of each member: tokens by weight, or seconds by rate."""
        return self._costs(members, Question(match, NO_KEY, prompt_tokens, candidates))

    def _relieved(self, cheapest: Candidate, asked: Question) -> Candidate:
        """Who takes a request over from one that had too many of late; itself where that would cost too much."""
        candidates = asked.candidates
        now_s, speed, recent = candidates.now_s(), self._speed(cheapest), candidates.recent
        members = candidates.members
        if len(members) > MAX_COMPARED:
            members = [cheapest, *self._shortlist(asked, recent.modest())]
        costs = self._costs(members, asked)
        limit = costs[members.index(cheapest)] + WORTH * recent.excess(cheapest) / speed
        work = work_ahead(cheapest.load, now_s) / speed
        takers, of_takers = [], []
        for member, cost in zip(members, costs, strict=True):
            if (
                cost <= limit
                and work_ahead(member.load, now_s) / self._speed(member) <= work
                and recent.excess(member) <= 0
            ):
                takers.append(member)
                of_takers.append(cost)
        return self._cheapest(takers, of_takers, asked) if takers else cheapest

    def _cheapest(self, members: list[Candidate], costs: list[float], asked: Question) -> Candidate:
        """The member with the least cost, of equal ones the key's home."""
        least = min(costs)
        cheapest = members[costs.index(least)]
        limit = self._limit(least, cheapest, asked.prompt_tokens - asked.hit_tokens(cheapest))
        tied = [member for at, member in enumerate(members) if costs[at] <= limit]
        return cheapest if len(tied) == 1 else self._first_home(tied, asked)

    def _costs(self, members: Sequence[Candidate], asked: Question) -> list[float]:
        candidates, match = asked.candidates, asked.match
        terms, busy = self._terms(members, match, asked.prompt_tokens, candidates.now_s())
        busy_ratio = busy / len(terms) if len(terms) == len(candidates) else candidates.order.busy_ratio
        price = self.base + (self.alpha - self.base) * max(busy_ratio**CHOICES, match.reuse_ratio)
        return [(work + price * uncached) / speed for work, uncached, speed in terms]

    def _terms(
        self, members: Sequence[Candidate], match: Match, prompt_tokens: int, now_s: float
    ) -> tuple[list[tuple[float, int, float]], int]:
        """Of each member: tokens of work ahead, tokens of the prompt to prefill, and speed; how many are busy."""
        levels, block_tokens, by_rate = match.levels[::-1], match.block_tokens, self.by_rate
        terms, busy = [], 0
        for _target, load, weight, bit, share in members:
            uncached, prefill = prompt_tokens, load.prefill
            rate = prefill.shown or prefill.tokens_per_s
            for blocks, holders in levels:
                if holders & bit:
                    uncached -= blocks * block_tokens
                    break
            if uncached < 0:  # noqa: PLR1730 -- the estimated length fell short, which is too rare to call max for
                uncached = 0
            work = STEP_S * rate * load.running
            if load.waiting_tokens:  # as in work_ahead; without two calls for each member
                done, most = (now_s - load.oldest_since_s) * rate, load.oldest_tokens
                work += load.waiting_tokens - (done if done < most else most)  # noqa: FURB136 -- nor a call of min
                busy += 1
            terms.append((work, uncached, rate * share if by_rate else weight))
        return terms, busy

    def _compared(self, asked: Question) -> tuple[list[Candidate], list[float]]:
        """Candidates and their costs, the least of all among them."""
        members, costs = self._few_holders(asked)
        if members:
            return members, costs
        members = asked.candidates.members
        if len(members) > MAX_COMPARED:
            members = self._shortlist(asked)
        return members, self._costs(members, asked)

    def _shortlist(self, asked: Question, among: int = EVERYBODY) -> list[Candidate]:
        """Whom to compare where there are many; the prompt's home is one of them, where it is near."""
        home = self._home(asked)
        chosen = shortlist(asked.match, asked.key, asked.candidates, among)
        return chosen if home is None else [*chosen, asked.candidates.by_name[home]]

    def _elsewhere(self, match: Match, prompt_tokens: int, candidates: Candidates) -> float:
        """The least that somebody costs who does not hold the longest known prefix: idle, at the least price."""
        next_blocks = match.levels[-2][0] if len(match.levels) > 1 else 0
        return self.base * (prompt_tokens - next_blocks * match.block_tokens) / candidates.greatest_weight

    def _few_holders(self, asked: Question) -> tuple[list[Candidate], list[float]]:
        """Several who hold the longest known prefix, their costs at the least price; nobody where others may cost less.

        Whoever holds less of the prompt loses more by a higher price. Holders of one weight stay in the same order, and
        where everybody is one there is nobody else.
        """
        match, prompt_tokens, candidates = asked.match, asked.prompt_tokens, asked.candidates
        holders = match.levels[-1][1] & candidates.mask if match.levels else 0
        count = holders.bit_count()
        if not 1 < count <= HOLDERS or self.by_rate or not candidates.is_even:
            return [], []
        by_bit, now_s, weight = candidates.by_bit, candidates.now_s(), candidates.greatest_weight
        members = [by_bit[bit] for bit in bits_of(holders)]
        uncached = max(0, prompt_tokens - match.blocks * match.block_tokens)  # the same for all of them
        costs = [(work_ahead(member.load, now_s) + self.base * uncached) / weight for member in members]
        least = min(costs)
        limit = self._limit(least, members[costs.index(least)], uncached)
        is_enough = holders == candidates.mask or limit < self._elsewhere(match, prompt_tokens, candidates)
        return (members, costs) if is_enough else ([], [])

    def _first_home(self, tied: list[Candidate], asked: Question) -> Candidate:
        """The key's home among all candidates; where that costs more, whoever has the highest hash with the key."""
        home = self._home(asked)
        for member in tied:
            if member.target == home:
                return member
        return _preferred(tied, asked.key)

    def _home(self, asked: Question) -> TargetId | None:
        """The key's home among the candidates, if one is near."""
        return self.ring.nearest(asked.key, asked.candidates.by_name)

    def _limit(self, least: float, member: Candidate, uncached: int) -> float:
        """The cost below which others count as equal to the least, at a member that would prefill so many tokens."""
        prefill = member.load.prefill
        tie = 0.0 if member.load.waiting_tokens or uncached > LONG else min(LEEWAY * uncached, MAX_LEEWAY)
        if self.by_rate:
            return least * (1 + RATE_ERROR) + TIE_S + tie / self._speed(member)
        return least + (TIE_S * (prefill.shown or prefill.tokens_per_s) + tie) / member.weight

    def _speed(self, member: Candidate) -> float:
        """What a member's work is divided by: tokens/s by rate, else its weight."""
        return member.load.prefill.tokens_per_s * member.share if self.by_rate else member.weight


def _preferred(members: list[Candidate], key: int) -> Candidate:
    """Whose name has the highest hash with a key."""
    return max(members, key=lambda member: xxh3_64_intdigest(member.target, key))


def work_ahead(load: Load, now_s: float) -> float:
    """Tokens that a request sent now would wait for, those of running requests' steps included."""
    prefill = load.prefill
    rate = prefill.shown or prefill.tokens_per_s
    if load.waiting_tokens:
        return STEP_S * rate * load.running + load.remaining_tokens(now_s)
    return STEP_S * rate * load.running


def _reason(match: Match, bit: int, hit_tokens: int, mask: int) -> Reason:
    """Whether it holds as much of the prompt as any candidate; if not, load has taken the request away from there."""
    for _blocks, holders in reversed(match.levels):
        if holders & bit:
            break
        if holders & mask:
            return Reason.ELSEWHERE
    return Reason.HIT if hit_tokens else Reason.COLD


def preferred_key(chain: Sequence[int], match: Match, tier1: PrefixHash | None) -> int:
    """What names a prompt's home: the first block that nobody holds, else its last one; of a short prompt, tier 1."""
    return chain[min(match.blocks, len(chain) - 1)] if chain else tier1 or NO_KEY
