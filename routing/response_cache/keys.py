"""Whether a request may be answered from a response cache, what it asks of the cache, and the name of its entry.

Two requests have the same entry if nothing that determines the response differs. The name covers every member of the
body but those of ``IRRELEVANT``, whose values do not reach the model, so a member that this release does not know is
covered too. It also covers path, pool, task group, model and whose request it is: the tenant of its API key, else the
key, else the credentials that it sends to the engine. A caller therefore
never gets a response that another caller's request produced.

Decision records have digests of these names, from which the control plane computes what a cache would bring before any
task group has one (``RequestDigests``).
"""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from routing.log import defect
from routing.observability.decision_log import DigestSampler
from routing.paths import ChatBody, Endpoint, MessagesBody
from routing.schema import CacheWhen, ResponseCache, derived_key, entry_prefix
from routing.types import BodyError

if TYPE_CHECKING:
    from routing.http.request import Request

# Members that concern the delivery or the sender and do not change what the model generates.
IRRELEVANT: Final = frozenset(
    {"stream", "stream_options", "cache", "user", "metadata", "session_id", "prompt_cache_key", "safety_identifier"}
    | {"request_id", "priority"}
)
WITH_TURNS: Final = (ChatBody, MessagesBody)
QUOTING: Final = ("echo", "prompt_logprobs", "return_token_ids")  # members for a response that contains the prompt
MAX_TURN_CHARS: Final = 8192
LENGTH_LIMITS: Final = ("max_tokens", "max_completion_tokens")
DIGEST_BYTES: Final = 32
KEY_CHARS: Final = 16  # of the digest in an entry's name, which clients see
MAX_NAMESPACE_CHARS: Final = 128
MAX_SECONDS: Final = 1 << 31  # longer times count as this one (RFC 9111, 1.2.2)
_SECONDS_DIGITS: Final = 11  # at least one more than it has
_LEVEL_BITS: Final = 6  # of a digest
_DEFAULTS: Final = ResponseCache()

logger = logging.getLogger(__name__)


class Scope(NamedTuple):
    """Whose request it is, and for what."""

    pool: str
    group: str
    model: str
    tenant: str  # of the API key; "": none
    key: str  # name of the API key; "": none
    credentials: bytes  # header lines that engines may check, where the router checks no keys

    @classmethod
    def of(cls, request: Request, pool: str, group: str, model: str) -> Scope:
        """The scope of an admitted request."""
        grant = request.grant
        credentials = request.head.credentials() if grant is None else b""
        tenant = "" if grant is None else grant.tenant or ""
        key = "" if grant is None or tenant else grant.name
        return cls(pool, group, model, tenant, key, credentials)


class CacheOptions(NamedTuple):
    """Options of one request, within the limits of its task group."""

    ttl_s: int  # of the entry that its response becomes
    namespace: str = ""
    max_age_s: int | None = None  # the oldest entry that it accepts; None: any
    may_load: bool = True
    is_asked_for: bool = False  # its body asks for the cache
    is_exact: bool = False  # responses of similar requests are not wanted


class Turn(NamedTuple):
    """The last user message of a request, for comparison with others of the same scope."""

    scope: bytes  # digest of everything else
    text: str
    caller: str  # whose requests count as evidence for it


class CacheKey(NamedTuple):
    """The entry of a request, and what the request asks of the cache."""

    name: str
    path: bytes
    is_stream: bool
    wants_usage: bool  # of a stream
    has_length_limit: bool  # the request itself limits the response
    options: CacheOptions
    turn: Turn | None = None  # None: only an identical request may get its response


def key_of_name(name: str) -> bytes:
    """The key of an entry, by which clients and operators name it: the beginning of the last part of its name."""
    return name.rpartition(":")[2][:KEY_CHARS].encode()


