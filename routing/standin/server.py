"""The HTTP server of the stand-in replica (``python -m routing replica --port P``).

It has the routes of vLLM 0.32 that routers and scrapers use, with the shapes and headers of the captures in
tests/data/vllm, and ``/standin/fault``.
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
from typing import Any

import msgspec
import uvloop
from aiohttp import web
from aiohttp.typedefs import Handler

from routing.standin import anthropic, pooling, responses_api, transfers
from routing.standin.errors import ApiError, bad_request, error_body, read_fault
from routing.standin.metrics import CONTENT_TYPE
from routing.standin.replica import Generation, Replica, ReplicaSettings, Task, parse_settings
from routing.standin.requests import (
    GenerationRequest,
    check_model,
    count_tokens,
    encode,
    read_chat,
    read_completion,
    read_messages,
    render_chat,
    token_ids,
)
from routing.standin.responses import (
    CHAT,
    COMPLETION,
    DONE,
    VERSION,
    Api,
    EventStream,
    StreamFormat,
    json_response,
    ok,
    read_json,
    replica_key,
)
from routing.standin.responses_api import ResponseStore
from routing.standin.transfers import RemoteBlocks

store_key: web.AppKey[ResponseStore] = web.AppKey("responses", ResponseStore)

AUTHENTICATED_PATHS = ("/v1", "/v2", "/inference", "/cohere")  # protected by --api-key; /health and /metrics stay open
MAX_BODY_BYTES = 64 << 20
SHUTDOWN_S = 2.0

# --- middleware ---


async def set_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Headers as in vLLM: the request id is echoed or generated, but not on a 500."""
    headers = response.headers
    headers["Server"] = "uvicorn"
    if response.status not in {401, 500}:
        headers["Vary"] = "Origin"
    if response.status != 500:
        headers["X-Request-Id"] = request.headers.get("X-Request-Id") or secrets.token_hex(16)


@web.middleware
async def respond(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Check the API key, and give errors vLLM's shapes."""
    if not _is_authorized(request):
        return json_response(b'{"error":"Unauthorized"}', 401)
    try:
        return await handler(request)
    except ApiError as error:
        is_anthropic = request.path.startswith(anthropic.PATH) and error.kind != anthropic.FRAMEWORK_ERROR
        return json_response(anthropic.error_body(error) if is_anthropic else error.body(), error.status)
    except web.HTTPRequestEntityTooLarge as error:
        return json_response(error_body(413, "Request Entity Too Large", error.reason), 413)
    except web.HTTPException as error:
        response = json_response(msgspec.json.encode({"detail": error.reason}), error.status)
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response


def _is_authorized(request: web.Request) -> bool:
    key = request.app[replica_key].settings.api_key
    if key is None or not request.path.startswith(AUTHENTICATED_PATHS):
        return True
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.encode(errors="surrogateescape"), key.encode())


# --- generation ---


async def chat(request: web.Request) -> web.StreamResponse:
    """``POST /v1/chat/completions``."""
    return await _transfer_and_generate(request, _read_chat(request, await read_json(request)), CHAT)


async def completion(request: web.Request) -> web.StreamResponse:
    """``POST /v1/completions``."""
    settings = request.app[replica_key].settings
    checked = read_completion(await read_json(request), settings.model, settings.engine.max_model_len)
    return await _transfer_and_generate(request, checked, COMPLETION)


async def messages(request: web.Request) -> web.StreamResponse:
    """``POST /v1/messages``."""
    body = anthropic.chat_body(await read_json(request))
    return await _generate(request, _read_chat(request, body), anthropic.MESSAGES)


def _read_chat(request: web.Request, body: dict[str, Any]) -> GenerationRequest:
    settings = request.app[replica_key].settings
    return read_chat(body, settings.model, settings.engine.max_model_len, settings.auto_tools)


