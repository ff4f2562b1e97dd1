"""Reading traces in Mooncake's format."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from routing.traffic.trace import TraceError, TraceRequest, parse_lines, read_trace, spread


def line(at_ms: int, tokens: int = 600, ids: list[int] | None = None, **fields: object) -> bytes:
    row = {"timestamp": at_ms, "input_length": tokens, "output_length": 5, "hash_ids": [0, 1] if ids is None else ids}
    return json.dumps({**row, **fields}).encode()


def test_a_row_is_read_with_its_time_in_seconds_and_its_full_blocks_as_keys() -> None:
    (request,) = parse_lines([line(1500)], "t")

    assert (request.at_s, request.prompt_tokens, request.output_tokens) == (1.5, 600, 5)
    assert request.hash_ids == (0, 1)
    assert request.keys == (0,)


def test_plain_and_gzipped_files_give_the_same_requests(tmp_path: Path) -> None:
    text = b"\n".join([line(0), line(1000), b""])
    (tmp_path / "a.jsonl").write_bytes(text)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text))

    assert read_trace(tmp_path / "a.jsonl") == read_trace(tmp_path / "a.jsonl.gz")


def test_requests_with_one_timestamp_are_spread_over_the_gap_to_the_next() -> None:
    requests = spread(parse_lines([line(0), line(0), line(0), line(3000), line(3000)], "t"))

    assert [request.at_s for request in requests] == [0.0, 1.0, 2.0, 3.0, 4.5]


@pytest.mark.parametrize(
    ("invalid", "message"),
    [
        (b"{", "t, line 2: Input data was truncated"),
        (line(0, tokens=0), "t, line 2: Expected `int` >= 1"),
        (line(0, ids=[1]), "t, line 2: 1 hash_ids for 2 blocks of 512 tokens"),
        (line(-5), "t, line 2: Expected `float` >= 0"),
        (b'{"timestamp": 1}', "t, line 2: Object missing required field"),
        (line(10), "t, line 2: the timestamp is before that of the previous line"),
    ],
)
def test_an_invalid_line_is_named_in_the_error(invalid: bytes, message: str) -> None:
    with pytest.raises(TraceError, match=message.replace("`", ".")):
        list(parse_lines([line(20), invalid], "t"))


def test_spreading_keeps_an_empty_or_single_request_trace() -> None:
    assert spread([]) == []
    assert spread([TraceRequest(7.0, 1, 1, (0,))]) == [TraceRequest(7.0, 1, 1, (0,))]
