"""The candidates whose cost is worth computing.

Theory of operation. Whatever a cost is made of, it grows with the load and falls with what a replica holds of the
prompt, so the least is found among few: the least loaded of all, and of those who hold most. Up to ``EVERYBODY``
candidates all are looked at; of more, the home of the prompt, the least loaded and up to ``HOLDERS`` of those who hold
the longest known opening and of those who hold less. Where more hold it than are looked at, a window is cut out of
them that the prompt's key places, so that routers look at the same ones and a prompt's requests stay together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from routing.core.candidates import Candidates
from routing.core.residency import Match
from routing.core.types import ReplicaId

EVERYBODY = 16  # candidates up to which all are looked at
HOLDERS = 8  # looked at of each of two depths


def shortlist(candidates: Candidates, match: Match, home_order: Iterable[ReplicaId], key: int) -> list[ReplicaId]:
    """Whom to compare; ``home_order`` may name replicas that are no candidates. At least one."""
    if len(candidates) <= EVERYBODY:
        return list(candidates)
    chosen = dict.fromkeys((candidates.least_loaded(),))
    home = next((replica for replica in home_order if replica in candidates), None)
    if home is not None:
        chosen[home] = None
    seen = 0
    for _blocks, mask in reversed(match.levels[-2:]):
        for bit in _window(mask & ~seen & candidates.mask, key):
            chosen[candidates.by_bit[bit]] = None
        seen |= mask
    return list(chosen)


def _window(mask: int, key: int) -> Iterator[int]:
    """Up to ``HOLDERS`` bits of a mask, from a place on that the key names, and around."""
    if mask.bit_count() > HOLDERS:
        start = key % mask.bit_length()
        above = mask >> start << start
        yield from _lowest(above, taken := min(HOLDERS, above.bit_count()))
        yield from _lowest(mask ^ above, HOLDERS - taken)
    else:
        yield from _lowest(mask, HOLDERS)


def _lowest(mask: int, limit: int) -> Iterator[int]:
    while mask and limit:
        bit = mask & -mask
        yield bit
        mask ^= bit
        limit -= 1
