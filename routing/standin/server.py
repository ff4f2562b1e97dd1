"""The stand-in replica's HTTP server: ``python -m routing replica --port P``.

It speaks vLLM 0.32's API as the captures of a real one show it (tests/data/vllm): the routes a router and a scraper
use, in the same shapes. Handlers parse, ask the replica, answer; ``server.py`` gives every answer its headers.

Where the application keeps what its handlers share.

What every exchange has in common: authentication, the errors' shapes, headers, and its place in the metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import signal
import sys
import time
from collections.abc import Sequence

import msgspec
import uvloop
from aiohttp import web
from aiohttp.typedefs import Handler

from routing.standin.errors import ApiError, bad_request, error_body, read_fault
from routing.standin.generation import Generation
from routing.standin.metrics import CONTENT_TYPE
from routing.standin.replica import Replica, ReplicaSettings, parse_settings
from routing.standin.requests import (
    bytes_of,
    check_model,
    count_tokens,
    decode,
    decode_body,
    encode,
    read_chat,
    read_completion,
    read_messages,
    render_chat,
    token_ids,
)
from routing.standin.responses import VERSION, EventStream, whole_answer

replica_key: web.AppKey[Replica] = web.AppKey("replica", Replica)
settings_key: web.AppKey[ReplicaSettings] = web.AppKey("settings", ReplicaSettings)


GUARDED = ("/v1", "/v2", "/inference", "/cohere")  # what --api-key guards; /health and /metrics stay open


async def set_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Headers as vLLM's: the request's id is echoed, or a random one set, but not on a 500."""
    headers = response.headers
    headers["Server"] = "uvicorn"
    if response.status not in {401, 500}:
        headers["Vary"] = "Origin"
    if response.status != 500:
        headers["X-Request-Id"] = request.headers.get("X-Request-Id") or secrets.token_hex(16)


@web.middleware
async def answer_every_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer with one of vLLM's shapes whatever happens, and count it."""
    started_s = time.perf_counter()
    response = await _shaped(request, handler)
    resource = request.match_info.route.resource
    path = resource.canonical if resource is not None and response.status != 405 else "none"
    request.app[replica_key].http.observe(
        path,
        request.method,
        response.status,
        seconds=time.perf_counter() - started_s,
        received_bytes=request.content_length or 0,
        sent_bytes=response.content_length or 0,
    )
    return response


async def _shaped(request: web.Request, handler: Handler) -> web.StreamResponse:
    if not _is_allowed(request):
        return _json(b'{"error":"Unauthorized"}', 401)
    try:
        return await handler(request)
    except ApiError as error:
        return _json(error.body(), error.status)
    except web.HTTPRequestEntityTooLarge as error:
        return _json(error_body(413, "Request Entity Too Large", error.reason), 413)
    except web.HTTPException as error:
        response = _json(msgspec.json.encode({"detail": error.reason}), error.status)
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response


def _is_allowed(request: web.Request) -> bool:
    key = request.app[settings_key].api_key
    if key is None or not request.path.startswith(GUARDED):
        return True
    given = request.headers.get("Authorization", "")
    return hmac.compare_digest(given.encode(errors="surrogateescape"), f"Bearer {key}".encode())


def _json(body: bytes, status: int) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


LARGEST_BODY_BYTES = 64 << 20
SHUTDOWN_S = 2.0
_ALLOWED = {  # what vLLM says of any model
    "allow_create_engine": False,
    "allow_sampling": True,
    "allow_logprobs": True,
    "allow_search_indices": False,
    "allow_view": True,
    "allow_fine_tuning": False,
}


def json_answer(value: object) -> web.Response:
    """200 with compact JSON."""
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


async def _body(request: web.Request) -> dict[str, object]:
    return decode_body(await request.read(), request.headers.get("Content-Type", ""))


# --- generation --------------------------------------------------------------------------------------


