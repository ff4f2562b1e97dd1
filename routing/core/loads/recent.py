"""How the requests of late are shared out: who had more than is fair, and may give one up.

Theory of operation. Work that waits spreads a busy fleet. Where caches keep a fleet idle nothing waits, and whoever
holds what most prompts begin with costs least for all of them: it gets them all, and nobody is in its way until the
traffic grows. So a replica that had more than ``SHARE`` times its fair share of the requests of late, and ``FEW`` more
at that, gives one up to a replica that had no more than its own, that has no more work (nobody waits for the sake of
balance), and that would have to prefill only ``WORTH`` tokens more for each request that the first one had too many.
What many prompts begin with thus comes to be at as many replicas as its share of the traffic asks for, each paid for by
one prefill, and the more of it there is to prefill, the longer it stays where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from routing.core.loads.book import LoadBook
from routing.core.loads.candidate import Candidate

SHARE: Final = 1.15  # ratio to the fair share of recent requests
FEW: Final = 8.0  # requests: chance, or one conversation
WORTH: Final = 600.0  # tokens to prefill, 0.075 s at 8,000 a second, to be rid of one request beyond both


class Recent:
    """The shares of some replicas. What all of them had is summed up once in as many changes as there are replicas."""

    __slots__ = ("_at", "_book", "_fair", "_members", "_modest", "_summed_weight", "_weight")

    def __init__(self, members: Sequence[Candidate], book: LoadBook) -> None:
        self._members = members
        self._weight = sum([member.weight for member in members])
        self._book = book
        self._at: int | None = None  # in the book, when they were summed up
        self._summed_weight = 0.0  # what a request counted then
        self._fair = 0.0  # the limit of a replica of weight 1, but for ``FEW``
        self._modest: int | None = None  # made when it is first asked for

    def excess(self, member: Candidate) -> float:
        """Requests of late that a member had too many; below 0 where it had fewer than it may."""
        book = self._book
        if self._at is None or book.position - self._at > len(self._members) or book.weight_now < self._summed_weight:
            self._sum_up()
        return (member.load.recent - self._fair * member.weight) / book.weight_now - FEW

    def modest(self) -> int:
        """The bits of those who had not too many, as of the last sum."""
        if self._modest is None:
            self._modest = sum([member.bit for member in self._members if self.excess(member) <= 0])
        return self._modest

    def _sum_up(self) -> None:
        self._at, self._summed_weight = self._book.position, self._book.weight_now
        self._fair = SHARE * sum([member.load.recent for member in self._members]) / self._weight
        self._modest = None
