"""Failures of replicas before and after the first byte, their deadlines, the retry policy, and circuit breakers."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from itertools import count

import msgspec
import pytest

from routing.http.response import ResponseHead
from routing.proxy.retries import retry_after_s
from routing.schema import (
    RETRY_CAUSES,
    BreakerConfig,
    ConfigError,
    HealthCheck,
    Limits,
    RoundRobinSettings,
    RouterConfig,
    dump_snapshot,
    load_snapshot,
)
from routing.types import ReplicaId
from tests.fakes.replica import (
    LAST_CHUNK,
    STREAM_HEAD,
    Call,
    FakeReplica,
    Script,
    answering,
    chunk,
    fake_replicas,
    halting,
    hanging,
    plain_answer,
    raw,
    resetting,
    sse,
)
from tests.fakes.replica import hanging as hang
from tests.routing.proxy.harness import BODY, CHAT, SECRET, Harness, RawClient, Response, config, get, post, routed
from tests.routing.proxy.streams import STREAM

DRAINING = json.dumps({"error": {"message": "cannot schedule new futures after shutdown", "code": 500}}).encode()
ABORTED = b'{"choices":[{"message":{"content":"half"},"finish_reason":"abort"}]}'
BUSY = (
    b'{"error":{"message":"The engine is currently busy and cannot accept new requests. Please try again later or on a '
    b'different instance.","type":"Service Unavailable","code":503}}'
)
SHORT = Limits(
    first_byte_timeout_s=0.15,
    response_timeout_s=0.15,
    idle_timeout_s=0.15,
    connect_timeout_s=0.5,
    retry_on=RETRY_CAUSES,
)
NEVER_DOWN = HealthCheck(failures=100, interval_s=60)
RETRIED: dict[str, tuple[Script, str]] = {
    "reset at once": (resetting, "reset"),
    "closed inside the head": (raw(b"HTTP/1.1 200 O", then_close=True), "reset"),
    "closed after the head": (raw(STREAM_HEAD, then_close=True), "reset"),
    "closed inside an error": (raw(b"HTTP/1.1 500 X\r\nContent-Length: 9\r\n\r\nabc", then_close=True), "reset"),
    "hanging": (hanging, "timeout"),
    "502": (answering(b"{}", status=502), "status_502"),
    "503": (answering(b"{}", status=503), "status_503"),
    "504": (answering(b"{}", status=504), "status_504"),
    "503 and long": (answering(b"x" * 200_000, status=503), "status_503"),
    "draining vLLM": (answering(DRAINING, status=500), "draining"),
    "a full queue": (answering(BUSY, status=503), "busy"),
    "a full queue of SGLang": (answering(b'{"message":"The request queue is full."}', status=503), "busy"),
    "aborted": (answering(ABORTED), "aborted"),
    "429 for a while": (answering(b"{}", status=429, extra=b"Retry-After: 1\r\n"), "status_429"),
}


@pytest.mark.parametrize("name", RETRIED)
async def test_clients_do_not_notice_a_failure_before_the_first_byte(name, two):
    script, cause = RETRIED[name]
    two[0].script = script
    async with routed(config(two, limits=SHORT, health=NEVER_DOWN)) as harness:
        for _ in range(4):
            response = await harness.chat()
            assert (response.status, response.body, response.replica) == (200, b'{"ok":true}', "replica-1")
        await harness.at_rest()
        _, text = await harness.admin("GET", "/metrics")
        assert (
            f'warmpath_router_retries_total{{pool="chat",replica="replica-0",cause="{cause}"}} {len(two[0].calls)}'
            in text
        )
    assert two[0].calls[0].body == two[1].calls[0].body == BODY


async def test_clients_do_not_notice_a_replica_that_refuses_connections(two):
    two[0].kill()
    async with routed(config(two)) as harness:
        for _ in range(6):
            assert (await harness.chat()).replica == "replica-1"
        await harness.until(lambda: not harness.health.is_up("replica-0"), "the dead replica to be down")


@pytest.mark.parametrize(
    ("script", "status"),
    [
        (resetting, 502),
        (hanging, 504),
        (answering(b'{"mine":1}', status=503), 503),
        (answering(DRAINING, status=500), 500),
    ],
)
async def test_when_all_replicas_failed_the_client_gets_the_last_failure(script, status, two):
    for replica in two:
        replica.script = script
    async with routed(config(two, limits=SHORT, health=NEVER_DOWN)) as harness, harness.connect() as client:
        response = await client.ask(post(CHAT))
        assert response.status == status
        await client.send(get(b"/health"))  # the client's connection is usable
        assert (await client.read_response()).status == 200
        await harness.at_rest()
    assert [len(replica.calls) for replica in two] == [1, 1]


@pytest.mark.parametrize("retries", [0, 1, 2])
async def test_retries_are_limited(retries):
    async with fake_replicas(5, resetting) as replicas:
        limits = Limits(retries=retries)
        async with routed(config(replicas, limits=limits, health=NEVER_DOWN)) as harness:
            assert (await harness.chat()).status == 502
        assert sum(len(replica.calls) for replica in replicas) == 1 + retries


async def test_a_retry_without_budget_is_not_placed():
    """Else it would take a turn of round robin."""
    async with fake_replicas(3) as replicas:
        replicas[0].script = resetting
        async with routed(config(replicas, health=NEVER_DOWN, limits=Limits(retry_ratio=0, retry_floor_per_s=0))) as it:
            found = [(await it.chat()).headers.get("x-warmpath-replica") for _ in range(6)]
            rejected = it.router.balancer.retry_budget.rejected
    assert found[:3] == found[3:]
    assert set(found) == {None, "replica-1", "replica-2"}
    assert rejected == 2


async def test_a_retry_for_which_no_replica_is_left_costs_no_budget(replica):
    replica.script = resetting
    async with routed(config([replica], health=NEVER_DOWN)) as harness:
        budget = harness.router.balancer.retry_budget
        statuses = {(await harness.chat()).status for _ in range(5)}
        assert (statuses, budget._retries, budget.rejected) == ({502}, 0, 0)


@pytest.mark.parametrize("status", [400, 404, 422, 500, 501])
async def test_other_statuses_are_relayed(status, two):
    for replica in two:
        replica.script = answering(b'{"theirs":1}', status=status, extra=b"Retry-After: 7\r\n")
    async with routed(config(two)) as harness:
        response = await harness.chat()
    assert (response.status, response.body, response.headers["retry-after"]) == (status, b'{"theirs":1}', "7")
    assert sum(len(replica.calls) for replica in two) == 1


async def test_a_stale_connection_is_replaced_by_a_new_one_to_the_same_replica(replica):
    async with routed(config([replica], limits=Limits(retries=0), health=NEVER_DOWN)) as harness:
        assert (await harness.chat()).status == 200
        (upstream,) = harness.router.active.connection_pools["replica-0"]._idle
        upstream.transport.pause_reading()  # so that the router does not notice the end yet
        replica.calls[0].close()
        await replica.calls[0].writer.wait_closed()
        pending = asyncio.create_task(harness.chat())
        await harness.until(lambda: upstream.waiting_listener is not None, "the request to be sent")
        upstream.transport.resume_reading()
        assert (await pending).status == 200
        _, text = await harness.admin("GET", "/metrics")
        assert harness.breakers.not_closed == {}
    assert (replica.connections, len(replica.calls)) == (2, 2)
    assert "retries_total{" not in text


@pytest.mark.parametrize("ends", [Call.close, Call.reset])
async def test_a_replica_that_fails_after_receiving_a_request_does_not_get_it_again(ends, two):
    async def script(call: Call) -> None:
        if len(two[0].calls) == 1:
            await call.send(plain_answer(b"fine"))
        else:
            ends(call)

    two[0].script = script
    async with routed(config(two, health=NEVER_DOWN)) as harness:
        while not two[0].calls:
            assert (await harness.chat()).status == 200
        while len(two[0].calls) < 2:
            assert (await harness.chat()).status == 200
        await harness.at_rest()
        _, text = await harness.admin("GET", "/metrics")
        assert harness.breakers.not_closed["replica-0"].failures == 1
    assert 'retries_total{pool="chat",replica="replica-0",cause="reset"} 1' in text
    assert two[0].connections == 1


async def test_a_stream_that_stops_ends_with_an_error_event_at_its_deadline(replica):
    replica.script = halting
    async with routed(config([replica], limits=SHORT)) as harness:
        response = await harness.chat()
        await harness.at_rest()
        await harness.until(replica.calls[0].gone.is_set, "the router to hang up on the replica")
    assert json.loads(response.body.split(b"data: ")[2])["error"]["code"] == 504


async def test_without_a_replica_up_the_error_names_the_pool(two):
    for replica in two:
        replica.health_status = 503
    async with routed(config(two, health=HealthCheck(failures=1, interval_s=0.05))) as harness:
        await harness.until(lambda: not harness.health.is_up("replica-1"), "both to be down")
        await harness.until(lambda: not harness.health.is_up("replica-0"), "both to be down")
        response = await harness.chat()
        assert (response.status, response.headers["retry-after"]) == (503, "1")
        assert "'chat'" in response.error["message"]
        two[0].health_status = 200
        await harness.until(lambda: harness.health.is_up("replica-0"), "one to be up")
        assert (await harness.chat()).replica == "replica-0"
        _, text = await harness.admin("GET", "/metrics")
        assert (
            'warmpath_router_requests_total{pool="chat",group="",replica="",policy="",revision="",reason="",'
            'outcome="router_error"} 1' in text
        )


async def test_a_busy_replica_without_health_responses_stays_up_while_it_responds(replica):
    stops = asyncio.Event()

    async def script(call: Call) -> None:
        await call.begin_stream()
        while not stops.is_set():
            await call.send(chunk(sse({"n": 1})))
            await asyncio.sleep(0.01)
        await call.wait_gone()

    replica.script = script
    health = HealthCheck(failures=1, interval_s=0.02, timeout_s=0.3)
    async with routed(config([replica], health=health)) as harness, asyncio.TaskGroup() as group:
        pending = group.create_task(harness.chat())
        await replica.wait_calls(1)
        await harness.until(lambda: harness.router.services.checks.status("replica-0").is_up, "a first finding")
        replica.health_status, before = None, replica.probes
        await harness.until(lambda: replica.probes >= before + 4, "some checks to pass in silence")
        assert harness.health.is_up("replica-0")

        stops.set()
        await harness.until(lambda: not harness.health.is_up("replica-0"), "it to be down, now it is silent")
        assert "no response within" in (harness.router.services.checks.status("replica-0").reason or "")
        pending.cancel()


async def test_a_router_without_sockets_does_not_blame_the_replica(replica, monkeypatch):
    async with routed(config([replica], health=NEVER_DOWN)) as harness, harness.connect() as client:

        async def fail(*_: object, **__: object) -> None:
            raise OSError(24, "Too many open files")

        finding = harness.router.services.checks.status("replica-0")
        await harness.until(lambda: finding.is_up, "the first probe")
        link = harness.router.active.connection_pools["replica-0"]
        monkeypatch.setattr(
            link,
            "_loop",
            type("Loop", (), {"create_connection": fail, "create_task": harness.router.loop.create_task})(),
        )
        assert (await client.ask(post(CHAT))).status == 502
        assert finding.failures == 0


REQUESTS = 14
EAGER = BreakerConfig(failures=2, stall_s=60)  # engines are checked, and only timeouts eject replicas


def moving() -> bytes:
    """The ``/metrics`` of an engine that generates a token between two reads."""
    return b'vllm:generation_tokens_total{engine="0"} %d\nvllm:num_requests_running{engine="0"} 1\n' % next(_tokens)


_tokens = count(1)


async def one_token(call: Call) -> None:
    """A healthy engine's response to a probe."""
    await call.stream(sse({"choices": [{"text": "a"}]}))


