"""One opening on its way to a joining replica: sent once, its answer thrown away.

One replica's warm-up, from the moment it joins until it takes traffic.

Theory of operation. A replica that joins is kept back from requests. As soon as its health check finds it up it is sent
the openings that it will own, the worthiest first, a few at a time; when all have ended, well or not, it takes traffic,
and starts slowly as any replica that joins. Whatever goes wrong shortens that: the time limit, ``FAILURES`` requests
in a row that fail, a request of a client that nobody else can serve. One that goes down meanwhile begins anew when it
is up again. Nothing here waits: the router's tick looks at it, and its own requests' ends push it on.

What warm-ups came to, by pool and replica.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Collection, Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from routing.balancing.replicas import rank_of
from routing.balancing.warm_up_prefixes import WarmUpPrompt
from routing.http.loop import log_exceptions
from routing.http.request import Request, RequestHead
from routing.log import defect
from routing.observability.exposition import PREFIX, header, labels
from routing.prompt.rewrite import with_member
from routing.types import ReplicaId, TargetId

if TYPE_CHECKING:
    from routing.health.balancer import Balancer
    from routing.health.checks import HealthChecks
    from routing.health.warm_ups import WarmUps
    from routing.http.response import ResponseHead
    from routing.schema import Limits
    from routing.schema import WarmUp as WarmUpSettings
    from routing.upstream.connection import Failure, UpstreamConnection
    from routing.upstream.pool import ConnectionPool


HELD_BYTES = 4096  # of an answer, to see why it is a refusal
BAD_REQUEST = 400
NO_PRIORITIES = b"riority scheduling"  # in vLLM's 400 where it schedules by arrival

logger = logging.getLogger(__name__)


class Owner(Protocol):
    """Who wants to know how a call ended."""

    def ended(self, call: WarmUpCall, *, ok: bool) -> None:
        """It is over, well or not."""
        ...


class WarmUpCall:
    """One request and its answer; a listener of the replica's connections."""

    __slots__ = (
        "_held",
        "_is_over",
        "_limits",
        "_link",
        "_owner",
        "_rank",
        "_request",
        "_upstream",
        "_with_priority",
        "cut",
        "target",
    )

    _link: ConnectionPool  # once started, as the rest
    _rank: int | None
    _limits: Limits

    def __init__(
        self, owner: Owner, cut: WarmUpPrompt, target: TargetId, request: Request, *, with_priority: bool
    ) -> None:
        self.cut = cut
        self.target = target
        self._owner = owner
        self._request = request
        self._with_priority = with_priority
        self._upstream: UpstreamConnection | None = None
        self._held = b""
        self._is_over = False

    def start(self, link: ConnectionPool, rank: int | None, limits: Limits) -> None:
        """Send it, on a kept-alive connection or a new one."""
        self._link, self._rank, self._limits = link, rank, limits
        upstream = link.take_idle()
        if upstream is None:
            link.connect(self, limits.connect_timeout_s)
        else:
            self._send(upstream)

    def abandon(self) -> None:
        """Nobody waits for it any more: the replica is to stop."""
        self._is_over = True
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.abort()

    @property
    def refuses_priority(self) -> bool:
        """Whether it was sent with one, and the answer says that this engine takes none."""
        return self._with_priority and NO_PRIORITIES in self._held

    # --- what its connection tells ---

    @log_exceptions
    def on_connected(self, upstream: UpstreamConnection) -> None:
        """Send it there."""
        if self._is_over:
            upstream.release()
        else:
            self._send(upstream)

    @log_exceptions
    def on_connect_failed(self, reason: str, *, is_local: bool) -> None:  # noqa: ARG002 - health checks find out why
        """There is no connection."""
        self._end(ok=False)

    @log_exceptions
    def on_response(self, answer: ResponseHead, data: bytes, last: bool) -> None:
        """Wait for its end; of a refusal keep the beginning."""
        if answer.status == BAD_REQUEST and len(self._held) < HELD_BYTES:
            self._held += data
        if last:
            self._upstream = None  # it has gone back to its pool
            self._end(ok=answer.status < BAD_REQUEST)

    @log_exceptions
    def on_upstream_failed(self, failure: Failure, *, is_stale: bool) -> None:  # noqa: ARG002 - any failure is one
        """No answer will come; where a kept-alive connection had just ended, on a new one perhaps."""
        self._upstream = None
        if is_stale and not self._is_over:
            self._link.connect(self, self._limits.connect_timeout_s)
        else:
            self._end(ok=False)

    # --- what watchers ask: no client waits for it ---

    def is_stream(self) -> bool:
        """Whether the first byte must come with the first token."""
        return False

    @property
    def waiting_tokens(self) -> int:
        """Estimated tokens to prefill."""
        return self.cut.tokens

    @property
    def queued_tokens(self) -> float:
        """The same: nothing is counted ahead of it."""
        return self.cut.tokens

    @property
    def prompt_tokens(self) -> int:
        """Estimated length of the prompt."""
        return self.cut.tokens

    def on_stalled(self) -> None:
        """The replica hangs: the time limit sees to that."""

    # --- its end ---

    def abort_on_error(self, error: Exception) -> None:
        """A mistake of ours."""
        defect(logger, error, "warm-up")
        self.abandon()
        self._owner.ended(self, ok=False)

    def _send(self, upstream: UpstreamConnection) -> None:
        self._upstream = upstream
        upstream.send(
            self,
            self._link.address.head(self._request, self._rank, body_bytes=len(self._request.body)),
            self._request.body,
            first_byte_s=self._limits.first_byte_timeout_s,
            idle_s=self._limits.idle_timeout_s,
            bodyless=False,
        )

    def _end(self, *, ok: bool) -> None:
        if not self._is_over:
            self._is_over = True
            self._owner.ended(self, ok=ok)


