"""What clients see of failing networks and replicas."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest

from routing.schema import BreakerConfig, HealthCheck, Limits
from tests.fakes.fault_proxy import Fault, fault_proxies
from tests.fakes.replica import Call, chunk, fake_replicas, resetting, sse
from tests.pace import examples
from tests.routing.proxy.harness import BODY, Harness, Response, config, routed

EVENTS = 12
LENIENT = Limits(retry_ratio=1.0, retry_floor_per_s=1000, retries=3)
NEVER_OUT = BreakerConfig(max_out_ratio=0.0)
PATIENT = HealthCheck(failures=100)


def body(number: int) -> bytes:
    return json.dumps({**json.loads(BODY), "stream": True, "user": f"n{number}"}).encode()


def events(number: int, attempt: int) -> bytes:
    """The response to an attempt of a request."""
    facts = ({"of": number, "attempt": attempt, "event": event} for event in range(EVENTS))
    return b"".join(map(sse, facts)) + sse("[DONE]")


class Streams:
    """Responds with streams that name the attempt, and checks what clients got."""

    def __init__(self) -> None:
        self.attempts: Counter[int] = Counter()

    async def __call__(self, call: Call) -> None:
        number = int(json.loads(call.body)["user"][1:])
        self.attempts[number] += 1
        await call.begin_stream()
        for event in events(number, self.attempts[number]).split(b"\n\n")[:-1]:
            await call.send(chunk(event + b"\n\n"))
            await asyncio.sleep(0)
        await call.end_stream()

    def check(self, response: Response, number: int) -> str:
        """``whole``, ``cut`` or ``refused``: the last attempt byte by byte, or a part and one error event.

        A request whose client got bytes was not retried.
        """
        if response.status == 502:
            return "refused"
        assert response.status == 200
        whole = events(number, self.attempts[number])
        if response.body == whole:
            return "whole"
        at = response.body.rindex(b'data: {"error"')
        assert response.body.count(b'"error"') == 1
        assert response.body.endswith(b"\n\n")
        assert json.loads(response.body[at + 6 :])["error"]["code"] == 502
        assert whole.startswith(response.body[:at].removesuffix(b"\n\n")), "a prefix, but for the end of a torn event"
        return "cut"

    async def play(self, harness: Harness, count: int, first: int = 0) -> Counter[str]:
        """Request streams, 16 at once, and check each."""
        results: Counter[str] = Counter()
        numbers = iter(range(first, first + count))

        async def keep_asking() -> None:
            for number in numbers:
                results[self.check(await harness.chat(body(number)), number)] += 1

        await asyncio.gather(*(keep_asking() for _ in range(16)))
        return results


@pytest.mark.generated
@pytest.mark.parametrize("seed", range(1, 1 + examples(5)))
async def test_faults_before_the_first_byte_cause_no_error(seed):
    """No error while another replica is up; all faults begin in the head of a response."""
    faults = [Fault.REFUSE, Fault.RESET, Fault.CLOSE, Fault.DELAY, Fault.TEAR, Fault.TRICKLE]
    streams = Streams()

    async def one_answer(call: Call) -> None:
        await streams(call)
        call.close()  # so that each of many connections meets one fault

    async with (
        fake_replicas(3, one_answer) as replicas,
        fault_proxies(replicas[1:], seed, faults, 60, again=False) as proxies,
        routed(config([replicas[0], *proxies], limits=LENIENT, health=PATIENT, breaker=NEVER_OUT)) as harness,
    ):
        assert await streams.play(harness, 200) == {"whole": 200}
        await harness.at_rest()
        assert {fault for proxy in proxies for fault in proxy.injected} >= set(faults)


@pytest.mark.generated
@pytest.mark.parametrize("seed", range(4, 4 + examples(5)))
async def test_faults_in_a_stream_end_it_once_and_are_never_retried(seed):
    """A stream cut after its first byte has one error event and was not retried."""
    faults = [Fault.RESET, Fault.CLOSE, Fault.TEAR, Fault.TRICKLE]
    streams = Streams()
    async with (
        fake_replicas(2, streams) as replicas,
        fault_proxies(replicas, seed, faults, 2 * len(events(0, 1))) as proxies,
        routed(config(proxies, limits=LENIENT, health=PATIENT, breaker=NEVER_OUT)) as harness,
    ):
        results = await streams.play(harness, 200)
        assert results["cut"] > 10
        assert results["whole"] > 100
        await harness.at_rest()


@pytest.mark.generated
async def test_kills_before_the_first_byte_cause_no_error(two):
    """A replica is killed with requests in flight, again and again."""
    two[0].script, two[1].script = resetting, (streams := Streams())
    async with routed(config(two, limits=LENIENT, health=PATIENT, breaker=NEVER_OUT)) as harness:
        first = 0
        while len(two[0].calls) < examples(500):
            assert await streams.play(harness, 100, first) == {"whole": 100}
            first += 100
        await harness.at_rest()


@pytest.mark.generated
async def test_torn_connections_leave_nothing():
    streams = Streams()
    async with (
        fake_replicas(3, streams) as replicas,
        fault_proxies(replicas, 9, list(Fault), 900) as proxies,
        routed(config(proxies, limits=LENIENT, health=PATIENT, breaker=NEVER_OUT)) as harness,
    ):
        for first in range(0, examples(500), 100):
            await streams.play(harness, 100, first)
            await harness.at_rest()
            open_ones = sum(link.connections for link in harness.router.active.connection_pools.values())
            assert open_ones <= 3 * 16, "kept alive, of 16 at once"
            await harness.until(lambda: sum(proxy.open for proxy in proxies) <= 3 * 16 + 3, "relays to end")
            assert len(harness.router.deadlines) <= 3 * 16 + 16 + len(harness.router.clients)
