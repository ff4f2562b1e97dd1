"""The canonical prompt: the bytes that all hashes of a request are computed from, and the hash of its rendering.

Theory of operation. If an engine would render two prompts identically up to some point, their canonical bytes are
identical up to that point, however their JSON is written. Different prompts never have the same canonical bytes. Both
properties come from framing each field with bytes that no UTF-8 text contains (0xC0, 0xC1, 0xF5-0xFF). A length in
front of each text would separate fields as well, but two prompts that share the first 10 KB of a message and differ
after it would then differ in their first block.

Parameters that change the rendering from the first token on, such as a chat template, are hashed into one number
(``rendering_of``).

    tools        TOOLS json                    key-sorted
    documents    DOCUMENTS json                after the leading system messages
    history      PREVIOUS json                 a stored response's id, or messages, after the instructions
    message      MESSAGE role CONTENT content [FIELD name CONTENT json]...
    content      text | part [PART part]...    a part is text or ATTACHMENT digest
    token ids    MESSAGE CONTENT IDS u32... 0xFFFFFFFF
    unknown      MESSAGE UNKNOWN json          a value of a type that the API does not define

Rendering. Another chat template, other template arguments, another reasoning effort or image size change the tokens
from the first one on, although the messages are the same. So these parameters start the chain of block hashes
(``hashing.py``), and blocks of one rendering never match blocks of another. Tier-1 and tier-2 keys do not depend on
them.

Parameters that only change tokens after the last message do not change any whole block before it and are left out: how
the response begins, its format, the tool choice, and the template arguments of ``TRAILING_ARGUMENTS``, which most
templates render there. Parameters that vLLM does not read at an endpoint are left out as well.
"""

from __future__ import annotations

import sys
from array import array
from itertools import takewhile
from typing import Any, Final

import msgspec
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from routing.paths import (
    BODIES,
    SCORED,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    Message,
    MessagesBody,
    ParsedBody,
    ResponsesBody,
    ScoreBody,
)
from routing.prompt.anthropic import ATTRIBUTION, chat_messages, effort_of, rendered_tools
from routing.types import BLOCK_BYTES, BLOCK_TOKENS, BodyError

TRAILING_ARGUMENTS: Final = frozenset({"enable_thinking", "thinking"})

RENDERING_FIELDS: Final = tuple(
    sorted({"reasoning", *(name for body in BODIES.values() for name in body.rendering_fields)})
)


def rendering_of(body: ParsedBody, prompt: CanonicalPrompt) -> int:
    """Hash of a body's rendering parameters, for its canonical prompt; 0 if it has none."""
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
    params = {name: value for name in body.rendering_fields if (value := getattr(body, name)) not in (None, {})}
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
        params["suffix"] = True  # the engine marks a fill-in-the-middle completion at the start of the prompt
    if _is_truncated_left(body, prompt.estimate(BLOCK_TOKENS)):
        params["whole"] = xxh3_128_hexdigest(prompt.data)
    return xxh3_64_intdigest(_encode_json(params)) if params else 0


def _adds_special_tokens(body: ParsedBody) -> bool:
    """The engine's default: it adds the tokenizer's special tokens unless a chat template brings them along."""
    return type(body) is CompletionBody or (type(body) is EmbeddingBody and body.messages is None)


def _is_truncated_left(body: ParsedBody, tokens: int) -> bool:
    """Whether the engine cuts the start of the prompt off, so that it shares no prefix with other prompts."""
    limit, side = body.truncate_prompt_tokens, body.truncation_side
    if type(limit) is not int or not 0 <= limit < tokens:
        return False
    return side == "left" or (side is None and type(body) is not EmbeddingBody)


MAX_PARTS: Final = 65_536  # messages, prompts and message parts in one body; each costs more time than its bytes
MAX_IDS: Final = 1 << 21  # token ids in one body: 8 MiB of canonical bytes, more than their JSON may have

MESSAGE: Final = b"\xff"
CONTENT: Final = b"\xfe"
PART: Final = b"\xfd"
ATTACHMENT: Final = b"\xfc"
FIELD: Final = b"\xfb"
TOOLS: Final = b"\xfa"
IDS: Final = b"\xf9"
UNKNOWN: Final = b"\xf8"
DOCUMENTS: Final = b"\xf7"
PREVIOUS: Final = b"\xf6"
END_OF_IDS: Final = b"\xff\xff\xff\xff"

