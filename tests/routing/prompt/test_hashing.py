from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from routing.prompt import hashing
from routing.prompt.canonical import CanonicalPrompt
from routing.prompt.hashing import BLOCK_BYTES, MAX_BLOCKS, PrefixHasher, boundary_end
from routing.schema import Boundary, PrefixHashSettings, Tier1
from tests.routing.building import SECRET, block_hashes, chat

HASHER = PrefixHasher(SECRET)


def of_bytes(data: bytes) -> CanonicalPrompt:
    return CanonicalPrompt(data, 0, 0, [len(data)])


def at(boundary: Boundary, **fields: Any) -> Tier1:
    return Tier1(boundary=boundary, **{"boundary_marker": "### Question"} | fields)


# --- the tier-1 key ----------------------------------------------------------------------------------

LONG_SYSTEM = ("system", "Answer from the handbook. " * 40)
SHORT_SYSTEM = ("system", "Be brief.")


def test_requests_that_share_a_long_system_prompt_share_the_key():
    one, other = chat(LONG_SYSTEM, ("user", "a" * 5000)), chat(LONG_SYSTEM, ("user", "b"))

    assert HASHER.tier1(one, "llama") == HASHER.tier1(other, "llama")


def test_a_system_prompt_below_one_block_is_extended():
    one, other = chat(SHORT_SYSTEM, ("user", "a" * 5000)), chat(SHORT_SYSTEM, ("user", "b"))

    assert HASHER.tier1(one, "llama") != HASHER.tier1(other, "llama")


def test_without_a_system_prompt_the_first_kibibyte_is_the_key():
    one, other = chat(("user", "a" * 1100)), chat(("user", "a" * 1100 + "b"))
    earlier = chat(("user", "a" * 1000 + "b" + "a" * 99))

    assert HASHER.tier1(one, "llama") == HASHER.tier1(other, "llama") != HASHER.tier1(earlier, "llama")


def test_a_system_boundary_includes_a_short_system_prompt():
    one, other = (chat(SHORT_SYSTEM, ("user", text)) for text in ("a", "b"))

    assert HASHER.tier1(one, "llama", at(Boundary.SYSTEM)) == HASHER.tier1(other, "llama", at(Boundary.SYSTEM))


def test_a_system_boundary_without_a_system_prompt_has_no_key():
    assert HASHER.tier1(chat(("user", "a")), "llama", at(Boundary.SYSTEM)) is None


def test_a_message_boundary_ends_after_its_messages():
    turns = [SHORT_SYSTEM, ("user", "a"), ("assistant", "b")]
    one, other = chat(*turns, ("user", "c")), chat(*turns, ("user", "d"))
    third, fourth = at(Boundary.MESSAGES, boundary_messages=3), at(Boundary.MESSAGES, boundary_messages=4)

    assert HASHER.tier1(one, "llama", third) == HASHER.tier1(other, "llama", third)
    assert HASHER.tier1(one, "llama", fourth) != HASHER.tier1(other, "llama", fourth)


def test_a_message_boundary_past_the_last_message_ends_with_it():
    prompt, two = chat(SHORT_SYSTEM, ("user", "a")), at(Boundary.MESSAGES, boundary_messages=2)

    assert HASHER.tier1(prompt, "llama", at(Boundary.MESSAGES, boundary_messages=9)) == HASHER.tier1(
        prompt, "llama", two
    )


def test_a_message_boundary_without_messages_ends_after_the_tools():
    assert HASHER.tier1(chat(tools=[{"name": "a"}]), "llama", at(Boundary.MESSAGES)) is not None


@pytest.mark.parametrize("prompt", [chat(LONG_SYSTEM, ("user", "a")), chat(("user", "a" * 5000)), chat()])
def test_a_prompt_without_the_marker_uses_the_default_boundary(prompt):
    assert boundary_end(prompt, at(Boundary.MARKER)) == boundary_end(prompt, Tier1())


IMAGE = {"type": "image_url", "image_url": {"url": "http://a/b.png"}}


@pytest.mark.parametrize(
    "prompt",
    [
        chat(("user", "a" * 2000 + "### Ques"), ("user", "tion")),  # over two messages
        chat(("user", [{"type": "text", "text": "a" * 2000 + "### Ques"}, {"type": "text", "text": "tion"}])),
        chat(("user", [IMAGE, {"type": "text", "text": "### question" + "a" * 2000}])),
        chat(("user", [{"type": "image_url", "image_url": {"url": "http://a/### Question"}}]), ("user", "a" * 2000)),
    ],
)
def test_a_marker_must_be_within_one_text(prompt):
    assert boundary_end(prompt, at(Boundary.MARKER)) == boundary_end(prompt, Tier1()) == 1024


