"""The stand-in's tokenizer: tokens per byte depend on the text, ids and text are one prompt, and turns share blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.standin.requests import (
    PseudoWords,
    block_keys,
    count_tokens,
    decode,
    encode,
    prompt_of_ids,
    render_chat,
    token_ids,
)

ENGLISH = "A replica that has lost a prefix computes it again, which takes as long as the first time. "
CODE = "def _of(self, at: int) -> list[int]:\n    return [self._rows[at][0] for _ in range(8)]\n"
GREEK = "Ένα αντίγραφο που έχασε ένα πρόθεμα το υπολογίζει ξανά. "


@pytest.mark.parametrize(("text", "least", "most"), [(ENGLISH, 2.6, 3.2), (CODE, 1.5, 2.3), (GREEK, 1.6, 2.0)])
def test_bytes_a_token_depend_on_the_text_and_are_not_four(text: str, least: float, most: float) -> None:
    data = (20 * text).encode()

    assert least <= len(data) / count_tokens(encode(data)) <= most


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_a_prompt_gives_its_text_back_by_its_tokens_and_by_their_ids(text: str) -> None:
    prompt = encode(text.encode())

    assert b"".join(decode(prompt)).decode() == text
    assert prompt_of_ids(token_ids(prompt)) == prompt
    assert len(token_ids(prompt)) == count_tokens(prompt)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), st.integers(1, 60))
def test_the_next_turn_begins_with_the_tokens_of_this_one_and_of_its_response(text: str, tokens: int) -> None:
    messages = [{"role": "user", "content": text}]
    prompt = encode(render_chat(messages))
    response = "".join(PseudoWords(1).tokens(prompt, tokens))
    following = [*messages, {"role": "assistant", "content": response}, {"role": "user", "content": "go on"}]

    whole = prompt + response.encode()
    assert count_tokens(whole) == count_tokens(prompt) + tokens
    assert encode(render_chat(following)).startswith(whole)
    assert block_keys(encode(render_chat(following)), 8)[: count_tokens(whole) // 8] == block_keys(whole, 8)
