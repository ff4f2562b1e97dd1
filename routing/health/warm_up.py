"""The warm-up of one joining replica, and the requests that it sends.

Theory of operation. A joining replica is kept back from clients' requests. Once its health check passes, it is sent the
prefixes that it will own, the most valuable first, a few at a time; when all have ended, successfully or not, it takes
traffic with a slow start. The time limit, ``MAX_FAILURES`` failed requests in a row, or a client's request that no
other replica can serve end the warm-up early. If the replica goes down meanwhile, its warm-up starts anew when it is
up again. Nothing here waits: the router's housekeeping and the ends of its own requests advance a warm-up.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from enum import StrEnum
from typing import TYPE_CHECKING

from msgspec import Struct

from routing.balancing.replicas import rank_of
from routing.balancing.warm_up_prefixes import WarmUpPrompt
from routing.http.loop import log_exceptions
from routing.http.request import Request, RequestHead
from routing.log import defect
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


MAX_FAILURES = 3  # requests that fail in a row, after which no more are sent
MAX_ERROR_BYTES = 4096  # of an error response that are read for its reason
BAD_REQUEST = 400
NO_PRIORITIES = b"riority scheduling"  # in the 400 of a vLLM that schedules by arrival

logger = logging.getLogger(__name__)


class Ending(StrEnum):
    """Why a warm-up ended."""

    COMPLETE = "complete"  # everything was sent
    TIME_LIMIT = "time_limit"
    FAILING = "failing"  # its requests fail
    NEEDED = "needed"  # no other replica could serve a request
    WITHDRAWN = "withdrawn"  # the replica went down, left, or is no longer to take traffic or to warm up


class Progress(Struct):
    """Progress of a warm-up. Tokens are estimated."""

    prefixes_done: int = 0
    prefixes: int = 0
    tokens_done: int = 0
    tokens: int = 0


class ReplicaWarmUp:
    """The warm-up of one replica."""

    def __init__(
        self,
        warm_ups: WarmUps,
        balancer: Balancer,
        checks: HealthChecks,
        pool: str,
        replica: ReplicaId,
        settings: WarmUpSettings,
    ) -> None:
        self.pool = pool
        self.replica = replica
        self.progress = Progress()
        self._warm_ups = warm_ups
        self._balancer = balancer
        self._checks = checks
        self._settings = settings
        self._until = balancer.loop.time() + settings.time_limit_s
        self._priority = settings.priority
        self._pending: deque[tuple[WarmUpPrompt, TargetId]] | None = None  # None: the replica is not up yet
        self._calls: set[WarmUpCall] = set()
        self._failures = 0  # in a row

    def advance(self, now: float) -> None:
        """Start once the replica is up; end if it went down or the time limit is over."""
        is_up = self._checks.status(self.replica).is_up
        if is_up is False:
            self._warm_ups.end(self, Ending.WITHDRAWN)
        elif now >= self._until:
            self._warm_ups.end(self, Ending.TIME_LIMIT)
        elif is_up and self._pending is None:
            self._pending = deque(self._warm_ups.chosen(self))
            self.progress.prefixes = len(self._pending)
            self.progress.tokens = sum(prompt.tokens for prompt, _ in self._pending)
            self._send_more()

    def on_call_ended(self, call: WarmUpCall, *, ok: bool) -> None:
        """Account for a request, and send the next ones."""
        self._calls.discard(call)
        if call.lacks_priorities and self._pending is not None:
            self._priority = None
            self._pending.appendleft((call.prompt, call.target))
            self._send_more()
            return
        self.progress.prefixes_done += 1
        self.progress.tokens_done += call.prompt.tokens
        self._failures = 0 if ok else self._failures + 1
        self._warm_ups.on_sent(self, call.prompt, call.target, ok=ok)
        if self._failures >= MAX_FAILURES:
            self._warm_ups.end(self, Ending.FAILING)
        else:
            self._send_more()

    def abandon(self) -> None:
        """Send nothing more, and abort the requests in flight."""
        self._pending = deque()
        for call in list(self._calls):
            call.abandon()
        self._calls.clear()

    def _send_more(self) -> None:
        fleet, pending = self._balancer.fleet, self._pending
        concurrency = math.ceil(self._settings.concurrency / self._warm_ups.parts)
        while fleet is not None and pending and len(self._calls) < concurrency:
            prompt, target = pending.popleft()
            body = prompt.body if self._priority is None else with_member(prompt.body, "priority", self._priority)
            head = RequestHead(b"POST", prompt.path.encode(), http11=True)
            head.lines = b"Content-Type: application/json\r\n"
            request = Request(head, body, self._warm_ups.new_request_id())
            call = WarmUpCall(self, prompt, target, request, with_priority=self._priority is not None)
            self._calls.add(call)
            call.start(fleet.connection_pools[self.replica], fleet.config.limits)
        if not self._calls and not pending:
            self._warm_ups.end(self, Ending.COMPLETE)


class WarmUpCall:
    """One request of a warm-up; a listener of the replica's connections."""

    __slots__ = (
        "_connections",
        "_error",
        "_is_over",
        "_limits",
        "_request",
        "_upstream",
        "_warm_up",
        "_with_priority",
        "prompt",
        "target",
    )

    _connections: ConnectionPool  # set by ``start``
    _limits: Limits

    def __init__(
        self, warm_up: ReplicaWarmUp, prompt: WarmUpPrompt, target: TargetId, request: Request, *, with_priority: bool
    ) -> None:
        self.prompt = prompt
        self.target = target
        self._warm_up = warm_up
        self._request = request
        self._with_priority = with_priority
        self._upstream: UpstreamConnection | None = None
        self._error = b""  # beginning of a 400's body
        self._is_over = False

    def start(self, connections: ConnectionPool, limits: Limits) -> None:
        """Send it, on a kept-alive connection or a new one."""
        self._connections, self._limits = connections, limits
        upstream = connections.take_idle()
        if upstream is None:
            connections.connect(self, limits.connect_timeout_s)
        else:
            self._send(upstream)

    def abandon(self) -> None:
        """Abort it without a result, so that the replica stops."""
        self._is_over = True
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.abort()

    @property
    def lacks_priorities(self) -> bool:
        """Whether the request had a priority and the engine rejected it for that."""
        return self._with_priority and NO_PRIORITIES in self._error

    # --- events of its connection ---

    @log_exceptions
    def on_connected(self, upstream: UpstreamConnection) -> None:
        """Send the request."""
        if self._is_over:
            upstream.release()
        else:
            self._send(upstream)

    @log_exceptions
    def on_connect_failed(self, reason: str, *, is_local: bool) -> None:  # noqa: ARG002 - health checks find the cause
        """There is no connection."""
        self._end(ok=False)

    @log_exceptions
    def on_response(self, answer: ResponseHead, data: bytes, last: bool) -> None:
        """Discard the body, except for the beginning of an error."""
        if answer.status == BAD_REQUEST and len(self._error) < MAX_ERROR_BYTES:
            self._error += data
        if last:
            self._upstream = None  # it is back in its pool
            self._end(ok=answer.status < BAD_REQUEST)

    @log_exceptions
    def on_upstream_failed(self, failure: Failure, *, is_stale: bool) -> None:  # noqa: ARG002 - any failure is one
        """No response will come; a kept-alive connection that had just ended is replaced once."""
        self._upstream = None
        if is_stale and not self._is_over:
            self._connections.connect(self, self._limits.connect_timeout_s)
        else:
            self._end(ok=False)

    # --- properties for stall detection ---

    def is_stream(self) -> bool:
        """Whether the first byte must come with the first token."""
        return False

    @property
    def waiting_tokens(self) -> int:
        """Estimated tokens to prefill."""
        return self.prompt.tokens

    @property
    def queued_tokens(self) -> float:
        """The same, since no queued tokens are counted for a warm-up."""
        return self.prompt.tokens

    @property
    def prompt_tokens(self) -> int:
        """Estimated length of the prompt."""
        return self.prompt.tokens

    def on_stalled(self) -> None:
        """Nothing: the time limit ends the warm-up."""

    def abort_on_error(self, error: Exception) -> None:
        """End after an internal error."""
        defect(logger, error, "warm-up")
        self.abandon()
        self._warm_up.on_call_ended(self, ok=False)

    def _send(self, upstream: UpstreamConnection) -> None:
        self._upstream = upstream
        body = self._request.body
        upstream.send(
            self,
            self._connections.address.head(self._request, rank_of(self.target), body_bytes=len(body)),
            body,
            first_byte_s=self._limits.first_byte_timeout_s,
            idle_s=self._limits.idle_timeout_s,
            bodyless=False,
        )

    def _end(self, *, ok: bool) -> None:
        if not self._is_over:
            self._is_over = True
            self._warm_up.on_call_ended(self, ok=ok)
