"""The canonical prompt: the bytes that every hash of a request reads.

Theory of operation. Two requests whose prompts an engine would render alike up to some point have canonical bytes
that are alike up to that point, however their JSON is written; and two different prompts never have the same
canonical bytes. Both come from framing each field with bytes that no UTF-8 text contains (0xC0, 0xC1, 0xF5-0xFF).
A length in front of a text would tell fields apart as well, but two prompts that share 10 KB of one message and
differ after it would then differ from their first block on.

What changes a prompt from its first token on without being a part of it is a number beside them (``rendering.py``).

    tools        TOOLS json                    key-sorted
    documents    DOCUMENTS json                behind the system messages that begin the prompt
    history      PREVIOUS json                 a stored response's id, or messages, behind the instructions
    message      MESSAGE role CONTENT content [FIELD name CONTENT json]...
    content      text | part [PART part]...    a part is text or ATTACHMENT digest
    token ids    MESSAGE CONTENT IDS u32... 0xFFFFFFFF
    odd value    MESSAGE ODD json              what the API does not describe
"""

from __future__ import annotations

import sys
from array import array
from itertools import takewhile
from typing import Any, Final, cast

import msgspec
from xxhash import xxh3_128_hexdigest

from routing.prompt.bodies import ChatBody, CompletionBody, EmbeddingBody, Message, ParsedBody, ResponsesBody
from routing.prompt.rendering import rendering_of
from routing.types import BLOCK_BYTES, BLOCK_TOKENS, BodyError

MAX_PARTS: Final = 65_536  # messages, prompts and parts of messages in one body: each takes far longer than its bytes
MAX_IDS: Final = 1 << 21  # token ids in one body: 8 MiB of canonical bytes, which a body of as many bytes may exceed

MESSAGE: Final = b"\xff"
CONTENT: Final = b"\xfe"
PART: Final = b"\xfd"
ATTACHMENT: Final = b"\xfc"
FIELD: Final = b"\xfb"
TOOLS: Final = b"\xfa"
IDS: Final = b"\xf9"
ODD: Final = b"\xf8"
DOCUMENTS: Final = b"\xf7"
PREVIOUS: Final = b"\xf6"
END_OF_IDS: Final = b"\xff\xff\xff\xff"

_SYSTEM_ROLES: Final = frozenset({"system", "developer"})
_TEXT_PARTS: Final = ("text", "input_text", "output_text")  # no set: a part's type may be anything, unhashable too
_FIELDS: Final = ("name", "tool_calls", "tool_call_id", "reasoning", "task", "tools")
_HEADS: Final = {role: MESSAGE + role.encode() + CONTENT for role in ("system", "user", "assistant", "tool")}  # of most
_ATTRIBUTION: Final = "x-anthropic-billing-header"  # a line that is new in each request of Claude Code; vLLM drops it
_json: Final = msgspec.json.Encoder(order="deterministic").encode


