"""Calls between a parent and a worker."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from routing.workers.messages import CallRejectedError, Channel, ChannelClosedError


async def test_a_channel_returns_results_and_reports_rejections_errors_timeouts_and_closing():
    async def answer(question: str, content: Any) -> Any:
        if question == "decline":
            raise CallRejectedError(reason="because", path="$")
        if question == "fail":
            raise ZeroDivisionError
        if question == "never":
            await asyncio.Event().wait()
        return content

    ends = socket.socketpair()
    mine, theirs = [await Channel.open(end, answer) for end in ends]
    running = [asyncio.create_task(channel.run()) for channel in (mine, theirs)]
    assert await mine.call("echo", {"a": [1, b"x"]}, timeout_s=5) == {"a": [1, b"x"]}
    big = b"x" * (8 << 20)
    assert await asyncio.gather(*(mine.call("echo", big, timeout_s=5), theirs.call("echo", 2, timeout_s=5))) == [big, 2]
    with pytest.raises(CallRejectedError) as declined:
        await mine.call("decline", timeout_s=5)
    assert declined.value.facts == {"reason": "because", "path": "$"}
    with pytest.raises(CallRejectedError) as failed:
        await mine.call("fail", timeout_s=5)
    assert failed.value.facts == {"reason": "internal error"}
    with pytest.raises(TimeoutError):
        await mine.call("never", timeout_s=0.01)
    waiting = asyncio.create_task(mine.call("never", timeout_s=5))
    await asyncio.sleep(0)
    theirs.close()
    with pytest.raises(ChannelClosedError):
        await waiting
    with pytest.raises(ChannelClosedError):
        await mine.call("echo", timeout_s=5)
    await asyncio.wait(running, timeout=5)
