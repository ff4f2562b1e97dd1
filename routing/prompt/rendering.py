"""What changes a prompt from its first token on without being a part of it.

Theory of operation. Another chat template, its arguments, how hard to think, how images are processed: none of this is
text that a prompt shares up to some point with another. So it is hashed, and the chain of block hashes starts with it
(``hashing.py``): nothing that replicas hold of one rendering is taken for another. The keys of openings go without it,
because they name what requests are about.

What is rendered behind the last message changes no whole block before it and is left out: whether an answer is begun or
continued, the format of the answer, which tool is to be called, and whether to think (``LATE``), which most templates
say there. Members that an endpoint of vLLM does not read are left out as well.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from routing.prompt.bodies import ChatBody, CompletionBody, EmbeddingBody, ParsedBody, ResponsesBody

LATE: Final = frozenset({"enable_thinking", "thinking"})  # arguments of templates

_TEMPLATE: Final = ("chat_template", "chat_template_kwargs", "mm_processor_kwargs", "media_io_kwargs")
_READ: Final[dict[type[ParsedBody], tuple[str, ...]]] = {
    ChatBody: (*_TEMPLATE, "reasoning_effort", "add_special_tokens"),
    CompletionBody: ("add_special_tokens",),
    EmbeddingBody: (*_TEMPLATE, "add_special_tokens"),
    ResponsesBody: _TEMPLATE[1:],
}
MEMBERS: Final = tuple(sorted({"reasoning", *(name for names in _READ.values() for name in names)}))  # all that is read
_json: Final = msgspec.json.Encoder(order="deterministic").encode


def rendering_of(body: ParsedBody, data: bytes, tokens: int) -> int:
    """Hash of it, for a canonical prompt and its estimated length; 0 for nothing, which costs 0.1 us."""
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
    said = {name: value for name in _READ[type(body)] if (value := getattr(body, name)) not in (None, {})}
    said |= _effort(body)
    if (arguments := _arguments(said.pop("chat_template_kwargs", None))) not in (None, {}):
        said["chat_template_kwargs"] = arguments
    if said.get("add_special_tokens") is _adds_special_tokens(body):
        del said["add_special_tokens"]
    if type(body) is CompletionBody and body.suffix is not None:
        said["suffix"] = True  # a gap to fill, which is marked in front of the prompt
    if _loses_its_beginning(body, tokens):
        said["whole"] = xxh3_128_hexdigest(data)
    return xxh3_64_intdigest(_json(said)) if said else 0


def _arguments(said: Any) -> Any:
    """A template's arguments but for those that are rendered late; null is the same as none."""
    if type(said) is not dict:
        return said
    return {name: value for name, value in said.items() if value is not None and name not in LATE}


def _effort(body: ParsedBody) -> dict[str, Any]:
    """The responses API's way to say how hard to think."""
    said = body.reasoning if type(body) is ResponsesBody else None
    effort = said.get("effort") if type(said) is dict else None
    return {} if effort is None else {"reasoning_effort": effort}


def _adds_special_tokens(body: ParsedBody) -> bool:
    """Whether an engine puts the tokenizer's own tokens in front if nobody says; a template brings them along."""
    return type(body) is CompletionBody or (type(body) is EmbeddingBody and body.messages is None)


def _loses_its_beginning(body: ParsedBody, tokens: int) -> bool:
    """Whether the prompt is longer than the client lets it be, and cut at its front: then it shares nothing."""
    most, side = body.truncate_prompt_tokens, body.truncation_side
    if type(most) is not int or not 0 <= most < tokens:
        return False
    return side == "left" or (side is None and type(body) is not EmbeddingBody)
