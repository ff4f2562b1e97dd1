"""Embeddings of texts, from a pool of the fleet. Needs numpy.

A request for embeddings is placed by the router's balancer and uses the replica's connections. It is not retried: a
failure costs a similar request its hit and nothing else. After five failures in a row the pool is left alone for a
second, then up to 30 s, and probed by one request. The circuit breakers of replicas do not count these requests.

Vectors are normalized, so that a product of two is their cosine similarity.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from routing.balancing.request import PlacementRequest
from routing.http.loop import log_exceptions
from routing.http.request import Request, RequestHead
from routing.log import defect
from routing.paths import DataPath
from routing.prompt.canonical import CanonicalPrompt
from routing.response_cache.store import Pause
from routing.types import RoutingError

if TYPE_CHECKING:
    from routing.balancing.load_tracker import Ticket
    from routing.balancing.placement import Decision, Placement
    from routing.balancing.replicas import HealthRegistry
    from routing.http.response import ResponseHead
    from routing.schema import RouterConfig
    from routing.upstream.connection import Failure, UpstreamConnection
    from routing.upstream.pool import ConnectionPool

Vector = npt.NDArray[np.float32]

PATH: Final = DataPath.EMBEDDINGS.encode()
MAX_RESPONSE_BYTES: Final = 2 << 20
MAX_DIMENSIONS: Final = 8192
NO_PROMPT: Final = CanonicalPrompt(b"", 0, 0, [])  # placed by load: replicas have no prefix of such a text

logger = logging.getLogger(__name__)


class Fleet(Protocol):
    """The replicas of the active configuration."""

    config: RouterConfig
    placement: Placement
    connection_pools: dict[str, ConnectionPool]


class Balancer(Protocol):
    """What a router places requests with."""

    health: HealthRegistry

    @property
    def fleet(self) -> Fleet | None: ...


class EmbeddingError(Exception):
    """No usable embeddings arrived; the kind of error as it is counted."""


class _Row(msgspec.Struct):
    embedding: list[float]
    index: int = 0


class _Response(msgspec.Struct):
    data: list[_Row]


_decode_response: Final = msgspec.json.Decoder(_Response).decode


class Embedder:
    """Requests embeddings from one pool."""

    def __init__(self, balancer: Balancer, model: str, errors: Counter[str]) -> None:
        self._balancer = balancer
        self._model = model
        self._errors = errors
        self._pause = Pause()
        self._request_ids = count(1)

    async def embed(self, texts: list[str], timeout_s: float) -> list[Vector] | None:
        """The normalized embedding of each text; None after any failure, which is counted."""
        if not self._pause.may_ask(monotonic()):
            self._errors["paused"] += 1
            return None
        try:
            async with asyncio.timeout(timeout_s):
                vectors = read_vectors(await self._post(texts), len(texts))
        except (EmbeddingError, RoutingError, TimeoutError) as error:
            kinds = {TimeoutError: "timeout", EmbeddingError: str(error)}
            self._errors[kinds.get(type(error), "no_replica")] += 1
            self._pause.record_failure(monotonic())
            return None
        self._pause.record_success()
        return vectors

    async def _post(self, texts: list[str]) -> bytes:
        fleet = self._balancer.fleet
        if fleet is None:
            raise EmbeddingError("no_replica")
        placed = PlacementRequest(self._model, None, None, NO_PROMPT, is_plain=True)
        decision = fleet.placement.decide(placed, self._balancer.health)
        body = msgspec.json.encode({"model": self._model, "input": texts, "encoding_format": "float"})
        head = RequestHead(b"POST", PATH, http11=True)
        head.lines = b"Content-Type: application/json\r\n"
        request = Request(head, body, f"semantic-cache-{next(self._request_ids):x}")
        call = EmbeddingCall(fleet, decision, request)
        try:
            return await call.response
        finally:
            call.end()


def read_vectors(body: bytes, expected: int) -> list[Vector]:
    """The normalized vectors of a response; EmbeddingError if it has others than expected."""
    try:
        rows = sorted(_decode_response(body).data, key=lambda row: row.index)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise EmbeddingError("invalid_response") from None
    lengths = {len(row.embedding) for row in rows}
    if len(rows) != expected or len(lengths) != 1 or not 0 < max(lengths) <= MAX_DIMENSIONS:
        raise EmbeddingError("invalid_response")
    vectors = np.array([row.embedding for row in rows])
    with np.errstate(over="ignore"):  # of huge numbers; their norm is infinite
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    if not np.all((norms > 0) & (norms < np.inf)):
        raise EmbeddingError("invalid_response")
    return list((vectors / norms).astype(np.float32))


def similarity_of(one: Vector, other: Vector) -> float:
    """Cosine similarity of two normalized vectors, rounded to four digits; 0 for different models' vectors."""
    return min(1.0, round(float(one @ other), 4)) if one.shape == other.shape else 0.0


