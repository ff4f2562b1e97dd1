"""Send one chat request and measure what a client sees."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

EVENT_END = b"\n\n"


class Delta(Struct):
    """The new part of a choice."""

    content: str | None = None


class StreamChoice(Struct):
    """A choice in a stream's chunk."""

    delta: Delta = field(default_factory=Delta)
    finish_reason: str | None = None


class Details(Struct):
    """Of the prompt's tokens."""

    cached_tokens: int | None = None


class Usage(Struct):
    """A stream's last chunk has it."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: Details | None = None


class Chunk(Struct):
    """One event of a stream; of an error, only that it is one matters."""

    choices: list[StreamChoice] = []
    usage: Usage | None = None
    error: Any = None


_chunks = msgspec.json.Decoder(Chunk)


@dataclass(slots=True)
class ChatResult:
    """What came back."""

    error: str | None = None  # its kind; None: a whole answer
    ttft_s: float | None = None  # from sending to the first byte of the body
    text: str = ""
    usage: Usage | None = None

    @property
    def is_unreachable(self) -> bool:
        """Whether the router was not there at all."""
        return self.error == "connect"


@dataclass(frozen=True, slots=True)
class ChatClient:
    """Chat requests to one router."""

    http: aiohttp.ClientSession
    url: str

    async def send(self, body: bytes, headers: dict[str, str]) -> ChatResult:
        """One streamed request. Never raises for what the other side does."""
        seen = ChatResult()
        started_s = time.perf_counter()
        try:
            async with self.http.post(self.url, data=body, headers=headers) as response:
                if response.status != 200:
                    await response.read()
                    seen.error = f"http_{response.status}"
                else:
                    await self._read(response, seen, started_s)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            seen.error = "connect"
        except TimeoutError:  # aiohttp's are ClientError as well
            seen.error = "timeout"
        except (aiohttp.ClientError, ConnectionError):
            seen.error = "broken"
        except (msgspec.DecodeError, UnicodeDecodeError):
            seen.error = "malformed"
        return seen

    async def _read(self, response: aiohttp.ClientResponse, seen: ChatResult, started_s: float) -> None:
        pieces: list[str] = []
        pending = b""
        is_done = False
        async for data in response.content.iter_any():
            if seen.ttft_s is None:
                seen.ttft_s = time.perf_counter() - started_s
            *events, pending = (pending + data).split(EVENT_END)
            for event in events:
                is_done = self._take(event, seen, pieces) or is_done
        seen.text = "".join(pieces)
        if not is_done and seen.error is None:
            seen.error = "broken"

    @staticmethod
    def _take(event: bytes, seen: ChatResult, pieces: list[str]) -> bool:
        """Read one event; whether it is the stream's last."""
        if not event.startswith(b"data: "):
            return False
        data = event[6:]
        if data == b"[DONE]":
            return True
        chunk = _chunks.decode(data)
        if chunk.error is not None:
            seen.error = "stream_error"
        if chunk.usage is not None:
            seen.usage = chunk.usage
        for choice in chunk.choices:
            if choice.delta.content:
                pieces.append(choice.delta.content)
            if choice.finish_reason == "abort":
                seen.error = "abort"
        return False
