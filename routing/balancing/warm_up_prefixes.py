"""Which openings are worth sending to a replica that joins, with a request body for each.

Theory of operation. A request counts for its opening: the tier-1 key, in its task group. Counts fade with time, as
growing weights do instead of shrinking counts (``allocation.py``), so that an opening's weight stands for its rate, and
its worth is tokens times rate. At most ``2 * KEPT`` openings are counted; then only the ``KEPT`` worthiest stay. A body
is kept once an opening has come again, cut where the opening ends (``warm_up_prefixes.py``), because what came once may
never come again. All bodies together have a limit in bytes: then those of the least worth go, and an opening whose body
went is asked for one again only when it has come twice as often. Nothing here leaves the process's memory.

A request's body, cut where the opening of its prompt ends: what fills a cache with that opening and nothing more.

Theory of operation. Only members that a chat template or the engine's cache keys read are taken over; who asked, for
which session, with what sampling is not. The prompt is cut at an offset of the canonical prompt, whose framing says
which message it falls in and where (``core/prompt/canonical.py``): whole messages before it stay, a text that it falls
into is cut, at a character. Where the last message that is left is not the user's, a user's message of one dot follows,
since many templates ask for one; the blocks before it are those of the opening all the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from heapq import nlargest
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from routing.prompt.canonical import DOCUMENTS, MESSAGE, CanonicalPrompt, without_attribution
from routing.prompt.rendering import RENDERING_FIELDS
from routing.types import PrefixHash, TargetId

KEPT: Final = 512  # openings counted at least
AGAIN: Final = 2  # times an opening comes until its body is kept
OVERHEAD_BYTES: Final = 512  # of an opening beside its body
LARGEST: Final = 1 / 8  # of all memory, that one body may take
_LARGE: Final = 1e100

PrefixKey = tuple[str, PrefixHash]  # task group, "" for the pool's own requests, and tier-1 key


class WarmUpPrompt(NamedTuple):
    """A request for an opening and nothing behind it."""

    path: str
    body: bytes
    tokens: int  # estimated
    blocks: array[int]  # chained hashes of its whole blocks
    adapter: str = ""  # that a replica must hold; "" for none

    @property
    def bytes(self) -> int:
        """What it takes in memory, roughly."""
        return len(self.body) + 8 * len(self.blocks) + OVERHEAD_BYTES


class Sized(Protocol):
    """Who can tell how long a request's opening is."""

    @property
    def tier1_tokens(self) -> int:
        """Its estimated tokens."""
        ...


class PopularPrefix:
    """How often an opening comes, and the request for it, once it is kept."""

    __slots__ = ("ask_at", "cut", "meetings", "tokens", "weight")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens  # estimated
        self.weight = 0.0
        self.meetings = 0
        self.ask_at = AGAIN  # meetings
        self.cut: WarmUpPrompt | None = None

    @property
    def worth(self) -> float:
        """Tokens by rate, to compare by."""
        return self.weight * self.tokens