async def chat(request: web.Request) -> web.StreamResponse:
    """``POST /v1/chat/completions``."""
    replica = request.app[replica_key]
    settings = replica.settings
    ask = read_chat(await _body(request), settings.model, settings.engine.max_model_len, settings.auto_tools)
    return await _answer(request, replica.generate(ask), "chatcmpl")


async def completion(request: web.Request) -> web.StreamResponse:
    """``POST /v1/completions``."""
    replica = request.app[replica_key]
    settings = replica.settings
    ask = read_completion(await _body(request), settings.model, settings.engine.max_model_len)
    return await _answer(request, replica.generate(ask), "cmpl")


async def _answer(request: web.Request, generation: Generation, prefix: str) -> web.StreamResponse:
    replica = request.app[replica_key]
    answer_id = f"{prefix}-{request.headers.get('X-Request-Id') or secrets.token_hex(8)}"
    replica.in_flight += 1
    try:
        if generation.ask.stream:
            return await _stream(request, generation, answer_id)
        return await _whole(request, generation, answer_id)
    finally:
        generation.drop()
        replica.in_flight -= 1


async def _whole(request: web.Request, generation: Generation, answer_id: str) -> web.Response:
    crash = request.app[replica_key].crash
    generation.start()
    await generation.wait()
    if crash is not None and request.transport is not None:
        request.transport.abort()
    return web.Response(body=whole_answer(generation, answer_id), content_type="application/json")


async def _stream(request: web.Request, generation: Generation, answer_id: str) -> web.StreamResponse:
    """The head goes out at once, the first event when prefill has ended: as vLLM does."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    response.enable_chunked_encoding()
    with contextlib.suppress(ConnectionResetError):  # the client has disconnected
        await response.prepare(request)
    transport = request.transport
    if transport is None or transport.is_closing():
        return response
    stream = EventStream(generation, answer_id, transport, request.app[replica_key].crash)
    generation.start(stream.on_token)
    await generation.wait()
    stream.close()
    return response


# --- everything else ---------------------------------------------------------------------------------


async def empty(_request: web.Request) -> web.Response:
    """``GET /health`` and ``/ping``: 200 without a body, whatever the engine does."""
    return web.Response()


async def version(_request: web.Request) -> web.Response:
    """``GET /version``."""
    return json_answer({"version": VERSION})


async def load(request: web.Request) -> web.Response:
    """``GET /load``: HTTP requests for a generation in flight."""
    return json_answer({"server_load": request.app[replica_key].in_flight})


async def models(request: web.Request) -> web.Response:
    """``GET /v1/models``."""
    settings = request.app[replica_key].settings
    created = int(time.time())
    permission = {
        "id": f"modelperm-{secrets.token_hex(8)}",
        "object": "model_permission",
        "created": created,
        **_ALLOWED,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    model = {
        "id": settings.model,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": settings.model,
        "parent": None,
        "max_model_len": settings.engine.max_model_len,
        "permission": [permission],
    }
    return json_answer({"object": "list", "data": [model]})


async def metrics(request: web.Request) -> web.Response:
    """``GET /metrics``."""
    return web.Response(body=request.app[replica_key].metrics_page(), headers={"Content-Type": CONTENT_TYPE})


async def tokenize(request: web.Request) -> web.Response:
    """``POST /tokenize``: of a prompt, or of messages by the chat template; exactly the engine's prompt."""
    settings = request.app[replica_key].settings
    body = await _body(request)
    check_model(body, settings.model)
    if body.get("messages"):
        tools = body.get("tools")
        data = render_chat(read_messages(body), tools if isinstance(tools, list) else None)
    else:
        data = str(body.get("prompt") or "").encode(errors="replace")
    prompt = encode(data)
    names = None
    if body.get("return_token_strs"):
        names = [token.decode(errors="replace") for token in decode(prompt)]
    longest = settings.engine.max_model_len
    answer = {
        "count": count_tokens(prompt),
        "max_model_len": longest,
        "tokens": token_ids(prompt),
        "token_strs": names,
    }
    return json_answer(answer)