async def ask_all(harness: Harness, body: bytes = BODY) -> Counter[int]:
    """Statuses of concurrent requests."""
    responses: list[Response] = await asyncio.gather(*(harness.chat(body) for _ in range(REQUESTS)))
    return Counter(response.status for response in responses)


async def test_slow_whole_responses_are_generated_once():
    """The limit of streams is 0.2 s, and each whole response takes 0.6 s on 4 replicas."""

    async def slow(call: Call) -> None:
        await asyncio.sleep(0.6)
        await call.send(plain_answer(b'{"ok":true}'))

    async with fake_replicas(4, slow) as replicas:
        limits = Limits(first_byte_timeout_s=0.2)
        async with routed(config(replicas, limits=limits, health=NEVER_DOWN)) as harness:
            assert await ask_all(harness) == {200: REQUESTS}
            assert harness.breakers.ejections == {}
            await harness.at_rest()
        assert sum(len(replica.calls) for replica in replicas) == REQUESTS


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["plain", "stream"])
async def test_a_timeout_is_not_retried_and_not_blamed_on_a_working_engine(body):
    async with fake_replicas(4, hanging) as replicas:
        for replica in replicas:
            replica.metrics, replica.on_token_probe = moving, hanging
        limits = Limits(first_byte_timeout_s=1.0, response_timeout_s=1.0)
        breaker = BreakerConfig(failures=2, stall_s=1.2)
        async with routed(config(replicas, limits=limits, health=NEVER_DOWN, breaker=breaker)) as harness:
            assert await ask_all(harness, body) == {504: REQUESTS}
            assert (harness.breakers.ejections, harness.breakers.not_closed) == ({}, {})
            await harness.at_rest()
            calls = [call for replica in replicas for call in replica.calls]
            assert len(calls) == REQUESTS
            await harness.until(lambda: all(call.gone.is_set() for call in calls), "engines to be told to stop")


