"""Warm-up prompts: which prefixes are worth sending to a joining replica, and a request body for each of them.

Popular prefixes. Each request counts for its tier-1 prefix in its task group. Counts decay with time: instead of
reducing all counts, the weight of a request grows (as in ``strategies/affinity_groups.py``). So a weight stands for a
request rate, and a prefix is worth its tokens times its rate. At most ``2 * MAX_PREFIXES`` prefixes are counted; then
only the ``MAX_PREFIXES`` most valuable remain. A body is stored when a prefix occurs again, because many prefixes never
do. If all bodies together exceed a limit in bytes, the least valuable are dropped, and a prefix whose body was dropped
must occur twice as often before another one is stored. All of this is in the router's memory only.

Prefix extraction. A body is reduced to the members that chat templates or the engine's cache keys read; client, session
and sampling parameters are left out. The prompt is cut at an offset of the canonical prompt, whose framing tells which
message the offset is in (``prompt/canonical.py``): earlier messages are kept, and the text at the offset is cut at a
character. If the last message is not the user's, a user's message with one dot is appended, because many templates
require one; the blocks before it are those of the prefix.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from heapq import nlargest
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from routing.paths import DataPath
from routing.prompt.canonical import (
    DOCUMENTS,
    MESSAGE,
    RENDERING_FIELDS,
    CanonicalPrompt,
    canonical_prompt,
    without_attribution,
)
from routing.prompt.parsing import parse_body
from routing.types import PrefixHash, TargetId

MAX_PREFIXES: Final = 512  # prefixes that keep their counts when the table is reduced
MIN_REQUESTS: Final = 2  # requests with a prefix until a body is stored
OVERHEAD_BYTES: Final = 512  # of a prefix besides its body
MAX_BODY_SHARE: Final = 1 / 8  # of the memory limit: the most that one body may take
_MAX_WEIGHT: Final = 1e100

PrefixKey = tuple[str, PrefixHash]  # task group ("" for the pool's own requests), and tier-1 key


class WarmUpPrompt(NamedTuple):
    """A request for a prefix and nothing after it."""

    path: str
    body: bytes
    tokens: int  # estimated
    blocks: array[int]  # chained hashes of its whole blocks
    adapter: str = ""  # adapter that a replica must have; "" for none

    @property
    def bytes(self) -> int:
        """Approximate size in memory."""
        return len(self.body) + 8 * len(self.blocks) + OVERHEAD_BYTES


class PrefixSize(Protocol):
    """Gives the length of a request's prefix."""

    @property
    def tier1_tokens(self) -> int:
        """Estimated tokens of the tier-1 prefix."""
        ...