@pytest.mark.parametrize(
    ("before", "prompt"),
    [
        (b"An \xc3\xa9t\xc3\xa9. ", chat(("user", "An été. ### Question ### Question"))),
        (b"\xfd", chat(("user", [IMAGE, {"type": "text", "text": "### Question"}]))),
        (b"brief.\xffuser\xfe", chat(SHORT_SYSTEM, ("user", "### Question"))),
        (b"}]\xffuser\xfe", chat(("user", "### Question"), tools=[{"name": "a"}])),
    ],
)
def test_the_prefix_ends_right_before_the_first_marker(before, prompt):
    assert prompt.data[: boundary_end(prompt, at(Boundary.MARKER))].endswith(before)


@pytest.mark.parametrize(
    "prompt", [chat(("user", "### Question a")), of_bytes(b"\xff\xfe### Question a"), chat(("### Question", "a"))]
)
def test_a_prompt_that_begins_with_the_marker_has_no_prefix(prompt):
    assert HASHER.tier1(prompt, "llama", at(Boundary.MARKER)) is None


@given(text=st.text("aé漢🙂", max_size=60), other=st.text("aé漢🙂", max_size=60), length=st.integers(64, 120))
def test_a_prefix_may_end_within_a_character(text, other, length):
    rule = at(Boundary.BYTES, boundary_bytes=length)
    one, second = chat(("user", text)), chat(("user", other))
    same_key = HASHER.tier1(one, "llama", rule) == HASHER.tier1(second, "llama", rule)

    assert same_key == (one.data[:length] == second.data[:length])


def test_a_policys_marker_without_text_means_the_default():
    assert PrefixHashSettings(boundary=Boundary.MARKER).tier1 == Tier1()


def test_an_adapter_has_keys_of_its_own():
    prompt = chat(LONG_SYSTEM, ("user", "a" * 5000))

    assert HASHER.tier1(prompt, "llama") != HASHER.tier1(prompt, "llama", adapter="sql")
    assert HASHER.tier2(prompt, "llama") != HASHER.tier2(prompt, "llama", adapter="sql")
    shared = {hash_ for chunk in HASHER.chunks(prompt, "llama") for hash_ in chunk}
    assert shared.isdisjoint(hash_ for chunk in HASHER.chunks(prompt, "llama", "sql") for hash_ in chunk)


# --- the tier-2 key ----------------------------------------------------------------------------------

SHARED = ("user", "The contract reads: " + "pay within thirty days. " * 60)
BEGINNINGS = {
    "system": (at(Boundary.SYSTEM), [LONG_SYSTEM]),
    "auto": (Tier1(), [LONG_SYSTEM]),
    "messages": (at(Boundary.MESSAGES, boundary_messages=2), [SHORT_SYSTEM, SHARED]),
    "bytes": (at(Boundary.BYTES, boundary_bytes=1200), [SHORT_SYSTEM, SHARED]),
}


@pytest.mark.parametrize("name", BEGINNINGS)
def test_the_tier2_key_identifies_a_conversation(name):
    rule, beginning = BEGINNINGS[name]
    turns = [("assistant", "Yes. " * 50), ("user", "And then? " * 50)]
    first, other = ([*beginning, ("user", question)] for question in ("When is it due?", "Who pays it?"))
    key = HASHER.tier2(chat(*first), "llama", rule)

    assert HASHER.tier1(chat(*first), "llama", rule) == HASHER.tier1(chat(*other), "llama", rule)
    assert None is not key == HASHER.tier2(chat(*first, *turns), "llama", rule)
    if name != "bytes":  # there the shared message ends after the prefix
        assert key != HASHER.tier2(chat(*other), "llama", rule)


def test_text_after_a_marker_distinguishes_conversations():
    rule = at(Boundary.MARKER)
    one, other = (chat(("user", f"{SHARED[1]} ### Question {text}")) for text in ("a", "b"))

    assert HASHER.tier1(one, "llama", rule) == HASHER.tier1(other, "llama", rule)
    assert None is not HASHER.tier2(one, "llama", rule) != HASHER.tier2(other, "llama", rule)