class CanonicalPrompt:
    """A prompt as hashes see it. Offsets are into ``data``, ascending."""

    __slots__ = ("data", "ids", "is_text", "message_ends", "rendering", "salt", "system_end", "tools_end")

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
        self.system_end = system_end  # of the tools and the system messages that begin the prompt; 0 without either
        self.message_ends = message_ends
        self.ids = ids  # token ids, each of them 4 bytes of ``data``
        self.is_text = is_text  # whether ``data`` shows all that has tokens: no attachments or odd values
        self.salt = salt  # the client's ``cache_salt``
        self.rendering = rendering  # hash of what else changes it from its first token on; 0 for nothing

    def salted(self, salt: str) -> CanonicalPrompt:
        """The same prompt under another salt."""
        ends = self.tools_end, self.system_end, self.message_ends
        return CanonicalPrompt(self.data, *ends, self.ids, salt, self.rendering, is_text=self.is_text)

    def estimate(self, block_tokens: int) -> int:
        """Estimated tokens, where a block of text has so many; an attachment counts as its digest."""
        return -(-(len(self.data) - 4 * self.ids) * block_tokens // BLOCK_BYTES) + self.ids

    @property
    def sample_bytes(self) -> int:
        """Its bytes, where these alone say how many tokens it has (a sample of tokens per byte); else 0."""
        return len(self.data) if self.is_text and not self.ids and not self.rendering else 0


def canonical_prompt(body: ParsedBody) -> CanonicalPrompt:
    """The canonical prompt of a parsed body; BodyError if it is nested too deeply or has too many parts or ids."""
    writer = _Writer()
    try:
        _write(body, writer)
        prompt = writer.finished()
        prompt.rendering = rendering_of(body, prompt.data, prompt.estimate(BLOCK_TOKENS))
    except RecursionError:
        raise BodyError(None, "the JSON is nested too deeply") from None
    salt = body.cache_salt
    if type(salt) is str:
        prompt.salt = salt
    return prompt


def _write(body: ParsedBody, writer: _Writer) -> None:
    """Write the fields of each endpoint in the order in which an engine renders them."""
    kind, fields = type(body), cast("Any", body)  # an odd body's hold anything, whatever their types say
    if kind is ChatBody:
        writer.tools(fields.tools)
        if fields.documents:
            writer.informed(fields.messages, fields.documents)
        else:
            writer.messages(fields.messages)
    elif kind is CompletionBody:
        if fields.prompt_embeds is not None:
            writer.embeddings(fields.prompt_embeds)
        writer.prompts(fields.prompt, fields.suffix)
    elif kind is EmbeddingBody:
        writer.prompts(fields.input)
        writer.messages(fields.messages)
    elif kind is ResponsesBody:
        writer.tools(fields.tools)
        if fields.instructions is not None:
            writer.messages([Message(role="system", content=fields.instructions)])
        writer.previous(fields.previous_response_id)
        writer.previous(fields.previous_input_messages)
        writer.items(fields.input)


class _Writer:
    """Collects pieces and the offsets at which segments end."""

    __slots__ = ("_ends", "_ids", "_is_text", "_left", "_length", "_pieces", "_system_end", "_tools_end")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._length = 0  # bytes in ``_pieces``
        self._ends: list[int] = []
        self._tools_end = 0
        self._system_end = 0
        self._ids = 0  # token ids written
        self._is_text = True
        self._left = MAX_PARTS  # that may still come

    def finished(self) -> CanonicalPrompt:
        data = b"".join(self._pieces)
        ends = self._tools_end, self._system_end, self._ends
        return CanonicalPrompt(data, *ends, self._ids, is_text=self._is_text)

    def tools(self, tools: Any) -> None:
        """The tool definitions; none is the same as an empty list."""
        if tools:
            self._add(TOOLS + _json(tools))
            self._tools_end = self._system_end = self._length

    def messages(self, messages: Any) -> None:
        """Chat messages, or whatever stands in their place."""
        if type(messages) is not list:
            if messages is not None:
                self._odd(messages)
            return
        self._count(len(messages))
        for message in messages:
            if type(message) is Message and type(role := message.role or "") is str:
                self._message(message, role)
            else:
                self._odd(message)

    def informed(self, messages: Any, documents: Any) -> None:
        """Messages with documents, which most templates render behind the system's."""
        listed = messages if type(messages) is list else []
        opening = list(takewhile(_is_system, listed))
        self.messages(opening)
        self._add(DOCUMENTS + _json(documents))
        self.messages(listed[len(opening) :] if messages is listed else messages)

    def previous(self, said: Any) -> None:
        """What went before the input, or the id that an engine knows it by."""
        if said:
            self._is_text = False
            self._segment(PREVIOUS + _json(said))

    def prompts(self, prompt: Any, suffix: Any = None) -> None:
        """A completion's prompt: a text, token ids, or a list of either, each of which counts as a message."""
        if prompt is None:
            return
        behind = b"" if suffix is None else FIELD + b"suffix" + CONTENT + _json(suffix)
        several = type(prompt) is list and prompt and type(prompt[0]) is not int
        if several:
            self._count(len(prompt))
        for one in prompt if several else (prompt,):
            if type(one) is str:
                self._segment(MESSAGE + CONTENT + one.encode() + behind)
            elif not self._token_ids(one):
                self._odd(one)

    def embeddings(self, embeddings: Any) -> None:
        """Prompts that were embedded before they were sent."""
        several = embeddings if type(embeddings) is list else (embeddings,)
        self._count(len(several))
        self._is_text = False
        for one in several:
            self._segment(MESSAGE + CONTENT + _attachment(one))

    def items(self, items: Any) -> None:
        """The input of the responses API: a text from the user, or a list of messages and other items."""
        if type(items) is str:
            items = [Message(role="user", content=items)]
        elif type(items) is list:
            items = [_as_message(item) for item in items[: MAX_PARTS + 1]]  # one too many is refused as any number is
        self.messages(items)

    def _message(self, message: Message, role: str) -> None:
        content, start = message.content, self._length
        if type(content) is not str:
            text = self._content(content, role)
        elif role == "system" and content.startswith(_ATTRIBUTION):
            text = unattributed(content).encode()
        else:
            text = content.encode()
        head = _HEADS.get(role) or MESSAGE + role.encode() + CONTENT
        self._pieces += (head, text)
        end = start + len(head) + len(text)
        if (
            message.name
            or message.tool_calls
            or message.tool_call_id
            or message.reasoning
            or message.reasoning_content
            or message.task
            or message.tools
        ):
            fields = _fields(message)
            self._pieces.append(fields)
            end += len(fields)
        self._length = end
        self._ends.append(end)
        if start == self._system_end and role in _SYSTEM_ROLES:
            self._system_end = end

    def _token_ids(self, ids: Any) -> bool:
        """Write token ids; False if these are none."""
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
        self._segment(MESSAGE + CONTENT + IDS + data + END_OF_IDS)
        return True

    def _content(self, content: Any, role: str) -> bytes:
        """A message's content. A lone text part is the same as that text, and null the same as no text."""
        if content is None:
            return b""
        if type(content) is list:
            self._count(len(content))
            joined = PART.join(map(_part, _unattributed_parts(content) if role == "system" else content))
            if ATTACHMENT in joined:
                self._is_text = False
            return joined
        self._is_text = False
        return _attachment(content)

    def _count(self, parts: int) -> None:
        self._left -= parts
        if self._left < 0:
            raise BodyError(None, f"more than {MAX_PARTS:,} messages, prompts and parts of messages in one request")

    def _odd(self, value: Any) -> None:
        self._is_text = False
        self._segment(MESSAGE + ODD + _json(value))

    def _segment(self, piece: bytes) -> None:
        self._add(piece)
        self._ends.append(self._length)

    def _add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._length += len(piece)


def _is_system(message: Any) -> bool:
    return type(message) is Message and type(message.role) is str and message.role in _SYSTEM_ROLES


def _fields(message: Message) -> bytes:
    """What a message says beside its role and content."""
    fields = {name: getattr(message, name) for name in _FIELDS}
    if fields["reasoning"] is None:
        fields["reasoning"] = message.reasoning_content  # its older name
    return b"".join(FIELD + name.encode() + CONTENT + _json(value) for name, value in fields.items() if value)


def unattributed(text: str) -> str:
    """A system message's text without the line that some clients put before it, which engines leave out too."""
    return text.partition("\n")[2] if text.startswith(_ATTRIBUTION) else text


def _unattributed_parts(parts: list[Any]) -> list[Any]:
    """The same of a message in parts; a part that was nothing else is none."""
    kept = []
    for part in parts:
        text = part.get("text") if type(part) is dict and part.get("type") == "text" else part
        if type(text) is not str or not text.startswith(_ATTRIBUTION):
            kept.append(part)
        elif rest := unattributed(text):
            kept.append(rest)
    return kept


def _part(part: Any) -> bytes:
    if type(part) is str:
        return part.encode()
    if type(part) is dict:
        text = part.get("text")
        if type(text) is str and part.get("type") in _TEXT_PARTS:
            return text.encode()
    return _attachment(part)


def _attachment(value: Any) -> bytes:
    """An image, a sound, a file: by digest. Marks for caching come and go between turns and change no token.

    What a client names by a ``uuid`` is that to an engine, whether it is sent along or was before.
    """
    if type(value) is dict:
        if type(uuid := value.get("uuid")) is str:
            value = {"type": value.get("type"), "uuid": uuid}
        elif "cache_control" in value:
            value = {key: value[key] for key in value if key != "cache_control"}
    return ATTACHMENT + xxh3_128_hexdigest(_json(value)).encode()


def _as_message(item: Any) -> Any:
    """An item of the responses API as the message that it is, or as it stands."""
    return msgspec.convert(item, Message) if type(item) is dict and "role" in item else item
