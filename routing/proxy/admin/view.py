"""What the admin port shows and does, of one router or of several workers together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from routing import build
from routing.proxy.configuration.store import Applied, ConfigStore
from routing.proxy.metrics.exposition import PREFIX, header, labels


class View(Protocol):
    """Whoever can show and do that."""

    @property
    def name(self) -> str:
        """The router's name."""
        ...

    @property
    def boot(self) -> str:
        """Tells one life of the router from the next."""
        ...

    @property
    def store(self) -> ConfigStore:
        """The configuration in force."""
        ...

    async def take(self, document: bytes) -> Applied:
        """Put a pushed configuration into force; NackError if it is refused, NotNowError if it was not judged."""
        ...

    @property
    def not_ready_reason(self) -> str | None:
        """Why no traffic should come here; None when it may."""
        ...

    @property
    def warming(self) -> dict[str, dict[str, int]]:
        """How far each replica is that warms up, by name."""
        ...

    async def metrics(self, *, is_fine: bool = False) -> str:
        """Everything counted, as Prometheus text; histograms with all their edges where ``is_fine``."""
        ...

    @property
    def health_epoch(self) -> int | None:
        """Changes with any replica's health; None where that is only known by looking."""
        ...

    async def replicas(self) -> list[dict[str, Any]]:
        """Every configured replica, its health and its load."""
        ...

    async def seen_replicas(self) -> list[dict[str, Any]]:
        """The same, as they were seen last: for who looks all the time."""
        ...

    async def decisions(self, after: int, limit: int, ratio: float) -> dict[str, Any]:
        """Decisions after a sequence number, oldest first, with this part of their block hashes."""
        ...

    async def explain(self, asked: bytes) -> dict[str, Any]:
        """The decision that a request would get now; RefusalError if it gets none."""
        ...


def about_lines(view: View, version: str) -> Iterator[str]:
    """Which router this is, and what it runs."""
    yield from header("info", "gauge", "This router.")
    yield f"{PREFIX}info{{{labels(router=view.name, boot=view.boot, **build.facts(version))}}} 1"
    applied = view.store.applied
    if applied is not None:
        yield from header("config_revision", "gauge", "The configuration in force.")
        yield f"{PREFIX}config_revision {applied.snapshot.revision}"
        yield from header("config_applied_timestamp_seconds", "gauge", "Unix time since when it is.")
        yield f"{PREFIX}config_applied_timestamp_seconds {applied.at.timestamp()}"
