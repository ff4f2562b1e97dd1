"""Chat client that measures TTFT, usage and errors of each request, and totals per task group."""

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
    content: str | None = None


class StreamChoice(Struct):
    delta: Delta = field(default_factory=Delta)
    finish_reason: str | None = None


class Details(Struct):
    cached_tokens: int | None = None


class Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: Details | None = None


class Chunk(Struct):
    """One event of a stream."""

    choices: list[StreamChoice] = []
    usage: Usage | None = None
    error: Any = None


_chunks = msgspec.json.Decoder(Chunk)


@dataclass(slots=True)
class ChatResult:
    """Outcome of one request."""

    error: str | None = None  # kind of error; None: a complete response
    ttft_s: float | None = None  # from sending to the first event; a comment that keeps a stream alive is none
    text: str = ""
    usage: Usage | None = None

    @property
    def is_unreachable(self) -> bool:
        """Whether no connection to the router was possible."""
        return self.error == "connect"


@dataclass(frozen=True, slots=True)
class ChatClient:
    """Sends chat requests to one router."""

    http: aiohttp.ClientSession
    url: str

    async def send(self, body: bytes, headers: dict[str, str], result: ChatResult | None = None) -> ChatResult:
        """Send one streamed request. Failures are part of the result, which grows meanwhile, and never raised."""
        result = result or ChatResult()
        started_s = time.perf_counter()
        try:
            async with self.http.post(self.url, data=body, headers=headers) as response:
                if response.status != 200:
                    await response.read()
                    result.error = f"http_{response.status}"
                else:
                    await self._read(response, result, started_s)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            result.error = "connect"
        except TimeoutError:  # aiohttp's are ClientError as well
            result.error = "timeout"
        except (aiohttp.ClientError, ConnectionError):
            result.error = "broken"
        except (msgspec.DecodeError, UnicodeDecodeError):
            result.error = "malformed"
        return result

    async def _read(self, response: aiohttp.ClientResponse, result: ChatResult, started_s: float) -> None:
        pieces: list[str] = []
        pending = b""
        is_done = False
        async for data in response.content.iter_any():
            if result.ttft_s is None and b"data:" in data:
                result.ttft_s = time.perf_counter() - started_s
            *events, pending = (pending + data).split(EVENT_END)
            for event in events:
                is_done = self._read_event(event, result, pieces) or is_done
        result.text = "".join(pieces)
        if not is_done and result.error is None:
            result.error = "broken"

    @staticmethod
    def _read_event(event: bytes, result: ChatResult, pieces: list[str]) -> bool:
        """Read one event; True for the stream's last."""
        if not event.startswith(b"data: "):
            return False
        data = event[6:]
        if data == b"[DONE]":
            return True
        chunk = _chunks.decode(data)
        if chunk.error is not None:
            result.error = "stream_error"
        if chunk.usage is not None:
            result.usage = chunk.usage
        for choice in chunk.choices:
            if choice.delta.content:
                pieces.append(choice.delta.content)
            if choice.finish_reason == "abort":
                result.error = "abort"
        return False


GROWTH = 1.05  # of bucket bounds, so quantiles are accurate to 5 %
FLOOR_S = 0.001


class Durations:
    """Histogram of seconds, of bounded size."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.count = 0
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total_s += seconds
        self._buckets[max(0, math.ceil(math.log(max(seconds, 1e-9) / FLOOR_S, GROWTH)))] += 1

    def merge(self, other: Durations) -> None:
        self._buckets += other._buckets
        self.count += other.count
        self.total_s += other.total_s

    def quantile(self, share: float) -> float | None:
        """Middle of the bucket that holds the quantile ``share`` (0 to 1); None without values."""
        left = share * self.count
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                return float(FLOOR_S * GROWTH ** (bucket - 0.5))
        return None

    def summary(self) -> dict[str, float | None]:
        """Mean, p50, p95 and p99; None without values."""
        mean = self.total_s / self.count if self.count else None
        return {"mean": mean, "p50": self.quantile(0.5), "p95": self.quantile(0.95), "p99": self.quantile(0.99)}


@dataclass(slots=True)
class Totals:
    """Totals of one task group, or of all."""

    requests: int = 0  # sent
    ok: int = 0
    errors: Counter[str] = field(default_factory=Counter)  # by kind
    usage_reported: int = 0  # responses that report cached tokens
    prompt_tokens: int = 0  # of those responses
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft: Durations = field(default_factory=Durations)

    @property
    def hit_rate(self) -> float | None:
        """Cached / prompt tokens, over responses that report both; None without any."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    def merge(self, other: Totals) -> None:
        self.requests += other.requests
        self.ok += other.ok
        self.errors += other.errors
        self.usage_reported += other.usage_reported
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.completion_tokens += other.completion_tokens
        self.ttft.merge(other.ttft)

    def report(self) -> dict[str, Any]:
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


def total(groups: dict[str, Totals]) -> Totals:
    """The sum of all groups."""
    sums = Totals()
    for totals in groups.values():
        sums.merge(totals)
    return sums


def summary_line(totals: Totals, seconds: float) -> str:
    """A summary for a terminal; ``-``: unknown."""
    errors = sum(totals.errors.values())
    p50, p95 = totals.ttft.quantile(0.5), totals.ttft.quantile(0.95)
    rate = totals.hit_rate
    return (
        f"{totals.requests / seconds:.1f} requests/s, {errors} errors, hit rate "
        f"{'-' if rate is None else f'{100 * rate:.1f} %'}, TTFT p50 {_seconds(p50)}, p95 {_seconds(p95)}"
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"
