"""The response caches of a router: lookups, single flight, and storing of responses.

Theory of operation. The first request that misses an entry is the leader of a flight; requests for the same entry that
arrive before its response is complete follow it, so that identical requests at the same time cost one prefill. If the
leader's response is stored, it answers the followers. If it may not be stored, all followers are sent to replicas. If
the leader failed or its client disconnected, the next follower becomes the leader. A flight belongs to one process.

Parsing a request costs several times a hit. A bounded memo maps the digest of a request's bytes to its key, so that the
same bytes are answered from memory without being parsed. A new configuration clears it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator
from enum import Enum, StrEnum
from time import monotonic, time
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from routing.http.response_json import Usage
from routing.http.usage import generated_tokens, prompt_and_cached
from routing.observability.metrics import PREFIX, header, labels
from routing.prompt.parsing import LARGE_BYTES
from routing.response_cache.forms import (
    MESSAGES,
    may_store,
    stream_of_whole,
    whole_of_stream,
    without_usage_event,
)
from routing.response_cache.keys import CacheKey, CacheKeys, Scope
from routing.response_cache.memory import MEMORY_S, Entry, MemoryLevel, StorePurge, pattern_of
from routing.schema import CachePurge, GroupMatch, ResponseCache, RouterConfig, ToolCalls, derived_key, entry_prefix

if TYPE_CHECKING:
    from routing.http.request import Request
    from routing.response_cache.store import Store


STREAM: Final = b"text/event-stream; charset=utf-8"
JSON: Final = b"application/json"
MEMO_ENTRIES: Final = 4096


class Result(StrEnum):
    """What became of a request of a task group with a cache; values of a metric's label and of X-Warmpath-Cache."""

    HIT = "hit"
    MISS = "miss"
    BYPASS = "bypass"  # its response is not deterministic, or its client wanted no cached one


class Progress(Enum):
    """The state of a lookup after ``start``."""

    FOUND = 0
    MISSING = 1
    WAITING = 2  # ``on_result`` will be called


class CachedResponse(NamedTuple):
    """A response from a cache, in the form that its client asked for."""

    body: bytes
    content_type: bytes
    age_s: int


