"""What it costs that replicas were away, wherever their prompts went. Pure.

Theory of operation. The prompts of a replica that goes away are sent to others, and back to it when it returns: each
time they meet a cache that does not know them, also at replicas that nothing happened to. An opening is at home at a
replica with the part of its tokens that it had there before. That part of what it usually hits is the most that is put
down to the replica, and no more than the opening lost. Openings that had next to nothing there are the witnesses: where
they hit less than usual too, something else is at work, and what is put down shrinks as their hit rate did. Openings
that nobody sent before are put down to nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from telemetry.causes.evidence import Prefix, Sums, added, grouped

ELSEWHERE = 0.1  # of its tokens, at most, that a witness had at replicas that were away
WITNESSES = 0.1  # of all tokens, at least, that theirs have to be
Key = tuple[str, int | None]  # task group, opening


def explained_ratio(
    before: Sequence[Prefix], now: Sequence[Prefix], away: Collection[str], cold: Collection[str] = ()
) -> float | None:
    """The part of the tokens of now that would have been cached had nobody been away, 0 to 1; None unless known.

    Openings at replicas that are ``cold`` lost what they lost there to that, wherever they were at home.
    """
    total = added(it.sums for it in now).prompt
    usual = grouped(before, _key)
    if not total or not usual:
        return None
    gone = grouped((it for it in before if it.replica in away), _key)
    shares = {key: gone.get(key, Sums()).prompt / sums.prompt for key, sums in usual.items() if sums.prompt}
    warm = grouped((it for it in now if it.replica not in cold), _key)
    kept = _kept(usual, {key: sums for key, sums in warm.items() if shares.get(key, 1.0) < ELSEWHERE}, total)
    lost = sum(_lost(sums, kept * (usual[key].rate or 0.0), shares[key]) for key, sums in warm.items() if key in shares)
    at_cold = grouped((it for it in now if it.replica in cold), _key)
    lost += sum(_lost(sums, kept * (usual[key].rate or 0.0), 1.0) for key, sums in at_cold.items() if key in shares)
    return lost / total


def _key(part: Prefix) -> Key:
    return part.group, part.prefix


def _lost(sums: Sums, usual: float, share: float) -> float:
    """Tokens of an opening that were not cached because a part of it was elsewhere."""
    return max(min(sums.lost(usual), share * usual * sums.prompt), 0.0)


def _kept(usual: dict[Key, Sums], witnesses: dict[Key, Sums], total: float) -> float:
    """What witnesses still hit of what they usually do, 0 to 1; 1 where they are too few to tell."""
    seen = added(witnesses.values())
    due = sum(sums.prompt * (usual[key].rate or 0.0) for key, sums in witnesses.items())
    return min(seen.cached / due, 1.0) if due and seen.prompt >= WITNESSES * total else 1.0
