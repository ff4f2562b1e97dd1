"""One stream of Envoy's external processing: one request of a client, and its response.

Theory of operation. Envoy sends the parts of the request and of the response in order: headers, body, trailers. The
picker decides at the end of the request's body, so it holds the body back, and sends it to Envoy with the decision.
It passes the response on as it arrives. How the bodies come is set in Envoy and is part of the first message:

- ``FULL_DUPLEX_STREAMED``: the picker sends every byte back, in chunks, whenever it wants.
- ``BUFFERED``: the body comes in one message. The reply has the decision, and the body only if it changed.
- ``STREAMED``, of responses only: each message gets one reply, which has the bytes only if they changed.
- ``NONE``, of responses only: usage is unknown, and the request ends when Envoy ends the stream.

The protocol of the decision is that of the Gateway API Inference Extension: proposal 004, endpoint picker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from enum import IntEnum
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from routing.engines import RANK_HEADER
from routing.http.request import (
    EncodedBody,
    RequestHead,
    body_too_large,
    is_body_digest,
    is_credential,
    parse_request_head,
)
from routing.http.response import BadResponseError, LocalResponse, RejectedRequestError, parse_response_head
from routing.http.tasks import SLICE_S
from routing.log import defect
from routing.picker.endpoints import Endpoints, joined
from routing.picker.picked_request import PickedRequest
from routing.picker.replies import (
    ENDPOINT,
    NAMESPACE,
    DecisionReply,
    body_replies,
    headers_reply,
    immediate_reply,
    response_body_reply,
    trailers_reply,
)

if TYPE_CHECKING:
    from routing.http.request import Request
    from routing.http.response import ResponseHead
    from routing.proxy.router import Router
    from routing.proxy.services import ActiveConfiguration

SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET = "x-gateway-destination-endpoint-subset"
SERVED = "x-gateway-destination-endpoint-served"
UPSTREAM_ADDRESS = "upstream.address"  # attribute of Envoy, with the same content

T = TypeVar("T")
logger = logging.getLogger(__name__)


class BodyMode(IntEnum):
    """``ProcessingMode.BodySendMode``."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4


DUPLEX, BUFFERED = BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED
FILTERED = frozenset({BodyMode.STREAMED, DUPLEX})  # modes in which usage can be removed from a stream


class StreamEndedError(Exception):
    """Envoy ended the stream."""


class Incoming:
    """The messages of one stream. ``read`` returns the next one, or None at the end."""

    def __init__(self, read: Callable[[], Awaitable[Any]]) -> None:
        self._read = read
        self._early: asyncio.Future[Any] | None = None  # a read that began while something else was awaited

    async def next(self) -> Any:
        """The next message; StreamEndedError at the end."""
        early, self._early = self._early, None
        message = await (self._read() if early is None else early)
        if message is None:
            raise StreamEndedError
        return message

    async def wait(self, future: asyncio.Future[T]) -> T:
        """The result of a future; StreamEndedError if the stream ends before."""
        early = self._early = self._early or asyncio.ensure_future(self._read())
        await asyncio.wait({future, early}, return_when=asyncio.FIRST_COMPLETED)
        if not future.done() and early.result() is None:
            raise StreamEndedError
        return await future

    def close(self) -> None:
        """Stop a read that is running."""
        if self._early is not None:
            self._early.cancel()


