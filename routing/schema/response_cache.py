"""Response caches: which responses of a task group are stored and served again, and the names of their entries.

An entry's name contains digests of its scope, so that a purge finds all entries of a group, model or namespace by a
prefix, and the store learns no name. Digests are keyed with the fleet's ``hash_secret``, which the store does not have.
"""

from __future__ import annotations

import hashlib
import hmac
from enum import StrEnum
from math import sqrt
from typing import Annotated, Final

from msgspec import Meta

from routing.schema.fields import Frozen, Model, Name, number, seconds

PREFIX: Final = "warmpath:responses:1"  # 1: the layout of entries, so that no release reads those of another
EVIDENCE_PREFIX: Final = "warmpath:semantic:1"
SCOPE_DIGEST_BYTES: Final = 8
CACHE_KEY_PATTERN: Final = r"^[0-9a-f]{16,64}$"  # of an entry, as responses name it


class CacheWhen(StrEnum):
    """Which requests of a task group may be answered from its response cache."""

    DETERMINISTIC = "deterministic"
    REQUESTED = "requested"


class ToolCalls(StrEnum):
    """Whether responses with tool calls are stored."""

    SKIP = "skip"
    STORE = "store"


class ResponseCache(Frozen, frozen=True):
    """The exact response cache of a task group. Off unless the group has one."""

    when: Annotated[
        CacheWhen,
        Meta(
            description="deterministic: requests with temperature 0 or a seed, embeddings and scores, and requests "
            "that ask for it with `cache` in their body; requested: only those that ask."
        ),
    ] = CacheWhen.DETERMINISTIC
    ttl_s: Annotated[
        int, number("seconds", 1, 2_592_000, "How long a response is served; clients may ask for less.")
    ] = 3600
    max_entry_bytes: Annotated[int, number("bytes", 1024, 8 << 20, "Larger responses are not stored.")] = 262_144
    tool_calls: Annotated[
        ToolCalls,
        Meta(
            description="store: responses with tool calls are stored too, so that clients run the same calls again; "
            "skip: they are not."
        ),
    ] = ToolCalls.SKIP
    version: Annotated[
        str,
        Meta(
            max_length=64,
            description="Any text. Entries of another version are not served: change it when the engines load other "
            "weights or another chat template under the same model name.",
        ),
    ] = ""


class CachePurge(Frozen, frozen=True):
    """Which entries of response caches a router removes: those of a task group, of a model or namespace, or one."""

    pool: str
    group: str
    model: str | None = None  # as engines know it; None: of all models
    namespace: str | None = None  # None: of all namespaces; "": of requests that name none
    key: Annotated[str, Meta(pattern=CACHE_KEY_PATTERN)] | None = None  # of one entry; None: of all
    dry_run: bool = False  # count entries, and remove none


class PurgeResult(Frozen, frozen=True):
    """What a router removed; of a dry run, what it would have removed."""

    memory_entries: int  # in the memory of all its processes
    store_entries: int | None = None  # None: it has no store
    remaining_entries: int | None = None  # in the store, by a second scan; None: no store, or not counted
    problem: str | None = None  # why entries may be left; None: the purge is complete


class SemanticMode(StrEnum):
    """What a semantic cache does with the stored response of a similar request."""

    SHADOW = "shadow"
    SERVE = "serve"


