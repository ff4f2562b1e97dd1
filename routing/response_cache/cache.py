"""The response caches of a router: lookups, single flight, and storing of responses.

Theory of operation. The first request that misses an entry is the leader of a flight; requests for the same entry that
arrive before its response is complete follow it, so that identical requests at the same time cost one prefill. If the
leader's response is stored, it answers the followers. If it may not be stored, or if the leader failed or its client
disconnected, all followers are sent to replicas: one after the other would add up their failures. So is a follower that
has waited for as long as it would wait for a replica. A flight belongs to one process.

Parsing a request costs several times a hit. A bounded memo maps the digest of a request's bytes to its key, so that the
same bytes are answered from memory without being parsed. A new configuration clears it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from enum import Enum, StrEnum
from functools import partial
from time import monotonic, time
from typing import TYPE_CHECKING, Final, NamedTuple

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from routing.observability.metrics import PREFIX, header, labels
from routing.response_cache.evidence import uses_semantic_caches
from routing.response_cache.keys import CacheKey, CacheKeys, Scope, key_of_name
from routing.response_cache.memory import MEMORY_S, Entry, MemoryLevel, StorePurge, body_for, entry_of, pattern_of
from routing.schema import CachePurge, GroupMatch, ResponseCache, RouterConfig, derived_key, entry_prefix

if TYPE_CHECKING:
    from routing.http.request import Request
    from routing.response_cache.embeddings import Balancer
    from routing.response_cache.semantic import SemanticCaches, SemanticLookup, Similar
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
    key: bytes  # of its entry
    age_s: int
    similarity: float | None  # of the request that it was made for; None: the same request


class Flight:
    """The requests that wait for the response of one that is being served."""

    __slots__ = ("followers", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.followers: dict[CacheLookup, None] = {}  # in the order of their arrival


class CacheLookup:
    """The use of a cache by one request, from the lookup to the end of its response."""

    __slots__ = (
        "_body", "_body_bytes", "_caches", "_flight", "_is_leader", "_is_stale", "_name", "_on_result", "_purges",
        "_semantic", "_similarity", "_timer", "group", "key", "pool", "response", "result", "settings",
    )  # fmt: skip

    def __init__(
        self,
        caches: ResponseCaches,
        scope: tuple[str, str],
        settings: ResponseCache,
        key: CacheKey | None,
        on_result: Callable[[], None],
        semantic: SemanticLookup | None = None,
    ) -> None:
        self.pool, self.group = scope
        self.settings = settings
        self.key = key  # None: the request may not use the cache
        self.response: CachedResponse | None = None
        self.result = Result.BYPASS
        self._caches = caches
        self._on_result = on_result
        self._purges = caches.purges
        self._semantic = semantic  # None: only an identical request's response is served
        self._similarity: float | None = None
        self._name = "" if key is None else key.name  # of the entry that is served
        self._is_stale = False  # an entry was found, and is too old
        self._flight: Flight | None = None
        self._is_leader = False
        self._timer: asyncio.TimerHandle | None = None  # while it waits for a result
        self._body: list[bytes] | None = None  # of the response, while it is recorded
        self._body_bytes = 0

    @property
    def began_before_purge(self) -> bool:
        """Whether its entry may be older than the last purge, and is not stored."""
        return self._purges != self._caches.purges

    @property
    def header_lines(self) -> bytes:
        """Header lines of a replica's response."""
        result = "stale" if self._is_stale else self.result.value
        lines = b"X-Warmpath-Cache: %b\r\n" % result.encode()
        return lines if self.key is None else lines + b"X-Warmpath-Cache-Key: %b\r\n" % key_of_name(self.key.name)

    # --- lookup ---

    def start(self, max_wait_s: float) -> Progress:
        """Look for a response in memory, then among running requests, then in the store; in ``max_wait_s`` at most."""
        caches, key = self._caches, self.key
        if key is None or not key.options.may_load:
            return Progress.MISSING
        self.result = Result.MISS
        if self.use(caches.memory.get(key.name, monotonic())):
            return Progress.FOUND
        flight = caches.flights.get(key.name)
        if flight is not None:
            self._flight = flight
            flight.followers[self] = None
        else:
            self._flight = caches.flights[key.name] = Flight(key.name)
            self._is_leader = True
            if not (caches.ask_store(self) or self._look_for_similar()):
                return Progress.MISSING
        self._timer = asyncio.get_running_loop().call_later(max_wait_s, self._end_wait)
        return Progress.WAITING

    def _end_wait(self) -> None:
        """Report what was found. A leader without a response still responds to its followers."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._is_leader:
            self._end_flight(None)
        self._on_result()

    def _look_for_similar(self) -> bool:
        """Look for the response of a similar request; False if there is nothing to wait for."""
        return self._semantic is not None and self._semantic.start(self.on_similar)

    def on_similar(self, similar: Similar | None) -> bool:
        """Called with the response of a similar request, None: a replica has to respond. Whether it is used."""
        if self._timer is None:
            return False  # its client has disconnected
        if similar is not None:
            name, self._similarity, self._name = self._name, similar.similarity, similar.name
            if self.use(similar.entry):
                self._end_flight(similar.entry)
            else:
                self._similarity, self._name = None, name
        self._end_wait()
        return self.response is not None

    def on_entry(self, entry: Entry | None) -> None:
        """Called with the store's entry, or with that of the flight's leader; None: a replica has to respond."""
        if self._timer is None:
            return  # its client has disconnected, or it has waited for too long
        if self.use(entry):
            self._end_flight(entry)
        elif self._is_leader and self._look_for_similar():
            return
        self._end_wait()

    def use(self, entry: Entry | None) -> bool:
        """Respond with an entry, if it is fresh enough and can be sent in the form that the client asked for."""
        key = self.key
        if entry is None or key is None:
            return False
        now = time()
        age_s = max(0, int(now - entry.created_s))
        is_expired = now >= min(entry.expires_s, entry.created_s + self.settings.ttl_s)
        if is_expired or (key.options.max_age_s is not None and age_s > key.options.max_age_s):
            self._is_stale = True
            return False
        body = body_for(key, entry)
        if body is None:
            return False
        content_type = STREAM if key.is_stream else JSON
        self.response = CachedResponse(body, content_type, key_of_name(self._name), age_s, self._similarity)
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
            self.stop_recording()

    def stop_recording(self) -> None:
        """Do not store the response: the followers need not wait for its end."""
        self._body = None
        self._end_flight(None)

    def complete(self, *, is_stream: bool) -> None:
        """The response is complete: store it if it may be stored, and respond to the followers with it."""
        body, self._body = self._body, None
        entry = None
        if body is not None and self.key is not None:
            whole = b"".join(body)
            entry = entry_of(self.key, self.settings, whole, is_stream=is_stream)
            stored = None if self.began_before_purge else entry
            if stored is not None:
                self._caches.put(self.key, stored)
            if self._semantic is not None:
                self._semantic.complete(stored, whole, is_stream=is_stream)
        self._end_flight(entry)

    def end(self) -> None:
        """The request has ended. If it was to respond to a flight and did not, its followers go to replicas."""
        self._caches.count(self)
        self._body = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._end_flight(None)

    def _end_flight(self, entry: Entry | None) -> None:
        """Respond to the followers with an entry; None: replicas have to. A follower leaves its flight."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        if not self._is_leader:
            flight.followers.pop(self, None)
            return
        self._caches.remove_flight(flight)
        for follower in list(flight.followers):
            follower._follow(entry, self._similarity, self._name)  # noqa: SLF001 - of the same class

    def _follow(self, entry: Entry | None, similarity: float | None, name: str) -> None:
        """Respond as the leader of its flight, unless that got a similar request's response and this one wants none."""
        self._similarity, self._name = similarity, name
        self.on_entry(entry if similarity is None or self._semantic is not None else None)


