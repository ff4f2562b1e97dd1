"""What goes on beside requests for as long as the process does, whatever we did wrong in one of its rounds.

Theory of operation. A router does some things again and again beside its requests. A mistake of ours in one round must
not end all later ones: it is counted, said once for each kind of error, and after a pause, which is bounded and grows
while it fails on, the loop goes on. Being cancelled is how a loop ends. Counts are the process's, as its loops are.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum

from routing.proxy.log import defect

FIRST_PAUSE_S = 0.1  # after a failure, doubled up to LAST_PAUSE_S while there is no other end to it
LAST_PAUSE_S = 2.0

logger = logging.getLogger(__name__)


class Background(StrEnum):
    """What goes on beside requests."""

    HEALTH = "health"  # asks a replica
    UPKEEP = "upkeep"  # what the clock brings; finds replicas that hang
    EVENTS = "events"  # notices what happens
    ANNOUNCING = "announcing"  # tells the control plane
    WORKERS = "workers"  # looks at workers, and replaces those that ended
    LOADS = "loads"  # exchanges them among workers
    LIMITS = "limits"  # lets in who waits for room that another worker has given back


_failures: Counter[Background] = Counter()
_said: set[tuple[Background, str]] = set()


def failures() -> Mapping[Background, int]:
    """How often each loop has failed in this process."""
    return {what: _failures[what] for what in Background}


def pause_s(failures_in_a_row: int) -> float:
    """Seconds to wait after so many."""
    return min(LAST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures_in_a_row - 1, 20))


async def keep_going(what: Background, work: Callable[[], Awaitable[None]]) -> None:
    """Do work that has no end, or has none yet: whenever a mistake of ours ends it, anew."""
    time, in_a_row = asyncio.get_running_loop().time, 0
    while True:
        began_at = time()
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - the next round must come
            in_a_row = 1 if time() - began_at > LAST_PAUSE_S else in_a_row + 1
            note_failure(what, error)
        else:
            return
        await asyncio.sleep(pause_s(in_a_row))


def note_failure(what: Background, error: Exception) -> None:
    """Count it, and say it once for each kind of error."""
    _failures[what] += 1
    kind = (what, type(error).__name__)
    if kind not in _said:
        _said.add(kind)
        defect(logger, error, f"{what} loop")