async def test_a_pausing_stream_is_not_blamed_on_an_engine_that_answers_a_probe(replica):
    async def halting(call: Call) -> None:
        await call.begin_stream(sse({"n": 1}))
        await call.wait_gone()

    replica.script, replica.on_token_probe = halting, one_token
    breaker = BreakerConfig(failures=1, stall_s=0.2, max_out_ratio=1.0)
    async with routed(
        config([replica], limits=Limits(idle_timeout_s=0.5), health=NEVER_DOWN, breaker=breaker)
    ) as harness:
        assert json.loads((await harness.chat(STREAM)).body.split(b"data: ")[2])["error"]["code"] == 504
        await harness.until(lambda: replica.token_probes, "a probe")
        await harness.at_rest()
        await harness.until(
            lambda: not harness.router.services.stall_detector._checks[replica.name]._tasks, "the probe to end"
        )
        assert harness.breakers.not_closed == {}


async def test_timeouts_count_against_an_engine_without_progress(two):
    for replica in two:
        replica.script = hanging
    limits = Limits(response_timeout_s=0.3, first_byte_timeout_s=0.3)
    async with routed(config(two, limits=limits, health=NEVER_DOWN, breaker=EAGER)) as harness:
        assert await ask_all(harness) == {504: REQUESTS}
        await harness.until(lambda: harness.breakers.ejections, "one to be out")
        ((_, _, cause),) = harness.breakers.ejections
        assert cause == "failures"


