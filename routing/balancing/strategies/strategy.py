"""Base class of strategies, and the keys of a request that they use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from routing.balancing.candidates import Candidates, Choice
from routing.types import PrefixHash, TargetId


class MediaKey(NamedTuple):
    """The first image, sound or file of a prompt."""

    key: int  # of its content, whatever text is around it
    block: int  # of the chain, in which it begins


class Keys(Protocol):
    """What strategies know about a request. Computed on first use, and cached."""

    @property
    def session(self) -> PrefixHash | None:
        """Key of the session; None if the request has none."""
        ...

    @property
    def conversation(self) -> PrefixHash | None:
        """The session's key if it names one conversation and not, for example, a user; else None."""
        ...

    @property
    def tier1(self) -> PrefixHash | None:
        """Key of the tier-1 prefix, which a whole task group shares; None if the prefix is empty.

        The boundary is the group's ``tier1``, else its pool's, else the policy's.
        """
        ...

    @property
    def tier2(self) -> PrefixHash | None:
        """Key of the conversation: its session, else the tier-1 prefix and the next message; None without either."""
        ...

    @property
    def chain(self) -> Sequence[int]:
        """Chained hashes of the prompt's whole blocks, for the residency."""
        ...

    @property
    def media(self) -> MediaKey | None:
        """The first image, sound or file; None without one."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Estimated length of the prompt."""
        ...

    @property
    def estimate(self) -> int:
        """``prompt_tokens`` by ``block_tokens`` alone, without ``add_surplus``."""
        ...

    @property
    def block_tokens(self) -> int:
        """Estimated tokens of a block of the chain, if nothing else is known of it."""
        ...

    def add_surplus(self, tokens: int) -> None:
        """Correct ``prompt_tokens`` by what is known of the prompt's blocks, relative to ``estimate``."""
        ...


class Estimate(NamedTuple):
    """How a strategy rates one candidate; None where it does not compute the value."""

    hit_tokens: int | None = None  # predicted cached tokens there
    cost: float | None = None  # the least is chosen


class Strategy:
    """Chooses one of the candidates. Has no side effects except on its own counters; costs microseconds."""

    def choose(self, keys: Keys, candidates: Candidates) -> Choice:
        """Choose among ``candidates``, the eligible replicas of the request's group, at least one."""
        raise NotImplementedError

    def choose_fallback(self, keys: Keys, candidates: Candidates) -> Choice:
        """Choose a replica to name after the chosen one. It may get no request, so turns are not counted."""
        return self.choose(keys, candidates)

    def estimate(self, _keys: Keys, _candidates: Candidates, targets: Sequence[TargetId]) -> list[Estimate]:
        """The values of some candidates that ``choose`` compares, as of now. Changes nothing."""
        return [Estimate()] * len(targets)

    def count_request(self, keys: Keys, uncached_tokens: int) -> None:
        """Count a request that was sent, with the tokens that it leaves to prefill; not its retries."""

    def preferred_count(self, _prefix: PrefixHash) -> int | None:
        """How many of the first replicas in ring order share a tier-1 prefix; None: all of them."""
        return None

    def carry_over(self, before: Any) -> None:
        """Continue with what a strategy of the same kind and settings learnt for the same requests."""