async def detokenize(request: web.Request) -> web.Response:
    """``POST /detokenize``."""
    body = await _body(request)
    check_model(body, request.app[replica_key].settings.model)
    tokens = body.get("tokens")
    if not isinstance(tokens, list) or not all(type(one) is int and 0 <= one < 1 << 32 for one in tokens):
        raise bad_request("tokens must be a list of token ids", "tokens")
    return json_answer({"prompt": b"".join(decode(bytes_of(tokens))).decode(errors="replace")})


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """``POST /reset_prefix_cache``: forget every cached block, unless requests are running."""
    return json_answer({"success": request.app[replica_key].engine.pool.reset()})


async def sleep(request: web.Request) -> web.Response:
    """``POST /sleep?level=1``."""
    level = request.query.get("level", "1")
    if level not in {"0", "1", "2"}:
        raise bad_request("level must be 0, 1 or 2", "level")
    request.app[replica_key].sleep()
    return json_answer({"status": "sleeping", "level": int(level)})


async def wake_up(request: web.Request) -> web.Response:
    """``POST /wake_up``."""
    request.app[replica_key].wake()
    return json_answer({"status": "awake", "tags": None})


async def is_sleeping(request: web.Request) -> web.Response:
    """``GET /is_sleeping``."""
    return json_answer({"is_sleeping": request.app[replica_key].is_asleep})


async def get_fault(request: web.Request) -> web.Response:
    """``GET /standin/fault``: the fault being shown (not vLLM's)."""
    return json_answer(request.app[replica_key].fault)


async def set_fault(request: web.Request) -> web.Response:
    """``POST /standin/fault``: show a fault, see ``errors.py`` (not vLLM's)."""
    replica = request.app[replica_key]
    try:
        replica.set_fault(read_fault(await request.read()))
    except ValueError as error:
        raise bad_request(str(error)) from None
    return json_answer(replica.fault)


# --- start and stop ----------------------------------------------------------------------------------


def make_app(settings: ReplicaSettings) -> web.Application:
    """The application; its replica is made when it starts, on the loop it runs on."""
    app = web.Application(client_max_size=LARGEST_BODY_BYTES, middlewares=[answer_every_request])
    app.on_startup.append(_start)
    app.on_response_prepare.append(set_headers)
    app[settings_key] = settings
    gets = {
        "/health": empty, "/ping": empty, "/version": version, "/load": load, "/v1/models": models, "/metrics": metrics,
        "/is_sleeping": is_sleeping, "/standin/fault": get_fault,
    }  # fmt: skip
    posts = {
        "/v1/chat/completions": chat, "/v1/completions": completion, "/tokenize": tokenize, "/detokenize": detokenize,
        "/reset_prefix_cache": reset_prefix_cache, "/sleep": sleep, "/wake_up": wake_up, "/standin/fault": set_fault,
    }  # fmt: skip
    app.add_routes([web.get(path, handler, allow_head=False) for path, handler in gets.items()])
    app.add_routes([web.post(path, handler) for path, handler in posts.items()])
    return app


async def _start(app: web.Application) -> None:
    app[replica_key] = Replica(app[settings_key])


async def serve(settings: ReplicaSettings, stop: asyncio.Event) -> None:
    """Serve until ``stop`` is set; then, as vLLM does by default, running requests end with "abort"."""
    app = make_app(settings)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        site = web.TCPSite(runner, settings.host, settings.port, reuse_address=True, backlog=1024)
        await site.start()
        port = runner.addresses[0][1]
        print(f"replica {settings.model} listens on http://{settings.host}:{port}", flush=True)  # noqa: T201
        await stop.wait()
        app[replica_key].runtime.stop()
    finally:
        await runner.cleanup()


async def _main(settings: ReplicaSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(settings, stop)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a replica until SIGTERM or SIGINT; 0, or 1 where its port is taken."""
    settings = parse_settings(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.WARNING)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            uvloop.run(_main(settings))
    except OSError as error:
        print(f"replica cannot listen on {settings.host}:{settings.port}: {error.strerror}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
