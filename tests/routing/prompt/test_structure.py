"""Prompt structure: the parts of a prompt's beginning and what varies in them, without its text."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.paths import BODIES
from routing.prompt.canonical import canonical_prompt
from routing.prompt.hashing import PrefixHasher
from routing.prompt.parsing import parse_body, session_key
from routing.prompt.structure import (
    DESCRIBED_BYTES,
    MAX_NUMBERS,
    MAX_PIECES,
    MAX_SEGMENTS,
    MAX_TAIL_PIECES,
    MAX_VOLATILE,
    TAIL_BYTES,
    VOLATILE,
    PromptStructure,
    Segment,
    ToolList,
    Volatile,
    describe_structure,
)
from routing.types import BodyError
from tests.routing.building import CHAT, SECRET, canonical

digest = PrefixHasher(SECRET).digest
LINES = "".join(
    f"- Rule {chr(65 + n % 26)}{chr(65 + n // 26)}: answer briefly and name your sources.\n" for n in range(60)
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
)


def structure_of(system: str, *turns: str, tools: Any = None, session: str | None = None) -> PromptStructure:
    listed = [{"role": "system", "content": system}]
    listed += [{"role": ("user", "assistant")[n % 2], "content": turn} for n, turn in enumerate(turns)]
    body = {"model": "llama", "messages": listed} | ({"tools": tools} if tools else {})
    return describe_structure(canonical(CHAT, body), tools, session, digest)


def differing(one: PromptStructure, other: PromptStructure) -> list[int]:
    """Offsets of the first prompt's pieces that the second lacks."""
    hashes = {piece[2] for piece in other.pieces}
    return [index for index, piece in enumerate(one.pieces) if piece[2] not in hashes]


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("Today is 2026-11-21, a Saturday.", "date", "2026-11-21"),
        ("It is 2026-11-21T16:42:57.123Z now", "date", "2026-11-21T16:42:57.123Z"),
        ("It is 2026-11-21 16:42 now", "date", "2026-11-21 16:42"),
        ("Date: November 21, 2026.", "date", "November 21, 2026"),
        ("Date: 21 Nov 2026.", "date", "21 Nov 2026"),
        ("Date: 11/21/2026.", "date", "11/21/2026"),
        ("Time: 4:42 PM.", "date", "4:42 PM"),
        ("now=1795277000.", "epoch", "1795277000"),
        ("now=1795277000.25 s", "epoch", "1795277000.25"),
        ("now=1795277000123 ms", "epoch", "1795277000123"),
        ("id 0b5ac3d2-6c1f-4a44-9f3e-2b8a6b1c9d10.", "uuid", "0b5ac3d2-6c1f-4a44-9f3e-2b8a6b1c9d10"),
        ("trace 4bf92f3577b34da6a3ce929d0e0e4736.", "hex", "4bf92f3577b34da6a3ce929d0e0e4736"),
        ("request req_9mQ2xLk41ZpTa7Bc ends", "id", "req_9mQ2xLk41ZpTa7Bc"),
        ("This is request number 48213 of today", "number", "48213"),
        ("Version 3.4.17 is out", "number", "3.4.17"),
    ],
)  # fmt: skip
def test_volatile_tokens_are_classified(text, kind, value):
    (found,) = structure_of(text).volatile

    assert (found.kind, found.bytes) == (kind, len(value))
    assert (
        canonical(CHAT, {"messages": [{"role": "system", "content": text}]}).data[found.at :].startswith(value.encode())
    )
    assert found.hash == digest(value.encode())


def test_a_date_changes_only_its_own_piece():
    today, tomorrow = (
        structure_of(f"Today is 2026-11-21.\n{LINES}"),
        structure_of(f"Today is November 2, 2026.\n{LINES}"),
    )

    assert differing(today, tomorrow) == [0]
    assert len(today.pieces) > 10
    assert sum(piece[1] for piece in today.pieces[1:]) > 0.8 * len(LINES)


def test_the_end_of_a_long_prompt_is_described_whatever_comes_before():
    texts = [f"{chr(97 + n) * (40_000 + 999 * n)}\n{LINES}" for n in range(2)]
    one, other = (structure_of(text) for text in texts)

    for found in (one, other):
        assert found.described <= DESCRIBED_BYTES <= found.tail[0][0]
        assert found.bytes - TAIL_BYTES <= found.tail[0][0]
        assert found.tail[-1][0] + found.tail[-1][1] == found.bytes
        assert len(found.tail) <= MAX_TAIL_PIECES
        assert all(re.fullmatch("[0-9a-f]{16}", hashed) for _, _, hashed in found.tail)
    shared = {piece[2] for piece in one.tail} & {piece[2] for piece in other.tail}
    assert sum(piece[1] for piece in one.tail if piece[2] in shared) > 0.8 * min(len(LINES), TAIL_BYTES)
    assert structure_of(LINES).tail == []


def test_reordered_content_has_the_same_letters_and_another_hash():
    one, other = (
        structure_of(json.dumps(item)).segments[0] for item in ({"city": "Oslo", "day": 4}, {"day": 4, "city": "Oslo"})
    )
    third = structure_of(json.dumps({"city": "Rome", "day": 4})).segments[0]

    assert one.letters == other.letters != third.letters
    assert one.hash != other.hash