_SYSTEM_ROLES: Final = frozenset({"system", "developer"})
_TEXT_PARTS: Final = ("text", "input_text", "output_text")  # not a set: a part's type may be an unhashable value
_MESSAGE_FIELDS: Final = ("name", "tool_calls", "tool_call_id", "reasoning", "task", "tools")
_ROLE_FRAMES: Final = {role: MESSAGE + role.encode() + CONTENT for role in ("system", "user", "assistant", "tool")}
_encode_json: Final = msgspec.json.Encoder(order="deterministic").encode


class CanonicalPrompt:
    """A canonical prompt. Offsets are into ``data``, ascending."""

    def __init__(
        self,
        data: bytes,
        tools_end: int,
        system_end: int,
        message_ends: list[int],
        ids: int = 0,
        salt: str = "",
        rendering: int = 0,
        *,
        is_text: bool = True,
    ) -> None:
        self.data = data
        self.tools_end = tools_end  # 0 without tools
        self.system_end = system_end  # of the tools and the leading system messages; 0 without either
        self.message_ends = message_ends
        self.ids = ids  # number of token ids, each of them 4 bytes of ``data``
        self.is_text = is_text  # whether all tokens come from ``data``: no attachments, no unknown values
        self.reads_cache = True  # whether the engine uses cached blocks for it; it stores blocks in any case
        self.salt = salt  # the client's ``cache_salt``
        self.rendering = rendering  # hash of the parameters that change its rendering; 0 for none

    def with_salt(self, salt: str) -> CanonicalPrompt:
        """The same prompt with another salt."""
        ends = self.tools_end, self.system_end, self.message_ends
        prompt = CanonicalPrompt(self.data, *ends, self.ids, salt, self.rendering, is_text=self.is_text)
        prompt.reads_cache = self.reads_cache
        return prompt

    def estimate(self, block_tokens: int) -> int:
        """Estimated tokens if a block of text has ``block_tokens``; an attachment counts as its digest."""
        return -(-(len(self.data) - 4 * self.ids) * block_tokens // BLOCK_BYTES) + self.ids

    @property
    def first_attachment(self) -> tuple[int, int] | None:
        """Offset and 64-bit digest of the first image, sound or file; None without one, or with token ids."""
        at = -1 if self.is_text or self.ids else self.data.find(ATTACHMENT)
        return None if at < 0 else (at, int(self.data[at + 1 : at + 17], 16))

    @property
    def sample_bytes(self) -> int:
        """The prompt's bytes if it is a usable sample of tokens per byte; 0 if not only text determines its tokens."""
        return len(self.data) if self.is_text and not self.ids and not self.rendering else 0


def canonical_prompt(body: ParsedBody) -> CanonicalPrompt:
    """The canonical prompt of a parsed body; BodyError if it is nested too deeply or has too many parts or ids."""
    writer = _Writer()
    try:
        _write(body, writer)
        prompt = writer.build()
        prompt.rendering = rendering_of(body, prompt)
    except RecursionError:
        raise BodyError(None, "the JSON is nested too deeply") from None
    prompt.reads_cache = reads_cache(body)
    salt = body.cache_salt
    if type(salt) is str:
        prompt.salt = salt
    return prompt


def reads_cache(body: ParsedBody) -> bool:
    """Whether vLLM uses cached blocks for a request: not if it computes log probabilities of the prompt's tokens."""
    if body.prompt_logprobs is not None:
        return False
    return not body.echo or (type(body) is CompletionBody and body.logprobs is None)


def _write(body: ParsedBody, writer: _Writer) -> None:
    """Write the fields of each endpoint in the order in which an engine renders them."""
    body_type = type(body)
    fields: Any = body  # a client may have sent fields of any type
    if body_type is ChatBody:
        writer.write_tools(fields.tools)
        if fields.documents:
            writer.write_messages_with_documents(fields.messages, fields.documents)
        else:
            writer.write_messages(fields.messages)
    elif body_type is CompletionBody:
        if fields.prompt_embeds is not None:
            writer.write_embeddings(fields.prompt_embeds)
        writer.write_prompts(fields.prompt, fields.suffix)
    elif body_type is EmbeddingBody:
        writer.write_prompts(fields.input)
        writer.write_messages(fields.messages)
    elif body_type is ResponsesBody:
        _write_response_request(fields, writer)
    elif body_type is MessagesBody:
        body.reasoning_effort = effort_of(fields)
        writer.write_tools(rendered_tools(fields))
        writer.write_messages(chat_messages(fields, writer.count_parts))
    elif body_type is ScoreBody:
        _write_pairs(fields, writer)
    else:
        for name in body.prompt_fields:
            writer.write_prompts(getattr(body, name))


def _write_response_request(fields: Any, writer: _Writer) -> None:
    writer.write_tools(fields.tools)
    if fields.instructions is not None:
        writer.write_messages([Message(role="system", content=fields.instructions)])
    writer.write_previous(fields.previous_response_id)
    writer.write_previous(fields.previous_input_messages)
    writer.write_items(fields.input)


def _write_pairs(fields: Any, writer: _Writer) -> None:
    """Write the query of a score or rerank request once, before the documents that it is scored against."""
    if fields.instruction is not None:
        writer.write_messages([Message(role="system", content=fields.instruction)])
    for name in (*SCORED[0], *SCORED[1]):
        writer.write_prompts(getattr(fields, name))


class _Writer:
    """Collects the pieces of a prompt and the offsets at which its segments end."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._length = 0  # bytes in ``_pieces``
        self._ends: list[int] = []
        self._tools_end = 0
        self._system_end = 0
        self._ids = 0  # token ids written so far
        self._is_text = True
        self._parts_left = MAX_PARTS

    def build(self) -> CanonicalPrompt:
        data = b"".join(self._pieces)
        ends = self._tools_end, self._system_end, self._ends
        return CanonicalPrompt(data, *ends, self._ids, is_text=self._is_text)

    def write_tools(self, tools: Any) -> None:
        """Write the tool definitions; null is the same as an empty list."""
        if tools:
            self._append(TOOLS + _encode_json(tools))
            self._tools_end = self._system_end = self._length

    def write_messages(self, messages: Any) -> None:
        """Write chat messages, or a value of another type that a client sent instead."""
        if type(messages) is not list:
            if messages is not None:
                self._write_unknown(messages)
            return
        self.count_parts(len(messages))
        for message in messages:
            if type(message) is Message and type(role := message.role or "") is str:
                self._write_message(message, role)
            else:
                self._write_unknown(message)

    def write_messages_with_documents(self, messages: Any, documents: Any) -> None:
        """Write messages with documents, which most templates render after the leading system messages."""
        listed = messages if type(messages) is list else []
        system = list(takewhile(_is_system, listed))
        self.write_messages(system)
        self._append(DOCUMENTS + _encode_json(documents))
        self.write_messages(listed[len(system) :] if messages is listed else messages)

    def write_previous(self, history: Any) -> None:
        """Write earlier messages, or the id of the stored response that contains them."""
        if history:
            self._is_text = False
            self._write_segment(PREVIOUS + _encode_json(history))

    def write_prompts(self, prompt: Any, suffix: Any = None) -> None:
        """Write a completion's prompt: a text, token ids, or a list of either; each item counts as a message."""
        if prompt is None:
            return
        encoded_suffix = b"" if suffix is None else FIELD + b"suffix" + CONTENT + _encode_json(suffix)
        is_batch = type(prompt) is list and prompt and type(prompt[0]) is not int
        if is_batch:
            self.count_parts(len(prompt))
        for item in prompt if is_batch else (prompt,):
            if type(item) is str:
                self._write_segment(MESSAGE + CONTENT + item.encode() + encoded_suffix)
            elif not self._write_token_ids(item):
                self._write_unknown(item)

    def write_embeddings(self, embeddings: Any) -> None:
        """Write prompts that the client sent as embeddings."""
        batch = embeddings if type(embeddings) is list else (embeddings,)
        self.count_parts(len(batch))
        self._is_text = False
        for item in batch:
            self._write_segment(MESSAGE + CONTENT + _encode_attachment(item))

    def write_items(self, items: Any) -> None:
        """Write the input of the responses API: a user's text, or a list of messages and other items."""
        if type(items) is str:
            items = [Message(role="user", content=items)]
        elif type(items) is list:
            items = [_as_message(item) for item in items[: MAX_PARTS + 1]]  # one too many, which count_parts rejects
        self.write_messages(items)

    def _write_message(self, message: Message, role: str) -> None:
        content, start = message.content, self._length
        if type(content) is not str:
            text = self._encode_content(content, role)
        elif role == "system" and content.startswith(ATTRIBUTION):
            text = without_attribution(content).encode()
        else:
            text = content.encode()
        frame = _ROLE_FRAMES.get(role) or MESSAGE + role.encode() + CONTENT
        self._pieces += (frame, text)
        end = start + len(frame) + len(text)
        if (
            message.name
            or message.tool_calls
            or message.tool_call_id
            or message.reasoning
            or message.reasoning_content
            or message.task
            or message.tools
        ):
            fields = _encode_fields(message)
            self._pieces.append(fields)
            end += len(fields)
        self._length = end
        self._ends.append(end)
        if start == self._system_end and role in _SYSTEM_ROLES:
            self._system_end = end

    def _write_token_ids(self, ids: Any) -> bool:
        """Write token ids; False if the value is not a list of token ids."""
        if type(ids) is not list:
            return False
        try:
            words = array("I", ids)
        except (TypeError, OverflowError):
            return False
        if sys.byteorder == "big":
            words.byteswap()
        data = words.tobytes()
        if END_OF_IDS in data:
            return False
        self._ids += len(words)
        if self._ids > MAX_IDS:
            raise BodyError(None, f"more than {MAX_IDS:,} token ids in one request")
        self._write_segment(MESSAGE + CONTENT + IDS + data + END_OF_IDS)
        return True

    def _encode_content(self, content: Any, role: str) -> bytes:
        """A message's content. A single text part is the same as its text, and null the same as an empty text."""
        if content is None:
            return b""
        if type(content) is list:
            self.count_parts(len(content))
            joined = PART.join(map(_encode_part, _parts_without_attribution(content) if role == "system" else content))
            if ATTACHMENT in joined:
                self._is_text = False
            return joined
        self._is_text = False
        return _encode_attachment(content)

    def count_parts(self, parts: int) -> None:
        """Count messages, prompts or parts; BodyError if there are too many."""
        self._parts_left -= parts
        if self._parts_left < 0:
            raise BodyError(None, f"more than {MAX_PARTS:,} messages, prompts and message parts in one request")

    def _write_unknown(self, value: Any) -> None:
        self._is_text = False
        self._write_segment(MESSAGE + UNKNOWN + _encode_json(value))

    def _write_segment(self, piece: bytes) -> None:
        self._append(piece)
        self._ends.append(self._length)

    def _append(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._length += len(piece)


def _is_system(message: Any) -> bool:
    return type(message) is Message and type(message.role) is str and message.role in _SYSTEM_ROLES


def _encode_fields(message: Message) -> bytes:
    """Encode the fields of a message other than role and content."""
    fields = {name: getattr(message, name) for name in _MESSAGE_FIELDS}
    if fields["reasoning"] is None:
        fields["reasoning"] = message.reasoning_content  # the older name of the field
    return b"".join(FIELD + name.encode() + CONTENT + _encode_json(value) for name, value in fields.items() if value)


def without_attribution(text: str) -> str:
    """A system message's text without the attribution line of some clients, which vLLM drops too."""
    return text.partition("\n")[2] if text.startswith(ATTRIBUTION) else text


def _parts_without_attribution(parts: list[Any]) -> list[Any]:
    """The parts of a system message without the attribution line; a part that only has this line is dropped."""
    retained = []
    for part in parts:
        text = part.get("text") if type(part) is dict and part.get("type") == "text" else part
        if type(text) is not str or not text.startswith(ATTRIBUTION):
            retained.append(part)
        elif rest := without_attribution(text):
            retained.append(rest)
    return retained


def _encode_part(part: Any) -> bytes:
    if type(part) is str:
        return part.encode()
    if type(part) is dict:
        text = part.get("text")
        if type(text) is str and part.get("type") in _TEXT_PARTS:
            return text.encode()
    return _encode_attachment(part)


def _encode_attachment(value: Any) -> bytes:
    """Encode an image, a sound or a file as its digest.

    Cache marks are left out, because clients move them between turns and they change no token. An attachment with a
    ``uuid`` is identified by it, because engines do so too, whether its data is sent again or not.
    """
    if type(value) is dict:
        if type(uuid := value.get("uuid")) is str:
            value = {"type": value.get("type"), "uuid": uuid}
        elif "cache_control" in value:
            value = {key: value[key] for key in value if key != "cache_control"}
    return ATTACHMENT + xxh3_128_hexdigest(_encode_json(value)).encode()


def _as_message(item: Any) -> Any:
    """An item of the responses API as a message, if it has a role; otherwise unchanged."""
    return msgspec.convert(item, Message) if type(item) is dict and "role" in item else item
