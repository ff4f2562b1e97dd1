"""What a workload is made of: requests in order of time, some of them turns of a session.

Read traces in Mooncake's format: one JSON object per line, ``.jsonl`` or ``.jsonl.gz``.

Fields: ``timestamp`` (ms since the start, ascending), ``input_length`` and ``output_length`` (tokens), ``hash_ids``
(one id for each block of 512 prompt tokens; an id stands for its block and everything before it, and the last block
may be partial). Source: github.com/kvcache-ai/Mooncake, FAST25-release.
"""

from __future__ import annotations

import gzip
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Protocol, cast

import msgspec

from routing.traffic.columns import Columns


class Script(Protocol):
    """A session's plan, or that of a single request. Compared and hashed by identity."""

    @property
    def group(self) -> str:
        """The task group's name: ``X-Task-Group``."""
        ...

    @property
    def session_id(self) -> str | None:
        """``X-Session-ID``; None for a request of no session."""
        ...

    def messages(self, turn: int, answers: Sequence[str]) -> list[dict[str, str]]:
        """The messages of turn ``turn`` (from 0), after ``answers`` to all turns before it."""
        ...

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """Tools offered to the model; empty for none."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """One request at its time."""

    at_s: float  # seconds since the workload's start
    script: Script
    turn: int  # from 0; a turn needs the answers to all before it
    output_tokens: int
    is_last: bool = True  # of its session

    def body(self, model: str | None, answers: Sequence[str]) -> dict[str, Any]:
        """The chat request: streamed, with usage, and as long as the workload says."""
        body: dict[str, Any] = {
            "messages": self.script.messages(self.turn, answers),
            "max_tokens": self.output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if model is not None:
            body["model"] = model
        if self.script.tools:
            # the list is part of the prompt; "none" keeps replicas without a tool parser from refusing it
            body |= {"tools": list(self.script.tools), "tool_choice": "none"}
        return body


class Workload(Protocol):
    """A source of jobs, ascending in time."""

    def jobs(self) -> Iterator[Job]:
        """From the start; a generated workload may have no end."""
        ...


BLOCK_TOKENS = 512
Tokens = Annotated[int, msgspec.Meta(ge=1, le=100_000_000)]


class TraceError(ValueError):
    """A line that is no request; the message names file and line."""


class Line(msgspec.Struct):
    """A line as the file has it."""

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
    hash_ids: tuple[int, ...]  # of all blocks of 512 tokens, the last one perhaps partial

    @property
    def keys(self) -> tuple[int, ...]:
        """The ids of the full blocks: only those can be cached."""
        return self.hash_ids[: self.prompt_tokens // BLOCK_TOKENS]


def read_trace(path: Path) -> list[TraceRequest]:
    """A whole trace, rows of equal time spread over the gap to the next; TraceError, OSError."""
    with _opened(path) as file:
        return spread(parse_lines(file, str(path)))


def parse_lines(lines: Iterable[bytes], name: str) -> Iterator[TraceRequest]:
    """Check and read lines; blank ones are passed over."""
    for line in _checked(lines, name):
        yield TraceRequest(line.timestamp / 1000, line.input_length, max(1, line.output_length), tuple(line.hash_ids))


def read_columns(path: Path) -> Columns:
    """The same as ``read_trace``, by column: for traces of a million requests. TraceError, OSError."""
    columns = Columns(BLOCK_TOKENS)
    append = columns.append
    with _opened(path) as file:
        for line in _checked(file, str(path)):
            try:
                append(line.timestamp / 1000, line.input_length, max(1, line.output_length), line.hash_ids)
            except OverflowError:
                raise TraceError(f"{path}, request {len(columns)}: a hash id is not below 2**64") from None
    columns.at_s = array("d", spread_stamps(columns.at_s))
    return columns


def spread(requests: Iterable[TraceRequest]) -> list[TraceRequest]:
    """Spread rows that share a stamp evenly over the gap to the next stamp; the last ones over the gap before."""
    rows = list(requests)
    return [replace(row, at_s=at_s) for row, at_s in zip(rows, spread_stamps([r.at_s for r in rows]), strict=True)]


def spread_stamps(stamps: Sequence[float]) -> Iterator[float]:
    """The same for ascending times alone."""
    gap_s, at, end = 0.0, 0, len(stamps)
    while at < end:
        stamp, after = stamps[at], at + 1
        while after < end and stamps[after] == stamp:
            after += 1
        if after < end:
            gap_s = stamps[after] - stamp
        for place in range(after - at):
            yield stamp + gap_s * place / (after - at)
        at = after


def _opened(path: Path) -> BinaryIO:
    return cast("BinaryIO", gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _checked(lines: Iterable[bytes], name: str) -> Iterator[Line]:
    """The lines that are not blank, checked; TraceError names the first that is wrong."""
    decode = msgspec.json.Decoder(Line).decode
    before = 0.0
    for number, text in enumerate(_read(lines, name), start=1):
        if not text.strip():
            continue
        try:
            line = decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(f"{name}, line {number}: {error}") from None
        blocks = -(-line.input_length // BLOCK_TOKENS)
        if len(line.hash_ids) != blocks:
            found = len(line.hash_ids)
            raise TraceError(f"{name}, line {number}: {found} hash_ids for {blocks} blocks of {BLOCK_TOKENS} tokens")
        if line.timestamp < before:
            raise TraceError(f"{name}, line {number}: its timestamp is before that of the line above")
        before = line.timestamp
        yield line


def _read(lines: Iterable[bytes], name: str) -> Iterator[bytes]:
    """The lines of a file that may be torn."""
    try:
        yield from lines
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{name}: not a whole gzip file: {error}") from None
