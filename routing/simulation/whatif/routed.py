"""The router's own strategy, deciding in a replay as it decides in production.

Load book and residency are used as the router uses them: dispatch at arrival, first byte at the first token, the
answer's cached tokens and the end at the last one. What a router cannot know it is not told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from routing.core.group_replicas import GroupReplicas
from routing.core.health.book import HealthBook
from routing.core.loads.book import LoadBook, Ticket
from routing.core.residency.residency import RUN_TOKENS, Residency
from routing.core.types import Choice, Reason
from routing.placement.placement import count_as_sent
from routing.schema import ReplicaConfig, ResidencySettings, Settings
from routing.simulation.whatif.fast_engine import FastEngine, FastEngineConfig, ModelledRequest
from routing.simulation.whatif.keys import KeyBook
from routing.strategies.registry import build_strategy
from routing.strategies.strategy import FollowsTraffic
from routing.workload.columns import Columns

# The residency enters and evicts blocks by runs. In a trace's blocks of 512 tokens the router's runs would be of two;
# longer ones are a third faster to replay and move no mean TTFT by more than 1 %.
RUN_BLOCKS = 16


class Clock:
    """The time of a replay, seconds; apart from who sets it, so that nothing refers to itself in a circle."""

    __slots__ = ("now_s",)

    def __init__(self) -> None:
        self.now_s = 0.0

    def read(self) -> float:
        """What the load book asks."""
        return self.now_s


class Routed:
    """One strategy with everything that a router keeps for it."""

    def __init__(self, settings: Settings, columns: Columns, config: FastEngineConfig, replicas: int) -> None:
        configs = [
            ReplicaConfig(
                name=f"replica-{number + 1}",
                url="http://simulated",
                block_tokens=config.block_tokens,
                capacity_blocks=config.blocks,
            )
            for number in range(replicas)
        ]
        self.reasons: Counter[Reason] = Counter()
        self._clock = Clock()
        self.book = LoadBook(self._clock.read)
        residency = Residency(
            block_tokens=config.block_tokens, run_tokens=max(RUN_TOKENS, RUN_BLOCKS * config.block_tokens)
        )
        self._asked = residency if isinstance(settings, ResidencySettings) else None
        self._keys = KeyBook(settings, columns)
        self._number = {it.name: number for number, it in enumerate(configs)}
        modelled = GroupReplicas(configs, self.book, residency=residency)
        self._strategy = build_strategy(settings, modelled)
        self._counting = self._strategy if isinstance(self._strategy, FollowsTraffic) else None
        self._candidates = modelled.candidates(HealthBook())

    def place(self, request: ModelledRequest, _engines: Sequence[FastEngine], now_s: float) -> int:
        """Ask the strategy, and count the request as sent."""
        choice, keys = self.ask(request, now_s), self._keys.of(request.index)
        self.reasons[choice.reason] += 1
        if self._counting is not None:
            self._counting.count_request(keys)
        request.note = count_as_sent(choice, keys, self.book, self._asked)
        return self._number[choice.target]

    def ask(self, request: ModelledRequest, now_s: float) -> Choice:
        """Where the strategy would send a request now."""
        self._clock.now_s = now_s
        return self._strategy.choose(self._keys.of(request.index), self._candidates)

    def first_token(self, request: ModelledRequest, now_s: float) -> None:
        """The first byte of the answer reaches the router."""
        self._clock.now_s = now_s
        ticket: Ticket = request.note
        ticket.first_byte()

    def ended(self, request: ModelledRequest, now_s: float) -> None:
        """The answer is whole. Its usage says how much was cached, to whoever learns from that."""
        self._clock.now_s = now_s
        ticket: Ticket = request.note
        if self._asked is not None:
            ticket.answered(request.first_token_s - request.arrived_s, request.prompt_tokens, request.cached_tokens)
        ticket.end()