@pytest.mark.parametrize("name", RETRIED)
async def test_a_failure_that_the_policy_does_not_name_is_not_retried(name, two):
    two[0].script, cause = RETRIED[name]
    two[1].script = two[0].script
    limits = msgspec.structs.replace(SHORT, retry_on=tuple(it for it in RETRY_CAUSES if it != cause))
    async with routed(config(two, limits=limits, health=NEVER_DOWN)) as harness:
        await harness.chat()
        assert sum(len(replica.calls) for replica in two) == 1


async def test_refused_connections_are_retried_only_if_the_policy_names_them(two):
    for replica in two:
        replica.kill()
    for named, retries in ((("connect",), 1), (("reset",), 0)):
        async with routed(config(two, limits=Limits(retry_on=named), health=NEVER_DOWN)) as harness:
            assert (await harness.chat()).status == 502
            _, text = await harness.admin("GET", "/metrics")
            assert text.count('cause="connect"} 1') == retries


@pytest.mark.parametrize(
    ("setting", "path", "reason"),
    [
        (["connect", "timeouts"], "$.limits.retry_on[1]", "connect|reset|timeout|"),
        ([], "$.limits.retry_on", ">= 1"),
        ("connect", "$.limits.retry_on", "array"),
    ],
)
def test_an_invalid_retry_policy_is_rejected_with_its_path(setting, path, reason):
    document = json.loads(dump_snapshot(RouterConfig(hash_secret=SECRET, pools=()), 1).document)
    document["config"]["limits"]["retry_on"] = setting
    del document["sha256"]
    with pytest.raises(ConfigError) as rejection:
        load_snapshot(json.dumps(document).encode())
    assert rejection.value.path == path
    assert reason in rejection.value.reason


