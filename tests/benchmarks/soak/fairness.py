"""Three tenants at a pool's concurrency limit, one of them hostile: what the others' TTFT is with it and without it.

A replica serves each request for a time of its own, however many others run there, as an engine with room does. So what
a tenant loses to the hostile one is its wait in the router's admission queue.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections import Counter
from contextlib import AsyncExitStack
from statistics import fmean, quantiles
from typing import NamedTuple

import aiohttp
import msgspec

from routing.schema import Access, ApiKey, ConcurrencyConfig
from tests.benchmarks.soak.stand import RouterProcess, pool_of, router_process
from tests.benchmarks.soak.verdict import Verdict
from tests.fakes.replica import Call, fake_replicas, sse

REPLICAS = 4
PREFILL_S = 8.0
DECODE_S = 0.3  # for each token
LENGTHS = range(2, 20)  # tokens of a response; a request for one is taken for a probe of the router
MAX_RUNNING = 468  # about 42 requests/s
WARM_UP_S = 40.0  # until the queue is full
WITHIN = 1.2  # of the TTFT without the hostile tenant
TENANTS = ("one", "other", "hostile")


class Load(NamedTuple):
    """What each of the two tenants sends, and what the hostile one does."""

    per_s: float
    hostile_per_s: float
    tokens: int
    hostile_tokens: int


LOADS = {"10 x the requests": Load(4, 40, 200, 200), "10 x the prompt": Load(15, 15, 200, 2000)}


async def generate(call: Call) -> None:
    """The script of a replica."""
    body = json.loads(call.body)
    await asyncio.sleep(PREFILL_S)
    await call.begin_stream(sse({"choices": [{"text": "word", "index": 0}]}))
    await asyncio.sleep(DECODE_S * body["max_tokens"])
    usage = {"prompt_tokens": body["prompt"].count(" "), "completion_tokens": body["max_tokens"]}
    await call.end_stream(sse({"choices": [], "usage": usage}) + sse("[DONE]"))


class Seen:
    """What the clients of one phase saw, by tenant."""

    def __init__(self) -> None:
        self.ttft_s: dict[str, list[float]] = {tenant: [] for tenant in TENANTS}
        self.failed = Counter[tuple[str, int | str]]()  # by tenant and status

    def figures(self) -> tuple[float, float]:
        """Mean and 95th percentile of the TTFT of the two tenants."""
        ttft_s = self.ttft_s["one"] + self.ttft_s["other"]
        return fmean(ttft_s), quantiles(ttft_s, n=20)[-1]


async def _send(http: aiohttp.ClientSession, url: str, tenant: str, prompt: str, length: int, seen: Seen) -> None:
    body = {"model": "warmpath-demo", "stream": True, "max_tokens": length, "prompt": prompt}
    loop = asyncio.get_running_loop()
    started, headers = loop.time(), {"Authorization": f"Bearer {tenant}"}
    try:
        async with http.post(url, json=body, headers=headers) as response:
            await response.content.readany()
            ttft_s = loop.time() - started
            await response.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        seen.failed[tenant, type(error).__name__] += 1
        return
    if response.status == 200:
        seen.ttft_s[tenant].append(ttft_s)
    else:
        seen.failed[tenant, response.status] += 1


async def _run(router: RouterProcess, load: Load, seconds: float, *, with_hostile: bool) -> Seen:
    seen, ignored, loop = Seen(), Seen(), asyncio.get_running_loop()
    url, count_from = f"http://127.0.0.1:{router.port}/v1/completions", loop.time() + WARM_UP_S
    end = count_from + seconds

    async def arrivals(tenant: str, per_s: float, tokens: int) -> None:
        chance, sent = random.Random(tenant), list[asyncio.Task[None]]()
        at, number = loop.time(), 0
        while (at := at + chance.expovariate(per_s)) < end:
            await asyncio.sleep(at - loop.time())
            number += 1
            prompt = f"{tenant} {number} {with_hostile} {load.per_s} " + "word " * tokens
            phase = seen if at >= count_from else ignored
            sent.append(asyncio.create_task(_send(http, url, tenant, prompt, chance.choice(LENGTHS), phase)))
        await asyncio.gather(*sent)

    timeout, connector = aiohttp.ClientTimeout(total=120), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        tenants = [arrivals(tenant, load.per_s, load.tokens) for tenant in ("one", "other")]
        if with_hostile:
            tenants.append(arrivals("hostile", load.hostile_per_s, load.hostile_tokens))
        await asyncio.gather(*tenants)
    return seen


async def measure(verdict: Verdict, seconds: float) -> None:
    """Each load without the hostile tenant, and then with it."""
    digests = [(tenant, hashlib.sha256(tenant.encode()).hexdigest()) for tenant in TENANTS]
    keys = tuple(ApiKey(name=tenant, digest=digest, tenant=tenant) for tenant, digest in digests)
    concurrency = ConcurrencyConfig(max_running=MAX_RUNNING, max_waiting=256, max_wait_s=60.0)
    async with AsyncExitStack() as stack:
        replicas = await stack.enter_async_context(fake_replicas(REPLICAS, generate))
        config = msgspec.structs.replace(pool_of(replicas, concurrency=concurrency), access=Access(keys))
        router = await stack.enter_async_context(router_process(config))
        for name, load in LOADS.items():
            alone = await _run(router, load, seconds, with_hostile=False)
            beside = await _run(router, load, seconds, with_hostile=True)
            for figure, before, after in zip(("mean", "p95"), alone.figures(), beside.figures(), strict=True):
                text = f"{before:.3f} s without the hostile tenant, {after:.3f} s with it: {after / before:.2f} x"
                verdict.check(f"{name}, {figure}", text, after <= WITHIN * before)
            failed = beside.failed
            verdict.check(f"{name}, rejected", str(dict(failed)), {tenant for tenant, _ in failed} <= {"hostile"})
            waited = fmean(beside.ttft_s["hostile"])
            verdict.check(f"{name}, hostile", f"mean {waited:.3f} s", waited > WITHIN * alone.figures()[0])
