"""Semantic response caches: the stored response of a request whose last user message means the same.

Theory of operation. A request that misses the exact cache may be similar to an earlier one of its scope: everything but
the text of the last user message is equal, the caller included. Its message is embedded, and the index names the most
similar earlier messages with their entries in the exact cache. The index is this process's own; with a store it also
gets the vectors of other processes (``vectors.py``).

In shadow, nothing of this is on the request's path: once its response is stored, a background task embeds the message,
compares the response with that of the most similar earlier one (a check, ``evidence.py``), and adds it to the index.

While serving, the message is embedded before the request is sent, within ``timeout_s``. Only part of the requests are
drawn for checks, before anything is known of them, so that checks are a fair sample at every similarity: these are
answered by a replica. Any other request that is similar enough gets the stored response. A request that follows one
with the same body shares its result.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import partial
from random import SystemRandom
from time import monotonic, time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from routing.log import defect
from routing.observability.metrics import PREFIX, header, labels
from routing.response_cache.embeddings import Balancer, Embedder, Vector, similarity_of
from routing.response_cache.evidence import (
    LEAST_SIMILARITY,
    CallerEvidence,
    Counts,
    Evidence,
    State,
    answer_of,
    compare,
)
from routing.response_cache.store import Pause
from routing.response_cache.vectors import SharedVectors, VectorIndex
from routing.schema import RouterConfig, SemanticCache, TaskGroupConfig, evidence_name, vectors_name

if TYPE_CHECKING:
    import re
    from random import Random

    from routing.response_cache.keys import CacheKey, Turn
    from routing.response_cache.memory import Entry
    from routing.response_cache.store import Store

BACKGROUND_S: Final = 5.0  # for an embedding that no request waits for
MAX_TASKS: Final = 64  # at the same time; further requests are not compared
INDEX_BYTES: Final = 256 << 20  # of all groups of this process

logger = logging.getLogger(__name__)

Get = Callable[[str], Awaitable["Entry | None"]]


class Similar(NamedTuple):
    """A stored response of a similar request."""

    entry: Entry
    name: str  # of the entry
    similarity: float


OnSimilar = Callable[["Similar | None"], bool]


class SemanticGroup:
    """The semantic cache of one task group."""

    def __init__(
        self,
        settings: SemanticCache,
        balancer: Balancer,
        evidence: Evidence,
        index: VectorIndex,
        vectors: SharedVectors | None,
        vectors_of: str,
    ) -> None:
        self.settings = settings
        self.vectors_of = vectors_of  # changes with what its vectors depend on
        self.evidence = evidence
        self.index = index
        self.vectors = vectors  # None: there is no store
        self.errors: Counter[str] = Counter()  # of embeddings, by kind
        self.lookups: Counter[str] = Counter()  # while serving, by result
        self.embedder = Embedder(balancer, settings.embedding_model, self.errors)
        self.patience = Pause()  # of requests that wait for their embeddings

    def configure(self, settings: SemanticCache) -> None:
        """Apply settings under which its vectors and its checks mean the same."""
        self.settings = settings
        self.index.max_entries = settings.max_entries
        self.evidence.configure(settings)

    async def share(self, evidence: CallerEvidence) -> None:
        """Exchange a caller's checks and vectors with other processes, where it is time to."""
        if evidence.should_share():
            await evidence.share()
        if self.vectors is not None and self.vectors.should_share():
            await self.vectors.share()

    def should_share(self, evidence: CallerEvidence) -> bool:
        """Whether ``share`` would do something."""
        return evidence.should_share() or (self.vectors is not None and self.vectors.should_share())


