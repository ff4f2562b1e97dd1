"""Routers before the same replicas that share their state through a Valkey."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import pytest

from routing.schema import LowestCostSettings
from routing.settings import STATE_URL, SettingsError, state_exchange
from routing.types import TargetId
from tests.fakes.replica import FakeReplica
from tests.routing.proxy.harness import DEADLINE_S, Harness, config, routed

REPLICAS = 6


def turn(conversation: int, number: int) -> bytes:
    """A turn of a conversation, 2 KiB longer than the one before."""
    messages = [
        {"role": "user" if at % 2 == 0 else "assistant", "content": f"{conversation} {at} " * 256}
        for at in range(2 * number + 1)
    ]
    return json.dumps({"model": "tiny", "messages": messages}).encode()


def placed(router: Harness) -> int:
    """Prompts of peers that a router knows of."""
    exchange = router.router.state_exchange
    return 0 if exchange is None else exchange.view.placed


async def replicas_of_turns(one: Harness, other: Harness) -> list[set[str]]:
    """For each of some conversations, the replicas that got its turns, which go to both routers in turn."""
    found = []
    for conversation in range(6):
        replicas: set[str] = set()
        for number in range(4):
            router = (one, other)[(conversation + number) % 2]
            peer = other if router is one else one
            known = placed(peer)
            response = await router.chat(turn(conversation, number))
            replicas.add(response.replica)
            if router.router.state_exchange is not None:
                async with asyncio.timeout(DEADLINE_S):
                    while placed(peer) == known:
                        await asyncio.sleep(0.005)
        found.append(replicas)
    return found


@pytest.mark.parametrize("is_shared", [False, True])
async def test_the_turns_of_a_conversation_stay_together_whichever_router_gets_them(
    valkey: str, monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    if is_shared:
        monkeypatch.setenv(STATE_URL, f"unix://{urlsplit(valkey).path}")
    async with AsyncExitStack() as stack:
        replicas = [FakeReplica(f"gpu-{number}") for number in range(REPLICAS)]
        for replica in replicas:
            await replica.start()
            stack.callback(replica.kill)
        fleet = config(replicas, settings=LowestCostSettings())
        one, other = [await stack.enter_async_context(routed(fleet)) for _ in range(2)]
        if is_shared:
            async with asyncio.timeout(DEADLINE_S):
                while not all(router.router.state_exchange.peers for router in (one, other)):
                    await asyncio.sleep(0.005)
        for replica in replicas[:3]:  # work that only one router has sent
            one.router.balancer.loads.dispatch(TargetId(replica.name), 1_000_000)
        async with asyncio.timeout(DEADLINE_S):
            while is_shared and other.router.balancer.loads.load(TargetId("gpu-2")).running == 0:
                await asyncio.sleep(0.005)
        found = await replicas_of_turns(one, other)
        _, text = await one.admin("GET", "/metrics")

    assert (max(map(len, found)) == 1) is is_shared
    assert ("shared_state_peers" in text) is is_shared


def test_an_invalid_url_is_an_error_that_does_not_show_it() -> None:
    with pytest.raises(SettingsError, match=f"^{STATE_URL}: expected redis://, rediss:// or unix:// ") as raised:
        state_exchange({STATE_URL: "http://user:secret@host"})

    assert "secret" not in str(raised.value)
    assert state_exchange({}) is None
