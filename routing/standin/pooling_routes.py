"""The routes of stand-in replicas whose model is for pooling or for transcription."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from aiohttp import web
from aiohttp.typedefs import Handler

from routing.standin.errors import bad_request
from routing.standin.exchange import ok, read_json, replica_key
from routing.standin.pooling import (
    PoolingRequest,
    read_classification,
    read_embeddings,
    read_pooling,
    read_rerank,
    read_score,
    transcription,
)
from routing.standin.replica import Task
from routing.standin.requests import check_model

_POOLING: Final[dict[str, Callable[[dict[str, Any], str, int], PoolingRequest]]] = {
    "/v1/embeddings": read_embeddings,
    "/pooling": read_pooling,
    "/classify": read_classification,
    **dict.fromkeys(("/score", "/v1/score"), read_score),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), read_rerank),
}
_AUDIO: Final = {"/v1/audio/transcriptions": False, "/v1/audio/translations": True}  # whether it translates


def routes(task: Task) -> list[web.RouteDef]:
    """The routes of a task."""
    if task is Task.POOLING:
        return [web.post(path, _pooling_handler(read)) for path, read in _POOLING.items()]
    return [web.post(path, _audio_handler(is_translation)) for path, is_translation in _AUDIO.items()]


def _pooling_handler(read: Callable[[dict[str, Any], str, int], PoolingRequest]) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        replica = request.app[replica_key]
        settings = replica.settings
        checked = read(await read_json(request), settings.model, settings.engine.max_model_len)
        generation = replica.generate(checked.generation)
        replica.in_flight += 1
        try:
            await generation.run()
        finally:
            generation.drop()
            replica.in_flight -= 1
        return ok(checked.result(generation.prompt_tokens))

    return handle


def _audio_handler(is_translation: bool) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        form = await request.post()
        model, file = form.get("model"), form.get("file")
        if not isinstance(file, web.FileField):
            raise bad_request("Field required", "file")
        check_model({"model": model}, request.app[replica_key].settings.model)
        return ok(transcription(file.file.read(), is_translation=is_translation))

    return handle