class PopularPrefix:
    """How often a prefix occurs, and its warm-up prompt, once stored."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens  # estimated
        self.weight = 0.0
        self.requests = 0
        self.store_at_requests = MIN_REQUESTS  # number of requests at which the prompt is stored
        self.prompt: WarmUpPrompt | None = None

    @property
    def value(self) -> float:
        """Tokens times rate, for comparison."""
        return self.weight * self.tokens


class PopularPrefixes:
    """The popular prefixes of one pool. Times are seconds of any one clock that never goes back."""

    def __init__(self, half_life_s: float, max_bytes: int, min_tokens: int) -> None:
        self._half_life_s = half_life_s
        self._max_bytes = max_bytes
        self._min_tokens = min_tokens  # of a prefix that is worth a body
        self._weight_base_s: float | None = None  # when a request's weight was 1
        self._prefixes: dict[PrefixKey, PopularPrefix] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._prefixes)

    @property
    def bytes(self) -> int:
        """Approximate size of the stored prompts in memory."""
        return self._bytes

    def configure(self, half_life_s: float, max_bytes: int, min_tokens: int) -> None:
        """Use these settings; counts and prompts are kept."""
        if half_life_s != self._half_life_s:
            self._rescale(max((prefix.weight for prefix in self._prefixes.values()), default=1.0))
            self._half_life_s, self._weight_base_s = half_life_s, None
        self._max_bytes, self._min_tokens = max_bytes, min_tokens
        self._drop_excess()

    def count(self, key: PrefixKey, now_s: float, size: PrefixSize) -> bool:
        """Count a request; True if ``store`` should be called with its prefix's prompt. 0.5 us."""
        prefix = self._prefixes.get(key)
        if prefix is None:
            if len(self._prefixes) >= 2 * MAX_PREFIXES:
                self._drop_least_valuable()
            prefix = self._prefixes[key] = PopularPrefix(size.tier1_tokens)
        weight = self._weight(now_s)  # computed first, because it may scale down all weights
        prefix.weight += weight
        prefix.requests += 1
        if prefix.prompt is not None or prefix.requests < prefix.store_at_requests or prefix.tokens < self._min_tokens:
            return False
        prefix.store_at_requests = 2 * prefix.requests
        return True

    def store(self, key: PrefixKey, prompt: WarmUpPrompt) -> None:
        """Store the prompt of a prefix, unless more valuable ones take all memory."""
        prefix = self._prefixes.get(key)
        if prefix is not None and prefix.prompt is None and prompt.bytes <= MAX_BODY_SHARE * self._max_bytes:
            prefix.prompt = prompt
            self._bytes += prompt.bytes
            self._drop_excess()

    def select(
        self,
        preferred_replicas: Callable[[PrefixKey, WarmUpPrompt], list[TargetId]],
        max_prefixes: int,
        max_tokens: int,
    ) -> Iterator[tuple[WarmUpPrompt, TargetId]]:
        """Prompts with each of their ``preferred_replicas``, the most valuable first, within the limits."""
        by_value = sorted(self._prefixes.items(), key=lambda item: item[1].value, reverse=True)
        for key, prefix in by_value:
            prompt = prefix.prompt
            for target in preferred_replicas(key, prompt) if prompt else ():
                if prompt and prompt.tokens <= max_tokens and max_prefixes:
                    max_tokens -= prompt.tokens
                    max_prefixes -= 1
                    yield prompt, target
            if not max_prefixes:
                return

    def _weight(self, now_s: float) -> float:
        """The weight of a request that arrives now."""
        if self._weight_base_s is None:
            self._weight_base_s = now_s
        weight: float = 2.0 ** min((now_s - self._weight_base_s) / self._half_life_s, 1000.0)
        if weight > _MAX_WEIGHT:
            self._rescale(weight)
            self._weight_base_s, weight = now_s, 1.0
        return weight

    def _rescale(self, unit: float) -> None:
        for prefix in self._prefixes.values():
            prefix.weight /= unit

    def _drop_excess(self) -> None:
        """If prompts exceed the memory limit, drop the least valuable until a tenth is free."""
        if self._bytes <= self._max_bytes:
            return
        stored = [prefix for prefix in self._prefixes.values() if prefix.prompt]
        by_value = sorted(stored, key=lambda prefix: prefix.value, reverse=True)
        while by_value and self._bytes > 0.9 * self._max_bytes:
            self._drop_prompt(by_value.pop())

    def _drop_least_valuable(self) -> None:
        most_valuable = nlargest(MAX_PREFIXES, self._prefixes.items(), key=lambda item: item[1].value)
        for key in self._prefixes.keys() - {key for key, _ in most_valuable}:
            self._drop_prompt(self._prefixes[key])
        self._prefixes = dict(most_valuable)

    def _drop_prompt(self, prefix: PopularPrefix) -> None:
        if prefix.prompt is not None:
            self._bytes -= prefix.prompt.bytes
            prefix.prompt, prefix.store_at_requests = None, 2 * prefix.requests


PLACEHOLDER: Final = "."
_RETAINED_MEMBERS: Final = ("model", "tools", "tool_choice", "cache_salt", *RENDERING_FIELDS)
# Members that change the start of the prompt.
_UNSUPPORTED_MEMBERS: Final = ("suffix", "prompt_embeds", "truncate_prompt_tokens")
_member_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_json_encoder: Final = msgspec.json.Encoder()


def extract_prefix(path: str, body: bytes, prompt: CanonicalPrompt, end: int) -> bytes | None:
    """A body with the first ``end`` bytes of a prompt that asks for one token; None if that is not possible.

    ``prompt`` is the canonical prompt of ``body``.
    """
    try:
        members = _member_decoder.decode(body)
        prefix = _prefix_members(path, members, prompt, end)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if prefix is None:
        return None
    retained = {name: members[name] for name in _RETAINED_MEMBERS if name in members}
    extracted = _json_encoder.encode(retained | prefix | {"stream": False})
    return extracted if path != DataPath.MESSAGES or _begins_alike(path, extracted, prompt, end) else None