class CacheKeys:
    """Makes the keys of requests, under one ``hash_secret``."""

    def __init__(self, hash_secret: str) -> None:
        self._secret = hash_secret
        self._digest_key = derived_key(hash_secret, "response cache digests")

    def digest_of(self, request: Request) -> bytes:
        """Identifies a request by its bytes: everything that its key follows from, under one configuration."""
        head, grant = request.head, request.grant
        digest = hashlib.blake2b(request.body, digest_size=DIGEST_BYTES, key=self._digest_key)
        digest.update(_joined(head.path, head.lines, head.task_group or "", "" if grant is None else grant.name))
        return digest.digest()

    def key_of(
        self, request: Request, scope: Scope, settings: ResponseCache, *, with_turn: bool = False
    ) -> CacheKey | None:
        """The key of a request; None if it may not be answered from the cache. BodyError for malformed options."""
        path, body, endpoint = request.head.path, request.body, request.head.endpoint
        if endpoint is None or not endpoint.is_cacheable:
            return None
        try:
            members = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None  # in a part that placement does not read: the engine responds
        if not isinstance(members, dict):
            return None
        header = request.head.header(b"cache-control") or ""
        options = read_options(members.get("cache"), header, settings.ttl_s)
        if options is None or not may_cache(endpoint, members, settings, asks=options.is_asked_for):
            return None
        relevant = {name: value for name, value in members.items() if name not in IRRELEVANT}
        covered = _joined(path, *scope, settings.version, options.namespace)
        turn = None
        if with_turn and not options.is_exact and options.may_load and (parts := split_last_turn(endpoint, relevant)):
            digest = self._digest(parts[0], _joined(covered, "last turn")).digest()
            turn = Turn(digest, parts[1], self._caller_of(scope))
        prefix = entry_prefix(self._secret, scope.pool, scope.group, model=scope.model, namespace=options.namespace)
        stream_options = members.get("stream_options")
        return CacheKey(
            prefix + self._digest(relevant, covered).hexdigest(),
            path,
            members.get("stream") is True,
            isinstance(stream_options, dict) and stream_options.get("include_usage") is True,
            any(isinstance(members.get(name), int) for name in LENGTH_LIMITS),
            options,
            turn,
        )

    def _caller_of(self, scope: Scope) -> str:
        """Names the caller in logs. Credentials are secret: of them a digest."""
        if scope.tenant or scope.key:
            return f"tenant {scope.tenant}" if scope.tenant else f"key {scope.key}"
        return hashlib.blake2b(scope.credentials, digest_size=8, key=self._digest_key).hexdigest()

    def _digest(self, members: dict[str, Any], covered: bytes) -> hashlib.blake2b:
        digest = hashlib.blake2b(
            msgspec.json.encode(members, order="sorted"), digest_size=DIGEST_BYTES, key=self._digest_key
        )
        digest.update(covered)
        return digest


class RequestDigests:
    """Digests of the entries that an exact cache with the default settings would have, for decision records.

    A digest costs as much as a cache lookup, so a ``DigestSampler`` chooses the requests. The last bits of a digest are
    the highest level at which it is computed, so that records of several levels can be reduced to the smallest part.
    """

    def __init__(self, hash_secret: str) -> None:
        self.hash_secret = hash_secret
        self._keys = CacheKeys(hash_secret)
        self._key = derived_key(hash_secret, "request digests")
        self.sampler = DigestSampler(int.from_bytes(self._key[:8], "big"))

    def digest_of(self, request: Request, prompt: bytes, scope: Scope) -> int | None:
        """64 bits that identify the entry of a request; None if no cache could answer it."""
        if request.is_large:
            return None
        try:
            key = self._keys.key_of(request, scope, _DEFAULTS)
        except BodyError:
            return None
        except Exception as error:  # noqa: BLE001 - a failed digest must not fail the request
            defect(logger, error, "request digest")
            return None
        if key is None or not key.options.may_load:
            return None
        digest = hashlib.blake2b(key.name.encode(), digest_size=8, key=self._key).digest()
        level = min(self.sampler.level_of(prompt), (1 << _LEVEL_BITS) - 1)
        return int.from_bytes(digest, "big") >> _LEVEL_BITS << _LEVEL_BITS | level


