"""The stand-in replica with a pooling or a speech model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from tests.routing.standin.replica_process import ReplicaProcess, Response, replica_process

RERANK, SCORE = ("/rerank", "/v1/rerank", "/v2/rerank"), ("/score", "/v1/score")


@pytest.fixture(scope="module")
def pooling() -> Iterator[ReplicaProcess]:
    with replica_process("--task", "pooling") as process:
        yield process


@pytest.fixture(scope="module")
def speech() -> Iterator[ReplicaProcess]:
    with replica_process("--task", "transcription") as process:
        yield process


@pytest.mark.parametrize("path", RERANK)
def test_documents_are_ranked_by_their_score(pooling: ReplicaProcess, path: str) -> None:
    body = {"model": "tiny", "query": "What?", "documents": ["A.", "B.", "C."], "top_n": 2}
    ranked = pooling.send("POST", path, body).json

    scores = [row["relevance_score"] for row in ranked["results"]]
    assert len(scores) == 2
    assert scores == sorted(scores, reverse=True)
    assert all(row["document"]["text"] == body["documents"][row["index"]] for row in ranked["results"])
    assert ranked["usage"]["prompt_tokens"] == ranked["usage"]["total_tokens"] > 0


@pytest.mark.parametrize("path", SCORE)
@pytest.mark.parametrize("names", [("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2")])
def test_pairs_are_scored(pooling: ReplicaProcess, path: str, names: tuple[str, str]) -> None:
    one_to_many = pooling.send("POST", path, dict(zip(names, ("A.", ["B.", "C."]), strict=True))).json
    many = pooling.send("POST", path, dict(zip(names, (["A.", "A."], ["B.", "C."]), strict=True))).json

    assert [row["score"] for row in one_to_many["data"]] == [row["score"] for row in many["data"]]
    assert [row["object"] for row in many["data"]] == ["score"] * 2


def test_embeddings_pooling_and_classes(pooling: ReplicaProcess) -> None:
    embedded = pooling.send("POST", "/v1/embeddings", {"input": ["A.", "B."]}).json
    pooled = pooling.send("POST", "/pooling", {"messages": [{"role": "user", "content": "A."}]}).json
    classes = pooling.send("POST", "/classify", {"input": "A."}).json["data"]

    assert [math.hypot(*row["embedding"]) for row in embedded["data"]] == pytest.approx([1, 1])
    assert len(pooled["data"][0]["data"]) == len(embedded["data"][0]["embedding"])
    assert sum(classes[0]["probs"]) == pytest.approx(1)
    assert classes[0]["label"] in ("LABEL_0", "LABEL_1")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/rerank", {"query": "A."}, 400),
        ("/rerank", {"query": "A.", "documents": [5]}, 400),
        ("/score", {"text_1": "A."}, 400),
        ("/score", {"text_1": ["A.", "B."], "text_2": ["A.", "B.", "C."]}, 400),
        ("/pooling", {"input": None}, 400),
        ("/classify", {"input": "A.", "model": "other"}, 404),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "A."}]}, 404),
    ],
)
def test_invalid_requests_are_rejected(pooling: ReplicaProcess, path: str, body: Any, status: int) -> None:
    assert pooling.send("POST", path, body).status == status


def form(speech: ReplicaProcess, path: str, model: bytes = b"tiny", name: bytes = b"file") -> Response:
    start = b"--xyz\r\nContent-Disposition: form-data; name="
    file = start + b'"' + name + b'"; filename="a.wav"\r\n\r\n' + b"RIFF" * 20_000 + b"\r\n"
    body = file + start + b'"model"\r\n\r\n' + model + b"\r\n--xyz--\r\n"
    return speech.send("POST", path, body, {"Content-Type": "multipart/form-data; boundary=xyz"})


def test_recordings_are_transcribed_and_translated(speech: ReplicaProcess) -> None:
    transcribed = form(speech, "/v1/audio/transcriptions").json
    translated = form(speech, "/v1/audio/translations").json

    assert transcribed == {"text": translated["text"], "usage": {"type": "duration", "seconds": 3}}
    assert form(speech, "/v1/audio/translations", model=b"other").status == 404
    assert form(speech, "/v1/audio/translations", name=b"other").status == 400
