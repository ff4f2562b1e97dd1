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
from typing import Any, Final

from aiohttp import web
from aiohttp.typedefs import Handler
from xxhash import xxh3_64_intdigest

from routing.standin.errors import bad_request, invalid
from routing.standin.replica import Replica, Task
from routing.standin.requests import GenerationRequest, check_length, check_model, encode, prompt_of_ids, render_chat
from routing.standin.responses import ok, read_json, replica_key

DIMENSIONS: Final = 8
_SIDES: Final = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))


def routes(task: Task) -> list[web.RouteDef]:
    """The routes of a task."""
    if task is Task.POOLING:
        ranking = [web.post(path, rerank) for path in ("/rerank", "/v1/rerank", "/v2/rerank")]
        return ranking + [web.post(path, _handler(*parts)) for path, parts in _LISTS.items()]
    return [
        web.post("/v1/audio/transcriptions", _speech_handler(is_translation=False)),
        web.post("/v1/audio/translations", _speech_handler(is_translation=True)),
    ]


def _handler(
    prefix: str, read_prompts: Callable[[dict[str, Any]], list[bytes]], row: Callable[[bytes], dict[str, Any]]
) -> Handler:
    """A handler whose response is a list with a row for each prompt. ``prefix``: of the response's id."""

    async def handle(request: web.Request) -> web.StreamResponse:
        replica, body = request.app[replica_key], await read_json(request)
        prompts = read_prompts(body)
        usage = await _compute(replica, body, prompts)
        none = {"completion_tokens": 0, "prompt_tokens_details": None, "completion_tokens_details": None}
        return ok(
            {
                "id": f"{prefix}-{secrets.token_hex(8)}",
                "object": "list",
                "created": int(time.time()),
                "model": replica.settings.model,
                "data": [{"index": at} | row(prompt) for at, prompt in enumerate(prompts)],
                "usage": usage | none,
            }
        )

    return handle


async def rerank(request: web.Request) -> web.StreamResponse:
    """The documents by their score, best first."""
    replica, body = request.app[replica_key], await read_json(request)
    for name in ("query", "documents"):
        if name not in body:
            raise invalid("missing", f"body.{name}", "Field required", body)
    (query,), documents = _texts(body, "query"), _texts(body, "documents")
    prompts = [_pair(query, document) for document in documents]
    usage = await _compute(replica, body, prompts)
    rows: list[dict[str, Any]] = [
        {"index": at, "document": {"text": document, "multi_modal": None}, "relevance_score": _score(prompt)}
        for at, (document, prompt) in enumerate(zip(documents, prompts, strict=True))
    ]
    rows.sort(key=itemgetter("relevance_score"), reverse=True)
    head = {"id": f"rerank-{secrets.token_hex(8)}", "model": replica.settings.model}
    return ok(head | {"usage": usage, "results": rows[: body.get("top_n") or len(rows)]})


async def _compute(replica: Replica, body: dict[str, Any], prompts: list[bytes]) -> dict[str, int]:
    """Prefill the prompts; returns their usage."""
    check_model(body, replica.settings.model)
    salt = str(body.get("cache_salt") or "")
    request = GenerationRequest(
        is_chat=False, model=replica.settings.model, prompts=prompts, max_tokens=1, salt=salt, ignore_eos=True
    )
    check_length(request, replica.settings.engine.max_model_len)
    generation = replica.generate(request)
    replica.in_flight += 1
    try:
        await generation.run()
    finally:
        generation.drop()
        replica.in_flight -= 1
    return {"prompt_tokens": generation.prompt_tokens, "total_tokens": generation.prompt_tokens}


def _speech_handler(*, is_translation: bool) -> Handler:
    """Recordings are taken to be of 16 kHz and 16 bit; translations have no usage."""

    async def handle(request: web.Request) -> web.StreamResponse:
        form = await request.post()
        file = form.get("file")
        if not isinstance(file, web.FileField):
            raise bad_request("Field required", "file")
        check_model({"model": form.get("model")}, request.app[replica_key].settings.model)
        audio = file.file.read()
        text = {"text": f" {xxh3_64_intdigest(audio):016x}"}
        usage = {"usage": {"type": "duration", "seconds": math.ceil(len(audio) / 32_000)}}
        return ok(text if is_translation else text | usage)

    return handle


# --- prompts ---


def _prompts(body: dict[str, Any]) -> list[bytes]:
    """The prompts of ``input``, or the one of ``messages``."""
    if body.get("messages"):
        return [encode(render_chat(body["messages"]))]
    value = body.get("input")
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return [prompt_of_ids(value)]
    return [encode(text.encode(errors="replace")) for text in _texts(body, "input")]


def _pairs(body: dict[str, Any]) -> list[bytes]:
    """One text with each of the others, or as many with as many."""
    sides = next((names for names in _SIDES if all(name in body for name in names)), None)
    if sides is None:
        raise invalid("missing", "body.queries", "Field required", body)
    firsts, seconds = (_texts(body, name) for name in sides)
    if len(firsts) not in (1, len(seconds)):
        raise bad_request("Input lengths must be either 1:1, 1:N or N:N")
    return [_pair(firsts[at % len(firsts)], second) for at, second in enumerate(seconds)]


def _pair(first: str, second: str) -> bytes:
    return encode(f"{first}\n{second}".encode(errors="replace"))


def _texts(body: dict[str, Any], name: str) -> list[str]:
    value = body.get(name)
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise invalid("string_type", f"body.{name}", "Input should be a valid string", value)
    return texts


# --- results ---


def _vector(prompt: bytes) -> list[float]:
    """A pseudo-random vector of length 1."""
    values = [xxh3_64_intdigest(prompt, at) / 2**63 - 1 for at in range(DIMENSIONS)]
    norm = math.hypot(*values) or 1.0
    return [value / norm for value in values]


def _score(prompt: bytes) -> float:
    return xxh3_64_intdigest(prompt) / 2**64


def _classes(prompt: bytes) -> dict[str, Any]:
    probability = _score(prompt)
    label = f"LABEL_{int(probability > 0.5)}"
    return {"label": label, "probs": [1 - probability, probability], "num_classes": 2}


def _scored(prompt: bytes) -> dict[str, Any]:
    return {"object": "score", "score": _score(prompt)}


_LISTS: Final = {
    "/v1/embeddings": ("embd", _prompts, lambda prompt: {"object": "embedding", "embedding": _vector(prompt)}),
    "/pooling": ("pool", _prompts, lambda prompt: {"object": "pooling", "data": _vector(prompt)}),
    "/classify": ("classify", _prompts, _classes),
    "/score": ("score", _pairs, _scored),
    "/v1/score": ("score", _pairs, _scored),
}
