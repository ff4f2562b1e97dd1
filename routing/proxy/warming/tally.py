"""What warm-ups came to, by pool and replica."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import StrEnum

from routing.proxy.metrics.exposition import PREFIX, header, labels

Key = tuple[str, str, str]  # pool, replica, and how it ended


class Ending(StrEnum):
    """Why a warm-up is over."""

    COMPLETE = "complete"  # everything was sent
    TIME_LIMIT = "time_limit"
    FAILING = "failing"  # its requests fail
    NEEDED = "needed"  # nobody else could serve a request
    WITHDRAWN = "withdrawn"  # the replica went down, is no longer to take traffic or to warm up, or left


class Tally:
    """Counted since the process began, of the replicas that are configured."""

    def __init__(self) -> None:
        self._ended: dict[Key, int] = {}
        self._prefixes: dict[Key, int] = {}
        self._tokens: dict[Key, int] = {}

    def ended(self, pool: str, replica: str, ending: Ending) -> None:
        """Count a warm-up that is over."""
        _add(self._ended, (pool, replica, ending), 1)

    def sent(self, pool: str, replica: str, tokens: int, *, ok: bool) -> None:
        """Count an opening that was sent."""
        outcome = "ok" if ok else "failed"
        _add(self._prefixes, (pool, replica, outcome), 1)
        _add(self._tokens, (pool, replica, outcome), tokens)

    def forget_all_but(self, replicas: Collection[str]) -> None:
        """Drop the figures of other replicas."""
        for counted in (self._ended, self._prefixes, self._tokens):
            for key in [key for key in counted if key[1] not in replicas]:
                del counted[key]

    def lines(self) -> Iterator[str]:
        """Prometheus text."""
        for name, label, text, counted in (
            ("warm_ups_total", "ending", "Warm-ups that ended, by why.", self._ended),
            ("warm_up_prefixes_total", "outcome", "Openings sent to replicas that joined.", self._prefixes),
            ("warm_up_tokens_total", "outcome", "Estimated tokens of those.", self._tokens),
        ):
            yield from header(name, "counter", text)
            for (pool, replica, how), number in list(counted.items()):
                where = labels(pool=pool, replica=replica, **{label: how})
                yield f"{PREFIX}{name}{{{where}}} {number}"


def _add(counted: dict[Key, int], key: Key, number: int) -> None:
    counted[key] = counted.get(key, 0) + number
