"""Hash of the parameters that change how a prompt is rendered from its first token on.

Another chat template, other template arguments, another reasoning effort or image size change the tokens from the first
one on, although the messages are the same. So these parameters start the chain of block hashes (``hashing.py``), and
blocks of one rendering never match blocks of another. Tier-1 and tier-2 keys do not depend on them.

Parameters that only change tokens after the last message do not change any whole block before it and are left out: how
the response begins, its format, the tool choice, and the template arguments of ``TRAILING_ARGUMENTS``, which most
templates render there. Parameters that vLLM does not read at an endpoint are left out as well.
"""

from __future__ import annotations

from typing import Final

import msgspec
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from routing.prompt.bodies import ChatBody, CompletionBody, EmbeddingBody, ParsedBody, ResponsesBody

TRAILING_ARGUMENTS: Final = frozenset({"enable_thinking", "thinking"})

_TEMPLATE: Final = ("chat_template", "chat_template_kwargs", "mm_processor_kwargs", "media_io_kwargs")
_READ: Final[dict[type[ParsedBody], tuple[str, ...]]] = {  # parameters that vLLM reads at each endpoint
    ChatBody: (*_TEMPLATE, "reasoning_effort", "add_special_tokens"),
    CompletionBody: ("add_special_tokens",),
    EmbeddingBody: (*_TEMPLATE, "add_special_tokens"),
    ResponsesBody: _TEMPLATE[1:],
}
RENDERING_FIELDS: Final = tuple(sorted({"reasoning", *(name for names in _READ.values() for name in names)}))
_json: Final = msgspec.json.Encoder(order="deterministic").encode


def rendering_of(body: ParsedBody, data: bytes, tokens: int) -> int:
    """Hash of a body's rendering parameters, for its canonical prompt and estimated length; 0 if it has none."""
    if (
        body.chat_template_kwargs is None
        and body.reasoning_effort is None
        and body.reasoning is None
        and body.truncate_prompt_tokens is None
        and body.add_special_tokens is None
        and body.chat_template is None
        and body.mm_processor_kwargs is None
        and body.media_io_kwargs is None
        and body.suffix is None
    ):
        return 0
    params = {name: value for name in _READ[type(body)] if (value := getattr(body, name)) not in (None, {})}
    if type(body) is ResponsesBody and type(body.reasoning) is dict:
        effort = body.reasoning.get("effort")
        if effort is not None:
            params["reasoning_effort"] = effort
    arguments = params.pop("chat_template_kwargs", None)
    if type(arguments) is dict:  # a null argument is the same as none
        arguments = {
            name: value for name, value in arguments.items() if value is not None and name not in TRAILING_ARGUMENTS
        }
    if arguments not in (None, {}):
        params["chat_template_kwargs"] = arguments
    if params.get("add_special_tokens") is _adds_special_tokens(body):
        del params["add_special_tokens"]
    if type(body) is CompletionBody and body.suffix is not None:
        params["suffix"] = True  # the engine marks a completion with a gap at the start of the prompt
    if _is_truncated_left(body, tokens):
        params["whole"] = xxh3_128_hexdigest(data)
    return xxh3_64_intdigest(_json(params)) if params else 0


def _adds_special_tokens(body: ParsedBody) -> bool:
    """The engine's default: it adds the tokenizer's special tokens unless a chat template brings them along."""
    return type(body) is CompletionBody or (type(body) is EmbeddingBody and body.messages is None)


def _is_truncated_left(body: ParsedBody, tokens: int) -> bool:
    """Whether the engine cuts the start of the prompt off, so that it shares no prefix with other prompts."""
    limit, side = body.truncate_prompt_tokens, body.truncation_side
    if type(limit) is not int or not 0 <= limit < tokens:
        return False
    return side == "left" or (side is None and type(body) is not EmbeddingBody)
