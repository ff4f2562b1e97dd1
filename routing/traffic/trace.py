"""Types of workloads (requests in order of time, some of them turns of a session), and the reader of traces.

Traces are in Mooncake's format: one JSON object per line, ``.jsonl`` or ``.jsonl.gz``.

Fields: ``timestamp`` (ms since the start, ascending), ``input_length`` and ``output_length`` (tokens), ``hash_ids``
(one id for each block of 512 prompt tokens; an id stands for its block and everything before it, and the last block
may be partial). Source: github.com/kvcache-ai/Mooncake, FAST25-release.
"""

from __future__ import annotations

import gzip
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Protocol, cast

import msgspec

from routing.traffic.columns import Columns


class Script(Protocol):
    """The messages of one session or of a single request. Compared and hashed by identity."""

    @property
    def group(self) -> str:
        """``X-Task-Group``."""
        ...

    @property
    def session_id(self) -> str | None:
        """``X-Session-ID``; None: no session."""
        ...

    def messages(self, turn: int, responses: Sequence[str]) -> list[dict[str, str]]:
        """The messages of turn ``turn`` (from 0), given the responses to all turns before it."""
        ...

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """Tools of the request."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """One scheduled request."""

    at_s: float  # seconds since the workload's start
    script: Script
    turn: int  # from 0; needs the responses to all turns before it
    output_tokens: int
    is_last: bool = True  # of its session

    def body(self, model: str | None, responses: Sequence[str]) -> dict[str, Any]:
        """The chat request: streamed, with usage, and with the workload's number of output tokens."""
        body: dict[str, Any] = {
            "messages": self.script.messages(self.turn, responses),
            "max_tokens": self.output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if model is not None:
            body["model"] = model
        if self.script.tools:
            # tools are part of the prompt; with "none", replicas without a tool parser accept them
            body |= {"tools": list(self.script.tools), "tool_choice": "none"}
        return body


class Workload(Protocol):
    """A source of jobs in order of time."""

    def jobs(self) -> Iterator[Job]:
        """All jobs; endless for generated traffic."""
        ...


BLOCK_TOKENS = 512
Tokens = Annotated[int, msgspec.Meta(ge=1, le=100_000_000)]


class TraceError(ValueError):
    """An invalid line of a trace; the message names file and line."""


class Line(msgspec.Struct):
    """One line of a trace."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]  # ms
    input_length: Tokens
    output_length: Annotated[int, msgspec.Meta(ge=0, le=100_000_000)]
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0)]]  # below 2**64


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    at_s: float  # seconds since the start
    prompt_tokens: int
    output_tokens: int  # >= 1
    hash_ids: tuple[int, ...]  # of blocks of 512 tokens; the last may be partial

    @property
    def keys(self) -> tuple[int, ...]:
        """Ids of the full blocks, which alone can be cached."""
        return self.hash_ids[: self.prompt_tokens // BLOCK_TOKENS]


def read_trace(path: Path) -> list[TraceRequest]:
    """A whole trace, as ``read_columns``."""
    return requests_of(read_columns(path))


def requests_of(columns: Columns) -> list[TraceRequest]:
    """The requests of a trace with blocks of 512 tokens."""
    rows = zip(columns.at_s, columns.prompt_tokens, columns.output_tokens, pairwise(columns.starts), strict=True)
    return [
        TraceRequest(at_s, prompt_tokens, output_tokens, tuple(columns.ids[start:end]))
        for at_s, prompt_tokens, output_tokens, (start, end) in rows
    ]


def read_columns(path: Path) -> Columns:
    """A whole trace; requests with the same timestamp are spread over the time to the next. TraceError, OSError."""
    columns = Columns(BLOCK_TOKENS)
    append = columns.append
    with cast("BinaryIO", gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb") as file:
        for line in _validated_lines(file, str(path)):
            try:
                append(line.timestamp / 1000, line.input_length, max(1, line.output_length), line.hash_ids)
            except OverflowError:
                raise TraceError(f"{path}, request {len(columns)}: a hash id is not below 2**64") from None
    columns.at_s = array("d", spread_stamps(columns.at_s))
    return columns


def spread_stamps(stamps: Sequence[float]) -> Iterator[float]:
    """Ascending times, of which equal ones are spread over the time to the next; the last over the previous gap."""
    gap_s, at, end = 0.0, 0, len(stamps)
    while at < end:
        stamp, after = stamps[at], at + 1
        while after < end and stamps[after] == stamp:
            after += 1
        if after < end:
            gap_s = stamps[after] - stamp
        for position in range(after - at):
            yield stamp + gap_s * position / (after - at)
        at = after


def _validated_lines(lines: Iterable[bytes], name: str) -> Iterator[Line]:
    """Validated lines, without blank ones; TraceError names the first invalid line, or a truncated gzip file."""
    decode = msgspec.json.Decoder(Line).decode
    previous = 0.0
    try:
        for number, text in enumerate(lines, start=1):
            if not text.strip():
                continue
            try:
                line = decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise TraceError(f"{name}, line {number}: {error}") from None
            blocks, ids = -(-line.input_length // BLOCK_TOKENS), len(line.hash_ids)
            if ids != blocks:
                raise TraceError(f"{name}, line {number}: {ids} hash_ids for {blocks} blocks of {BLOCK_TOKENS} tokens")
            if line.timestamp < previous:
                raise TraceError(f"{name}, line {number}: the timestamp is before that of the previous line")
            previous = line.timestamp
            yield line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{name}: truncated or corrupt gzip file: {error}") from None