def request_for(path: str, body: bytes, name: str) -> Request:
    """A request as a client might have sent it."""
    head = RequestHead(b"POST", path.encode(), http11=True)
    head.lines = b"Content-Type: application/json\r\n"
    return Request(head, body, name)


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


FAILURES = 3  # requests in a row that fail, after which no more are sent


class Progress(Struct):
    """How far a replica is. Tokens are estimated."""

    prefixes_done: int = 0
    prefixes: int = 0
    tokens_done: int = 0
    tokens: int = 0


class ReplicaWarmUp:
    """One replica's."""

    def __init__(
        self,
        owner: WarmUps,
        balancer: Balancer,
        checks: HealthChecks,
        pool: str,
        replica: ReplicaId,
        settings: WarmUpSettings,
    ) -> None:
        self.pool = pool
        self.replica = replica
        self.progress = Progress()
        self._owner = owner
        self._balancer = balancer
        self._checks = checks
        self._settings = settings
        self._until = balancer.loop.time() + settings.time_limit_s
        self._priority = settings.priority
        self._pending: deque[tuple[WarmUpPrompt, TargetId]] | None = None  # None: it is not known to be up yet
        self._calls: set[WarmUpCall] = set()
        self._failures = 0  # in a row

    def look(self, now: float) -> None:
        """Go on by what is known of the replica now."""
        is_up = self._checks.status(self.replica).is_up
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
        fleet, pending = self._balancer.fleet, self._pending
        concurrency = math.ceil(self._settings.concurrency / self._owner.parts)
        while fleet is not None and pending and len(self._calls) < concurrency:
            cut, target = pending.popleft()
            body = cut.body if self._priority is None else with_member(cut.body, "priority", self._priority)
            request = request_for(cut.path, body, self._owner.new_id())
            call = WarmUpCall(self, cut, target, request, with_priority=self._priority is not None)
            self._calls.add(call)
            call.start(fleet.connection_pools[self.replica], rank_of(target), fleet.config.limits)
        if not self._calls and not pending:
            self._owner.end(self, Ending.COMPLETE)
