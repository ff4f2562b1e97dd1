"""One replica's warm-up, from the moment it joins until it takes traffic.

Theory of operation. A replica that joins is kept back from requests. As soon as its health check finds it up it is sent
the openings that it will own, the worthiest first, a few at a time; when all have ended, well or not, it takes traffic,
and starts slowly as any replica that joins. Whatever goes wrong shortens that: the time limit, ``FAILURES`` requests
in a row that fail, a request of a client that nobody else can serve. One that goes down meanwhile begins anew when it
is up again. Nothing here waits: the router's tick looks at it, and its own requests' ends push it on.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from msgspec import Struct

from routing.core.prompt.splice import with_member
from routing.core.targets import rank_of
from routing.core.types import ReplicaId, TargetId
from routing.core.warming.openings import Cut
from routing.proxy.warming.call import WarmUpCall, request_for
from routing.proxy.warming.tally import Ending

if TYPE_CHECKING:
    from routing.proxy.router import Router
    from routing.proxy.warming.warm_ups import WarmUps
    from routing.schema import WarmUp as WarmUpSettings

FAILURES = 3  # requests in a row that fail, after which no more are sent


class Progress(Struct):
    """How far a replica is. Tokens are estimated."""

    prefixes_done: int = 0
    prefixes: int = 0
    tokens_done: int = 0
    tokens: int = 0


class ReplicaWarmUp:
    """One replica's."""

    def __init__(self, owner: WarmUps, router: Router, pool: str, replica: ReplicaId, settings: WarmUpSettings) -> None:
        self.pool = pool
        self.replica = replica
        self.progress = Progress()
        self._owner = owner
        self._router = router
        self._settings = settings
        self._until = router.loop.time() + settings.time_limit_s
        self._priority = settings.priority
        self._pending: deque[tuple[Cut, TargetId]] | None = None  # None: it is not known to be up yet
        self._calls: set[WarmUpCall] = set()
        self._failures = 0  # in a row

    def look(self, now: float) -> None:
        """Go on by what is known of the replica now."""
        is_up = self._router.checks.finding(self.replica).is_up
        if is_up is False:
            self._owner.end(self, Ending.WITHDRAWN)
        elif now >= self._until:
            self._owner.end(self, Ending.TIME_LIMIT)
        elif is_up and self._pending is None:
            self._pending = deque(self._owner.chosen(self))
            self.progress.prefixes = len(self._pending)
            self.progress.tokens = sum(cut.tokens for cut, _ in self._pending)
            self._send_more()

    def ended(self, call: WarmUpCall, *, ok: bool) -> None:
        """One request is over."""
        self._calls.discard(call)
        if not ok and call.refuses_priority and self._pending is not None:
            self._priority = None
            self._pending.appendleft((call.cut, call.target))
            self._send_more()
            return
        self.progress.prefixes_done += 1
        self.progress.tokens_done += call.cut.tokens
        self._failures = 0 if ok else self._failures + 1
        self._owner.sent(self, call.cut, call.target, ok=ok)
        if self._failures >= FAILURES:
            self._owner.end(self, Ending.FAILING)
        else:
            self._send_more()

    def abandon(self) -> None:
        """Send nothing more, and wait for nothing."""
        self._pending = deque()
        for call in list(self._calls):
            call.abandon()
        self._calls.clear()

    def _send_more(self) -> None:
        serving, pending = self._router.serving, self._pending
        concurrency = math.ceil(self._settings.concurrency / self._owner.parts)
        while serving is not None and pending and len(self._calls) < concurrency:
            cut, target = pending.popleft()
            body = cut.body if self._priority is None else with_member(cut.body, "priority", self._priority)
            request = request_for(cut.path, body, self._owner.new_id())
            call = WarmUpCall(self, cut, target, request, with_priority=self._priority is not None)
            self._calls.add(call)
            call.start(serving.links[self.replica], rank_of(target), serving.limits)
        if not self._calls and not pending:
            self._owner.end(self, Ending.COMPLETE)
