"""Where a prompt goes, whichever router it comes through."""

from __future__ import annotations

import json

from routing.schema import PrefixHashSettings
from tests.fakes.replica import fake_replicas
from tests.routing.proxy.harness import config, routed


async def test_two_routers_send_the_same_prompt_to_the_same_replica() -> None:
    async with fake_replicas(5) as replicas:
        snapshot = config(replicas, settings=PrefixHashSettings())
        async with routed(snapshot) as one, routed(snapshot) as other:
            chosen = set()
            for number in range(40):
                message = {"role": "system", "content": f"You are expert number {number}. " * 20}
                body = json.dumps({"model": "tiny", "messages": [message]}).encode()
                first, second = await one.chat(body), await other.chat(body)
                assert first.replica == second.replica
                assert first.headers["x-warmpath-reason"] == "affinity"
                chosen.add(first.replica)
            assert len(chosen) == 5
