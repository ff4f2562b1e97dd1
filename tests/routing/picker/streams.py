"""A picker in this process, and streams that speak Envoy's side of the protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from grpc import aio

from routing.picker.messages import HealthCheckRequest, HealthCheckResponse, ProcessingRequest, ProcessingResponse
from routing.picker.service import EXTERNAL_PROCESSOR, HEALTH, Picker
from routing.schema import HealthCheck, RouterConfig
from tests.fakes.replica import FakeReplica
from tests.routing.proxy.harness import BODY, CHAT, DEADLINE_S, Harness, config, routed

ENDPOINT = "x-gateway-destination-endpoint"
STREAMED, BUFFERED, DUPLEX = 1, 2, 4


@asynccontextmanager
async def picking(snapshot: RouterConfig | None, **options: Any) -> AsyncIterator[tuple[Harness, aio.Channel]]:
    """A picker with this configuration, and a connection to it."""
    async with routed(snapshot, make=Picker, **options) as harness, connected(harness.port) as channel:
        yield harness, channel


@asynccontextmanager
async def connected(port: int, credentials: Any = None) -> AsyncIterator[aio.Channel]:
    address = f"127.0.0.1:{port}"
    channel = aio.insecure_channel(address) if credentials is None else aio.secure_channel(address, credentials)
    async with channel:
        yield channel


class EnvoyStream:
    """One request of a client, as Envoy sends it."""

    def __init__(self, channel: aio.Channel) -> None:
        self._call = channel.stream_stream(
            f"/{EXTERNAL_PROCESSOR}/Process",
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )()

    async def send(self, **fields: Any) -> None:
        await self._call.write(ProcessingRequest(**fields))

    async def read(self) -> Any:
        """The next reply; None at the end."""
        async with asyncio.timeout(DEADLINE_S):
            reply = await self._call.read()
        return None if reply is aio.EOF else reply

    async def end(self) -> None:
        """Envoy half-closes the stream; reads to its end."""
        await self._call.done_writing()
        while await self.read() is not None:
            pass

    def cancel(self) -> None:
        self._call.cancel()

    # --- a whole request ---

    async def request(
        self,
        body: bytes = BODY,
        headers: Iterable[tuple[str, str]] = (),
        *,
        path: bytes = CHAT,
        chunks: int = 1,
        has_trailers: bool = False,
        mode: int = DUPLEX,
        response_mode: int = DUPLEX,
        subset: Sequence[str] | None = None,
    ) -> Picked:
        """Send a request in full duplex or buffered mode, and read the decision."""
        fields: dict[str, Any] = {"request_headers": {"headers": head(path, headers)}}
        if subset is not None:
            hint = {"x-gateway-destination-endpoint-subset": {"list_value": {"values": texts(subset)}}}
            fields["metadata_context"] = metadata("envoy.lb.subset_hint", hint)
        modes = {"request_body_mode": mode, "response_body_mode": response_mode}
        await self.send(**fields, protocol_config=modes)
        if mode == BUFFERED:
            reply = await self.read()
            if reply.HasField("immediate_response"):
                return Picked([reply])
            assert reply.HasField("request_headers")
        size = -(-len(body) // chunks) or 1
        for start in range(0, max(1, len(body)), size):
            is_end = start + size >= len(body) and not has_trailers
            await self.send(request_body={"body": body[start : start + size], "end_of_stream": is_end})
        if has_trailers:
            await self.send(request_trailers={"trailers": {"headers": [{"key": "checksum", "raw_value": b"1"}]}})
        return await self._decision(mode, has_trailers=has_trailers)

    async def _decision(self, mode: int, *, has_trailers: bool) -> Picked:
        replies: list[Any] = []
        while True:
            reply = await self.read()
            assert reply is not None, replies
            replies.append(reply)
            streamed = reply.request_body.response.body_mutation.streamed_response
            is_last = reply.HasField("request_trailers") if has_trailers else streamed.end_of_stream
            if is_last or reply.HasField("immediate_response") or (mode == BUFFERED and reply.HasField("request_body")):
                return Picked(replies)

    async def response(
        self,
        *pieces: bytes,
        status: int = 200,
        kind: str = "application/json",
        served: str | None = None,
        headers: Iterable[tuple[str, str]] = (),
    ) -> tuple[dict[str, str], bytes]:
        """Send a whole response in full duplex; the header fields that the picker sets, and the passed bytes."""
        fields: dict[str, Any] = {}
        if served is not None:
            fields["metadata_context"] = metadata(
                "envoy.lb", {"x-gateway-destination-endpoint-served": {"string_value": served}}
            )
        headers = [(":status", str(status)), ("content-type", kind), *headers]
        message = {"headers": pairs(headers), "end_of_stream": not pieces}
        await self.send(response_headers=message, **fields)
        reply = await self.read()
        set_fields, passed = fields_of(reply.response_headers.response), b""
        for number, piece in enumerate(pieces, 1):
            await self.send(response_body={"body": piece, "end_of_stream": number == len(pieces)})
        while pieces:
            streamed = (await self.read()).response_body.response.body_mutation.streamed_response
            passed += streamed.body
            if streamed.end_of_stream:
                break
        return set_fields, passed


class Picked:
    """The replies to a request."""

    def __init__(self, replies: list[Any]) -> None:
        self.replies = replies
        self.immediate = replies[-1].immediate_response if replies[-1].HasField("immediate_response") else None
        carrier = next((reply for reply in replies if reply.HasField("dynamic_metadata")), None)
        self._carrier = carrier
        common = None if carrier is None else (carrier.request_headers.response, carrier.request_body.response)
        response = common[0] if common and carrier.HasField("request_headers") else common and common[1]
        self.fields = fields_of(response) if response is not None else {}
        self.removed = list(response.header_mutation.remove_headers) if response is not None else []
        self.new_body = response.body_mutation.body if response is not None else b""
        self.chunks = [
            reply.request_body.response.body_mutation.streamed_response.body
            for reply in replies
            if reply.HasField("request_body")
        ]

    @property
    def endpoints(self) -> list[str]:
        return self.fields[ENDPOINT].split(",")

    @property
    def metadata(self) -> str:
        """The endpoints in the dynamic metadata."""
        return self._carrier.dynamic_metadata.fields["envoy.lb"].struct_value.fields[ENDPOINT].string_value

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def status(self) -> int | None:
        """The status of the picker's own response; None if it chose a replica."""
        return None if self.immediate is None else self.immediate.status.code

    @property
    def error(self) -> Any:
        return json.loads(self.immediate.body)["error"]

    @property
    def own_fields(self) -> dict[str, str]:
        """Header fields of the picker's own response."""
        return {option.header.key: option.header.raw_value.decode() for option in self.immediate.headers.set_headers}


