"""One opening on its way to a joining replica: sent once, its answer thrown away."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from routing.core.types import TargetId
from routing.core.warming.openings import Cut
from routing.proxy.http.request import Head, Request
from routing.proxy.log import defect
from routing.proxy.loop.guarded import never_raises

if TYPE_CHECKING:
    from routing.proxy.http.answer import AnswerHead
    from routing.proxy.replicas.link import ReplicaLink
    from routing.proxy.replicas.upstream import Failure, Upstream
    from routing.schema import Limits

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

    _link: ReplicaLink  # once started, as the rest
    _rank: int | None
    _limits: Limits

    def __init__(self, owner: Owner, cut: Cut, target: TargetId, request: Request, *, with_priority: bool) -> None:
        self.cut = cut
        self.target = target
        self._owner = owner
        self._request = request
        self._with_priority = with_priority
        self._upstream: Upstream | None = None
        self._held = b""
        self._is_over = False

    def start(self, link: ReplicaLink, rank: int | None, limits: Limits) -> None:
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
            upstream.abandon()

    @property
    def refuses_priority(self) -> bool:
        """Whether it was sent with one, and the answer says that this engine takes none."""
        return self._with_priority and NO_PRIORITIES in self._held

    # --- what its connection tells ---

    @never_raises
    def connected(self, upstream: Upstream) -> None:
        """Send it there."""
        if self._is_over:
            upstream.release()
        else:
            self._send(upstream)

    @never_raises
    def connect_failed(self, reason: str, *, ours: bool) -> None:  # noqa: ARG002 - health checks find out why
        """There is no connection."""
        self._end(ok=False)

    @never_raises
    def answer_arrived(self, answer: AnswerHead, data: bytes, last: bool) -> None:
        """Wait for its end; of a refusal keep the beginning."""
        if answer.status == BAD_REQUEST and len(self._held) < HELD_BYTES:
            self._held += data
        if last:
            self._upstream = None  # it has gone back to its pool
            self._end(ok=answer.status < BAD_REQUEST)

    @never_raises
    def upstream_failed(self, failure: Failure, *, stale: bool) -> None:  # noqa: ARG002 - any failure is one
        """No answer will come; where a kept-alive connection had just ended, on a new one perhaps."""
        self._upstream = None
        if stale and not self._is_over:
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
    def tokens_ahead(self) -> float:
        """The same: nothing is counted ahead of it."""
        return self.cut.tokens

    @property
    def prompt_tokens(self) -> int:
        """Estimated length of the prompt."""
        return self.cut.tokens

    def stalled(self) -> None:
        """The replica hangs: the time limit sees to that."""

    # --- its end ---

    def give_up(self, error: Exception) -> None:
        """A mistake of ours."""
        defect(logger, error, "warm-up")
        self.abandon()
        self._owner.ended(self, ok=False)

    def _send(self, upstream: Upstream) -> None:
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
    head = Head(b"POST", path.encode(), http11=True)
    head.lines = b"Content-Type: application/json\r\n"
    return Request(head, body, name)
