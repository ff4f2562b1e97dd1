"""The raw requests of the corpus with random damage: no other server reads otherwise what the router takes for one."""

from __future__ import annotations

import os
import random

import pytest

from tests.routing.proxy.corpus.parsers import by_aiohttp, by_h11
from tests.routing.proxy.corpus.requests import FOLLOWER, VECTORS
from tests.routing.proxy.corpus.test_boundaries import Listening, outcome

pytestmark = pytest.mark.plain_python(reason="Their router is of a class of their own.")

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
SHORT = [vector for vector in VECTORS if len(vector.raw) < 400]
SEEDS = [vector.raw for vector in SHORT] + 9 * [vector.raw for vector in SHORT if not vector.is_refused]


def damaged(raw: bytes, chance: random.Random) -> bytes:
    """The same bytes with a few pieces put in, left out, doubled or changed."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        at, end = sorted(chance.randrange(len(raw) + 1) for _ in range(2))
        end = min(end, at + chance.choice((0, 1, 1, 2, 20)))
        piece = chance.choice((b"", chance.choice(PIECES), chance.choice(PIECES), raw[at:end] * 2))
        raw = raw[:at] + piece + raw[end:]
    return raw


@pytest.mark.parametrize("seed", range(10))
async def test_no_damage_makes_two_requests_of_one(seed: int) -> None:
    chance, router = random.Random(seed), Listening()
    for _ in range(ROUNDS):
        raw = damaged(chance.choice(SEEDS), chance) + FOLLOWER
        heard, _, _ = await outcome(router, raw)
        taken = [(method, body) for method, _, _, body, _ in heard]
        for parse in (by_h11, by_aiohttp):
            read = [(method, body) for method, _, body in parse(raw)]
            shared = min(len(read), len(taken))
            assert read[:shared] == taken[:shared], (parse.__name__, raw)
        cut = chance.randrange(1, len(raw))
        assert (await outcome(router, raw[:cut], raw[cut:]))[0] == heard, raw
    router.deadlines.close()
