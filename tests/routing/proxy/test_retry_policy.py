"""Which failures another replica is tried after, and what a response that does not come in time means."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from itertools import count

import msgspec
import pytest

from routing.schema import (
    RETRY_CAUSES,
    UNSAFE_CAUSES,
    BreakerConfig,
    ConfigError,
    HealthCheck,
    Limits,
    RouterConfig,
    dump_snapshot,
    load_snapshot,
)
from tests.fakes.replica import (
    LAST_CHUNK,
    STREAM_HEAD,
    Call,
    FakeReplica,
    Script,
    answering,
    chunk,
    fake_replicas,
    hanging,
    plain_answer,
    resetting,
    sse,
)
from tests.routing.proxy.harness import BODY, SECRET, Answer, Harness, config, routed
from tests.routing.proxy.streams import STREAM

REQUESTS = 14
PATIENT = HealthCheck(failures=100, interval_s=60)
EAGER = BreakerConfig(failures=2, stall_s=60)  # engines are examined, and timeouts alone take replicas out
DRAINING = json.dumps({"error": {"message": "cannot schedule new futures after shutdown", "code": 500}}).encode()
BUSY = json.dumps({"error": {"message": "The engine is currently busy and cannot accept new requests."}}).encode()
FAILING: dict[str, Script] = {
    "reset": resetting,
    "draining": answering(DRAINING, status=500),
    "busy": answering(BUSY, status=503),
    "aborted": answering(b'{"choices":[{"finish_reason":"abort"}]}'),
    "status_429": answering(b"{}", status=429, extra=b"Retry-After: 1\r\n"),
    "status_502": answering(b"{}", status=502),
    "status_503": answering(b"{}", status=503),
    "status_504": answering(b"{}", status=504),
    "timeout": hanging,
}


def moving() -> bytes:
    """The ``/metrics`` of an engine that generates a token between any two looks."""
    return b'vllm:generation_tokens_total{engine="0"} %d\nvllm:num_requests_running{engine="0"} 1\n' % next(_tokens)


_tokens = count(1)


async def one_token(call: Call) -> None:
    """A healthy engine's response to a probe."""
    await call.send(STREAM_HEAD, chunk(sse({"choices": [{"text": "a"}]})), LAST_CHUNK)


async def ask_all(harness: Harness, body: bytes = BODY) -> Counter[int]:
    """Statuses of so many requests that are sent at once."""
    answers: list[Answer] = await asyncio.gather(*(harness.chat(body) for _ in range(REQUESTS)))
    return Counter(answer.status for answer in answers)


async def test_plain_responses_that_take_longer_than_a_first_token_may_are_generated_once() -> None:
    """The limit of streams is 1 s, and each whole response takes 2.5 s on 4 replicas."""

    async def slow(call: Call) -> None:
        await asyncio.sleep(2.5)
        await call.send(plain_answer(b'{"ok":true}'))

    async with fake_replicas(4, slow) as replicas:
        limits = Limits(first_byte_timeout_s=1.0)
        async with routed(config(replicas, limits=limits, health=PATIENT)) as harness:
            assert await ask_all(harness) == {200: REQUESTS}
            assert harness.router.balancer.breakers.ejections == {}
            await harness.at_rest()
        assert sum(len(replica.calls) for replica in replicas) == REQUESTS


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["plain", "stream"])
async def test_a_timeout_generates_nothing_twice_and_is_not_blamed_on_an_engine_that_works(body: bytes) -> None:
    async with fake_replicas(4, hanging) as replicas:
        for replica in replicas:
            replica.metrics, replica.on_token_probe = moving, hanging
        limits = Limits(first_byte_timeout_s=1.0, response_timeout_s=1.0)
        breaker = BreakerConfig(failures=2, stall_s=1.2)
        async with routed(config(replicas, limits=limits, health=PATIENT, breaker=breaker)) as harness:
            assert await ask_all(harness, body) == {504: REQUESTS}
            assert (harness.router.balancer.breakers.ejections, harness.router.balancer.breakers.not_closed) == ({}, {})
            await harness.at_rest()
            calls = [call for replica in replicas for call in replica.calls]
            assert len(calls) == REQUESTS
            await harness.until(lambda: all(call.gone.is_set() for call in calls), "engines to be told to stop")