def test_tools_are_hashed_by_name_by_definition_and_as_sent():
    def tools(*names: str, **extra: Any) -> Any:
        described = {"description": "Looks it up.", **extra}
        return structure_of(
            "Help.", tools=[{"type": "function", "function": {"name": item} | described} for item in names]
        ).tools

    one = tools("weather", "search")
    assert tools("search", "weather").names == one.names
    assert tools("search", "weather").definitions == one.definitions
    assert tools("search", "weather").sent != one.sent
    assert tools("weather", "search", strict=True).names == one.names
    assert tools("weather", "search", strict=True).definitions != one.definitions
    assert tools("weather").names != one.names
    assert (one.count, tools("weather").count) == (2, 1)


def test_segment_kinds_are_from_a_fixed_list():
    whole = describe_structure(
        canonical(CHAT, {"messages": [{"role": "Canary", "content": "a"}, {"role": "user", "content": "b"}, 7]}),
        None, None, digest,
    )  # fmt: skip

    assert [segment.kind for segment in whole.segments] == ["other", "user", "other"]
    assert whole.messages == 3
    assert whole.segments[1].at == whole.segments[0].at + whole.segments[0].bytes + len(b"\xffuser\xfe")


def test_a_structure_is_bounded_in_every_part():
    numbers = " ".join(str(n) for n in range(20_000))
    dates = " ".join(f"2026-11-{n % 28 + 1:02d}" for n in range(2_000))
    for one in (
        structure_of(numbers, dates),
        structure_of(dates, numbers),
        structure_of(LINES * 200),
        structure_of("x" * 100_000),
        structure_of(*(["y"] * 500)),
    ):
        assert one.described <= DESCRIBED_BYTES
        assert len(one.segments) <= MAX_SEGMENTS
        assert len(one.pieces) <= MAX_PIECES
        assert len(one.tail) <= MAX_TAIL_PIECES
        assert len(one.volatile) <= MAX_VOLATILE
        assert sum(token.kind == "number" for token in one.volatile) <= MAX_NUMBERS
        assert len(msgspec.json.encode(one)) < 24 << 10


@given(
    path=st.sampled_from(sorted(BODIES)),
    fields=st.dictionaries(
        st.sampled_from(["messages", "prompt", "input", "tools", "instructions", "user"]), json_values
    ),
    data=st.binary(),
)
def test_any_body_has_a_structure(path, fields, data):
    for body in (msgspec.json.encode(fields), data):
        try:
            parsed = parse_body(path, body)
            prompt = canonical_prompt(parsed)
        except BodyError:
            continue
        found = describe_structure(prompt, getattr(parsed, "tools", None), session_key(parsed), digest)
        assert {token.kind for token in found.volatile} <= set(VOLATILE)
        ends = [segment.at + segment.bytes for segment in found.segments]
        assert ends == sorted(ends)
        assert all(end <= len(prompt.data) for end in ends)
        covered = sum(piece[1] for piece in found.pieces)
        assert covered <= sum(segment.bytes for segment in found.segments)


# Letters that do not occur in the record's own words and hashes, so that each of them is from the prompt.
words = st.text("GHJKLMNPQRSTVWXYZghjqwxyzäßλ界", min_size=1, max_size=8)
secrets = st.one_of(
    words,
    st.dates().map(str),
    st.uuids().map(str),
    st.integers(10**9, 10**14).map(str),
    st.from_regex(r"[a-z]{3,8}@[a-z]{3,8}\.[a-z]{2,4}", fullmatch=True),
)


OUR_WORDS = sorted(
    {*VOLATILE, "system", "user", "assistant", "tools", "null"}
    | {field for kind in (PromptStructure, Segment, Volatile, ToolList) for field in kind.__struct_fields__},
    key=len, reverse=True,
)  # fmt: skip


@given(texts=st.lists(st.lists(secrets, min_size=1, max_size=8).map(" ".join), min_size=1, max_size=6))
def test_a_structure_contains_nothing_of_the_prompt(texts):
    tools = [{"type": "function", "function": {"name": text, "parameters": {text: text}}} for text in texts]
    encoded = msgspec.json.encode(structure_of(*texts, tools=tools, session=texts[0])).decode()
    encoded = re.sub("|".join(OUR_WORDS), "", encoded)

    assert re.fullmatch(r'[\[\]{},:"0-9a-f]*', encoded)
    for word in {word for text in texts for word in text.split() if len(word) >= 10}:
        assert word not in encoded


def test_hashes_depend_on_the_fleets_secret():
    other = PrefixHasher("another" * 8).digest

    assert other(b"2026-11-21") != digest(b"2026-11-21") == PrefixHasher(SECRET).digest(b"2026-11-21")


def test_documents_are_a_segment_of_their_own():
    body = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}
    plain = describe_structure(canonical(CHAT, body), None, None, digest)
    informed = describe_structure(canonical(CHAT, body | {"documents": [{"text": LINES}]}), None, None, digest)

    assert [item.kind for item in informed.segments] == ["system", "other", "user"]
    assert [item.hash for item in informed.segments if item.kind != "other"] == [item.hash for item in plain.segments]
    assert informed.messages == plain.messages == 2


def test_earlier_turns_are_a_segment_of_their_own():
    body = {"instructions": "Be brief.", "previous_response_id": "resp_1", "input": "Go on"}
    found = describe_structure(canonical("/v1/responses", body), None, None, digest)

    assert [item.kind for item in found.segments] == ["system", "other", "user"]