class Flight:
    """The requests that wait for the response of one that is being served."""

    __slots__ = ("followers", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.followers: deque[CacheLookup] = deque()


class CacheLookup:
    """The use of a cache by one request, from the lookup to the end of its response."""

    __slots__ = (
        "_body", "_body_bytes", "_caches", "_flight", "_is_leader", "_on_result", "_purges", "group", "key", "pool",
        "response", "result", "settings",
    )  # fmt: skip

    def __init__(
        self,
        caches: ResponseCaches,
        scope: tuple[str, str],
        settings: ResponseCache,
        key: CacheKey | None,
        on_result: Callable[[], None],
    ) -> None:
        self.pool, self.group = scope
        self.settings = settings
        self.key = key  # None: the request may not use the cache
        self.response: CachedResponse | None = None
        self.result = Result.BYPASS
        self._caches = caches
        self._on_result = on_result
        self._purges = caches.purges
        self._flight: Flight | None = None
        self._is_leader = False
        self._body: list[bytes] | None = None  # of the response, while it is recorded
        self._body_bytes = 0

    @property
    def began_before_purge(self) -> bool:
        """Whether its entry may be older than the last purge, and is not stored."""
        return self._purges != self._caches.purges

    # --- lookup ---

    def start(self) -> Progress:
        """Look for a response in memory, then among running requests, then in the store."""
        caches, key = self._caches, self.key
        if key is None or not key.options.may_load:
            return Progress.MISSING
        self.result = Result.MISS
        if self.use(caches.memory.get(key.name, monotonic())):
            return Progress.FOUND
        flight = caches.flights.get(key.name)
        if flight is not None:
            self._flight = flight
            flight.followers.append(self)
            return Progress.WAITING
        self._flight = caches.flights[key.name] = Flight(key.name)
        self._is_leader = True
        return Progress.MISSING if caches.store is None else caches.look_up(self)

    def on_entry(self, entry: Entry | None) -> None:
        """Called with the store's entry, or with that of the flight's leader; None: a replica has to respond."""
        is_leader = self._is_leader
        if is_leader and self._flight is None:
            return  # its client has disconnected
        if self.use(entry) and is_leader:
            self._end_flight(entry)
        if not is_leader:
            self._flight = None
        self._on_result()

    def use(self, entry: Entry | None) -> bool:
        """Respond with an entry, if it is fresh enough and can be sent in the form that the client asked for."""
        key = self.key
        if entry is None or key is None:
            return False
        now = time()
        age_s = max(0, int(now - entry.created_s))
        if now >= min(entry.expires_s, entry.created_s + self.settings.ttl_s):
            return False
        if key.options.max_age_s is not None and age_s > key.options.max_age_s:
            return False
        body = body_for(key, entry)
        if body is None:
            return False
        self.response = CachedResponse(body, STREAM if key.is_stream else JSON, age_s)
        self.result = Result.HIT
        self._caches.count_saved(self, entry)
        return True

    # --- the response of a replica ---

    @property
    def is_recording(self) -> bool:
        """Whether the body of the response is kept."""
        return self._body is not None

    def begin_recording(self) -> None:
        """Keep the body of the response, which may be stored."""
        if self.key is not None:
            self._body, self._body_bytes = [], 0

    def record(self, data: bytes) -> None:
        """Keep bytes of the body; a body above ``max_entry_bytes`` is not stored."""
        if self._body is None:
            return
        self._body.append(data)
        self._body_bytes += len(data)
        if self._body_bytes > self.settings.max_entry_bytes:
            self._body = None

    def complete(self, *, is_stream: bool) -> None:
        """The response is complete: store it if it may be stored, and respond to the followers with it."""
        body, self._body = self._body, None
        entry = None
        if body is not None and self.key is not None:
            entry = entry_of(self.key, self.settings, b"".join(body), is_stream=is_stream)
            if entry is not None and not self.began_before_purge:
                self._caches.put(self.key, entry)
        self._end_flight(entry)

    def end(self) -> None:
        """The request has ended. If it was to respond to a flight and did not, another request takes its place."""
        self._caches.count(self)
        self._body = None
        flight, self._flight = self._flight, None
        if flight is None:
            return
        if not self._is_leader:
            flight.followers.remove(self)
        elif flight.followers:
            follower = flight.followers.popleft()
            follower._is_leader = True  # noqa: SLF001 - of the same class
            asyncio.get_running_loop().call_soon(follower._on_result)  # noqa: SLF001 - a chain of calls may be long
        else:
            self._caches.flights.pop(flight.name, None)

    def _end_flight(self, entry: Entry | None) -> None:
        flight, self._flight = self._flight, None
        if flight is not None and self._is_leader:
            self._caches.flights.pop(flight.name, None)
            for follower in list(flight.followers):
                follower.on_entry(entry)


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
    except (msgspec.DecodeError, RecursionError):
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


class ResponseCaches:
    """The response caches of all task groups of one router process."""

    def __init__(self, store: Store | None) -> None:
        self.store = store  # None: entries are in this process's memory alone
        self.memory = MemoryLevel(None if store is None else MEMORY_S)
        self.flights: dict[str, Flight] = {}
        self.purges = 0
        self._settings: dict[tuple[str, str], ResponseCache] = {}
        self._secret = ""
        self._names: frozenset[str] | None = frozenset()  # of groups that requests have to name; None: not only by name
        self._memo: dict[bytes, tuple[tuple[str, str], ResponseCache, CacheKey]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._requests: Counter[tuple[str, str, Result]] = Counter()
        self._saved: Counter[tuple[str, str, str]] = Counter()  # tokens, by pool, group and kind

    def configure(self, config: RouterConfig) -> bool:
        """Apply a configuration; whether any task group has a cache."""
        self._memo.clear()
        self._settings = {
            (pool.name, group.name): group.response_cache
            for pool in config.pools
            for group in pool.groups
            if group.response_cache is not None
        }
        if config.hash_secret != self._secret:
            self._secret = config.hash_secret
            self._keys = CacheKeys(config.hash_secret)
            self._cipher = AESGCM(derived_key(config.hash_secret, "response cache encryption"))
            self.memory.clear()
        is_named_only = config.access is None and all(
            group.match == GroupMatch() for pool in config.pools for group in pool.groups if group.response_cache
        )
        self._names = frozenset(group for _, group in self._settings) if is_named_only else None
        return bool(self._settings)

    def recall(self, request: Request, on_result: Callable[[], None]) -> CacheLookup | None:
        """The lookup of a request whose bytes came before, if its entry is in memory; else None.

        Requests that may belong to a task group with a cache get a digest; large ones are never cached.
        """
        if (self._names is not None and request.head.task_group not in self._names) or len(request.body) > LARGE_BYTES:
            return None
        request.cache_digest = digest = self._keys.digest_of(request)
        known = self._memo.get(digest)
        if known is None:
            return None
        names, settings, key = known
        entry = self.memory.get(key.name, monotonic()) if key.options.may_load else None
        lookup = CacheLookup(self, names, settings, key, on_result)
        return lookup if lookup.use(entry) else None

    def lookup(self, request: Request, scope: Scope, on_result: Callable[[], None]) -> CacheLookup | None:
        """The lookup of a request, to be started; None if its task group has no cache. BodyError for bad options."""
        names = scope.pool, scope.group
        settings = self._settings.get(names)
        if settings is None:
            return None
        key = self._keys.key_of(request, scope, settings)
        if key is not None:
            if len(self._memo) >= MEMO_ENTRIES:
                self._memo.clear()
            self._memo[request.cache_digest] = names, settings, key
        return CacheLookup(self, names, settings, key, on_result)

    def look_up(self, lookup: CacheLookup) -> Progress:
        """Ask the store for a lookup's entry; it hears of the result."""
        task = asyncio.get_running_loop().create_task(self._look_up(lookup))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return Progress.WAITING

    async def _look_up(self, lookup: CacheLookup) -> None:
        key, store = lookup.key, self.store
        entry = None if key is None or store is None else await store.get(key.name, self._cipher)
        if key is not None and entry is not None and not lookup.began_before_purge:
            self.memory.put(key.name, entry, monotonic())
        lookup.on_entry(entry)

    def put(self, key: CacheKey, entry: Entry) -> None:
        """Store an entry in memory, and in the background in the store."""
        self.memory.put(key.name, entry, monotonic())
        if self.store is not None:
            self.store.put(key.name, entry, self._cipher, key.options.ttl_s)

    async def forget(self, purge: CachePurge) -> int:
        """Remove the entries of a purge from memory; their number. Requests that began before it store nothing.

        Nor do later requests follow them. Pending writes to the store end first, so that a purge of it finds them.
        """
        pattern = pattern_of(self._prefix_of(purge))
        names = self.memory.matching(pattern)
        if not purge.dry_run:
            self.purges += 1
            self.memory.remove(names)
            for name in [name for name in self.flights if pattern.match(name)]:
                del self.flights[name]
            if self.store is not None:
                await self.store.settle()
        return len(names)

    async def purge_store(self, purge: CachePurge) -> StorePurge | None:
        """Remove the entries of a purge from the store; None without a store."""
        return None if self.store is None else await self.store.purge(self._prefix_of(purge), dry_run=purge.dry_run)

    def _prefix_of(self, purge: CachePurge) -> str:
        return entry_prefix(self._secret, purge.pool, purge.group, model=purge.model, namespace=purge.namespace)

    def count(self, lookup: CacheLookup) -> None:
        """Count a request that has ended, by its result."""
        self._requests[lookup.pool, lookup.group, lookup.result] += 1

    def count_saved(self, lookup: CacheLookup, entry: Entry) -> None:
        for kind, tokens in (("prompt", entry.prompt_tokens), ("generated", entry.generated_tokens)):
            if tokens is not None:
                self._saved[lookup.pool, lookup.group, kind] += tokens

    def lines(self) -> Iterator[str]:
        """Prometheus text; nothing before the first request of a group with a cache."""
        if not self._requests:
            return
        name = "response_cache_requests_total"
        yield from header(name, "counter", "Requests of task groups with a response cache, by result.")
        for (pool, group, result), count in list(self._requests.items()):
            yield f"{PREFIX}{name}{{{labels(pool=pool, group=group, result=result)}}} {count}"
        name = "response_cache_saved_tokens_total"
        yield from header(name, "counter", "Tokens of responses from a cache, which no replica had to compute.")
        for (pool, group, kind), count in list(self._saved.items()):
            yield f"{PREFIX}{name}{{{labels(pool=pool, group=group, kind=kind)}}} {count}"
        yield from header("response_cache_memory_bytes", "gauge", "Entries of response caches in memory.")
        yield f"{PREFIX}response_cache_memory_bytes {self.memory.bytes}"
        if self.store is None:
            return
        yield from header("response_cache_store_up", "gauge", "1 if lookups are sent to the store of response caches.")
        yield f"{PREFIX}response_cache_store_up {int(self.store.is_up)}"
        name = "response_cache_store_errors_total"
        yield from header(name, "counter", "Failed reads and writes of the store of response caches, by kind.")
        for error, count in list(self.store.errors.items()):
            yield f"{PREFIX}{name}{{{labels(kind=error)}}} {count}"

    async def close(self) -> None:
        """Stop lookups and close the store's connections."""
        for task in list(self._tasks):
            task.cancel()
        if self.store is not None:
            await self.store.close()