async def test_a_stream_that_pauses_for_too_long_is_not_blamed_on_an_engine_that_answers_a_probe(
    replica: FakeReplica,
) -> None:
    async def halting(call: Call) -> None:
        await call.send(STREAM_HEAD, chunk(sse({"n": 1})))
        await call.wait_gone()

    replica.script, replica.on_token_probe = halting, one_token
    breaker = BreakerConfig(failures=1, stall_s=0.2, max_out_ratio=1.0)
    async with routed(config([replica], limits=Limits(idle_timeout_s=0.5), health=PATIENT, breaker=breaker)) as harness:
        assert json.loads((await harness.chat(STREAM)).body.split(b"data: ")[2])["error"]["code"] == 504
        await harness.until(lambda: replica.token_probes, "a probe")
        await harness.at_rest()
        await harness.until(
            lambda: not harness.router.services.stall_detector._checks[replica.name]._tasks, "the probe to end"
        )
        assert harness.router.balancer.breakers.not_closed == {}


async def test_timeouts_count_against_a_replica_whose_engine_shows_no_progress(two: list[FakeReplica]) -> None:
    for replica in two:
        replica.script = hanging
    limits = Limits(response_timeout_s=0.3, first_byte_timeout_s=0.3)
    async with routed(config(two, limits=limits, health=PATIENT, breaker=EAGER)) as harness:
        assert await ask_all(harness) == {504: REQUESTS}
        await harness.until(lambda: harness.router.balancer.breakers.ejections, "one to be out")
        ((_, _, cause),) = harness.router.balancer.breakers.ejections
        assert cause == "failures"


@pytest.mark.parametrize("cause", FAILING)
@pytest.mark.parametrize("is_named", [False, True])
async def test_another_replica_is_tried_after_the_failures_that_the_policy_names(
    cause: str, is_named: bool, two: list[FakeReplica]
) -> None:
    for replica in two:
        replica.script = FAILING[cause]
    named = RETRY_CAUSES if is_named else tuple(it for it in RETRY_CAUSES if it != cause)
    limits = Limits(response_timeout_s=0.2, retry_on=named)
    async with routed(config(two, limits=limits, health=PATIENT)) as harness:
        await harness.chat()
        assert sum(len(replica.calls) for replica in two) == 1 + is_named


async def test_a_connection_that_is_refused_is_retried_only_where_the_policy_names_it(two: list[FakeReplica]) -> None:
    for replica in two:
        replica.kill()
    for named, retries in ((("connect",), 1), (("reset",), 0)):
        async with routed(config(two, limits=Limits(retry_on=named), health=PATIENT)) as harness:
            assert (await harness.chat()).status == 502
            _, text = await harness.admin("GET", "/metrics")
            assert text.count('cause="connect"} 1') == retries


def test_what_may_generate_a_response_twice_has_to_be_asked_for() -> None:
    assert {"timeout", "status_504"} == UNSAFE_CAUSES
    assert set(Limits().retry_on) == set(RETRY_CAUSES) - UNSAFE_CAUSES
    assert Limits().response_timeout_s > 600


@pytest.mark.parametrize(
    ("given", "path", "reason"),
    [
        (["connect", "timeouts"], "$.limits.retry_on[1]", "connect|reset|timeout|"),
        ([], "$.limits.retry_on", ">= 1"),
        ("connect", "$.limits.retry_on", "array"),
    ],
)
def test_a_policy_that_names_no_known_failure_is_refused_where_it_is_wrong(
    given: object, path: str, reason: str
) -> None:
    document = json.loads(dump_snapshot(RouterConfig(hash_secret=SECRET, pools=()), 1).document)
    document["config"]["limits"]["retry_on"] = given
    del document["sha256"]
    with pytest.raises(ConfigError) as refusal:
        load_snapshot(json.dumps(document).encode())
    assert refusal.value.path == path
    assert reason in refusal.value.reason


def test_routers_that_do_not_know_the_policy_read_a_configuration_that_leaves_it_as_it_is() -> None:
    def limits(given: Limits) -> dict[str, object]:
        document = dump_snapshot(RouterConfig(hash_secret=SECRET, pools=(), limits=given), 1).document
        assert load_snapshot(document).config.limits == given
        written: dict[str, object] = msgspec.json.decode(document)["config"]["limits"]
        return written

    assert {"retry_on", "response_timeout_s"}.isdisjoint(limits(Limits()))
    changed = limits(Limits(retry_on=("connect",), response_timeout_s=60.0))
    assert (changed["retry_on"], changed["response_timeout_s"]) == (["connect"], 60.0)