class SemanticCache(Frozen, frozen=True):
    """The semantic response cache of a task group, beside its exact one. Off unless the group has one.

    Two requests are compared that differ only in the text of their last user message.
    """

    embedding_pool: Annotated[Name, Meta(description="The pool that computes embeddings, at /v1/embeddings.")]
    embedding_model: Annotated[Model, Meta(description="The embedding model, as requests to that pool name it.")]
    mode: Annotated[
        SemanticMode,
        Meta(
            description="shadow: similar requests are found and their responses compared, but none is served; "
            "serve: they are served while the measured precision allows it."
        ),
    ] = SemanticMode.SHADOW
    threshold: Annotated[
        float,
        number("cosine similarity", 0.7, 1, "Least similarity of two last user messages that get the same response."),
    ] = 0.95
    min_precision: Annotated[
        float,
        number(
            "ratio", 0.5, 0.9999, "Responses are served only while at least this part of the checked ones is right."
        ),
    ] = 0.98
    min_checks: Annotated[
        int, number("checks", 20, 2000, "Checks at or above the threshold that are needed before any is served.")
    ] = 200
    check_rate: Annotated[
        float,
        number("ratio", 0.001, 1, "Part of the requests that a replica answers all the same while serving, as checks."),
    ] = 0.01
    answer_similarity: Annotated[
        float,
        number("cosine similarity", 0.5, 1, "Two responses with other words count as the same from this similarity."),
    ] = 0.9
    timeout_s: Annotated[
        float, seconds("How long a request waits for its embedding while serving; then it is a miss.", maximum=5)
    ] = 0.05
    max_entries: Annotated[
        int, number("requests", 10, 100_000, "Requests that each process of a router compares with.")
    ] = 10_000


CONFIDENCE_Z: Final = 1.96  # of 95 %


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """The 95 % interval of a ratio by its observed successes; (0, 1) without any trial (Wilson, 1927)."""
    if not trials:
        return 0.0, 1.0
    ratio, weight = successes / trials, CONFIDENCE_Z**2 / trials
    centre, margin = ratio + weight / 2, CONFIDENCE_Z * sqrt(ratio * (1 - ratio) / trials + weight / (4 * trials))
    return max(0.0, (centre - margin) / (1 + weight)), min(1.0, (centre + margin) / (1 + weight))


def derived_key(hash_secret: str, purpose: str) -> bytes:
    """32 bytes for one purpose, derived from the fleet's secret."""
    return hmac.digest(bytes.fromhex(hash_secret), f"warmpath {purpose}".encode(), "sha256")


def entry_prefix(
    hash_secret: str,
    pool: str,
    group: str,
    *,
    model: str | None = None,
    namespace: str | None = None,
    key: str | None = None,
) -> str:
    """What the names of a group's entries begin with; ``*`` in it stands for any model or namespace.

    ``key``: of one entry, or its beginning.
    """
    secret = derived_key(hash_secret, "response cache names")
    parts = [_digest(secret, "group", pool, group)]
    if model is not None or namespace is not None or key is not None:
        parts.append("*" if model is None else _digest(secret, "model", model))
    if namespace is not None or key is not None:
        parts.append("*" if namespace is None else _digest(secret, "namespace", namespace))
    return ":".join((PREFIX, *parts, key or ""))


def evidence_name(
    hash_secret: str, pool: str, group: str, version: str, settings: SemanticCache, caller: str = ""
) -> str:
    """The name under which routers share checks of a group's semantic cache: others, once a setting differs.

    ``caller``: of its requests alone; "": of all callers.
    """
    key = derived_key(hash_secret, "response cache names")
    names = pool, group, version, settings.embedding_pool, settings.embedding_model
    limits = f"{settings.threshold:g}", f"{settings.answer_similarity:g}"
    return f"{EVIDENCE_PREFIX}:{_digest(key, 'evidence', *names, *limits, *filter(None, [caller]))}"


def vectors_name(hash_secret: str, pool: str, group: str, settings: SemanticCache) -> str:
    """The name under which routers share the vectors of a group's semantic cache: others, for another model."""
    names = pool, group, settings.embedding_pool, settings.embedding_model
    return f"{EVIDENCE_PREFIX}:{_digest(derived_key(hash_secret, 'response cache names'), 'vectors', *names)}:vectors"


def _digest(key: bytes, kind: str, *names: str) -> str:
    text = "\0".join((kind, *names)).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=SCOPE_DIGEST_BYTES, key=key).hexdigest()