class PopularPrefixes:
    """Those of one pool. Times are seconds of any one clock that never goes back."""

    __slots__ = ("_bytes", "_half_life_s", "_max_bytes", "_min_tokens", "_origin_s", "_seen")

    def __init__(self, half_life_s: float, max_bytes: int, min_tokens: int) -> None:
        self._half_life_s = half_life_s
        self._max_bytes = max_bytes
        self._min_tokens = min_tokens  # of an opening that is worth a body
        self._origin_s: float | None = None  # when a request weighs 1
        self._seen: dict[PrefixKey, PopularPrefix] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._seen)

    @property
    def bytes(self) -> int:
        """Roughly what the kept requests take in memory."""
        return self._bytes

    def configure(self, half_life_s: float, max_bytes: int, min_tokens: int) -> None:
        """Go by these settings; what is known stays."""
        if half_life_s != self._half_life_s:
            self._rescale(max((it.weight for it in self._seen.values()), default=1.0))
            self._half_life_s, self._origin_s = half_life_s, None
        self._max_bytes, self._min_tokens = max_bytes, min_tokens
        self._make_room()

    def count(self, key: PrefixKey, now_s: float, size: Sized) -> bool:
        """Count a request; whether ``keep`` should be told what to send for its opening. 0.5 us."""
        opening = self._seen.get(key) or self._new(key, size)
        weight = self._weight(now_s)  # first, for it may make all weights smaller, this opening's too
        opening.weight += weight
        opening.meetings += 1
        if opening.cut is not None or opening.meetings < opening.ask_at or opening.tokens < self._min_tokens:
            return False
        opening.ask_at = 2 * opening.meetings
        return True

    def keep(self, key: PrefixKey, cut: WarmUpPrompt) -> None:
        """Remember what to send for an opening, unless others are worth more and there is no room for all."""
        opening = self._seen.get(key)
        if opening is not None and opening.cut is None and cut.bytes <= LARGEST * self._max_bytes:
            opening.cut = cut
            self._bytes += cut.bytes
            self._make_room()

    def chosen(
        self,
        preferred_replicas: Callable[[PrefixKey, WarmUpPrompt], list[TargetId]],
        max_prefixes: int,
        max_tokens: int,
    ) -> Iterator[tuple[WarmUpPrompt, TargetId]]:
        """The worthiest that have ``preferred_replicas``, each with each of them, the worthiest first, as the limits
        have room.
        """
        kept = sorted(self._seen.items(), key=lambda item: item[1].worth, reverse=True)
        for key, opening in kept:
            cut = opening.cut
            for home in preferred_replicas(key, cut) if cut else ():
                if cut and cut.tokens <= max_tokens and max_prefixes:
                    max_tokens -= cut.tokens
                    max_prefixes -= 1
                    yield cut, home
            if not max_prefixes:
                return

    def _new(self, key: PrefixKey, size: Sized) -> PopularPrefix:
        if len(self._seen) >= 2 * KEPT:
            self._drop_all_but(KEPT)
        opening = self._seen[key] = PopularPrefix(size.tier1_tokens)
        return opening

    def _weight(self, now_s: float) -> float:
        """Of a request that comes now."""
        if self._origin_s is None:
            self._origin_s = now_s
        weight: float = 2.0 ** min((now_s - self._origin_s) / self._half_life_s, 1000.0)
        if weight > _LARGE:
            self._rescale(weight)
            self._origin_s, weight = now_s, 1.0
        return weight

    def _rescale(self, unit: float) -> None:
        """Make all weights smaller together."""
        for opening in self._seen.values():
            opening.weight /= unit

    def _make_room(self) -> None:
        """Where bodies take too much, let those of the least worth go, until there is a tenth to spare."""
        if self._bytes <= self._max_bytes:
            return
        kept = sorted((it for it in self._seen.values() if it.cut), key=lambda it: it.worth, reverse=True)
        while kept and self._bytes > 0.9 * self._max_bytes:
            self._let_go(kept.pop())

    def _drop_all_but(self, count: int) -> None:
        worthiest = nlargest(count, self._seen.items(), key=lambda item: item[1].worth)
        for key in self._seen.keys() - {key for key, _ in worthiest}:
            self._let_go(self._seen[key])
        self._seen = dict(worthiest)

    def _let_go(self, opening: PopularPrefix) -> None:
        if opening.cut is not None:
            self._bytes -= opening.cut.bytes
            opening.cut, opening.ask_at = None, 2 * opening.meetings


DOT: Final = "."
_CHAT: Final = "/v1/chat/completions"
_COMPLETIONS: Final = "/v1/completions"
_RESPONSES: Final = "/v1/responses"
_TAKEN: Final = (
    "model",
    "tools",
    "tool_choice",
    "cache_salt",
    *RENDERING_FIELDS,
)
_UNCUT: Final = ("suffix", "prompt_embeds", "truncate_prompt_tokens")  # with one of these it begins otherwise
_members: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_json: Final = msgspec.json.Encoder()


def extract_prefix(path: str, body: bytes, prompt: CanonicalPrompt, end: int) -> bytes | None:
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
        content = without_attribution(content)
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