class SemanticLookup:
    """The use of a semantic cache by one request."""

    __slots__ = ("_caches", "_embedding", "_evidence", "_group", "_is_check", "_key", "_path", "_turn")

    def __init__(self, caches: SemanticCaches, group: SemanticGroup, key: CacheKey, turn: Turn) -> None:
        self._caches = caches
        self._group = group
        self._key, self._path = key.name, key.path
        self._turn = turn
        self._evidence = group.evidence.of(turn.caller)
        self._is_check = False
        self._embedding: asyncio.Task[list[Vector] | None] | None = None

    def start(self, on_similar: OnSimilar) -> bool:
        """Look for a similar request whose response may be served; False if there is nothing to wait for."""
        group, caches = self._group, self._caches
        if group.should_share(self._evidence):
            caches.run(group.share(self._evidence))
        is_serving = self._evidence.state is State.SERVING
        self._is_check = not is_serving or caches.random.random() < group.settings.check_rate
        if self._is_check or self._turn.scope not in group.index or not group.patience.may_ask(monotonic()):
            return False
        return caches.run(self._search(on_similar))

    def complete(self, entry: Entry | None, body: bytes, *, is_stream: bool) -> None:
        """A replica responded: check and index the response. ``entry``: what was stored of it."""
        if not self._caches.run(self._learn(entry, body, is_stream=is_stream)):
            self._group.errors["dropped"] += 1

    async def _search(self, on_similar: OnSimilar) -> None:
        found, result = None, "failed"
        try:
            found, result = await self._search_in_time()
        except Exception as error:  # noqa: BLE001 - the client gets a response in any case
            defect(logger, error, "semantic_cache")
        is_used = on_similar(found)
        self._group.lookups[result if is_used or found is None else "unusable"] += 1

    async def _search_in_time(self) -> tuple[Similar | None, str]:
        group = self._group
        task = self._embedding = asyncio.get_running_loop().create_task(self._embed([self._turn.text]))
        await asyncio.wait({task}, timeout=group.settings.timeout_s)
        if not task.done():
            group.patience.record_failure(monotonic())
            return None, "late"
        group.patience.record_success()
        vectors = task.result()
        if vectors is None:
            return None, "failed"
        found = await self._most_similar(vectors[0], group.settings.threshold)
        return found, "miss" if found is None else "hit"

    async def _learn(self, entry: Entry | None, body: bytes, *, is_stream: bool) -> None:
        group = self._group
        vectors = await (self._embedding or self._embed([self._turn.text]))
        if vectors is None:
            return
        if self._is_check:
            similar = await self._most_similar(vectors[0], LEAST_SIMILARITY)
            is_right = None if similar is None else await self._is_right(similar.entry, body, is_stream=is_stream)
            if similar is not None and is_right is not None:
                self._evidence.record(similar.similarity, is_right=is_right)
        if entry is not None:
            group.index.put(self._turn.scope, self._key, vectors[0], entry.expires_s, time())
            if group.vectors is not None:
                group.vectors.add(self._turn.scope, self._key, vectors[0], entry.expires_s)
            self._caches.limit_memory()
        await group.share(self._evidence)

    async def _is_right(self, stored: Entry, body: bytes, *, is_stream: bool) -> bool | None:
        """Whether the stored response says the same as the replica's; None if that is unknown."""
        one = answer_of(self._path, stored.body, is_stream=stored.is_stream)
        other = answer_of(self._path, body, is_stream=is_stream)
        if one is None or other is None:
            return None
        is_right = compare(one, other)
        if is_right is not None:
            return is_right
        vectors = await self._embed([one, other])
        return None if vectors is None else similarity_of(*vectors) >= self._group.settings.answer_similarity

    async def _embed(self, texts: list[str]) -> list[Vector] | None:
        return await self._group.embedder.embed(texts, BACKGROUND_S)

    async def _most_similar(self, vector: Vector, least: float) -> Similar | None:
        """The most similar request whose entry still exists, if it is similar enough."""
        index, scope = self._group.index, self._turn.scope
        for name, similarity in await index.nearest(scope, vector, time()):
            if similarity < least:
                break
            if name == self._key:
                continue
            entry = await self._caches.get(name)
            if entry is not None and time() < entry.expires_s:
                return Similar(entry, name, similarity)
            index.remove(scope, name)
        return None


