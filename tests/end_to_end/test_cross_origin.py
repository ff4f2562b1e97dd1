"""A script in a real browser sends requests from a page of another origin, through a router, to a replica."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import uvloop
from msgspec.structs import replace

from tests.fakes.replica import Call, fake_replicas, plain_answer, sse, streaming
from tests.routing.proxy.harness import KEY, api_key, routed, with_keys

START_S = 60.0
FETCH = """async ([url, model, options]) => {
    const body = JSON.stringify({model, ...options, messages: [{role: "user", content: "Say something."}]});
    const headers = {"Content-Type": "application/json", "Authorization": options.key, "X-Task-Group": "coding",
                     "X-Session-ID": "s1", "anthropic-version": "2023-06-01"};
    try {
        const response = await fetch(url + "/v1/chat/completions", {method: "POST", headers, body});
        let text = "";
        const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
        for (let part = await reader.read(); !part.done; part = await reader.read()) text += part.value;
        return {status: response.status, text, id: response.headers.get("X-Request-Id"),
                replica: response.headers.get("X-Warmpath-Replica"), retry: response.headers.get("Retry-After")};
    } catch (error) {
        return {error: error.name};
    }
}"""


@dataclass
class Site:
    """Ports of a router that allows the page at 127.0.0.1, and of the server of the page."""

    router: int
    page: int
    calls: list[Call]  # that reached the replica


async def serve(started: Future[Site], stop: asyncio.Event) -> None:
    """A router, a replica that would allow every page, and a page."""

    async def respond(call: Call) -> None:
        if b'"stream":true' in call.body:
            await streaming(sse({"choices": [{"delta": {"content": "Hi"}}]}), sse("[DONE]"))(call)
        elif b'"fails":true' in call.body:
            await call.send(plain_answer(b'{"error":"busy"}', status=429, extra=b"Retry-After: 7\r\n"))
        else:
            await call.send(plain_answer(b'{"ok":true}', extra=b"Access-Control-Allow-Origin: *\r\n"))

    async def show(call: Call) -> None:
        page = b"<!doctype html><title>Chat</title>"
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n"
        await call.send(head % len(page) + page)

    async with AsyncExitStack() as stack:
        [replica] = await stack.enter_async_context(fake_replicas(1, respond))
        [page] = await stack.enter_async_context(fake_replicas(1, show))
        whole = with_keys([replica], api_key())
        pool = replace(whole.pools[0], allowed_origins=(f"http://127.0.0.1:{page.port}",))
        harness = await stack.enter_async_context(routed(replace(whole, pools=(pool,))))
        started.set_result(Site(harness.port, page.port, replica.calls))
        await stop.wait()


@pytest.fixture
def site() -> Iterator[Site]:
    """They run in a thread with a loop of its own, because the browser is driven without one."""
    started: Future[Site] = Future()
    loop, stop = uvloop.new_event_loop(), asyncio.Event()

    def run() -> None:
        try:
            loop.run_until_complete(serve(started, stop))
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
            raise
        finally:
            loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield started.result(START_S)
    finally:
        if thread.is_alive():
            loop.call_soon_threadsafe(stop.set)
        thread.join(START_S)
        assert not thread.is_alive()


def test_a_page_of_an_allowed_origin_reads_responses_streams_and_errors(site, new_context):
    page = new_context().new_page()

    def fetch(model: str = "tiny", key: str = f"Bearer {KEY}", **options: Any) -> dict[str, Any]:
        return page.evaluate(FETCH, [f"http://127.0.0.1:{site.router}", model, {"key": key, **options}])

    page.goto(f"http://127.0.0.1:{site.page}/")
    whole = fetch()
    assert (whole["status"], whole["text"], whole["replica"]) == (200, '{"ok":true}', "replica-0")
    assert whole["id"]
    assert fetch(stream=True)["text"].endswith("data: [DONE]\n\n")
    limited = fetch(fails=True)
    assert (limited["status"], limited["retry"]) == (429, "7")
    assert fetch(key="Bearer wrong")["status"] == 401
    assert fetch(model="none")["status"] == 404
    reached = len(site.calls)

    page.goto(f"http://localhost:{site.page}/")  # the same page from another origin
    assert fetch() == {"error": "TypeError"}
    assert len(site.calls) == reached, "the browser asked first and sent nothing"
    without_question = "url => fetch(url + '/health').then(response => response.text(), error => error.name)"
    assert page.evaluate(without_question, f"http://127.0.0.1:{site.router}") == "TypeError"
