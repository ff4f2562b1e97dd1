"""What a request asks of the response cache: ``Cache-Control`` (RFC 9111), and ``cache`` in its body."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from routing.types import BodyError

MAX_NAMESPACE_CHARS = 128


class CacheOptions(NamedTuple):
    """Options of one request, within the limits of its task group."""

    ttl_s: int  # of the entry that its response becomes
    namespace: str = ""
    max_age_s: int | None = None  # the oldest entry that it accepts; None: any
    may_load: bool = True
    may_store: bool = True
    is_asked_for: bool = False  # its body asks for the cache


def read_options(member: Any, header: str, ttl_s: int) -> CacheOptions | None:
    """Options of the ``cache`` member (None: absent) and ``Cache-Control``; None if the request may not use the cache.

    ``ttl_s``: the task group's. BodyError for a malformed member, which would otherwise be ignored unnoticed.
    """
    directives = _directives(header)
    if "no-store" in directives or member is False:
        return None
    asked_ttl_s, namespace = _read_member(member)
    return CacheOptions(
        ttl_s if asked_ttl_s is None else min(ttl_s, asked_ttl_s),
        namespace,
        _seconds(directives.get("max-age")),
        may_load="no-cache" not in directives,
        is_asked_for=member is not None,
    )


def without_options(body: bytes) -> bytes:
    """A JSON body without the ``cache`` member, which some engines reject; the same object if it has none."""
    if b'"cache"' not in body:
        return body
    members = msgspec.json.decode(body)
    if not isinstance(members, dict) or "cache" not in members:
        return body
    return msgspec.json.encode({name: value for name, value in members.items() if name != "cache"})


def _read_member(member: Any) -> tuple[int | None, str]:
    if member is None or member is True:
        return None, ""
    if not isinstance(member, dict) or set(member) - {"ttl_s", "namespace"}:
        raise BodyError("cache", "expected true, false, or an object with ttl_s and namespace")
    ttl_s, namespace = member.get("ttl_s"), member.get("namespace", "")
    if ttl_s is not None and (not isinstance(ttl_s, int) or isinstance(ttl_s, bool) or ttl_s < 1):
        raise BodyError("cache.ttl_s", "expected a whole number of seconds, at least 1")
    if not isinstance(namespace, str) or len(namespace) > MAX_NAMESPACE_CHARS:
        raise BodyError("cache.namespace", f"expected a text of at most {MAX_NAMESPACE_CHARS} characters")
    return ttl_s, namespace


def _directives(header: str) -> dict[str, str]:
    parts = (part.strip().partition("=") for part in header.lower().split(","))
    return {name.strip(): value.strip().strip('"') for name, _, value in parts if name}


def _seconds(text: str | None) -> int | None:
    """A directive's seconds. A malformed value counts as 0: the entry is then stale (RFC 9111, 4.2.1)."""
    if text is None:
        return None
    return int(text) if text.isascii() and text.isdigit() else 0
