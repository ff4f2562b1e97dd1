"""Send one chat request and measure what a client sees.

What a client saw: counts per task group, and TTFT in a histogram of bounded size.
"""

from __future__ import annotations

import math
import time
from collections import Counter
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


GROWTH = 1.05  # a bucket's width: quantiles are right to 5 %
FLOOR_S = 0.001


class Durations:
    """Seconds, in buckets that grow by 5 %."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.count = 0
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.count += 1
        self.total_s += seconds
        self._buckets[max(0, math.ceil(math.log(max(seconds, 1e-9) / FLOOR_S, GROWTH)))] += 1

    def merge(self, other: Durations) -> None:
        """Take in another's."""
        self._buckets += other._buckets
        self.count += other.count
        self.total_s += other.total_s

    def quantile(self, q: float) -> float | None:
        """The middle of the bucket in which the share ``q`` is reached; None of nothing."""
        left = q * self.count
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                return float(FLOOR_S * GROWTH ** (bucket - 0.5))
        return None

    def summary(self) -> dict[str, float | None]:
        """Mean, p50, p95 and p99, None of nothing."""
        mean = self.total_s / self.count if self.count else None
        return {"mean": mean, "p50": self.quantile(0.5), "p95": self.quantile(0.95), "p99": self.quantile(0.99)}


@dataclass(slots=True)
class Tally:
    """Figures of one task group, or of all."""

    requests: int = 0  # sent
    ok: int = 0
    errors: Counter[str] = field(default_factory=Counter)  # by kind
    usage_reported: int = 0  # answers that told their cached tokens
    prompt_tokens: int = 0  # of those answers
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft: Durations = field(default_factory=Durations)

    @property
    def hit_rate(self) -> float | None:
        """Cached tokens / prompt tokens of the answers that told; None where none did."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    def merge(self, other: Tally) -> None:
        """Take in another group's figures."""
        self.requests += other.requests
        self.ok += other.ok
        self.errors += other.errors
        self.usage_reported += other.usage_reported
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.completion_tokens += other.completion_tokens
        self.ttft.merge(other.ttft)

    def report(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "requests": self.requests,
            "ok": self.ok,
            "errors": dict(sorted(self.errors.items())),
            "usage_reported": self.usage_reported,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "hit_rate": self.hit_rate,
            "ttft_s": self.ttft.summary(),
        }


def total(groups: dict[str, Tally]) -> Tally:
    """All groups together."""
    everything = Tally()
    for tally in groups.values():
        everything.merge(tally)
    return everything


def one_line(tally: Tally, seconds: float) -> str:
    """A summary for a terminal; ``-`` for what is unknown."""
    errors = sum(tally.errors.values())
    p50, p95 = tally.ttft.quantile(0.5), tally.ttft.quantile(0.95)
    rate = tally.hit_rate
    return (
        f"{tally.requests / seconds:.1f} requests/s, {errors} errors, hit rate "
        f"{'-' if rate is None else f'{100 * rate:.1f} %'}, TTFT p50 {_seconds(p50)}, p95 {_seconds(p95)}"
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"
