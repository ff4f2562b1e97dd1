"""What a strategy is, and what it may ask about a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from routing.balancing.candidates import Candidates
from routing.types import Choice, PrefixHash, TargetId


class Keys(Protocol):
    """What a strategy may ask about a request. Computed when asked; what is asked twice is kept."""

    @property
    def session(self) -> PrefixHash | None:
        """Key of the session; None when the request names none."""
        ...

    @property
    def tier1(self) -> PrefixHash | None:
        """Key of the opening that a whole task group shares; None when that is empty.

        It ends where the group's ``tier1`` says, else its pool's, else the policy's settings.
        """
        ...

    @property
    def tier2(self) -> PrefixHash | None:
        """Key of the conversation: its session, else the opening and the message behind it; None without either."""
        ...

    @property
    def chain(self) -> Sequence[int]:
        """Chained hashes of the prompt's whole blocks, as long as the residency's: what that is asked with."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Estimated length of the prompt."""
        ...

    @property
    def block_tokens(self) -> int:
        """Estimated tokens of a block of the chain."""
        ...


class Strategy(Protocol):
    """Pick one of the candidates. Pure but for its own counters; costs microseconds."""

    def choose(self, keys: Keys, candidates: Candidates) -> Choice:
        """Choose among ``candidates`` (eligible replicas of the request's group, at least one)."""
        ...


class Weighed(NamedTuple):
    """What a strategy thinks of one candidate; None where it does not ask."""

    hit_tokens: int | None = None  # predicted cached tokens there
    cost: float | None = None  # the least is chosen


@runtime_checkable
class Weighs(Protocol):
    """A strategy that compares candidates by figures, and can show them."""

    def weigh(self, keys: Keys, candidates: Candidates, targets: Sequence[TargetId]) -> list[Weighed]:
        """The figures of some of the candidates, as ``choose`` computes them at this moment. Changes nothing."""
        ...


@runtime_checkable
class FollowsTraffic(Protocol):
    """A strategy that goes by the requests that came: ``choose`` counts none of them."""

    def count_request(self, keys: Keys) -> None:
        """A request is sent. Called once for each, however often it is tried, and never for one that is explained."""
        ...


@runtime_checkable
class CarriesOver(Protocol):
    """A strategy that learns from its requests, and goes on from there in the next configuration."""

    def carry_over(self, before: Any) -> None:
        """Know what a strategy of the same kind and settings knew, for the same requests."""
        ...
