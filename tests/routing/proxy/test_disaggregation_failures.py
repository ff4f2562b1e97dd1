"""Failures of prefill and decode legs: no client sees one that another replica can make up for."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
from msgspec.structs import replace

from routing.schema import RETRY_CAUSES, BreakerConfig, HealthCheck, Limits
from tests.fakes.replica import (
    LAST_CHUNK,
    STREAM_HEAD,
    Call,
    Script,
    answering,
    chunk,
    fake_replicas,
    hanging,
    raw,
    resetting,
    sse,
    streaming,
)
from tests.pace import is_within
from tests.routing.proxy.disaggregated import (
    DECODE,
    MEMBER,
    PREFILL,
    PREFILLED,
    TRANSFER_PARAMETERS,
    decoded,
    has_parameters,
    last_prefill,
    legs,
    prefilling,
    prompt,
    roles,
)
from tests.routing.proxy.harness import CHAT, post, routed

NEVER_DOWN = HealthCheck(failures=100, interval_s=60)
SHORT = Limits(first_byte_timeout_s=0.4, response_timeout_s=0.4, connect_timeout_s=0.2)
OVERSIZED = b'{"filler":"%b"}' % (b"x" * (5 << 20))
FAILURES: dict[str, tuple[Script, str, bool]] = {  # script, cause, and whether another prefill replica gets the prompt
    "reset": (resetting, "reset", True),
    "closed inside the body": (raw(b"HTTP/1.1 200 O\r\nContent-Length: 9\r\n\r\nabc", then_close=True), "reset", True),
    "503": (answering(b"{}", status=503), "status_503", True),
    "aborted": (prefilling(choices=[{"finish_reason": "abort"}]), "aborted", True),
    "500": (answering(b"{}", status=500), "status_500", False),
    "400": (answering(b"{}", status=400), "status_400", False),
    "429": (answering(b"{}", status=429), "status_429", False),
    "429 for a while": (answering(b"{}", status=429, extra=b"Retry-After: 1\r\n"), "status_429", True),
    "not JSON": (answering(b"Hello."), "invalid_response", False),
    "parameters of another type": (prefilling(**{MEMBER: "x"}), "invalid_response", False),
    "without parameters": (prefilling(**{MEMBER: None}), "no_parameters", False),
    "too long": (answering(OVERSIZED), "invalid_response", False),
    "not HTTP": (raw(b"SSH-2.0\r\n\r\n"), "invalid_response", False),
    "hanging": (hanging, "timeout", False),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_a_decode_replica_prefills_the_prompt_itself_if_the_leg_fails(name, two):
    script, cause, _ = FAILURES[name]
    whole = roles(two, PREFILL, DECODE, limits=SHORT, health=NEVER_DOWN)
    two[0].script = script
    async with routed(whole) as harness:
        response = await harness.chat(prompt())
        await harness.at_rest()
        found, record = await legs(harness), await last_prefill(harness)

    assert (response.status, response.replica) == (200, "replica-1")
    assert "x-warmpath-prefill-replica" not in response.headers
    (decode,) = two[1].calls
    assert decode.body == prompt()
    assert (len(two[0].calls), found) == (1, {("replica-0", "failed", cause): 1})
    assert (record["outcome"], record["replica"], record["cause"]) == ("failed", "replica-0", cause)


@pytest.mark.parametrize("name", FAILURES)
async def test_one_other_prefill_replica_gets_the_prompt_if_the_failure_may_be_retried(name, three):
    script, cause, is_retried = FAILURES[name]
    whole = roles(three, PREFILL, PREFILL, DECODE, limits=SHORT, health=NEVER_DOWN)

    async def first_fails(call: Call) -> None:
        others = len(three[0].calls) + len(three[1].calls) > 1
        await (prefilling() if others else script)(call)

    three[0].script = three[1].script = first_fails
    async with routed(whole) as harness:
        response = await harness.chat(prompt())
        await harness.at_rest()
        found, record = await legs(harness), await last_prefill(harness)

    assert response.status == 200
    assert record["cause"] == (None if is_retried else cause)
    assert sorted(len(replica.calls) for replica in three[:2]) == ([1, 1] if is_retried else [0, 1])
    assert ("x-warmpath-prefill-replica" in response.headers) == has_parameters(three[2].calls[0])
    assert sum(found.values()) == 1 + has_parameters(three[2].calls[0])


async def test_a_prefill_replica_that_refuses_connections_is_found_to_be_down(three):
    whole = roles(three, PREFILL, PREFILL, DECODE, health=HealthCheck(failures=2, interval_s=0.05))
    three[0].kill()
    async with routed(whole) as harness:
        for number in range(6):
            assert (await harness.chat(prompt(str(number)))).status == 200
        await harness.until(lambda: not harness.health.is_up("replica-0"), "the health check")
        assert (await harness.chat(prompt("last"))).headers["x-warmpath-prefill-replica"] == "replica-1"
        await harness.at_rest()

    assert all(json.loads(call.body)[MEMBER] == TRANSFER_PARAMETERS for call in three[2].calls)


async def test_an_engine_without_a_kv_connector_is_logged_once(two, caplog):
    whole = roles(two, PREFILL, DECODE)
    two[0].script = prefilling(**{MEMBER: None})
    async with routed(whole) as harness:
        for number in range(3):
            assert (await harness.chat(prompt(str(number)))).status == 200

    assert [record.message for record in caplog.records].count("prefill_without_kv_transfer") == 1


async def test_replicas_are_compared_with_those_that_do_the_same_work():
    """All decode replicas are slow alike, and prefill replicas respond at once: none is ejected for that."""

    async def trickling(call: Call) -> None:
        await call.begin_stream()
        for number in range(4):
            await call.send(chunk(sse({"n": number})))
            await asyncio.sleep(1.2)
        await call.end_stream()

    async with fake_replicas(4) as four:
        whole = roles(four, PREFILL, PREFILL, DECODE, DECODE, breaker=BreakerConfig(stall_s=0.5))
        four[2].script = four[3].script = trickling
        async with routed(whole) as harness:
            bodies = [prompt(f"{number} ", stream=True) for number in range(10)]
            responses = asyncio.gather(*(harness.chat(body) for body in bodies))
            for number in range(8):  # legs go on while the streams trickle
                later = asyncio.create_task(harness.chat(prompt(f"later {number} ", stream=True)))
                await asyncio.sleep(0.4)
                later.cancel()
            await responses
            assert harness.breakers.ejections == {}


async def test_the_retry_budget_limits_further_legs(three):
    limits = Limits(retry_ratio=0, retry_floor_per_s=0)
    whole = roles(three, PREFILL, PREFILL, DECODE, limits=limits, health=NEVER_DOWN)
    three[0].script = three[1].script = resetting
    async with routed(whole) as harness:
        response = await harness.chat(prompt())
        found = await legs(harness)

    assert response.status == 200
    assert sum(found.values()) == 1


async def test_failing_legs_eject_their_replica_and_a_probe_readmits_it(two):
    breaker = BreakerConfig(failures=2, open_s=0.05, successes=1)
    whole = roles(two, PREFILL, DECODE, breaker=breaker, health=NEVER_DOWN)
    two[0].script = answering(b"{}", status=500)
    async with routed(whole) as harness:
        await harness.chat(prompt("a"))
        await harness.chat(prompt("b"))
        await harness.until(lambda: harness.breakers.not_closed, "the ejection")
        two[0].script = prefilling()
        number = 0
        while harness.breakers.not_closed:
            number += 1
            assert (await harness.chat(prompt(f"c{number}"))).status == 200
        assert (await harness.chat(prompt("d"))).headers["x-warmpath-prefill-replica"] == "replica-0"
        await harness.at_rest()


async def test_all_prefill_replicas_may_be_ejected_but_only_half_of_the_others():
    async with fake_replicas(4) as four:
        breaker = BreakerConfig(failures=2, open_s=60)
        whole = roles(four, PREFILL, PREFILL, DECODE, DECODE, breaker=breaker, health=NEVER_DOWN)
        for replica in four:
            replica.script = answering(b"{}", status=500)
        async with routed(whole) as harness:
            for number in range(20):
                assert (await harness.chat(prompt(f"{number} "))).status == 500
            ejected = {replica for _, replica, _ in harness.breakers.ejections}
            await harness.at_rest()

    assert ejected - {"replica-2", "replica-3"} == {"replica-0", "replica-1"}
    assert len(ejected) == 3


async def test_a_leg_leaves_time_for_the_decode_replica(two):
    """Both legs together may take as long as a request to one replica."""
    limits = Limits(first_byte_timeout_s=2.0, response_timeout_s=2.0, retry_on=RETRY_CAUSES)
    whole = roles(two, PREFILL, DECODE, limits=limits, health=NEVER_DOWN)
    two[0].script = two[1].script = hanging
    async with routed(whole) as harness:
        started_at = asyncio.get_running_loop().time()
        response = await harness.chat(prompt(stream=True))
        took_s = asyncio.get_running_loop().time() - started_at
        found = await legs(harness)
        await harness.at_rest()

    assert (response.status, len(two[1].calls)) == (504, 1)
    assert found == {("replica-0", "failed", "timeout"): 1}
    assert took_s > 1.9
    assert is_within(took_s, 3.5)


def trickling(start: bytes, piece: bytes) -> Script:
    """Send the start at once, then one piece after the other without end."""

    async def script(call: Call) -> None:
        await call.send(start)
        while True:
            await call.send(piece)
            await asyncio.sleep(0.05)

    return script


LENGTH = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 4000000\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
TRICKLES: dict[str, Script] = {
    "a head without end": trickling(b"HTTP/1.1 200 OK\r\nX-Long: ", b"x"),
    "header lines": trickling(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
    "interim responses": trickling(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
    "a head alone": raw(LENGTH),
    "a body with a length": trickling(LENGTH, b" "),
    "a body in chunks": trickling(CHUNKED, chunk(b" ")),
    "a stream that was not asked for": trickling(STREAM_HEAD, chunk(sse({"choices": [{"delta": {"content": "a"}}]}))),
    "comments": trickling(STREAM_HEAD, chunk(b": still here\n\n")),
}


@pytest.mark.parametrize("name", TRICKLES)
async def test_a_prefill_replica_that_trickles_has_the_same_deadline(name, two):
    whole = roles(two, PREFILL, DECODE, limits=SHORT, health=NEVER_DOWN)
    two[0].script = TRICKLES[name]
    async with routed(whole) as harness:
        started_at = asyncio.get_running_loop().time()
        response = await harness.chat(prompt())
        took_s = asyncio.get_running_loop().time() - started_at
        await two[0].calls[0].wait_gone()
        await harness.at_rest()
        found = await legs(harness)

    assert (response.status, response.replica, two[1].calls[0].body == prompt()) == (200, "replica-1", True)
    assert found == {("replica-0", "failed", "timeout"): 1}
    assert is_within(took_s, 0.5 * SHORT.first_byte_timeout_s + 1.0)


async def test_a_prefill_replica_that_ends_no_handshake_has_a_deadline(two):
    """It accepts the connection, and reads and sends nothing."""
    whole = roles(two, PREFILL, DECODE, limits=SHORT, health=NEVER_DOWN)
    pool = whole.pools[0]
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts
        secure = replace(pool.replicas[0], url=f"https://127.0.0.1:{silent.getsockname()[1]}")
        async with routed(replace(whole, pools=(replace(pool, replicas=(secure, *pool.replicas[1:])),))) as harness:
            response = await harness.chat(prompt())
            await harness.at_rest()
            found = await legs(harness)

    assert (response.status, response.replica) == (200, "replica-1")
    assert found == {("replica-0", "failed", "connect"): 1}


async def test_the_time_to_the_first_token_includes_the_leg(two):
    whole = roles(two, PREFILL, DECODE)
    answer = prefilling()

    async def late(call: Call) -> None:
        await asyncio.sleep(0.2)
        await answer(call)

    two[0].script, two[1].script = late, streaming(sse({"n": 1}))
    async with routed(whole) as harness:
        await harness.chat(prompt(stream=True))
        await harness.at_rest()
        _, page = await harness.admin("GET", "/admin/decisions")

    assert page["decisions"][0]["ttft_s"] > page["decisions"][0]["prefill"]["duration_s"] > 0.2


# --- the decode leg ---------------------------------------------------------------------------------


DECODE_FAILURES: dict[str, Script] = {
    "reset": resetting,
    "503": answering(b"{}", status=503),
    "closed after the head": raw(STREAM_HEAD, then_close=True),
}


@pytest.mark.parametrize("name", DECODE_FAILURES)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_another_decode_replica_gets_the_request_without_the_used_parameters(is_streamed, name, three):
    whole = roles(three, PREFILL, DECODE, DECODE, health=NEVER_DOWN)
    good = streaming(sse({"n": 1})) if is_streamed else decoded(16)

    async def first_fails(call: Call) -> None:
        await (DECODE_FAILURES[name] if has_parameters(call) else good)(call)

    three[1].script = three[2].script = first_fails
    body = prompt(stream=is_streamed)
    async with routed(whole) as harness:
        response = await harness.chat(body)
        await harness.at_rest()
        found, record = await legs(harness), await last_prefill(harness)
        _, page = await harness.admin("GET", "/admin/decisions")

    assert response.status == 200
    assert "x-warmpath-prefill-replica" not in response.headers
    (last,) = [call for call in [*three[1].calls, *three[2].calls] if not has_parameters(call)]
    assert json.loads(last.body)["messages"] == json.loads(body)["messages"]
    assert (len(three[0].calls), len(three[1].calls), len(three[2].calls)) == (1, 1, 1)
    assert found == {("replica-0", "used", ""): 1, ("replica-0", "failed", "retried"): 1}
    assert (record["outcome"], record["cause"]) == ("failed", "retried")
    assert page["decisions"][-1]["retries"] == 1
    assert is_streamed or page["decisions"][-1]["cached_tokens"] == 16
    assert not is_streamed or response.body == sse({"n": 1})


async def test_parameters_that_no_replica_has_received_are_kept(three):
    whole = roles(three, PREFILL, DECODE, DECODE, health=NEVER_DOWN)
    three[1].kill()
    async with routed(whole) as harness:
        for number in range(4):
            response = await harness.chat(prompt(str(number)))
            assert (response.status, response.replica) == (200, "replica-2")
            assert response.headers["x-warmpath-prefill-replica"] == "replica-0"
        await harness.at_rest()

    assert all(json.loads(call.body)[MEMBER] == TRANSFER_PARAMETERS for call in three[2].calls)
    assert len(three[0].calls) == 4


FAILED_LOAD = {"error": {"message": "Failed to load KV blocks.", "type": "InternalServerError", "code": 500}}
REJECTIONS: dict[str, Script] = {
    "a 500": answering(json.dumps(FAILED_LOAD).encode(), status=500),
    "an error event": streaming(sse(FAILED_LOAD), sse("[DONE]")),
    "an error event and nothing else": raw(STREAM_HEAD + chunk(sse(FAILED_LOAD)), LAST_CHUNK),
}


@pytest.mark.parametrize("name", REJECTIONS)
async def test_a_decode_replica_that_cannot_fetch_the_blocks_gets_the_request_without_them(name, two):
    whole = roles(two, PREFILL, DECODE, limits=Limits(retry_ratio=0, retry_floor_per_s=0))

    async def without_blocks(call: Call) -> None:
        await (REJECTIONS[name] if has_parameters(call) else streaming(sse({"n": 1})))(call)

    two[1].script = without_blocks
    async with routed(whole) as harness:
        response = await harness.chat(prompt(stream=True))
        await harness.at_rest()
        found, record = await legs(harness), await last_prefill(harness)
        breakers = dict(harness.breakers.not_closed)

    assert (response.status, response.body) == (200, sse({"n": 1}))
    assert [has_parameters(call) for call in two[1].calls] == [True, False]
    assert found == {("replica-0", "used", ""): 1, ("replica-0", "failed", "rejected"): 1}
    assert (record["outcome"], record["cause"], breakers) == ("failed", "rejected", {})


async def test_a_500_without_parameters_is_the_clients(two):
    whole = roles(two, PREFILL, DECODE)
    two[1].script = answering(b'{"error":"broken"}', status=500)
    async with routed(whole) as harness:
        response = await harness.chat(prompt())
        await harness.at_rest()

    assert (response.status, response.body) == (500, b'{"error":"broken"}')
    assert [has_parameters(call) for call in two[1].calls] == [True, False]


# --- the client disconnects ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waiting", "calls", "outcome"), [(0, [1, 0], "cancelled"), (1, [1, 1], "used")], ids=["prefill", "decode"]
)
async def test_a_client_that_disconnects_ends_the_leg(waiting, calls, outcome, two):
    whole = roles(two, PREFILL, DECODE)
    two[waiting].script = hanging
    async with routed(whole) as harness:
        async with harness.connect() as client:
            await client.send(post(CHAT, prompt()))
            call = await two[waiting].wait_calls(1)
        await asyncio.wait_for(call.gone.wait(), 10)
        await harness.at_rest()
        assert await legs(harness) == {("replica-0", outcome, ""): 1}

    assert [len(replica.calls) for replica in two] == calls


async def test_a_client_that_disconnects_while_the_leg_connects_leaves_nothing_behind(two):
    whole = roles(two, PREFILL, DECODE)
    async with routed(whole) as harness:
        for number in range(20):
            async with harness.connect() as client:
                await client.send(post(CHAT, prompt(str(number))))
                await harness.until(lambda seen=number: harness.router.requests > seen, "the request")
        await harness.at_rest()
        assert (await harness.chat(prompt("last"))).status == 200
        await harness.at_rest()


async def test_a_stale_connection_to_a_prefill_replica_is_replaced(two):
    whole = roles(two, PREFILL, DECODE)

    async def then_close(call: Call) -> None:
        await prefilling()(call)
        call.close()

    two[0].script = then_close
    async with routed(whole) as harness:
        for number in range(5):
            response = await harness.chat(prompt(str(number)))
            assert response.headers["x-warmpath-prefill-replica"] == "replica-0"
        found = await legs(harness)
        await harness.at_rest()

    assert found == {("replica-0", "used", ""): 5}


async def test_mixed_failures_under_load_neither_lose_nor_repeat_a_request(three):
    whole = roles(three, PREFILL, DECODE, DECODE, health=NEVER_DOWN, breaker=BreakerConfig(failures=1000))
    served: list[str] = []
    scripts = [prefilling(), resetting, answering(b"{}", status=503), prefilling(**{MEMBER: None}), answering(b"x")]

    async def prefill(call: Call) -> None:
        await scripts[len(three[0].calls) % len(scripts)](call)

    async def decode(call: Call) -> None:
        body = json.loads(call.body)
        if MEMBER in body and len(three[1].calls) % 3 == 0:
            call.reset()
            return
        served.append(body["user"])
        await streaming(sse({"user": body["user"]}))(call)

    three[0].script, three[1].script, three[2].script = prefill, decode, decode
    async with routed(whole) as harness:
        bodies = [prompt(f"{number} ", stream=True, user=f"u{number}") for number in range(60)]
        responses = await asyncio.gather(*(harness.chat(body) for body in bodies))
        await harness.at_rest()

    assert [response.status for response in responses] == [200] * 60
    assert [response.body for response in responses] == [sse({"user": f"u{number}"}) for number in range(60)]
    assert sorted(served) == sorted(f"u{number}" for number in range(60))
    assert PREFILLED[MEMBER] == TRANSFER_PARAMETERS
