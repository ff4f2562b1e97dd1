"""Pooling and speech endpoints, as vLLM 0.32 serves them for such models; the results are pseudo-random.

vLLM serves the endpoints of the model's task only, and so does the stand-in (``--task``). A prompt is prefilled like
one of a generation and generates one token, so that it takes time and blocks of the cache.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from operator import itemgetter
from typing import Any, Final, NamedTuple

from aiohttp import web
from aiohttp.typedefs import Handler
from xxhash import xxh3_64_intdigest

from routing.standin.errors import bad_request, invalid
from routing.standin.replica import Task
from routing.standin.requests import GenerationRequest, check_length, check_model, encode, prompt_of_ids, render_chat
from routing.standin.responses import ok, read_json, replica_key

DIMENSIONS: Final = 8
LABELS: Final = ("LABEL_0", "LABEL_1")
_SIDES: Final = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))


class PoolingRequest(NamedTuple):
    """A checked request: what the engine computes, and how the response is made of it."""

    generation: GenerationRequest
    result: Callable[[int], dict[str, Any]]  # the response, by the number of prompt tokens


def read_embeddings(body: dict[str, Any], model: str, max_model_len: int) -> PoolingRequest:
    """``/v1/embeddings``."""
    prompts = _prompts(body)
    rows = [{"index": at, "object": "embedding", "embedding": _vector(prompt)} for at, prompt in enumerate(prompts)]
    return _request(body, model, max_model_len, prompts, "embd", {"data": rows})


def read_pooling(body: dict[str, Any], model: str, max_model_len: int) -> PoolingRequest:
    """``/pooling``."""
    prompts = _prompts(body)
    rows = [{"index": at, "object": "pooling", "data": _vector(prompt)} for at, prompt in enumerate(prompts)]
    return _request(body, model, max_model_len, prompts, "pool", {"data": rows})


def read_classification(body: dict[str, Any], model: str, max_model_len: int) -> PoolingRequest:
    """``/classify``."""
    prompts = _prompts(body)
    rows = [{"index": at} | _classification(_score(prompt)) for at, prompt in enumerate(prompts)]
    return _request(body, model, max_model_len, prompts, "classify", {"data": rows})


def read_score(body: dict[str, Any], model: str, max_model_len: int) -> PoolingRequest:
    """``/score`` and ``/v1/score``: one text with each of the others, or as many with as many."""
    sides = next((names for names in _SIDES if all(name in body for name in names)), None)
    if sides is None:
        raise invalid("missing", "body.queries", "Field required", body)
    firsts, seconds = (_texts(body, name) for name in sides)
    if len(firsts) not in (1, len(seconds)):
        raise bad_request("Input lengths must be either 1:1, 1:N or N:N")
    prompts = _pairs(firsts * len(seconds) if len(firsts) == 1 else firsts, seconds)
    rows = [{"index": at, "object": "score", "score": _score(prompt)} for at, prompt in enumerate(prompts)]
    return _request(body, model, max_model_len, prompts, "score", {"data": rows})


def read_rerank(body: dict[str, Any], model: str, max_model_len: int) -> PoolingRequest:
    """``/rerank``, ``/v1/rerank`` and ``/v2/rerank``: the documents by their score, best first."""
    for name in ("query", "documents"):
        if name not in body:
            raise invalid("missing", f"body.{name}", "Field required", body)
    (query,), documents = _texts(body, "query"), _texts(body, "documents")
    prompts = _pairs([query] * len(documents), documents)
    rows = [
        {"index": at, "document": {"text": document, "multi_modal": None}, "relevance_score": _score(prompt)}
        for at, (document, prompt) in enumerate(zip(documents, prompts, strict=True))
    ]
    rows.sort(key=itemgetter("relevance_score"), reverse=True)
    generation = _generation(body, model, max_model_len, prompts)
    head = {"id": f"rerank-{secrets.token_hex(8)}", "model": model}
    results = rows[: body.get("top_n") or len(rows)]
    return PoolingRequest(
        generation,
        lambda tokens: head | {"usage": {"prompt_tokens": tokens, "total_tokens": tokens}, "results": results},
    )


def transcription(audio: bytes, *, is_translation: bool) -> dict[str, Any]:
    """The text of a recording, whose length is assumed to be that of 16 kHz and 16 bit; translations have no usage."""
    seconds = math.ceil(len(audio) / 32_000)
    text = {"text": f" {xxh3_64_intdigest(audio):016x}"}
    return text if is_translation else text | {"usage": {"type": "duration", "seconds": seconds}}


def _request(
    body: dict[str, Any], model: str, max_model_len: int, prompts: list[bytes], prefix: str, data: dict[str, Any]
) -> PoolingRequest:
    generation = _generation(body, model, max_model_len, prompts)
    head = {
        "id": f"{prefix}-{secrets.token_hex(8)}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
    }
    none = {"completion_tokens": 0, "prompt_tokens_details": None, "completion_tokens_details": None}
    return PoolingRequest(
        generation,
        lambda tokens: head | data | {"usage": {"prompt_tokens": tokens, "total_tokens": tokens} | none},
    )


def _generation(body: dict[str, Any], model: str, max_model_len: int, prompts: list[bytes]) -> GenerationRequest:
    check_model(body, model)
    request = GenerationRequest(
        is_chat=False,
        model=model,
        prompts=prompts,
        n=1,
        max_tokens=1,
        stream=False,
        include_usage=False,
        continuous_usage=False,
        stops=(),
        salt=str(body.get("cache_salt") or ""),
        ignore_eos=True,
        min_tokens=0,
        logprobs=False,
        return_token_ids=False,
    )
    check_length(request, max_model_len)
    return request


def _prompts(body: dict[str, Any]) -> list[bytes]:
    """The prompts of ``input``, or the one of ``messages``."""
    if body.get("messages"):
        return [encode(render_chat(body["messages"]))]
    value = body.get("input")
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return [prompt_of_ids(value)]
    return [encode(text.encode(errors="replace")) for text in _texts(body, "input")]


def _texts(body: dict[str, Any], name: str) -> list[str]:
    value = body.get(name)
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise invalid("string_type", f"body.{name}", "Input should be a valid string", value)
    return texts


def _pairs(firsts: list[str], seconds: list[str]) -> list[bytes]:
    return [
        encode(f"{first}\n{second}".encode(errors="replace")) for first, second in zip(firsts, seconds, strict=True)
    ]


def _vector(prompt: bytes) -> list[float]:
    """A pseudo-random vector of length 1."""
    values = [xxh3_64_intdigest(prompt, at) / 2**63 - 1 for at in range(DIMENSIONS)]
    norm = math.hypot(*values) or 1.0
    return [value / norm for value in values]


def _score(prompt: bytes) -> float:
    return xxh3_64_intdigest(prompt) / 2**64


def _classification(probability: float) -> dict[str, Any]:
    probabilities = [1 - probability, probability]
    label = LABELS[probability > 0.5]
    return {"label": label, "probs": probabilities, "num_classes": len(LABELS)}


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
