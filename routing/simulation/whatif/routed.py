"""The router's own strategy, deciding in a replay as it decides in production.

The load book is used as the router uses it: dispatch at arrival, first byte at the first token, end at the last one.
What a router cannot know it is not told. A trace has no text, so its keys stand in for those of a prompt:

* tier 1 is the id of the block in which the policy's boundary falls, a token taken as 4 bytes: with ``boundary_bytes``
  up to 2048 the first block, the system prompt of Mooncake's traces; 4096 the second. ``system`` is the first block.
* the session is unknown, as in the traces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from routing.core.fleet import Fleet
from routing.core.health import HealthBook
from routing.core.load import LoadBook, Ticket
from routing.core.types import PrefixHash, Reason
from routing.schema import Boundary, PrefixHashSettings, ReplicaConfig, Settings
from routing.simulation.whatif.engine import EngineModel, FastEngine, Job
from routing.strategies.registry import build_strategy
from routing.workload.columns import Columns

TOKEN_BYTES = 4  # of text, as the router estimates


class NotInTracesError(ValueError):
    """A setting that asks for something which a trace does not tell."""


class TraceKeys:
    """What a strategy may ask about one request of a trace."""

    __slots__ = ("_columns", "_depth", "_index")

    session: PrefixHash | None = None

    def __init__(self, columns: Columns, index: int, depth: int) -> None:
        self._columns = columns
        self._index = index
        self._depth = depth  # blocks of the tier-1 prefix, >= 1

    @property
    def tier1(self) -> PrefixHash | None:
        """Key of the opening: of its last block, which stands for all before it."""
        columns, index = self._columns, self._index
        start, end = columns.starts[index], columns.starts[index + 1]
        last = columns.ids[min(start + self._depth, end) - 1]
        return PrefixHash(xxh3_64_intdigest(last.to_bytes(8, "little")))


class Routed:
    """One strategy with everything that a router keeps for it."""

    def __init__(self, settings: Settings, columns: Columns, model: EngineModel, replicas: int) -> None:
        members = [
            ReplicaConfig(
                name=f"replica-{number + 1}",
                url="http://simulated",
                block_tokens=model.block_tokens,
                capacity_blocks=model.blocks,
            )
            for number in range(replicas)
        ]
        self.reasons: Counter[Reason] = Counter()
        self.book = LoadBook()
        self._columns = columns
        self._depth = tier1_depth(settings, columns.block_tokens)
        self._number = {member.name: number for number, member in enumerate(members)}
        fleet = Fleet(members, self.book)
        self._strategy = build_strategy(settings, fleet)
        self._candidates = fleet.candidates(HealthBook())

    def place(self, job: Job, _engines: Sequence[FastEngine], _now_s: float) -> int:
        """Ask the strategy, and count the request as sent."""
        choice = self._strategy.choose(TraceKeys(self._columns, job.index, self._depth), self._candidates)
        job.ticket = self.book.dispatch(choice.replica, job.prompt_tokens)
        self.reasons[choice.reason] += 1
        return self._number[choice.replica]

    def first_token(self, job: Job, _now_s: float) -> None:
        """The first byte of the answer reaches the router."""
        ticket: Ticket = job.ticket
        ticket.first_byte()

    def ended(self, job: Job, _now_s: float) -> None:
        """The answer is whole."""
        ticket: Ticket = job.ticket
        ticket.end()


def tier1_depth(settings: Settings, block_tokens: int) -> int:
    """The block in which a policy's tier-1 prefix ends, counted from 1; NotInTracesError for ends of messages."""
    if not isinstance(settings, PrefixHashSettings) or settings.boundary is Boundary.SYSTEM:
        return 1
    if settings.boundary is Boundary.MESSAGES:
        raise NotInTracesError("boundary messages: a trace tells no messages; use bytes with boundary_bytes, or system")
    return -(-settings.boundary_bytes // (block_tokens * TOKEN_BYTES))