def split_last_turn(endpoint: Endpoint, members: dict[str, Any]) -> tuple[dict[str, Any], str] | None:
    """The members without the text of their last message, and that text; None unless a user wrote only text."""
    messages = members.get("messages")
    if endpoint.body not in WITH_TURNS or any(members.get(name) for name in QUOTING) or not isinstance(messages, list):
        return None
    last = messages[-1] if messages else None
    if not isinstance(last, dict) or last.get("role") != "user":
        return None
    content = last.get("content")
    rest: list[dict[str, Any]] | None = None
    if isinstance(content, list):
        if not all(_is_text(part) for part in content):
            return None
        rest = [{name: value for name, value in part.items() if name != "text"} for part in content]
        content = "\n".join(part["text"] for part in content)
    if not isinstance(content, str) or not content.strip() or len(content) > MAX_TURN_CHARS:
        return None
    return {**members, "messages": [*messages[:-1], {**last, "content": rest}]}, content


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def may_cache(endpoint: Endpoint, members: dict[str, Any], settings: ResponseCache, *, asks: bool) -> bool:
    """Whether the response of a request may be stored and served again. ``asks``: the request asks for it."""
    has_seed = isinstance(members.get("seed"), int) and not isinstance(members.get("seed"), bool)
    if not has_seed and any(_count(members.get(name)) > 1 for name in ("n", "best_of")):
        return False
    if asks:
        return True
    if settings.when is CacheWhen.REQUESTED:
        return False
    temperature = members.get("temperature")
    is_greedy = isinstance(temperature, int | float) and not isinstance(temperature, bool) and temperature == 0
    return not endpoint.generates or is_greedy or has_seed


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 1


def _joined(*parts: object) -> bytes:
    """Parts as bytes that no other parts give: each with its length."""
    encoded = [part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass") for part in parts]
    return b"".join(b"%d:%b" % (len(part), part) for part in encoded)


# --- Cache-Control (RFC 9111), and ``cache`` in a body ---


def read_options(member: Any, header: str, ttl_s: int) -> CacheOptions | None:
    """Options of the ``cache`` member (None: absent) and ``Cache-Control``; None if the request may not use the cache.

    ``ttl_s``: the task group's. BodyError for a malformed member, which would otherwise be ignored unnoticed.
    """
    directives = _directives(header)
    if "no-store" in directives or member is False:
        return None
    asked_ttl_s, namespace, is_exact = _read_member(member)
    return CacheOptions(
        ttl_s if asked_ttl_s is None else min(ttl_s, asked_ttl_s),
        namespace,
        _seconds(directives.get("max-age")),
        may_load="no-cache" not in directives,
        is_asked_for=member is not None and member != {"semantic": False},
        is_exact=is_exact,
    )


def _read_member(member: Any) -> tuple[int | None, str, bool]:
    """TTL, namespace, and whether only an identical request's response is wanted."""
    if member is None or member is True:
        return None, "", False
    if not isinstance(member, dict) or set(member) - {"ttl_s", "namespace", "semantic"}:
        raise BodyError("cache", "expected true, false, or an object with ttl_s, namespace and semantic")
    ttl_s, namespace, semantic = member.get("ttl_s"), member.get("namespace", ""), member.get("semantic", True)
    if ttl_s is not None and (not isinstance(ttl_s, int) or isinstance(ttl_s, bool) or ttl_s < 1):
        raise BodyError("cache.ttl_s", "expected a whole number of seconds, at least 1")
    if not isinstance(namespace, str) or len(namespace) > MAX_NAMESPACE_CHARS:
        raise BodyError("cache.namespace", f"expected a text of at most {MAX_NAMESPACE_CHARS} characters")
    if not isinstance(semantic, bool):
        raise BodyError("cache.semantic", "expected true or false")
    return ttl_s, namespace, not semantic


def _directives(header: str) -> dict[str, str]:
    """By name; of several with one name the first (RFC 9111, 4.2.1)."""
    parts = [part.strip().partition("=") for part in reversed(header.lower().split(","))]
    return {name.strip(): value.strip().strip('"') for name, _, value in parts if name}


def _seconds(text: str | None) -> int | None:
    """A directive's seconds. A malformed value counts as 0: the entry is then stale (RFC 9111, 4.2.1)."""
    if text is None:
        return None
    return min(int(text[:_SECONDS_DIGITS]), MAX_SECONDS) if text.isascii() and text.isdigit() else 0
