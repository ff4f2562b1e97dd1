"""Limits that processes share: what a budget and a gate ask of the memory that they have in common."""

from __future__ import annotations

from typing import Protocol


class Places(Protocol):
    """Room that processes share. Order is a number: who wants to run sooner has the higher one, and 0 is nobody's."""

    def take(self, most: int, order: float) -> bool:
        """Take a place, unless ``most`` are taken by all processes together, or somebody elsewhere is to go first."""
        ...

    def give(self) -> None:
        """Give one back."""
        ...

    def tell_line(self, waiting: int, order: float) -> None:
        """Tell the others how many wait here, and the order of the first."""
        ...

    @property
    def running(self) -> int:
        """Places that are taken, by all processes together."""
        ...

    @property
    def waiting_elsewhere(self) -> int:
        """Who waits in other processes."""
        ...


class SharedLimits(Protocol):
    """What a process shares with others; None for what it counts by itself."""

    def cell(self, name: str) -> memoryview[float] | None:
        """The one number of a budget."""
        ...

    def places(self, name: str) -> Places | None:
        """The room of a gate."""
        ...