class ResponseCaches:
    """The response caches of all task groups of one router process."""

    def __init__(self, store: Store | None, balancer: Balancer) -> None:
        self.semantic: SemanticCaches | None = None  # None: no task group has had one
        self._balancer = balancer
        self.store = store  # None: entries are in this process's memory alone
        self.memory = MemoryLevel(None if store is None else MEMORY_S)
        self.flights: dict[str, Flight] = {}
        self.purges = 0
        self._settings: dict[tuple[str, str], ResponseCache] = {}
        self._secret = ""
        self._names: frozenset[str] | None = frozenset()  # of groups that requests have to name; None: not only by name
        self._memo: dict[bytes, tuple[tuple[str, str], ResponseCache, CacheKey]] = {}
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
        if self.semantic is not None or uses_semantic_caches(config):
            self._configure_semantic(config)
        is_named_only = config.access is None and all(
            group.match == GroupMatch() for pool in config.pools for group in pool.groups if group.response_cache
        )
        self._names = frozenset(group for _, group in self._settings) if is_named_only else None
        return bool(self._settings)

    def _configure_semantic(self, config: RouterConfig) -> None:
        if self.semantic is None:
            from routing.response_cache.semantic import SemanticCaches  # noqa: PLC0415 - needs numpy

            self.semantic = SemanticCaches(self._balancer, self.store, self.get)
        self.semantic.configure(config)

    def lookup_known(self, request: Request, on_result: Callable[[], None]) -> CacheLookup | None:
        """The lookup of a request whose bytes came before, if its entry is in memory; else None.

        Requests that may belong to a task group with a cache get a digest; large ones are never cached.
        """
        if (self._names is not None and request.head.task_group not in self._names) or request.is_large:
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
        semantic = self.semantic
        with_turn = semantic is not None and semantic.has(names)
        key: CacheKey | None = self._keys.key_of(request, scope, settings, with_turn=with_turn)
        if key is None:
            return CacheLookup(self, names, settings, key, on_result)
        if len(self._memo) >= MEMO_ENTRIES:
            self._memo.clear()
        self._memo[request.cache_digest] = names, settings, key._replace(turn=None)  # without text
        similar = semantic.lookup(names, key) if semantic is not None else None
        return CacheLookup(self, names, settings, key._replace(turn=None), on_result, similar)

    def explain(self, request: Request, scope: Scope) -> dict[str, bool | str | None] | None:
        """Whether a request may use its group's cache, its key, and whether its entry is in memory now.

        None without a cache.
        """
        settings = self._settings.get((scope.pool, scope.group))
        if settings is None:
            return None
        key = self._keys.key_of(request, scope, settings)
        entry = None if key is None else self.memory.get(key.name, monotonic())
        return {
            "is_cacheable": key is not None,
            "is_in_memory": entry is not None and time() < entry.expires_s,
            "key": None if key is None else key_of_name(key.name).decode(),
        }

    def remove_flight(self, flight: Flight) -> None:
        """No later request follows this flight. After a purge a newer one may have its name, and stays."""
        if self.flights.get(flight.name) is flight:
            del self.flights[flight.name]

    def ask_store(self, lookup: CacheLookup) -> bool:
        """Ask the store for a lookup's entry; the lookup hears of the result later. False without a store."""
        key, store = lookup.key, self.store
        return (
            key is not None
            and store is not None
            and store.ask(key.name, self._cipher, partial(self._on_stored_entry, lookup, key.name))
        )

    def _on_stored_entry(self, lookup: CacheLookup, name: str, entry: Entry | None) -> None:
        if entry is not None and not lookup.began_before_purge:
            self.memory.put(name, entry, monotonic())
        lookup.on_entry(entry)

    async def get(self, name: str) -> Entry | None:
        """An entry from memory, else from the store; the caller checks its expiry."""
        entry = self.memory.get(name, monotonic())
        return entry if entry is not None or self.store is None else await self.store.get(name, self._cipher)

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
            if self.semantic is not None:
                self.semantic.forget(pattern)
            for name in [name for name in self.flights if pattern.match(name)]:
                del self.flights[name]
            if self.store is not None:
                await self.store.settle()
        return len(names)

    async def purge_store(self, purge: CachePurge) -> StorePurge | None:
        """Remove the entries of a purge from the store, and its task group's vectors; None without a store."""
        if self.store is None:
            return None
        vectors = None
        if self.semantic is not None and purge.key is None:  # one vector without an entry is no hit
            vectors = self.semantic.stream_of(purge.pool, purge.group)
        return await self.store.purge(self._prefix_of(purge), vectors, dry_run=purge.dry_run)

    def _prefix_of(self, purge: CachePurge) -> str:
        scope = purge.pool, purge.group
        return entry_prefix(self._secret, *scope, model=purge.model, namespace=purge.namespace, key=purge.key)

    def count(self, lookup: CacheLookup) -> None:
        """Count a request that has ended, by its result."""
        self._requests[lookup.pool, lookup.group, lookup.result] += 1

    def count_saved(self, lookup: CacheLookup, entry: Entry) -> None:
        for kind, tokens in (("prompt", entry.prompt_tokens), ("generated", entry.generated_tokens)):
            if tokens is not None:
                self._saved[lookup.pool, lookup.group, kind] += tokens

    def lines(self) -> Iterator[str]:
        """Prometheus text; of exact caches nothing before the first request of a group with one."""
        if self.semantic is not None:
            yield from self.semantic.lines()
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
        if self.semantic is not None:
            await self.semantic.close()
        if self.store is not None:
            await self.store.close()
