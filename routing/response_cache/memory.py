"""Entries of response caches, and the bounded level of them in this process's memory."""

from __future__ import annotations

import re
from collections import OrderedDict
from math import inf
from time import time
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from routing.http.response_json import Usage
from routing.http.usage import generated_tokens, prompt_and_cached
from routing.response_cache.forms import MESSAGES, may_store, stream_of_whole, whole_of_stream, without_usage_event
from routing.schema import ResponseCache, ToolCalls

if TYPE_CHECKING:
    from routing.response_cache.keys import CacheKey

MEMORY_S: Final = 5.0  # lifetime where a store is shared, so that a purge of it reaches every router within that time
MEMORY_BYTES: Final = 64 << 20
PURGE_S: Final = 8.0  # deadline of the purge of a store, which a request to the control plane waits for
ENTRY_OVERHEAD: Final = 512  # bytes of an entry in memory beside its body


class Entry(NamedTuple):
    """A stored response: its body as the replica sent it."""

    created_s: float  # Unix time
    expires_s: float
    is_stream: bool
    has_usage: bool  # of a stream: whether it has a usage event
    body: bytes
    prompt_tokens: int | None
    generated_tokens: int | None


class StorePurge(NamedTuple):
    """Entries that a purge removed from the store, and those that a second scan found."""

    removed: int
    remaining: int | None = None
    problem: str | None = None  # None: all entries that existed when it began are removed


def pattern_of(prefix: str) -> re.Pattern[str]:
    """Matches the names of entries with a prefix; ``*`` in it stands for one part (see ``entry_prefix``)."""
    return re.compile(re.escape(prefix).replace(r"\*", "[^:]*"))


def body_for(key: CacheKey, entry: Entry) -> bytes | None:
    """An entry's body in the form that a request asks for; None if it cannot be converted."""
    if key.is_stream == entry.is_stream:
        if not key.is_stream or key.wants_usage == entry.has_usage:
            return entry.body
        return without_usage_event(entry.body) if entry.has_usage else None
    if key.is_stream:
        return stream_of_whole(key.path, msgspec.json.decode(entry.body), with_usage=key.wants_usage)
    whole = whole_of_stream(key.path, entry.body)
    return None if whole is None or whole.get("usage") is None else msgspec.json.encode(whole)


def entry_of(key: CacheKey, settings: ResponseCache, body: bytes, *, is_stream: bool) -> Entry | None:
    """The entry of a complete response with status 200; None if it may not be stored."""
    try:
        whole = whole_of_stream(key.path, body) if is_stream else msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(whole, dict):
        return None
    if not may_store(
        whole, has_length_limit=key.has_length_limit, stores_tool_calls=settings.tool_calls is ToolCalls.STORE
    ):
        return None
    try:
        usage = msgspec.convert(whole.get("usage") or {}, Usage)
    except msgspec.ValidationError:
        usage = Usage()
    now, (prompt_tokens, _) = time(), prompt_and_cached(usage)
    return Entry(
        now,
        now + key.options.ttl_s,
        is_stream,
        is_stream and whole.get("usage") is not None and key.path != MESSAGES,
        body,
        prompt_tokens,
        generated_tokens(usage),
    )


class MemoryLevel:
    """The entries that this process used last, at most ``max_bytes``. ``lifetime_s``: of each; None: unlimited."""

    def __init__(self, lifetime_s: float | None, max_bytes: int = MEMORY_BYTES) -> None:
        self._entries: OrderedDict[str, tuple[Entry, float]] = OrderedDict()  # with the time until it may be used
        self._lifetime_s = inf if lifetime_s is None else lifetime_s
        self._max_bytes = max_bytes
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, name: str, now: float) -> Entry | None:
        """An entry within its lifetime; the caller checks its expiry. ``now``: monotonic."""
        found = self._entries.get(name)
        if found is None:
            return None
        entry, until = found
        if now >= until:
            self._drop(name)
            return None
        self._entries.move_to_end(name)
        return entry

    def put(self, name: str, entry: Entry, now: float) -> None:
        self._drop(name)
        self._entries[name] = (entry, now + self._lifetime_s)
        self.bytes += len(entry.body) + ENTRY_OVERHEAD
        while self.bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def matching(self, pattern: re.Pattern[str]) -> list[str]:
        """The names of the entries that a pattern matches."""
        return [name for name in self._entries if pattern.match(name)]

    def remove(self, names: list[str]) -> None:
        for name in names:
            self._drop(name)

    def clear(self) -> None:
        self._entries.clear()
        self.bytes = 0

    def _drop(self, name: str) -> None:
        found = self._entries.pop(name, None)
        if found is not None:
            self.bytes -= len(found[0].body) + ENTRY_OVERHEAD
