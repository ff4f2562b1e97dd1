"""How long a client may still take for a body: each read has a deadline, and the whole has an average to keep.

Theory of operation. Bytes buy time: after the grace, a body of ``n`` bytes so far must be no older than ``n`` divided
by the least rate. So a body that trickles is let go although it never stops, and one that came fast may pause. It is
asked only where a body does not come whole in one read.
"""

from __future__ import annotations

from routing.proxy.http.request import Head
from routing.schema import Limits


class BodyPace:
    """The body that one connection waits for."""

    __slots__ = ("_grace_until", "_head")

    def __init__(self) -> None:
        self._head: Head | None = None  # of the request whose body is timed
        self._grace_until = 0.0

    def wait_s(self, head: Head, body_bytes: int, now: float, limits: Limits) -> float:
        """How many seconds from ``now`` to wait for more of a body; below 0 where it is too slow already."""
        if self._head is not head:
            self._head = head
            self._grace_until = now + limits.body_grace_s
        rate = limits.min_body_bytes_per_s
        if not rate:
            return limits.body_idle_timeout_s
        return min(limits.body_idle_timeout_s, self._grace_until + body_bytes / rate - now)

    def start_over(self) -> None:
        """Time what comes from now on: it was not read for a while, and that was not the client's doing."""
        self._head = None