def head(path: bytes, headers: Iterable[tuple[str, str]] = (), method: str = "POST") -> dict[str, Any]:
    pseudo = [(":method", method), (":path", path.decode()), (":authority", "models.test"), (":scheme", "http")]
    return pairs([*pseudo, *headers])


def pairs(headers: Iterable[tuple[str, str]]) -> dict[str, Any]:
    return {"headers": [{"key": name, "raw_value": value.encode()} for name, value in headers]}


def fields_of(response: Any) -> dict[str, str]:
    return {option.header.key: option.header.raw_value.decode() for option in response.header_mutation.set_headers}


def texts(values: Iterable[str]) -> list[dict[str, str]]:
    return [{"string_value": value} for value in values]


def metadata(namespace: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {"filter_metadata": {namespace: {"fields": fields}}}


async def health(channel: aio.Channel, service: str) -> int:
    check = channel.unary_unary(
        f"/{HEALTH}/Check",
        request_serializer=HealthCheckRequest.SerializeToString,
        response_deserializer=HealthCheckResponse.FromString,
    )
    return int((await check(HealthCheckRequest(service=service), timeout=DEADLINE_S)).status)


def replicas(count: int = 3) -> list[FakeReplica]:
    """Replicas that nobody connects to."""
    members = [FakeReplica(f"replica-{number}") for number in range(count)]
    for number, member in enumerate(members):
        member.port = number + 1
    return members


def fleet(members: list[FakeReplica], **fields: Any) -> RouterConfig:
    """A configuration whose replicas are not checked again."""
    return config(members, health=HealthCheck(interval_s=600, failures=100), **fields)
