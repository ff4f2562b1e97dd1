"""Where an exchange stands, and where it may go from there.

READING     its body is large, and another process reads it
PLACING     a replica is being chosen; synchronous
QUEUED      its pool or task group has as many requests at replicas as it may
CONNECTING  no kept-alive connection was free
AWAITING    sent; the answer's head may be here, but is held until the first byte of its body
JUDGING     an error of the replica is here, held until it is whole, because another replica may do better
STREAMING   bytes of the answer have gone to the client: from here on nothing is tried again
DONE        the end, reached exactly once; the load is given back whatever happened
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class State(IntEnum):
    """Where an exchange stands."""

    READING = 0
    PLACING = 1
    QUEUED = 2
    CONNECTING = 3
    AWAITING = 4
    JUDGING = 5
    STREAMING = 6
    DONE = 7


READING: Final = State.READING  # an enum's attributes are slow to look up
PLACING: Final = State.PLACING
QUEUED: Final = State.QUEUED
CONNECTING: Final = State.CONNECTING
AWAITING: Final = State.AWAITING
JUDGING: Final = State.JUDGING
STREAMING: Final = State.STREAMING
DONE: Final = State.DONE

NEXT: Final = {
    READING: {PLACING, DONE},
    PLACING: {READING, QUEUED, CONNECTING, AWAITING, DONE},
    QUEUED: {PLACING, DONE},
    CONNECTING: {PLACING, AWAITING, DONE},
    AWAITING: {PLACING, CONNECTING, JUDGING, STREAMING, DONE},
    JUDGING: {PLACING, CONNECTING, STREAMING, DONE},
    STREAMING: {DONE},
    DONE: set[State](),
}
