"""What a request would cost at each candidate: the work ahead of it, and what it would have to prefill.

Theory of operation. The cost at a replica is ``remaining + 80 * running + alpha * uncached``, in tokens, divided by
the replica's speed. Whatever the figures are, that grows with the load and falls with what the replica holds of the
prompt, so the least is found among few: up to ``EVERYBODY`` candidates all are compared; of more, the least loaded of
all, the prompt's home, and up to ``HOLDERS`` of those who hold its longest known opening and of those who hold the
next shorter one. Where more hold it than are compared, a window is cut out of them that the prompt's key places, so
that routers look at the same ones and a prompt's requests stay together.

Costs within ``TIE_TOKENS`` of the least count as equal and go by the home order of the first block that nobody holds.
So a new prompt, or a new branch of a known one, has the same home at every router, as long as that is lightly loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from routing.core.candidates import REQUEST_TOKENS, Candidates, Member
from routing.core.residency import Match
from routing.core.ring import HashRing
from routing.core.types import Choice, PrefixHash, Reason

EVERYBODY = 16  # candidates up to which all are compared
HOLDERS = 8  # compared of each of two depths
TIE_TOKENS = 80.0  # a step's fixed cost: less than the estimates are off


class CostRule:
    """Choose the least cost. ``by_rate`` divides by the measured prefill rate, in seconds, else by the weight."""

    __slots__ = ("alpha", "by_rate", "ring")

    def __init__(self, ring: HashRing, alpha: float, *, by_rate: bool) -> None:
        self.ring = ring
        self.alpha = alpha  # of a token to prefill, beside one that waits
        self.by_rate = by_rate

    def choose(self, match: Match, key: int, prompt_tokens: int, candidates: Candidates) -> Choice:
        """The candidate with the least cost, of equal ones the first in the key's home order."""
        members = candidates.members
        if len(members) > EVERYBODY:
            members = self._shortlist(match, key, candidates)
        costs = self.costs(members, match, prompt_tokens, candidates.now_s())
        least = min(costs)
        best = members[costs.index(least)]
        limit = least + TIE_TOKENS / self._speed(best)
        tied = {member.replica: member for member, cost in zip(members, costs, strict=True) if cost <= limit}
        if len(tied) > 1:
            best = next(tied[replica] for replica in self.ring.walk(PrefixHash(key)) if replica in tied)
        hit_tokens = min(match.tokens(best.bit), prompt_tokens)
        return Choice(best.replica, Reason.HIT if hit_tokens else Reason.COLD, hit_tokens=hit_tokens)

    def costs(self, members: Sequence[Member], match: Match, prompt_tokens: int, now_s: float) -> list[float]:
        """Of each member: tokens by weight, or seconds by rate."""
        alpha, by_rate, held = self.alpha, self.by_rate, match.tokens
        found = []
        for _replica, load, weight, bit in members:
            uncached = prompt_tokens - held(bit)
            work = load.remaining_tokens(now_s) if load.waiting_tokens else 0.0
            work += REQUEST_TOKENS * load.running
            if uncached > 0:
                work += alpha * uncached
            found.append(work / (load.prefill.tokens_per_s if by_rate else weight))
        return found

    def _speed(self, member: Member) -> float:
        return member.load.prefill.tokens_per_s if self.by_rate else member.weight

    def _shortlist(self, match: Match, key: int, candidates: Candidates) -> list[Member]:
        """Whom to compare where there are many, each once."""
        by_name, by_bit = candidates.by_name, candidates.by_bit
        replica = candidates.least_loaded()
        home = next(replica for replica in self.ring.walk(PrefixHash(key)) if replica in by_name)
        chosen = {replica: by_name[replica], home: by_name[home]}
        mask, seen = candidates.mask, 0
        for _blocks, holders in reversed(match.levels[-2:]):
            for bit in window(mask & holders & ~seen, key):
                member = by_bit[bit]
                chosen[member.replica] = member
            seen = holders
        return list(chosen.values())


def home_key(chain: Sequence[int], match: Match, tier1: PrefixHash | None) -> int:
    """What names a prompt's home: the first block that nobody holds, else its last one; of a short prompt, tier 1."""
    return chain[min(match.blocks, len(chain) - 1)] if chain else tier1 or 0


def window(mask: int, key: int) -> Iterator[int]:
    """Up to ``HOLDERS`` bits of a mask, from a place on that the key names, and around."""
    if mask.bit_count() <= HOLDERS:
        yield from _lowest(mask, HOLDERS)
        return
    start = key % mask.bit_length()
    above = mask >> start << start
    yield from _lowest(above, HOLDERS)
    yield from _lowest(mask ^ above, HOLDERS - above.bit_count())


def _lowest(mask: int, limit: int) -> Iterator[int]:
    """Its lowest bits, at most so many."""
    while mask and limit > 0:
        bit = mask & -mask
        yield bit
        mask ^= bit
        limit -= 1
