"""The raw requests of the corpus with random damage: no other server reads otherwise what the router takes for one."""

from __future__ import annotations

import random

import pytest

from tests.routing.proxy.corpus.damage import ROUNDS, damaged
from tests.routing.proxy.corpus.listening import Listening, outcome
from tests.routing.proxy.corpus.parsers import by_aiohttp, by_h11
from tests.routing.proxy.corpus.requests import FOLLOWER, VECTORS

pytestmark = pytest.mark.plain_python(reason="Their router is of a class of their own.")


SHORT = [vector for vector in VECTORS if len(vector.raw) < 400]
SEEDS = [vector.raw for vector in SHORT] + 9 * [vector.raw for vector in SHORT if not vector.is_refused]


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
