"""Embeddings of texts, from a pool of the fleet. Needs numpy.

A request for embeddings is placed by the router's balancer and uses the replica's connections. It is not retried: a
failure costs a similar request its hit and nothing else. After five failures in a row the pool is left alone for a
second, then up to 30 s, and probed by one request. The circuit breakers of replicas do not count these requests.

Vectors are normalized, so that a product of two is their cosine similarity.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from routing.balancing.request import PlacementRequest
from routing.http.request import Request, RequestHead
from routing.paths import DataPath
from routing.prompt.canonical import CanonicalPrompt
from routing.response_cache.store import Pause
from routing.types import RoutingError
from routing.upstream.connection import OwnCall

if TYPE_CHECKING:
    from routing.balancing.placement import Placement
    from routing.balancing.replicas import HealthRegistry
    from routing.schema import RouterConfig
    from routing.upstream.pool import ConnectionPool

Vector = npt.NDArray[np.float32]

PATH: Final = DataPath.EMBEDDINGS.encode()
MAX_DIMENSIONS: Final = 8192
NO_PROMPT: Final = CanonicalPrompt(b"", 0, 0, [])  # placed by load: replicas have no prefix of such a text


class Fleet(Protocol):
    """The part of ``ActiveFleet`` in ``health/checks.py`` that is used here; import contracts forbid its module."""

    config: RouterConfig
    placement: Placement
    connection_pools: dict[str, ConnectionPool]


class Balancer(Protocol):
    """The part of the class in ``health/checks.py`` that is used here."""

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
        response: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def on_end(call: OwnCall) -> None:
            if response.done():
                return
            if call.failure or call.status != 200:
                response.set_exception(EmbeddingError(call.failure or "status"))
            else:
                response.set_result(call.body)

        ticket = fleet.placement.dispatch(decision, is_plain=True)
        queued_tokens = ticket.queued_tokens  # its own are unknown, and few
        call = OwnCall(fleet.config.limits, request, decision.target.rank, on_end, queued_tokens=queued_tokens)
        try:
            call.open(fleet.connection_pools[decision.replica.name])
            return await response
        finally:
            ticket.end()
            call.abort()


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