class SemanticCaches:
    """The semantic caches of all task groups of one router process. ``get``: an entry of the exact cache."""

    def __init__(self, balancer: Balancer, store: Store | None, get: Get) -> None:
        self.get = get
        self.random: Random = SystemRandom()  # draws checks
        self._balancer = balancer
        self._store = store
        self._groups: dict[tuple[str, str], SemanticGroup] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def configure(self, config: RouterConfig) -> None:
        """Apply a configuration. Vectors and evidence are kept where they still mean the same."""
        self._groups = {
            (pool.name, group.name): self._configured((pool.name, group.name), group, settings, config.hash_secret)
            for pool in config.pools
            for group in pool.groups
            if (settings := group.semantic_cache) is not None and group.response_cache is not None
        }

    def _configured(
        self, names: tuple[str, str], group: TaskGroupConfig, settings: SemanticCache, secret: str
    ) -> SemanticGroup:
        version = group.response_cache.version if group.response_cache is not None else ""
        name_of = partial(evidence_name, secret, *names, version, settings)
        current = self._groups.get(names)
        if current is not None and current.evidence.name == name_of(""):
            current.configure(settings)
            return current
        vectors_of = vectors_name(secret, *names, settings)
        evidence = Evidence(names, settings, name_of, self._store)
        if current is not None and current.vectors_of == vectors_of:
            index, vectors = current.index, current.vectors
            index.max_entries = settings.max_entries
        else:
            index = VectorIndex(settings.max_entries)
            vectors = (
                None
                if self._store is None
                else SharedVectors(vectors_of, secret, self._store, index, self.limit_memory)
            )
        return SemanticGroup(settings, self._balancer, evidence, index, vectors, vectors_of)

    def has(self, names: tuple[str, str]) -> bool:
        """Whether a pool's task group has a semantic cache."""
        return names in self._groups

    def lookup(self, names: tuple[str, str], key: CacheKey) -> SemanticLookup | None:
        """The lookup of a request; None if its group has no semantic cache, or if the request cannot use one."""
        group = self._groups.get(names)
        return None if group is None or key.turn is None else SemanticLookup(self, group, key, key.turn)

    def run(self, work: Coroutine[Any, Any, None]) -> bool:
        """Do something in the background; False if too much is being done."""
        if len(self._tasks) >= MAX_TASKS:
            work.close()
            return False
        task = asyncio.get_running_loop().create_task(_logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    def forget(self, pattern: re.Pattern[str]) -> None:
        """Remove the vectors of the entries that a purge removes."""
        for group in self._groups.values():
            group.index.remove_matching(pattern)
            if group.vectors is not None:
                group.vectors.forget()

    def stream_of(self, pool: str, group: str) -> str | None:
        """The name of a task group's vectors in the store; None if it has none."""
        found = self._groups.get((pool, group))
        return None if found is None else found.vectors_of

    def limit_memory(self) -> None:
        """Let the largest index give up what it used least recently, while all of them are too large."""
        while sum(group.index.bytes for group in self._groups.values()) > INDEX_BYTES:
            max(self._groups.values(), key=lambda group: group.index.bytes).index.shrink()

    def lines(self) -> Iterator[str]:
        """Prometheus text; nothing if no group has a semantic cache."""
        if not self._groups:
            return
        groups = {labels(pool=pool, group=name): _samples(group) for (pool, name), group in self._groups.items()}
        for metric, kind, text in _METRICS:
            yield from header(f"semantic_cache_{metric}", kind, text)
            for names, samples in groups.items():
                for pairs, value in samples[metric].items():
                    if value is not None:
                        yield f"{PREFIX}semantic_cache_{metric}{{{names}{',' * bool(pairs)}{pairs}}} {value}"

    async def close(self) -> None:
        """Stop all background work."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _logged(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Exception as error:  # noqa: BLE001 - the loop would log arguments, which hold texts
        defect(logger, error, "semantic_cache")


# --- metrics ---

_METRICS: Final = (
    ("checks_total", "counter", "Checks, by similarity of requests and result."),
    ("shared_checks", "gauge", "Checks of all routers with the same store."),
    ("lookups_total", "counter", "Requests that were compared while serving, by result."),
    ("errors_total", "counter", "Embeddings that did not arrive, and checks dropped."),
    ("state", "gauge", "1 for each state in which callers of a group's semantic cache are."),
    ("recent_precision_ratio", "gauge", "Part of the latest checks that were right, of the least precise caller."),
    ("precision_lower_bound_ratio", "gauge", "Lower bound (95 %) of its precision."),
    ("window_checks", "gauge", "Checks that decide whether it is served."),
    ("index_entries", "gauge", "Requests that others are compared with."),
    ("index_bytes", "gauge", "Memory of their vectors."),
)


def _samples(group: SemanticGroup) -> dict[str, dict[str, float | None]]:
    """By metric: values by label pairs beside the group's; None: unknown."""
    evidence = group.evidence
    caller, states = evidence.least_precise, evidence.states
    return {
        "checks_total": _counts(evidence.counts),
        "shared_checks": _counts(evidence.shared_counts or Counts()),
        "lookups_total": {labels(result=result): number for result, number in sorted(group.lookups.items())},
        "errors_total": {labels(kind=kind): number for kind, number in sorted(group.errors.items())},
        "state": {labels(state=state): int(state in states) for state in State},
        "recent_precision_ratio": {"": None if caller is None else caller.recent_precision},
        "precision_lower_bound_ratio": {"": None if caller is None else caller.lower_bound},
        "window_checks": {"": None if caller is None else caller.checks},
        "index_entries": {"": len(group.index)},
        "index_bytes": {"": group.index.bytes},
    }


def _counts(counts: Counts) -> dict[str, float | None]:
    return {
        labels(similarity=similarity, result="right" if is_right else "wrong"): number
        for (similarity, is_right), number in sorted(counts.items())
    }