class ProcessingStream:
    """The state of one stream."""

    def __init__(self, router: Router, endpoints: Callable[[ActiveConfiguration], Endpoints], fallbacks: int) -> None:
        self._router = router
        self._endpoints = endpoints
        self._fallbacks = fallbacks
        self._head: RequestHead | None = None
        self._path = b""  # with its query; known before the head is checked
        self._credentials: list[str] = []  # names of the client's headers that carry a key
        self._digests: list[str] = []  # names of those with a digest of the body
        self._subset: list[str] | None = None  # the only permitted endpoints; None: all
        self._body = bytearray()  # of the request
        self._request: Request | None = None  # once its body is complete
        self._picked: PickedRequest | None = None
        self._request_mode = self._response_mode = int(DUPLEX)
        self.is_over = False  # the picker has sent a response of its own

    async def replies(self, message: Any, incoming: Incoming) -> list[Any]:
        """The replies to a message. Call ``on_sent`` when they are sent."""
        try:
            return await self._replies(message, incoming)
        except RejectedRequestError as rejection:
            return [self._reject(rejection)]
        except StreamEndedError:
            raise
        except Exception as error:  # noqa: BLE001 - the client gets a response in any case
            defect(logger, error, "endpoint picker")
            return [self._reject(RejectedRequestError(500, "internal error"))]

    def on_sent(self) -> None:
        """Called when the replies are sent."""
        if self._picked is not None and self._request is not None:
            self._request = None
            self._picked.on_sent()

    def close(self) -> None:
        """The stream has ended."""
        self._drop_body()
        if self._picked is None:
            return
        if self._response_mode == BodyMode.NONE and self._picked.has_response:
            self._picked.complete()
        self._picked.cancel()

    async def _replies(self, message: Any, incoming: Incoming) -> list[Any]:
        if message.HasField("response_body"):
            return self._on_response_body(message.response_body)
        if message.HasField("request_headers"):
            return await self._on_request_headers(message, incoming)
        if message.HasField("request_body"):
            return await self._on_request_body(message.request_body, incoming)
        if message.HasField("response_headers"):
            return self._on_response_headers(message)
        if message.HasField("request_trailers"):
            replies = [] if self._picked is not None else await self._pick(incoming, has_trailers=True)
            return [*replies, trailers_reply("request_trailers")]
        if message.HasField("response_trailers"):
            return self._on_response_trailers()
        return []

    def _reject(self, rejection: RejectedRequestError) -> Any:
        self.is_over = True
        if self._picked is None:
            self._router.services.metrics.count_rejected(rejection.status)
        else:
            self._picked.reject(rejection)
        return self._immediate(rejection.response(self._path))

    def _immediate(self, response: LocalResponse) -> Any:
        self.is_over = True
        self._drop_body()
        request_id = self._head.request_id if self._head is not None else ""
        return immediate_reply(response, self._request.request_id if self._request is not None else request_id)

    # --- the request ---

    async def _on_request_headers(self, message: Any, incoming: Incoming) -> list[Any]:
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        self._subset = _subset(message)
        pseudo, headers = _split(message.request_headers.headers.headers)
        self._path = pseudo.get(b":path", b"")
        self._credentials = [name.decode("latin-1") for name, _ in headers if is_credential(name)]
        self._digests = [name.decode("latin-1") for name, _ in headers if is_body_digest(name)]
        host = (b"host", pseudo.get(b":authority", b""))
        self._head = parse_request_head(
            pseudo.get(b":method", b""), self._path, "1.1", [host, *headers], limits=self._router.limits
        )
        if message.request_headers.end_of_stream:
            return await self._pick(incoming, has_body=False)
        if (rejection := self._router.reject_before_body(self._head)) is not None:
            raise rejection
        if self._request_mode == BUFFERED:
            return [headers_reply("request_headers")]
        if self._request_mode != DUPLEX:
            raise RejectedRequestError(500, "request_body_mode must be FULL_DUPLEX_STREAMED or BUFFERED")
        return []

    async def _on_request_body(self, body: Any, incoming: Incoming) -> list[Any]:
        if self._head is None:
            raise RejectedRequestError(500, "request_header_mode must be SEND")
        router, limits = self._router, self._router.limits
        self._body += body.body
        router.unfinished_body_bytes += len(body.body)
        if len(self._body) > limits.max_body_bytes:
            raise body_too_large(limits)
        if body.end_of_stream or self._request_mode == BUFFERED:
            return await self._pick(incoming)
        self._check_unfinished()
        return []

    def _check_unfinished(self) -> None:
        if self._router.unfinished_body_bytes > self._router.limits.max_unfinished_body_bytes:
            raise RejectedRequestError(503, "too many bodies are being received at once", retry_after_s=1)

    def _drop_body(self) -> None:
        self._router.unfinished_body_bytes -= len(self._body)
        self._body = bytearray()

    async def _pick(self, incoming: Incoming, *, has_body: bool = True, has_trailers: bool = False) -> list[Any]:
        """Choose the endpoints; the replies that name them."""
        if self._head is None:
            raise RejectedRequestError(500, "request_header_mode must be SEND")
        received = bytes(self._body)
        if self._head.coding:
            await self._decode(self._head.coding)
        body = bytes(self._body)
        self._drop_body()
        self._request = request = self._router.request(self._head, body)
        accepted = self._router.accept(request)
        if isinstance(accepted, LocalResponse):
            return [self._immediate(accepted)]
        endpoints = self._endpoints(accepted)
        excluded = endpoints.excluded(self._subset)
        self._picked = PickedRequest(self._router.services, endpoints, request, excluded=excluded)
        await self._picked.place(incoming.wait, self._fallbacks)
        decision = self._decision(self._picked, endpoints, request)
        if not has_body:
            return [decision.headers_reply()]
        body = self._picked.body_to_send(may_filter=self._response_mode in FILTERED)
        if self._request_mode == BUFFERED:
            return [decision.body_reply(None if body == received else body)]
        return [decision.headers_reply(), *body_replies("request_body", body, is_end=not has_trailers)]

    async def _decode(self, coding: bytes) -> None:
        """Replace the body by the decoded one, in slices between which other requests run."""
        router, until = self._router, perf_counter() + SLICE_S
        encoded = EncodedBody(coding, router.limits)
        encoded.add(bytes(self._body))
        counted, self._body = len(self._body), bytearray()
        try:
            while encoded.step():
                if perf_counter() > until:
                    router.unfinished_body_bytes += encoded.held_bytes - counted
                    counted = encoded.held_bytes
                    self._check_unfinished()
                    await asyncio.sleep(0)
                    until = perf_counter() + SLICE_S
            self._body += encoded.end()
        finally:
            router.unfinished_body_bytes += len(self._body) - counted

    def _decision(self, picked: PickedRequest, endpoints: Endpoints, request: Request) -> DecisionReply:
        """The reply to Envoy: the endpoints, and the header fields that replace those of the client."""
        decision = picked.decision
        named = joined([endpoints.of(decision), *map(endpoints.of, picked.fallbacks)])
        fields, hidden = [(ENDPOINT, named.encode()), ("x-request-id", request.request_id.encode())], self._credentials
        fields.append(("accept-encoding", b"identity"))
        address = endpoints.active.connection_pools[decision.replica.name].address
        if address.api_key is not None:
            fields.append(("authorization", b"Bearer " + address.api_key.encode()))
            hidden = [name for name in hidden if name != "authorization"]
        if decision.target.rank is not None:
            fields.append((RANK_HEADER.decode().lower(), b"%d" % decision.target.rank))
        removed = [*self._digests, *(hidden if address.hides_keys else [])]
        if request.head.coding:
            removed = [*removed, "content-encoding"]
        if picked.trace is not None:
            parent, keeps_state = picked.trace.context_for_replica()
            fields.append(("traceparent", parent))
            removed = removed if keeps_state else [*removed, "tracestate"]
        return DecisionReply(named, fields, removed)

    # --- the response ---

    def _on_response_headers(self, message: Any) -> list[Any]:
        picked = self._picked
        if picked is None:  # Envoy responds by itself before the request is complete
            return [headers_reply("response_headers")]
        picked.on_response(_response_head(message.response_headers.headers.headers), _served(message))
        if message.response_headers.end_of_stream:
            picked.complete()
        return [headers_reply("response_headers", picked.headers())]

    def _on_response_body(self, body: Any) -> list[Any]:
        data, last, picked = body.body, body.end_of_stream, self._picked
        passed = data if picked is None else picked.on_body(data, last=last)
        if last and picked is not None:
            picked.complete()
        if self._response_mode == DUPLEX:
            return list(body_replies("response_body", passed, is_end=last)) if passed or last else []
        return [response_body_reply(None if passed is data else passed)]

    def _on_response_trailers(self) -> list[Any]:
        held_back = b""
        if self._picked is not None:
            held_back = self._picked.response.held_back()
            self._picked.complete()
        bodies = body_replies("response_body", held_back, is_end=False) if held_back else ()
        return [*bodies, trailers_reply("response_trailers")]