@pytest.mark.parametrize(
    ("lines", "seconds"),
    [
        (b"Retry-After: 30\r\n", 30.0),
        (b"retry-after: 3600\r\n", 60.0),
        (b"Retry-After: Sun, 06 Nov 1994 08:49:37 GMT\r\n", 0.0),
        (b"Retry-After: Fri, 31 Dec 2100 23:59:59 GMT\r\n", 60.0),
        (b"retry-after-ms: 1500\r\n", 1.5),
        (b"Retry-After: 2\r\nRetry-After-Ms: 1500\r\n", 1.5),
        (b"Retry-After: soon\r\n", None),
        (b"Retry-After: -1\r\n", None),
        (b"Retry-After: nan\r\n", None),
        (b"Retry-After: 1e9\r\n", None),
        (b"X-Retry-After: 5\r\n", None),
        (b"", None),
    ],
)
def test_retry_after_is_read_in_all_its_forms(lines, seconds):
    head = ResponseHead(429, b"")
    head.lines = lines
    assert retry_after_s(head) == seconds


@pytest.mark.parametrize("limit", [b"Retry-After: 30\r\n", b"retry-after-ms: 30000\r\n"])
@pytest.mark.parametrize("status", [429, 503])
async def test_a_limited_replica_gets_no_requests_while_another_is_eligible(limit, status, two):
    two[0].script = answering(b"{}", status=status, extra=limit)
    async with routed(config(two, settings=RoundRobinSettings())) as harness:
        statuses = [(await harness.chat()).status for _ in range(20)]
        assert (statuses, len(two[0].calls), len(two[1].calls)) == ([200] * 20, 1, 20)

        two[1].kill()
        assert (await harness.chat()).status == status  # it is the last one
        await harness.at_rest()


async def test_if_all_replicas_are_limited_they_get_requests(two):
    two[0].script = two[1].script = answering(b"{}", status=429, extra=b"Retry-After: 30\r\n")
    async with routed(config(two)) as harness:
        for _ in range(3):
            response = await harness.chat()
            assert (response.status, response.headers["retry-after"]) == (429, "30")
        two[0].script = two[1].script = answering()
        assert (await harness.chat()).status == 200