async def count_message_tokens(request: web.Request) -> web.Response:
    """``POST /v1/messages/count_tokens``."""
    body = anthropic.chat_body(await read_json(request), is_counted=True)
    check_model(body, request.app[replica_key].settings.model)
    tokens = count_tokens(encode(render_chat(body["messages"], body.get("tools"))))
    return ok({"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}})


async def create_response(request: web.Request) -> web.StreamResponse:
    """``POST /v1/responses``."""
    store, body = request.app[store_key], await read_json(request)
    converted = responses_api.chat_body(body, store)
    api = responses_api.api_of(body, converted["messages"], store)
    return await _generate(request, _read_chat(request, converted), api)


async def stored_response(request: web.Request) -> web.Response:
    """``GET /v1/responses/{id}``."""
    return ok(request.app[store_key].find(request.match_info["id"]).document)


async def _transfer_and_generate(request: web.Request, checked: GenerationRequest, api: Api) -> web.StreamResponse:
    """Fetch the prompt's KV blocks if another replica has prefilled it, then generate."""
    replica = request.app[replica_key]
    connector = replica.transfers
    if connector is None or not checked.transfer:
        return await _generate(request, checked, api)
    try:
        checked.external_tokens = await connector.fetch(checked.transfer, count_tokens(checked.prompts[0]))
    except ApiError as error:
        if not checked.stream:
            raise
        events = b"data: " + error.body() + b"\n\n" + DONE  # vLLM has sent the headers before
        return web.Response(body=events, headers={"Content-Type": "text/event-stream; charset=utf-8"})
    return await _generate(request, checked, api)


def _keep_blocks(request: web.Request, generation: Generation) -> None:
    """Keep the blocks of a prompt that another replica will continue, if its generation reached its length limit."""
    replica, checked, (first, *others) = request.app[replica_key], generation.request, generation.choices
    connector, is_requested = replica.transfers, checked.transfer.get("do_remote_decode") is True
    if connector is None or not is_requested or others or first.finish_reason != "length" or request.transport is None:
        return
    host, port = request.transport.get_extra_info("sockname")[:2]
    tokens, block_tokens = count_tokens(checked.prompts[0]), replica.settings.engine.block_tokens
    generation.transfer_params = connector.keep(tokens, block_tokens, (host, port))


async def _generate(request: web.Request, checked: GenerationRequest, api: Api) -> web.StreamResponse:
    replica = request.app[replica_key]
    generation = replica.generate(checked)
    response_id = f"{api.id_prefix}-{request.headers.get('X-Request-Id') or secrets.token_hex(8)}"
    replica.in_flight += 1
    try:
        if generation.request.stream:
            return await _stream(request, generation, api.stream(generation, response_id))
        crash = replica.crash
        await generation.run()
        if crash is not None and request.transport is not None:
            request.transport.abort()
        _keep_blocks(request, generation)
        return json_response(api.whole(generation, response_id))
    finally:
        generation.drop()
        replica.in_flight -= 1


async def _stream(request: web.Request, generation: Generation, events: StreamFormat) -> web.StreamResponse:
    """Send the headers at once, and the first event when prefill has ended, as vLLM does."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    response.enable_chunked_encoding()
    with contextlib.suppress(ConnectionResetError):  # the client has disconnected
        await response.prepare(request)
    transport = request.transport
    if transport is None or transport.is_closing():
        return response
    stream = EventStream(generation, events, transport, request.app[replica_key].crash)
    stream.open()
    await generation.run(stream.on_progress)
    stream.close()
    return response


# --- other routes ---


async def health(_request: web.Request) -> web.Response:
    """``GET /health`` and ``/ping``: 200 without a body, even while the engine is stalled."""
    return web.Response()


async def version(_request: web.Request) -> web.Response:
    """``GET /version``."""
    return ok({"version": VERSION})


async def load(request: web.Request) -> web.Response:
    """``GET /load``: HTTP requests for a generation in flight."""
    return ok({"server_load": request.app[replica_key].in_flight})


async def models(request: web.Request) -> web.Response:
    """``GET /v1/models``."""
    settings = request.app[replica_key].settings
    created = int(time.time())
    allowed = dict.fromkeys(("allow_sampling", "allow_logprobs", "allow_view"), True)
    allowed |= dict.fromkeys(("allow_create_engine", "allow_search_indices", "allow_fine_tuning", "is_blocking"), False)
    head = {"id": f"modelperm-{secrets.token_hex(8)}", "object": "model_permission", "created": created}
    permission = head | allowed | {"organization": "*", "group": None}
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
    return ok({"object": "list", "data": [model]})


async def metrics(request: web.Request) -> web.Response:
    """``GET /metrics``."""
    return web.Response(body=request.app[replica_key].metrics_page(), headers={"Content-Type": CONTENT_TYPE})


async def tokenize(request: web.Request) -> web.Response:
    """``POST /tokenize``: tokens of a prompt, or of messages in the chat template, exactly as the engine gets them."""
    settings = request.app[replica_key].settings
    body = await read_json(request)
    check_model(body, settings.model)
    if body.get("messages"):
        text = render_chat(read_messages(body), body.get("tools"))
    else:
        text = str(body.get("prompt") or "").encode(errors="replace")
    prompt = encode(text)
    return ok(
        {
            "count": count_tokens(prompt),
            "max_model_len": settings.engine.max_model_len,
            "tokens": token_ids(prompt),
            "token_strs": None,
        }
    )


async def release_blocks(request: web.Request) -> web.Response:
    """``POST /standin/kv_transfer``: another replica fetches kept KV blocks (not in vLLM)."""
    connector = request.app[replica_key].transfers
    if connector is None:
        raise ApiError(404, "NotFoundError", "This replica has no role.")
    try:
        blocks = msgspec.json.decode(await request.read(), type=RemoteBlocks)
    except msgspec.MsgspecError as error:
        raise bad_request(str(error)) from None
    return ok(connector.release(blocks))


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """``POST /reset_prefix_cache``: empty the cache, unless requests are running."""
    return ok({"success": request.app[replica_key].engine.clear_cache()})


async def kv_event_sources(request: web.Request) -> web.Response:
    """``GET /kv_event_sources``: where each data-parallel rank publishes KV events."""
    publisher = request.app[replica_key].kv_events
    return ok({} if publisher is None else {"0": publisher.config})


async def get_fault(request: web.Request) -> web.Response:
    """``GET /standin/fault``: the active fault (not in vLLM)."""
    return ok(request.app[replica_key].fault)


async def set_fault(request: web.Request) -> web.Response:
    """``POST /standin/fault``: replace the active fault, see ``errors.py`` (not in vLLM)."""
    replica = request.app[replica_key]
    replica.set_fault(read_fault(await request.read()))
    return ok(replica.fault)


# --- start and stop ---


def make_app(settings: ReplicaSettings) -> web.Application:
    """The application; its replica is created at startup, on the loop that it runs on."""
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[respond])

    async def start(app: web.Application) -> None:
        app[replica_key] = Replica(settings)

    async def stop(app: web.Application) -> None:
        if (publisher := app[replica_key].kv_events) is not None:
            publisher.close()

    app[store_key] = ResponseStore()
    app.on_startup.append(start)
    app.on_cleanup.append(stop)
    app.on_response_prepare.append(set_headers)
    if settings.task is not Task.GENERATE:
        app.add_routes(pooling.routes(settings.task))
    gets = {
        "/health": health, "/ping": health, "/version": version, "/load": load, "/v1/models": models,
        "/metrics": metrics, "/standin/fault": get_fault,
        "/kv_event_sources": kv_event_sources, f"{responses_api.PATH}/{{id}}": stored_response,
    }  # fmt: skip
    generation = {
        "/v1/chat/completions": chat, "/v1/completions": completion, anthropic.PATH: messages,
        f"{anthropic.PATH}/count_tokens": count_message_tokens, responses_api.PATH: create_response,
    }  # fmt: skip
    posts = {
        **(generation if settings.task is Task.GENERATE else {}), "/tokenize": tokenize,
        "/reset_prefix_cache": reset_prefix_cache, "/standin/fault": set_fault,
        transfers.PATH: release_blocks,
    }  # fmt: skip
    app.add_routes([web.get(path, handler, allow_head=False) for path, handler in gets.items()])
    app.add_routes([web.post(path, handler) for path, handler in posts.items()])
    return app


async def serve(settings: ReplicaSettings) -> None:
    """Serve until SIGTERM or SIGINT; then, as vLLM does by default, running requests end with "abort"."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    app = make_app(settings)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, settings.host, settings.port, reuse_address=True, backlog=1024).start()
        port = runner.addresses[0][1]
        print(f"replica {settings.model} listens on http://{settings.host}:{port}", flush=True)  # noqa: T201
        await stop.wait()
        app[replica_key].runtime.stop()
    finally:
        await runner.cleanup()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a replica until SIGTERM or SIGINT; 0, or 1 if its port is taken."""
    settings = parse_settings(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.WARNING)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            uvloop.run(serve(settings))
    except OSError as error:
        print(f"replica cannot listen on {settings.host}:{settings.port}: {error.strerror}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
