"""The input of the detector: what each task group of a pool sent and got from caches in one short step of time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True, slots=True)
class GroupBin:
    """One task group in one bin: responses that reported their cached tokens."""

    prompt: float  # tokens, above 0
    cached: float  # tokens
    requests: float

    @property
    def ratio(self) -> float:
        """Hit rate, 0 to 1."""
        return min(max(self.cached / self.prompt, 0.0), 1.0)


@dataclass(frozen=True, slots=True)
class Bin:
    """One step of a pool. A task group without traffic is absent."""

    end: datetime
    groups: Mapping[str, GroupBin] = field(default_factory=dict)

    @property
    def prompt(self) -> float:
        """Tokens of all task groups."""
        return sum(one.prompt for one in self.groups.values())

    @property
    def requests(self) -> float:
        """Requests of all task groups."""
        return sum(one.requests for one in self.groups.values())

    @property
    def cached(self) -> float:
        """Cached tokens of all task groups."""
        return sum(one.cached for one in self.groups.values())

    def of_group(self, group: str) -> Bin:
        """The same bin with one task group alone."""
        return Bin(self.end, {name: one for name, one in self.groups.items() if name == group})