def _split(headers: Iterable[Any]) -> tuple[dict[bytes, bytes], list[tuple[bytes, bytes]]]:
    """The pseudo-header fields by name, and the others in order."""
    pseudo: dict[bytes, bytes] = {}
    others: list[tuple[bytes, bytes]] = []
    for header in headers:
        name, value = header.key.encode(), header.raw_value or header.value.encode()
        if name.startswith(b":"):
            pseudo[name] = value
        elif name != b"host":
            others.append((name, value))
    return pseudo, others


def _response_head(headers: Iterable[Any]) -> ResponseHead:
    pseudo, others = _split(headers)
    try:
        return parse_response_head(int(pseudo.get(b":status", b"0")), b"", "1.1", others)
    except (BadResponseError, ValueError):
        raise RejectedRequestError(502, "the replica sent a response that is not valid HTTP") from None


def _subset(message: Any) -> list[str] | None:
    """The endpoints of the subset hint; None if there is no hint."""
    struct = message.metadata_context.filter_metadata.get(SUBSET_NAMESPACE)
    value = None if struct is None else struct.fields.get(SUBSET)
    if value is None:
        return None
    if value.HasField("list_value"):
        return [item.string_value for item in value.list_value.values]
    return [endpoint for endpoint in value.string_value.split(",") if endpoint]


def _served(message: Any) -> str | None:
    """The endpoint that served the request: the protocol's metadata, else Envoy's attribute; None if unknown."""
    struct = message.metadata_context.filter_metadata.get(NAMESPACE)
    named = [] if struct is None else [(struct, SERVED)]
    named += [(attributes, UPSTREAM_ADDRESS) for attributes in message.attributes.values()]
    for fields, name in named:
        value = fields.fields.get(name)
        if value is not None and ":" in value.string_value:  # "-" if Envoy responded by itself
            return str(value.string_value)
    return None