def _begins_alike(path: str, body: bytes, prompt: CanonicalPrompt, end: int) -> bool:
    """Whether a body's prompt begins with the prefix. System messages among the others may be part of the prefix."""
    extracted = canonical_prompt(parse_body(path, body))
    return extracted.rendering == prompt.rendering and extracted.data[:end] == prompt.data[:end]


def _prefix_members(
    path: str, members: dict[str, msgspec.Raw], prompt: CanonicalPrompt, end: int
) -> dict[str, Any] | None:
    if any(name in members for name in _UNSUPPORTED_MEMBERS):
        return None
    if path == DataPath.CHAT_COMPLETIONS:
        messages = _prefix_messages(_decode(members, "messages"), prompt, end)
        # Documents before the end are kept whole.
        has_documents = end > prompt.system_end and _skip_documents(prompt, prompt.system_end) > prompt.system_end
        documents = {"documents": members["documents"]} if has_documents else {}
        return documents | {"messages": messages, "max_tokens": 1} if messages else None
    if path == DataPath.COMPLETIONS:
        text = _prefix_prompt(_decode(members, "prompt"), end)
        return {"prompt": text, "max_tokens": 1} if text else None
    if path == DataPath.RESPONSES and end == prompt.system_end:
        request = {"input": PLACEHOLDER, "max_output_tokens": 1, "store": False}
        return request | ({"instructions": members["instructions"]} if "instructions" in members else {})
    if path == DataPath.MESSAGES and end == prompt.system_end:
        request = {"messages": [{"role": "user", "content": PLACEHOLDER}], "max_tokens": 1}
        thinking = _decode(members, "thinking")
        is_disabled = type(thinking) is dict and thinking.get("type") == "disabled"  # else it needs more tokens
        names = ("system", "output_config", "thinking") if is_disabled else ("system", "output_config")
        return request | {name: members[name] for name in names if name in members}
    return None


def _decode(members: dict[str, msgspec.Raw], name: str) -> Any:
    return msgspec.json.decode(members[name]) if name in members else None


def _prefix_messages(messages: Any, prompt: CanonicalPrompt, end: int) -> list[Any] | None:
    """Whole messages before the end, and the beginning of the text that contains it."""
    if type(messages) is not list or len(messages) != len(prompt.message_ends):
        return None
    retained, start = [], prompt.tools_end
    for message, message_end in zip(messages, prompt.message_ends, strict=True):
        if type(message) is not dict:
            return None
        start = _skip_documents(prompt, start)
        if message_end > end:
            if part := _cut_message(message, end - start):
                retained.append(part)
            break
        retained.append(message)
        start = message_end
    if not retained and not prompt.tools_end:
        return None
    ends_with_user = retained and retained[-1].get("role") == "user"
    return retained if ends_with_user else [*retained, {"role": "user", "content": PLACEHOLDER}]


def _skip_documents(prompt: CanonicalPrompt, start: int) -> int:
    """The offset of the next message from ``start``, where documents may be."""
    return prompt.data.find(MESSAGE, start) if prompt.data.startswith(DOCUMENTS, start) else start


def _cut_message(message: dict[str, Any], length: int) -> dict[str, Any] | None:
    """The first bytes of a message as in the canonical prompt; None if none of its text remains."""
    role, content = message.get("role"), message.get("content")
    if type(role) is not str or type(content) is not str:
        return None
    if role == "system":
        content = without_attribution(content)
    text = _cut_text(content, length - len(role.encode()) - 2)  # the framing bytes around the role
    return {"role": role, "content": text} if text else None


def _prefix_prompt(prompt: Any, end: int) -> str | list[int] | None:
    """The first bytes of a completion's prompt, a text or token ids."""
    if type(prompt) is str:
        return _cut_text(prompt, end - 2) or None
    if type(prompt) is list and all(type(token) is int for token in prompt):
        return prompt[: max(0, end - 3) // 4] or None
    return None


def _cut_text(text: str, length: int) -> str:
    return text.encode()[: max(0, length)].decode(errors="ignore")
