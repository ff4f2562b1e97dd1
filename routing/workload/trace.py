"""Read traces in Mooncake's format: one JSON object per line, ``.jsonl`` or ``.jsonl.gz``.

Fields: ``timestamp`` (ms since the start, ascending), ``input_length`` and ``output_length`` (tokens), ``hash_ids``
(one id for each block of 512 prompt tokens; an id stands for its block and everything before it, and the last block
may be partial). Source: github.com/kvcache-ai/Mooncake, FAST25-release.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec

BLOCK_TOKENS = 512
Tokens = Annotated[int, msgspec.Meta(ge=1, le=100_000_000)]


class TraceError(ValueError):
    """A line that is no request; the message names file and line."""


class Line(msgspec.Struct):
    """A line as the file has it."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]  # ms
    input_length: Tokens
    output_length: Annotated[int, msgspec.Meta(ge=0, le=100_000_000)]
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0)]]


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
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        return spread(parse_lines(file, str(path)))


def parse_lines(lines: Iterable[bytes], name: str) -> Iterator[TraceRequest]:
    """Check and read lines; blank ones are passed over."""
    decoder = msgspec.json.Decoder(Line)
    before = 0.0
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except msgspec.DecodeError as error:
            raise TraceError(f"{name}, line {number}: {error}") from None
        blocks = -(-line.input_length // BLOCK_TOKENS)
        if len(line.hash_ids) != blocks:
            found = len(line.hash_ids)
            raise TraceError(f"{name}, line {number}: {found} hash_ids for {blocks} blocks of {BLOCK_TOKENS} tokens")
        if line.timestamp < before:
            raise TraceError(f"{name}, line {number}: its timestamp is before that of the line above")
        before = line.timestamp
        yield TraceRequest(before / 1000, line.input_length, max(1, line.output_length), tuple(line.hash_ids))


def spread(requests: Iterable[TraceRequest]) -> list[TraceRequest]:
    """Spread rows that share a stamp evenly over the gap to the next stamp; the last ones over the gap before."""
    groups: list[list[TraceRequest]] = []
    for request in requests:
        if groups and groups[-1][0].at_s == request.at_s:
            groups[-1].append(request)
        else:
            groups.append([request])
    out: list[TraceRequest] = []
    gap_s = 0.0
    for index, group in enumerate(groups):
        if index + 1 < len(groups):
            gap_s = groups[index + 1][0].at_s - group[0].at_s
        out += (replace(row, at_s=row.at_s + gap_s * place / len(group)) for place, row in enumerate(group))
    return out
