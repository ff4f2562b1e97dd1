"""Which paths a pool serves, where its requests name their session, and which web pages may send them.

``DEFAULT_SESSION_KEYS`` is the order of pools that set none. A header is named in any case, as ``header:X-Session-ID``;
a field of the body as ``body:user``. Ids that differ in each request of a session are rejected: they would spread a
conversation over all replicas.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Final

from msgspec import Meta

from routing.schema.fields import ConfigError, matching

SessionKey = Annotated[str, Meta(max_length=128)]
MAX_ORIGINS: Final = 100  # of one pool
ANY_ORIGIN: Final = "*"
Origin = Annotated[
    str,
    matching(
        r"(\*|[a-z][a-z0-9+.-]{0,31}://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[1-9][0-9]{0,4})?)",
        form="* or scheme://host[:port] in lower case, without a path",
        max_length=256,
    ),
]
_DEFAULT_PORTS: Final = {"http": ":80", "https": ":443"}

SESSION_FIELDS: Final = (
    *("prompt_cache_key", "session_id", "conversation", "user", "metadata.session_id", "metadata.user_id"),
)
DEFAULT_SESSION_KEYS: Final = (
    "header:x-session-id",
    "header:x-claude-code-session-id",
    "header:session-id",
    "header:session_id",
    "header:x-session-affinity",
    *(f"body:{field}" for field in SESSION_FIELDS),
)

# Headers of tracing: they differ in each request, and also in each response.
TRACE_HEADERS: Final = (
    *("traceparent", "tracestate", "baggage", "b3", "x-b3-traceid", "x-b3-spanid", "x-b3-parentspanid"),
    *("x-amzn-trace-id", "x-cloud-trace-context", "x-datadog-trace-id", "x-datadog-parent-id", "x-datadog-tags"),
    *("uber-trace-id", "sentry-trace", "elastic-apm-traceparent", "newrelic"),
)
PER_REQUEST_HEADERS: Final = (
    *(*TRACE_HEADERS, "x-request-id", "x-client-request-id", "x-correlation-id", "idempotency-key"),
)
# Credentials, framing, and headers that only a trusted hop may set.
_UNREAD_HEADERS: Final = frozenset(
    {"authorization", "api-key", "x-api-key", "proxy-authorization", "host", "forwarded", "x-real-ip", "expect"}
    | {"connection", "keep-alive", "proxy-authenticate", "proxy-connection", "te", "trailer", "transfer-encoding"}
    | {"upgrade", "content-length", "content-encoding", "date"}
)
_UNREAD_PREFIXES: Final = ("x-forwarded-", "x-user-", "x-warmpath-")
_header_name: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}").fullmatch


def check_session_keys(keys: Sequence[str], path: str) -> None:
    """Check that each key can name a session, and that none is listed twice; ConfigError."""
    seen: set[str] = set()
    for at, key in enumerate(keys):
        kind, _, name = key.partition(":")
        reason = None
        if kind == "header":
            reason = _header_problem(name)
        elif kind != "body" or name not in SESSION_FIELDS:
            fields = ", ".join(f"body:{field}" for field in SESSION_FIELDS)
            reason = f"expected header:NAME or one of {fields}, not {key[:64]!r}"
        if reason is None and key.lower() in seen:
            reason = f"{key!r} is listed twice"
        if reason is not None:
            raise ConfigError(f"{path}[{at}]", reason)
        seen.add(key.lower())


def _header_problem(name: str) -> str | None:
    """Why a header cannot name a session; None if it can."""
    if not _header_name(name):
        return f"{name[:64]!r} is not the name of a header"
    generic = name.lower().replace("_", "-")
    if generic in PER_REQUEST_HEADERS:
        return f"{name} differs in each request, so it does not identify a session"
    if generic in _UNREAD_HEADERS or generic.startswith(_UNREAD_PREFIXES):
        return f"{name} is a credential, part of the message's framing, or set by proxies; it cannot name a session"
    return None


def check_paths(paths: Sequence[str], path: str) -> None:
    """Check that a pool serves at least one path; ConfigError."""
    if not paths:
        raise ConfigError(path, "a pool without paths serves nothing; use null for all")


def check_origins(origins: Sequence[str], path: str) -> None:
    """Check that browsers send each origin in this form, and that none is listed twice; ConfigError."""
    for at, origin in enumerate(origins):
        scheme, _, rest = origin.partition("://")
        port = _DEFAULT_PORTS.get(scheme)
        if port is not None and rest.endswith(port):
            raise ConfigError(f"{path}[{at}]", f"browsers leave out the port {port[1:]} of {scheme}: leave it out, too")
        if origin in origins[:at]:
            raise ConfigError(f"{path}[{at}]", f"{origin!r} is listed twice")
