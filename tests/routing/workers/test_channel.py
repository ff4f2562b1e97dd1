"""What is asked between a parent and its worker, and what comes back where there is no answer."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from routing.workers.messages import Channel, ChannelClosedError, DeclinedError


async def test_a_channel_says_why_there_is_no_answer() -> None:
    async def answer(question: str, content: Any) -> Any:
        if question == "decline":
            raise DeclinedError(reason="because", path="$")
        if question == "fail":
            raise ZeroDivisionError
        if question == "never":
            await asyncio.Event().wait()
        return content

    ends = socket.socketpair()
    mine, theirs = [await Channel.open(end, answer) for end in ends]
    running = [asyncio.create_task(channel.run()) for channel in (mine, theirs)]
    assert await mine.ask("echo", {"a": [1, b"x"]}, timeout_s=5) == {"a": [1, b"x"]}
    big = b"x" * (8 << 20)
    assert await asyncio.gather(*(mine.ask("echo", big, timeout_s=5), theirs.ask("echo", 2, timeout_s=5))) == [big, 2]
    with pytest.raises(DeclinedError) as declined:
        await mine.ask("decline", timeout_s=5)
    assert declined.value.facts == {"reason": "because", "path": "$"}
    with pytest.raises(DeclinedError) as failed:
        await mine.ask("fail", timeout_s=5)
    assert failed.value.facts == {"reason": "internal error"}
    with pytest.raises(TimeoutError):
        await mine.ask("never", timeout_s=0.01)
    waiting = asyncio.create_task(mine.ask("never", timeout_s=5))
    await asyncio.sleep(0)
    theirs.close()
    with pytest.raises(ChannelClosedError):
        await waiting
    with pytest.raises(ChannelClosedError):
        await mine.ask("echo", timeout_s=5)
    await asyncio.wait(running, timeout=5)
