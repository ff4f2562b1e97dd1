"""A request's body, cut where the opening of its prompt ends: what fills a cache with that opening and nothing more.

Theory of operation. Only members that a chat template or the engine's cache keys read are taken over; who asked, for
which session, with what sampling is not. The prompt is cut at an offset of the canonical prompt, whose framing says
which message it falls in and where (``core/prompt/canonical.py``): whole messages before it stay, a text that it falls
into is cut, at a character. Where the last message that is left is not the user's, a user's message of one dot follows,
since many templates ask for one; the blocks before it are those of the opening all the same.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from routing.core.prompt.canonical import DOCUMENTS, MESSAGE, CanonicalPrompt, unattributed
from routing.core.prompt.rendering import MEMBERS

DOT: Final = "."
_CHAT: Final = "/v1/chat/completions"
_COMPLETIONS: Final = "/v1/completions"
_RESPONSES: Final = "/v1/responses"
_TAKEN: Final = ("model", "tools", "tool_choice", "cache_salt", *MEMBERS)  # what begins a prompt, or keys its blocks
_UNCUT: Final = ("suffix", "prompt_embeds", "truncate_prompt_tokens")  # with one of these it begins otherwise
_members: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_json: Final = msgspec.json.Encoder()


def cut_body(path: str, body: bytes, prompt: CanonicalPrompt, end: int) -> bytes | None:
    """The body for the first ``end`` bytes of a prompt, asking for one token; None where that cannot be written.

    ``body`` was read before; ``prompt`` is what it came to.
    """
    try:
        members = _members.decode(body)
        cut = _cut(path, members, prompt, end)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if cut is None:
        return None
    kept = {name: members[name] for name in _TAKEN if name in members}
    return _json.encode(kept | cut | {"stream": False})


def _cut(path: str, members: dict[str, msgspec.Raw], prompt: CanonicalPrompt, end: int) -> dict[str, Any] | None:
    if any(name in members for name in _UNCUT):
        return None
    if path == _CHAT:
        messages = _cut_messages(_decoded(members, "messages"), prompt, end)
        informed = {"documents": members["documents"]} if _has_documents(prompt, end) else {}
        return informed | {"messages": messages, "max_tokens": 1} if messages else None
    if path == _COMPLETIONS:
        text = _cut_prompt(_decoded(members, "prompt"), end)
        return {"prompt": text, "max_tokens": 1} if text else None
    if path == _RESPONSES and end == prompt.system_end:
        whole = {"input": DOT, "max_output_tokens": 1, "store": False}
        return whole | ({"instructions": members["instructions"]} if "instructions" in members else {})
    return None


def _decoded(members: dict[str, msgspec.Raw], name: str) -> Any:
    return msgspec.json.decode(members[name]) if name in members else None


def _cut_messages(messages: Any, prompt: CanonicalPrompt, end: int) -> list[Any] | None:
    """Whole messages up to the cut, and the beginning of the text that it falls into."""
    if type(messages) is not list or len(messages) != len(prompt.message_ends):
        return None
    kept, start = [], prompt.tools_end
    for message, message_end in zip(messages, prompt.message_ends, strict=True):
        if type(message) is not dict:
            return None
        start = _behind_documents(prompt, start)
        if message_end > end:
            if part := _cut_message(message, end - start):
                kept.append(part)
            break
        kept.append(message)
        start = message_end
    if not kept and not prompt.tools_end:
        return None
    return kept if kept and kept[-1].get("role") == "user" else [*kept, {"role": "user", "content": DOT}]


def _has_documents(prompt: CanonicalPrompt, end: int) -> bool:
    """Whether there are any before the cut; they stay whole."""
    return end > prompt.system_end and _behind_documents(prompt, prompt.system_end) > prompt.system_end


def _behind_documents(prompt: CanonicalPrompt, start: int) -> int:
    """Where the message begins that follows a place; documents may stand before it."""
    return prompt.data.find(MESSAGE, start) if prompt.data.startswith(DOCUMENTS, start) else start


def _cut_message(message: dict[str, Any], length: int) -> dict[str, Any] | None:
    """The first bytes of a message as it stands in the canonical prompt; None where nothing of its text is left."""
    role, content = message.get("role"), message.get("content")
    if type(role) is not str or type(content) is not str:
        return None
    if role == "system":
        content = unattributed(content)
    text = _cut_text(content, length - len(role.encode()) - 2)  # the marks around the role
    return {"role": role, "content": text} if text else None


def _cut_prompt(prompt: Any, end: int) -> str | list[int] | None:
    """The same of a completion's prompt, a text or token ids."""
    if type(prompt) is str:
        return _cut_text(prompt, end - 2) or None
    if type(prompt) is list and all(type(it) is int for it in prompt):
        return prompt[: max(0, end - 3) // 4] or None
    return None


def _cut_text(text: str, length: int) -> str:
    return text.encode()[: max(0, length)].decode(errors="ignore")