def test_the_tier2_key_includes_4_kib_after_the_prefix():
    one, other, third = (
        chat(LONG_SYSTEM, ("user", "a" * count + end)) for count, end in ((5000, "b"), (6000, "c"), (99, "b"))
    )

    assert HASHER.tier2(one, "llama") == HASHER.tier2(other, "llama") != HASHER.tier2(third, "llama")


def test_without_a_message_after_the_prefix_there_is_no_tier2_key():
    assert HASHER.tier2(chat(LONG_SYSTEM), "llama") is None
    assert HASHER.tier2(chat(("user", "a" * 2000)), "llama", at(Boundary.MESSAGES)) is None


@pytest.mark.parametrize("boundary", Boundary)
def test_an_empty_prompt_has_no_key(boundary):
    assert HASHER.tier1(chat(), "llama", at(boundary)) is None


def test_model_salt_and_secret_each_change_the_key():
    prompt, salted = chat(LONG_SYSTEM), chat(LONG_SYSTEM, cache_salt="team-a")
    keys = {
        HASHER.tier1(prompt, "llama"),
        HASHER.tier1(prompt, "mistral"),
        HASHER.tier1(salted, "llama"),
        PrefixHasher("0" * 32).tier1(prompt, "llama"),
    }

    assert len(keys) == 4


def test_model_and_salt_are_separated():
    assert HASHER.seed("ab", salt="c") != HASHER.seed("a", salt="bc")
    assert HASHER.seed("a", salt="b") != HASHER.seed("a", adapter="b")


def test_the_secret_is_not_in_the_repr():
    assert SECRET not in repr(HASHER)


# --- the chain of blocks -----------------------------------------------------------------------------


def test_each_block_is_hashed_with_the_hash_before_it():
    data = bytes(range(256)) + b"b" * 256
    first = xxh3_64_intdigest(HASHER.seed("llama").to_bytes(8, "little") + data[:256])
    second = xxh3_64_intdigest(first.to_bytes(8, "little") + data[256:])

    assert block_hashes(HASHER, of_bytes(data)).tolist() == [first, second]


@given(
    blocks=st.lists(st.sampled_from([b"a", b"b"]), min_size=1, max_size=6),
    others=st.lists(st.sampled_from([b"a", b"b"]), min_size=1, max_size=6),
)
def test_two_prompts_share_exactly_the_blocks_of_their_common_prefix(blocks, others):
    one = block_hashes(HASHER, of_bytes(b"".join(block * BLOCK_BYTES for block in blocks)))
    other = block_hashes(HASHER, of_bytes(b"".join(block * BLOCK_BYTES for block in others)))

    common = 0
    while common < min(len(blocks), len(others)) and blocks[common] == others[common]:
        common += 1
    assert one[:common] == other[:common]
    assert not set(one[common:]) & set(other[common:])


def test_cached_hashes_equal_computed_ones():
    data = bytes(range(256)) * 40
    for length in range(0, len(data), 3 * BLOCK_BYTES):
        fresh, used = PrefixHasher(SECRET), PrefixHasher(SECRET)
        block_hashes(used, of_bytes(data))
        assert block_hashes(used, of_bytes(data[:length])) == block_hashes(fresh, of_bytes(data[:length]))


@pytest.mark.plain_python(reason="It sets a constant.")
def test_the_cache_of_hashes_is_bounded(monkeypatch):
    monkeypatch.setattr(hashing, "MAX_CHUNKS", 10)
    hasher = PrefixHasher(SECRET)
    for number in range(100):
        block_hashes(hasher, of_bytes(number.to_bytes(256, "little")))
    assert len(hasher._chunks) <= 10


def test_blocks_end_at_half_a_mebibyte():
    assert len(block_hashes(HASHER, of_bytes(b"x" * (BLOCK_BYTES * MAX_BLOCKS + 5000)))) == MAX_BLOCKS == 2048


# --- golden values: a change here sends every fleet's prompts to other replicas ----------------------


def test_hashes_never_change():
    prompt = chat(LONG_SYSTEM, ("user", "Which form do I need?"), tools=[{"name": "search"}], cache_salt="team-a")

    assert HASHER.seed("llama", salt="team-a", adapter="legal") == 0x8BDE60279143F756
    assert HASHER.tier1(prompt, "llama") == 0xF0FA516F72A9226F
    assert HASHER.session("session-17") == 0xC3CD921366947516
    assert block_hashes(HASHER, prompt).tolist() == [
        0x880CE203B9389BA8,
        0xADE2E2C9FA915B33,
        0x4B6E610AFDDB77FB,
        0xA794F7D807CEEDDF,
    ]