class EmbeddingCall:
    """One request for embeddings; a listener of the replica's connections."""

    waiting_tokens = 0  # of its prompts: unknown, and few
    prompt_tokens = 0

    def __init__(self, fleet: Fleet, decision: Decision, request: Request) -> None:
        self.response: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._connections = fleet.connection_pools[decision.replica.name]
        self._limits = fleet.config.limits
        self._rank = decision.target.rank
        self._request = request
        self._ticket: Ticket = fleet.placement.dispatch(decision, is_plain=True)
        self._upstream: UpstreamConnection | None = None
        self._body = b""
        upstream = self._connections.take_idle()
        if upstream is None:
            self._connections.connect(self, self._limits.connect_timeout_s)
        else:
            self._send(upstream)

    def end(self) -> None:
        """Release the load, and abort the request if it has no response yet."""
        self._ticket.end()
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.abort()

    def _send(self, upstream: UpstreamConnection) -> None:
        self._upstream = upstream
        body = self._request.body
        upstream.send(
            self,
            self._connections.address.head(self._request, self._rank, body_bytes=len(body)),
            body,
            first_byte_s=self._limits.first_byte_timeout_s,
            idle_s=self._limits.idle_timeout_s,
            bodyless=False,
        )

    def _fail(self, kind: str) -> None:
        if not self.response.done():
            self.response.set_exception(EmbeddingError(kind))

    # --- events of its connection ---

    @log_exceptions
    def on_connected(self, upstream: UpstreamConnection) -> None:
        """Send the request, unless it was cancelled or took too long."""
        if self.response.done():
            upstream.release()
        else:
            self._send(upstream)

    @log_exceptions
    def on_connect_failed(self, reason: str, *, is_local: bool) -> None:  # noqa: ARG002 - any failure is one
        """End without embeddings: health checks find the cause."""
        self._fail("connect")

    @log_exceptions
    def on_response(self, head: ResponseHead, data: bytes, last: bool) -> None:
        """Collect the body."""
        self._body += data
        if last:
            self._upstream = None  # the connection is back in its pool
            if head.status != 200:
                self._fail("status")
            elif not self.response.done():
                self.response.set_result(self._body)
        elif len(self._body) > MAX_RESPONSE_BYTES:
            self._fail("invalid_response")

    @log_exceptions
    def on_upstream_failed(self, failure: Failure, *, is_stale: bool) -> None:
        """End without embeddings, or connect again if a kept-alive connection had just ended."""
        self._upstream = None
        if is_stale and not self.response.done():
            self._connections.connect(self, self._limits.connect_timeout_s)
        else:
            self._fail(failure)

    def abort_on_error(self, error: Exception) -> None:
        """End after an internal error."""
        defect(logger, error, "embeddings")
        self._fail("internal")

    # --- properties for stall detection ---

    def is_stream(self) -> bool:
        """Whether the first byte must come with the first token."""
        return False

    @property
    def queued_tokens(self) -> float:
        """Estimated tokens that the replica had to prefill before."""
        return self._ticket.queued_tokens

    def on_stalled(self) -> None:
        """Does nothing: the caller's deadline ends the request."""