async def test_a_request_for_a_stored_response_goes_to_a_limited_replica(two):
    async def engine(call: Call) -> None:
        await call.send(plain_answer(call.body or b"{}"))  # with the id that the router chose

    two[0].script = two[1].script = engine
    async with routed(config(two)) as harness, harness.connect() as client:
        created = await client.ask(post(b"/v1/responses", json.dumps({"model": "tiny", "input": "x"}).encode()))
        harness.breakers.record_retry_after(ReplicaId(created.replica), 30.0)
        assert (
            await client.ask(get(b"/v1/responses/" + json.loads(created.body)["request_id"].encode()))
        ).replica == created.replica


# --- Circuit breakers: replicas that fail requests but not their health checks; the retry budget ---


HEALTHY = answering()
BROKEN = answering(b'{"error":"x"}', status=500)
QUICK = BreakerConfig(open_s=0.3)
DEAD_ENGINE = [chunk(sse({"error": {"message": "EngineCore died", "code": 500}})), chunk(sse("[DONE]"))]


async def test_five_failures_eject_a_replica_and_a_probe_readmits_it(two):
    two[0].script = BROKEN
    async with routed(config(two, breaker=QUICK)) as harness:
        statuses = [(await harness.chat()).status for _ in range(20)]
        assert statuses.count(500) == 5
        assert len(two[0].calls) == 5
        _, shown = await harness.admin("GET", "/admin/replicas")
        row = shown["replicas"][0]
        assert (row["health"], row["breaker"], row["reason"]) == ("up", "open", "status_500")
        _, text = await harness.admin("GET", "/metrics")
        assert 'ejections_total{pool="chat",replica="replica-0",cause="failures"} 1' in text
        assert 'replica_out{pool="chat",replica="replica-0"} 1' in text
        two[0].script = HEALTHY
        await harness.until(lambda: harness.health.is_up("replica-0"), "a probe")
        for _ in range(8):
            assert (await harness.chat()).status == 200
        _, shown = await harness.admin("GET", "/admin/replicas")
        row = shown["replicas"][0]
        assert (row["breaker"], row["reason"], row["share"]) == ("closed", None, 0.25)
        await harness.at_rest()


async def eject(harness: Harness, failing: FakeReplica) -> None:
    """Make a replica fail until it is ejected, then let a request probe it."""
    failing.script = BROKEN
    while harness.health.is_up(failing.name):
        await harness.chat()
    harness.breakers.on_health_check_passed(ReplicaId(failing.name))


async def send_probe(client: RawClient, failing: FakeReplica) -> None:
    """Send requests until one probes the replica."""
    before = len(failing.calls)
    while len(failing.calls) == before:
        await client.send(post(CHAT))
        waits = [asyncio.ensure_future(client.read_response()), asyncio.ensure_future(failing.wait_calls(before + 1))]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await asyncio.wait(waits)


async def test_a_client_that_disconnects_after_a_probe_result_does_not_end_the_next_probe(two):
    async def begin(call: Call) -> None:
        await call.begin_stream(sse({"n": 1}))
        await call.wait_gone()

    breaker = BreakerConfig(open_s=60, successes=3)
    async with routed(config(two, breaker=breaker)) as harness, harness.connect() as second:
        await eject(harness, two[0])
        state = harness.breakers.not_closed[ReplicaId(two[0].name)]
        two[0].script = begin
        async with harness.connect() as first:
            await send_probe(first, two[0])
            await harness.until(lambda: state.successes == 1, "a first byte")
            two[0].script = hang
            await send_probe(second, two[0])
            assert state.is_probing
        await harness.until(lambda: harness.router.services.in_flight == 1, "the first client's end to be heard of")
        assert state.is_probing
        calls_before = len(two[0].calls)
        for _ in range(4):
            assert (await harness.chat()).replica == "replica-1"
        assert len(two[0].calls) == calls_before


