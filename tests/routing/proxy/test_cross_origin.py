"""Web pages of other origins (CORS): which may send requests, and which responses they may read."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from routing.proxy.client_connection import CloseReason
from routing.schema import (
    ConfigError,
    Limits,
    PoolConfig,
    ResponseCache,
    RouterConfig,
    TaskGroupConfig,
    dump_snapshot,
    load_snapshot,
)
from tests.fakes.replica import FakeReplica, answering, sse, streaming
from tests.routing.proxy.harness import (
    CHAT,
    RawClient,
    Response,
    api_key,
    bearer,
    chat_body,
    config,
    get,
    post,
    routed,
    with_keys,
)

PAGE, OTHER_KEY = "https://chat.example", "sk-" + "b2" * 32
ORIGIN = b"Origin: https://chat.example"
ASKS = b"Access-Control-Request-Method: POST"
ALLOW, EXPOSE = "access-control-allow-origin", "access-control-expose-headers"


def allowing(whole: RouterConfig, *origins: str) -> RouterConfig:
    return replace(whole, pools=(replace(whole.pools[0], allowed_origins=origins), *whole.pools[1:]))


def two_pools(first: FakeReplica, second: FakeReplica) -> RouterConfig:
    """Pool ``chat`` serves ``tiny`` to the page, pool ``closed`` serves ``large`` to no page."""
    open_pool = config([first], models=("tiny",))
    closed = replace(config([second], models=("large",)).pools[0], name="closed")
    return allowing(replace(open_pool, pools=(open_pool.pools[0], closed)), PAGE)


async def ask(client: RawClient, *headers: bytes, path: bytes = CHAT) -> Response:
    return await client.ask(get(path, headers, b"OPTIONS"))


def cross_origin_of(response: Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("access-control-")}


# --- preflight requests -------------------------------------------------------------------------------------


async def test_a_browser_that_asks_gets_a_yes_without_a_key(replica):
    names = "authorization,content-type,x-task-group,x-session-id,anthropic-version,x-api-key,x-stainless-os"
    asked = b"Access-Control-Request-Headers: " + names.encode()
    async with routed(allowing(with_keys([replica], api_key()), PAGE)) as harness, harness.connect() as client:
        response = await ask(client, ORIGIN, ASKS, asked)
        assert (response.status, response.body, replica.calls) == (200, b"", [])
        assert cross_origin_of(response) == {
            ALLOW: PAGE,
            EXPOSE: "*",
            "access-control-allow-methods": "POST",
            "access-control-allow-headers": names,
            "access-control-max-age": "600",
        }
        assert response.headers["vary"] == "Origin"
        assert cross_origin_of(await ask(client, ORIGIN, ASKS, path=b"/v1/models"))["access-control-allow-methods"] == (
            "GET, HEAD"
        )
        assert (await ask(client, ORIGIN, ASKS, path=b"/v1/other")).status == 404


@pytest.mark.parametrize(
    "origin",
    [
        b"https://chat.example.evil.example",
        b"https://evil-chat.example",
        b"https://chat.example:8443",
        b"http://chat.example",
        b"https://chat.exampl",
        b"HTTPS://CHAT.EXAMPLE",
        b"https://chat.example/",
        b"https://chat.example, https://evil.example",
        b"https://chat.example\r\nOrigin: https://evil.example",
        b"null",
        b"*",
        b"",
        b"\xff",
    ],
)
async def test_only_the_exact_origin_is_allowed(origin, replica):
    async with routed(allowing(config([replica]), PAGE)) as harness, harness.connect() as client:
        asked = await ask(client, b"Origin: " + origin, ASKS)
        assert (asked.status, cross_origin_of(asked)) == (405, {})
        served = await client.ask(post(CHAT, headers=(b"Origin: " + origin,)))
        assert (served.status, served.body, cross_origin_of(served)) == (200, b'{"ok":true}', {})


@pytest.mark.parametrize(
    "headers",
    [
        (ORIGIN,),  # no browser's question
        (ASKS,),
        (ORIGIN, ASKS, b"Access-Control-Request-Headers: " + b"a," * 2500 + b"a"),
        (ORIGIN, ASKS, b"Access-Control-Request-Headers: content type"),
        (ORIGIN, ASKS, b"Access-Control-Request-Headers: x-a,,x-b"),
        (ORIGIN, ASKS, b"Access-Control-Request-Headers: x-a: b"),
        (ORIGIN, ASKS, b"Access-Control-Request-Headers: x-\xe9"),
    ],
)
async def test_what_is_no_question_of_a_browser_gets_405(headers, replica):
    async with routed(allowing(config([replica]), PAGE)) as harness, harness.connect() as client:
        asked = await ask(client, *headers)
        assert (asked.status, asked.headers["allow"]) == (405, "POST")
        assert "access-control-allow-headers" not in asked.headers
        assert (await ask(client, ORIGIN, ASKS)).status == 200, "the connection stays open"


# --- responses ----------------------------------------------------------------------------------------------


async def test_the_response_replaces_what_the_replica_says(replica):
    replica.script = answering(
        extra=b"access-control-allow-origin: *\r\nAccess-Control-Allow-Credentials: true\r\nX-Own: 1\r\n"
    )
    async with routed(allowing(config([replica]), PAGE)) as harness:
        for _ in range(2):  # the second time with cached heads
            response = await harness.chat(headers=(ORIGIN,))
            assert cross_origin_of(response) == {ALLOW: PAGE, EXPOSE: "*"}
            assert response.head.lower().count(b"access-control-allow-origin") == 1
            assert (response.headers["x-own"], response.headers["vary"]) == ("1", "Origin")
        assert cross_origin_of(await harness.chat(headers=(b"Origin: https://other.example",))) == {}
        assert cross_origin_of(await harness.chat()) == {}


async def test_a_star_allows_every_page_and_no_credentials(replica):
    async with routed(allowing(config([replica]), "*")) as harness:
        response = await harness.chat(headers=(b"Origin: null",))
        assert cross_origin_of(response) == {ALLOW: "*", EXPOSE: "*"}


async def test_the_response_is_for_the_origins_of_its_own_pool(two):
    first, second = two
    second.script = answering(extra=b"Access-Control-Allow-Origin: *\r\n")
    async with routed(two_pools(first, second)) as harness, harness.connect() as client:
        assert (await ask(client, ORIGIN, ASKS)).status == 200, "the pool is not known yet"
        assert (await harness.chat(b'{"model":"tiny"}', (ORIGIN,))).headers[ALLOW] == PAGE
        closed = await harness.chat(b'{"model":"large"}', (ORIGIN,))
        assert (closed.status, cross_origin_of(closed)) == (200, {})
        second.kill()
        failed = await harness.chat(b'{"model":"large"}', (ORIGIN,))
        assert (failed.status, cross_origin_of(failed)) == (502, {})
        first.kill()
        assert (await harness.chat(b'{"model":"tiny"}', (ORIGIN,))).headers[ALLOW] == PAGE


async def test_streams_and_errors_of_the_router_can_be_read(replica):
    replica.script = streaming(sse({"choices": [{"delta": {"content": "Hi"}}]}), sse("[DONE]"))
    whole = allowing(with_keys([replica], api_key(), limits=Limits(max_body_bytes=65_536)), PAGE)
    async with routed(whole) as harness:
        stream = await harness.chat(b'{"model":"tiny","stream":true}', (ORIGIN, bearer()))
        assert (stream.status, stream.headers[ALLOW]) == (200, PAGE)
        for headers, status in [
            ((), 401),  # no key
            ((bearer(), b"Content-Length: 1"), 400),  # two lengths: the head is not valid
            ((bearer(OTHER_KEY),), 401),
        ]:
            response = await harness.chat(headers=(ORIGIN, *headers))
            assert (response.status, response.headers[ALLOW]) == (status, PAGE)
        too_large = await harness.chat(b" " * 70_000, (ORIGIN, bearer()))
        assert (too_large.status, too_large.headers[ALLOW]) == (413, PAGE)
        async with harness.connect() as client:
            assert (await client.ask(get(b"/v1/models", (ORIGIN, bearer())))).headers[ALLOW] == PAGE
            assert (await client.ask(get(b"/health", (ORIGIN,)))).headers[ALLOW] == PAGE
        assert harness.router.closed[CloseReason.REJECTED] >= 1


async def test_a_cached_response_is_for_the_origins_of_its_pool(two):
    answer = {"choices": [{"message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}]}
    for replica in two:
        replica.script = answering(json.dumps(answer).encode())
    whole = two_pools(*two)
    group = TaskGroupConfig(name="faq", response_cache=ResponseCache())
    pools = [replace(pool, groups=(replace(group, name=f"faq-{pool.name}"),)) for pool in whole.pools]
    async with routed(replace(whole, pools=tuple(pools))) as harness:
        for model, pool, allowed in (("tiny", "chat", PAGE), ("large", "closed", None)):
            headers = (ORIGIN, b"X-Task-Group: faq-" + pool.encode())
            cached = [await harness.chat(chat_body(model, temperature=0), headers) for _ in range(2)]
            assert [response.headers["x-warmpath-cache"] for response in cached] == ["miss", "hit"]
            assert [response.headers.get(ALLOW) for response in cached] == [allowed, allowed]


async def test_the_admin_port_answers_no_page(replica):
    headers = {"Origin": PAGE, "Access-Control-Request-Method": "PUT"}
    async with routed(allowing(config([replica]), "*")) as harness:
        for method in ("OPTIONS", "GET"):
            async with harness.http.request(
                method, f"{harness.server.admin_url}/admin/config", headers=headers
            ) as response:
                assert not any(name.lower().startswith("access-control-") for name in response.headers)


async def test_without_origins_nothing_changes(replica):
    replica.script = answering(extra=b"access-control-allow-origin: *\r\n")
    async with routed(config([replica])) as harness, harness.connect() as client:
        asked = await ask(client, ORIGIN, ASKS)
        assert (asked.status, cross_origin_of(asked), "vary" in asked.headers) == (405, {}, False)
        response = await harness.chat(headers=(ORIGIN,))
        assert (cross_origin_of(response), "vary" in response.headers) == ({ALLOW: "*"}, False)


# --- the configuration --------------------------------------------------------------------------------------


def with_origins(*origins: str) -> PoolConfig:
    pool = config([]).pools[0]
    whole = RouterConfig("ab" * 16, (replace(pool, allowed_origins=origins),))
    return load_snapshot(dump_snapshot(whole, 1).document).config.pools[0]


@pytest.mark.parametrize(
    "origin", ["*", "https://chat.example", "http://[::1]:3000", "http://localhost:3000", "chrome-extension://abcdef"]
)
def test_origins_as_browsers_send_them_are_accepted(origin):
    assert with_origins(origin).allowed_origins == (origin,)


@pytest.mark.parametrize(
    "origin",
    [
        *("null", "", "chat.example", "https://", "https://a/", "https://A", "https://a:443", "http://a:80"),
        *(
            "https://a:0",
            "https://a\r\nX: b",
            "https://user@a",
            "https://a?b",
            "**",
            "https://a b",
            "https://ä.example",
        ),
        "https://*.a",
    ],
)
def test_other_origins_are_errors(origin):
    with pytest.raises(ConfigError, match=r"allowed_origins\[0\]"):
        with_origins(origin)


def test_repeated_and_too_many_origins_are_errors():
    with pytest.raises(ConfigError, match="twice"):
        with_origins(PAGE, PAGE)
    with pytest.raises(ConfigError, match="allowed_origins"):
        with_origins(*(f"https://a{number}" for number in range(101)))
