"""A read is taken for one whole chunk only where it is what this router would write."""

from __future__ import annotations

import pytest

from routing.http.response import SHORT_CHUNK, chunk_start, chunked


def test_every_short_chunk_is_found() -> None:
    for length in range(1, SHORT_CHUNK):
        data = chunked(b"x" * length, False)
        assert data[chunk_start(data) : -2] == b"x" * length
        assert chunk_start(data) > 0


@pytest.mark.parametrize("length", [15, 16, 17, 255, 256, 257])
def test_one_byte_more_or_less_is_none(length: int) -> None:
    data = chunked(b"x" * length, False)

    assert chunk_start(data + b"y") == chunk_start(data[:-1]) == chunk_start(data[1:]) == 0


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\r\n",
        b"0\r\n\r\n",
        b"1\r\n\r\n\r\n",
        b"5\r\nhello",
        b"5\r\nhello\n\n",
        b"5\nhello\r\n\r\n",
        b"05\r\nhello\r\n",
        b"5;a\r\nhello\r\n",
        b"A\r\n0123456789\r\n",
        b"+5\r\nhello\r\n",
        b"5\r\nhello\r\n5\r\nhello\r\n",
        chunked(b"hello", True),
        chunked(b"x" * SHORT_CHUNK, False),
    ],
)
def test_anything_else_is_the_parsers(data: bytes) -> None:
    assert chunk_start(data) == 0