@pytest.mark.parametrize("status", [429, 501])
async def test_a_probe_without_result_lets_the_next_request_probe(status, two):
    async with routed(config(two, breaker=BreakerConfig(open_s=60))) as harness, harness.connect() as client:
        await eject(harness, two[0])
        two[0].script = answering(b"{}", status=status)
        await send_probe(client, two[0])
        await harness.at_rest()
        assert not harness.breakers.not_closed[ReplicaId(two[0].name)].is_probing


@pytest.mark.parametrize(("body", "status"), [(b"{}", 400), (b"{}", 404), (b"{}", 429), (b"{}", 501), (BUSY, 503)])
async def test_errors_that_are_not_the_replicas_fault_eject_nothing(body, status, two):
    two[0].script = answering(body, status=status)
    async with routed(config(two)) as harness:
        for _ in range(20):
            await harness.chat()
        assert len(two[0].calls) >= 10
        assert harness.breakers.not_closed == {}


@pytest.mark.parametrize(
    "script",
    [
        raw(STREAM_HEAD, chunk(sse({"n": 1})), *DEAD_ENGINE, LAST_CHUNK),
        raw(STREAM_HEAD, chunk(sse({"n": 1})), then_close=True),
    ],
    ids=["an error inside", "incomplete"],
)
async def test_streams_that_fail_eject_a_replica(script, two):
    two[0].script = script
    async with routed(config(two, health=HealthCheck(failures=100))) as harness:
        for _ in range(20):
            await harness.chat()
        assert len(two[0].calls) == 5


@pytest.mark.parametrize(("extra", "calls"), [(b"Retry-After: 1\r\n", 2), (b"X-Other: 1\r\n", 1)])
async def test_a_429_is_retried_once_if_it_has_retry_after(extra, calls):
    async with fake_replicas(4, answering(b"{}", status=429, extra=extra)) as replicas:
        async with routed(config(replicas, limits=Limits(retries=3))) as harness:
            response = await harness.chat()
            assert response.status == 429
            assert ("retry-after" in response.headers) is (calls == 2)
            await harness.at_rest()
        assert sum(len(replica.calls) for replica in replicas) == calls


@pytest.mark.parametrize(
    "script",
    [
        answering(ABORTED),
        raw(STREAM_HEAD, chunk(sse({"n": 1})), chunk(sse({"choices": [{"finish_reason": "abort"}]})), LAST_CHUNK),
    ],
)
async def test_an_aborted_response_that_is_relayed_counts_against_the_replica(script, replica):
    replica.script = script
    async with routed(config([replica])) as harness:
        assert (await harness.chat()).status == 200
        _, text = await harness.admin("GET", "/metrics")
        assert 'reason="round_robin",outcome="replica_error"} 1' in text
        assert harness.breakers.not_closed["replica-0"].failures == 1


async def test_text_that_mentions_abort_is_a_valid_response(two):
    response_body = json.dumps(
        {"choices": [{"message": {"content": '"finish_reason":"abort"'}, "finish_reason": "stop"}]}
    )
    two[0].script = two[1].script = answering(response_body.encode())
    async with routed(config(two)) as harness:
        assert (await harness.chat()).body == response_body.encode()
        assert len(two[0].calls) + len(two[1].calls) == 1
        assert harness.breakers.not_closed == {}


async def test_an_older_stream_that_breaks_does_not_end_the_probe(two):
    breaks = asyncio.Event()

    async def begin(call: Call) -> None:
        await call.begin_stream(sse({"n": 1}))
        await breaks.wait()
        call.reset()

    async with routed(config(two, breaker=BreakerConfig(open_s=60))) as harness, harness.connect() as old:
        for replica in two:
            replica.script = begin
        await old.send(post(CHAT))
        await old.read_until(b"\n\n")
        failing = next(replica for replica in two if replica.calls)
        two[two[0] is failing].script = HEALTHY
        await eject(harness, failing)
        breaks.set()
        assert b"error" in await old.read_all()
        state = harness.breakers.not_closed[ReplicaId(failing.name)]
        assert (state.state, state.reason) == ("half_open", "status_500")
