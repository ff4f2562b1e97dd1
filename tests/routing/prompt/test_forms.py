"""Multipart forms: the model and other fields are read as an engine reads them, or the form is rejected."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.prompt.forms import MAX_FIELDS, read_form
from routing.types import BodyError

TYPE = b"multipart/form-data; boundary=xyz"


def field(name: str, value: bytes, extra: bytes = b"") -> bytes:
    return b'--xyz\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (name.encode(), extra, value)


def form(*fields: bytes) -> bytes:
    return b"".join(fields) + b"--xyz--\r\n"


FILE = field("file", b"RIFF\r\n\r\n--xy\0", b'; filename="a; name=model.wav"\r\nContent-Type: audio/wav')
MODEL = field("model", b"whisper")


def test_the_fields_are_read() -> None:
    data = form(FILE, MODEL, field("stream", b"True"), field("n", b"3"), field("max_completion_tokens", b"1e9"))
    read = read_form(TYPE, data)

    assert (read.body.model, read.body.stream, read.body.n, read.body.max_completion_tokens) == (
        "whisper",
        True,
        3,
        "1e9",
    )
    assert read.model_span is not None
    assert data[slice(*read.model_span)] == b"whisper"


@pytest.mark.parametrize(
    "content_type", [TYPE, b'multipart/form-data;boundary="xyz"', b"Multipart/Form-Data; Boundary=xyz"]
)
def test_a_form_without_a_model_names_none(content_type: bytes) -> None:
    for data in (form(FILE), form(FILE, field("model", b""))):
        read = read_form(content_type, data)
        assert (read.body.model, read.body.stream, read.body.n) == (None, False, None)


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (form(FILE, MODEL, field("model", b"other")), "model"),
        (form(field("model", b"whisper", b'; filename="m"')), "model"),
        (form(field("model", b"\xff")), "model"),
        (form(field("model", b"w" * 2000)), "model"),
        (form(FILE)[:-4], None),
        (b"preamble\r\n" + form(FILE), None),
        (form(FILE).replace(b"--xyz\r\n", b"--xyz \r\n"), None),
        (form(b"--xyz\r\n\r\nwhisper\r\n"), None),
        (form(field("model", b"whisper", b'; name="other"')), None),
        (form(b"--xyz\r\nContent-Disposition: form-data; name=model\r\n\r\nwhisper\r\n"), None),
        (form(b'--xyz\r\nContent-Disposition: form-data; name="a"\n\r\n\r\nwhisper\r\n'), None),
        (form(*[field("temperature", b"0")] * (MAX_FIELDS + 1)), None),
        (b'{"model":"whisper"}', None),
        (b"", None),
    ],
)
def test_a_form_that_could_be_read_in_two_ways_is_rejected(data: bytes, param: str | None) -> None:
    with pytest.raises(BodyError) as error:
        read_form(TYPE, data)
    assert error.value.param == param


@pytest.mark.parametrize(
    "content_type",
    [b"", b"application/json", b"multipart/form-data", b"multipart/form-data; boundary=a; boundary=xyz"],
)
def test_a_body_without_a_boundary_is_rejected(content_type: bytes) -> None:
    with pytest.raises(BodyError, match="boundary"):
        read_form(content_type, form(FILE, MODEL))


@given(st.lists(st.sampled_from([b"--xyz", b"--", b"\r\n", FILE, MODEL, b"\n", b"x"]), max_size=12))
def test_any_bytes_are_read_or_rejected(pieces: list[bytes]) -> None:
    with contextlib.suppress(BodyError):
        assert (read_form(TYPE, b"".join(pieces)).body.model or "whisper").startswith("whisper")
