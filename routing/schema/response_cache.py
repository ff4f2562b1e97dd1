"""Exact response caches: which responses of a task group are stored and served again, and the names of their entries.

An entry's name contains digests of its scope, so that a purge finds all entries of a group, model or namespace by a
prefix, and the store learns no name. Digests are keyed with the fleet's ``hash_secret``, which the store does not have.
"""

from __future__ import annotations

import hashlib
import hmac
from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta

from routing.schema.fields import Frozen, number

PREFIX: Final = "warmpath:responses:1"  # 1: the layout of entries, so that no release reads those of another
SCOPE_DIGEST_BYTES: Final = 8


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
    """Which entries of response caches a router removes: those of a task group, or of one model or namespace of it."""

    pool: str
    group: str
    model: str | None = None  # as engines know it; None: of all models
    namespace: str | None = None  # None: of all namespaces; "": of requests that name none
    dry_run: bool = False  # count entries, and remove none


class PurgeResult(Frozen, frozen=True):
    """What a router removed; of a dry run, what it would have removed."""

    memory_entries: int  # in the memory of all its processes
    store_entries: int | None = None  # None: it has no store
    remaining_entries: int | None = None  # in the store, by a second scan; None: no store, or not counted
    problem: str | None = None  # why entries may be left; None: the purge is complete


def derived_key(hash_secret: str, purpose: str) -> bytes:
    """32 bytes for one purpose, derived from the fleet's secret."""
    return hmac.digest(bytes.fromhex(hash_secret), f"warmpath {purpose}".encode(), "sha256")


def entry_prefix(
    hash_secret: str, pool: str, group: str, *, model: str | None = None, namespace: str | None = None
) -> str:
    """What the names of a group's entries begin with, or match with ``*`` for any model; see ``entry_name``."""
    key = derived_key(hash_secret, "response cache names")
    parts = [_digest(key, "group", pool, group)]
    if model is not None or namespace is not None:
        parts.append("*" if model is None else _digest(key, "model", model))
    if namespace is not None:
        parts.append(_digest(key, "namespace", namespace))
    return ":".join((PREFIX, *parts)) + ":"


def _digest(key: bytes, kind: str, *names: str) -> str:
    text = "\0".join((kind, *names)).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=SCOPE_DIGEST_BYTES, key=key).hexdigest()
