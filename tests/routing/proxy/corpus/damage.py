"""Random damage to raw requests and answers."""

from __future__ import annotations

import os
import random

ROUNDS = int(os.environ.get("WARMPATH_FUZZ_ROUNDS", "200"))  # for each of ten seeds
PIECES = (
    *(b"\r\n", b"\n", b"\r", b" ", b"\t", b"\0", b":", b",", b";", b"0", b"1", b"7", b"a", b"\xff", b"\x0b", b"\r\n "),
    *(b"chunked", b"Content-Length: 3\r\n", b"Content-Length: 7\r\n", b"Transfer-Encoding: chunked\r\n", b"\r\n\r\n"),
    *(b"0\r\n\r\n", b"3\r\nabc\r\n", b"Connection: close\r\n", b"Host: a\r\n", b"HTTP/1.0", b"GET / HTTP/1.1\r\n"),
    *(
        b"Connection: upgrade\r\nUpgrade: x\r\n",
        b"Expect: 100-continue\r\n",
        b"identity",
        b"http://router",
        b"0x",
        b"+",
    ),
)


def damaged(raw: bytes, chance: random.Random) -> bytes:
    """The same bytes with a few pieces put in, left out, doubled or changed."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        at, end = sorted(chance.randrange(len(raw) + 1) for _ in range(2))
        end = min(end, at + chance.choice((0, 1, 1, 2, 20)))
        piece = chance.choice((b"", chance.choice(PIECES), chance.choice(PIECES), raw[at:end] * 2))
        raw = raw[:at] + piece + raw[end:]
    return raw
