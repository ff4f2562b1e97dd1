"""API keys: what a request's key permits, and the rates that it may send at; web pages that may read responses.

Theory of operation. A key is looked up by its SHA-256 digest, so the time of a look-up reveals nothing about any key.
The result for a head is stored in the head, which many requests share (``HeaderCache``), and is valid for one
configuration. ``x-api-key`` is read only in a request without ``Authorization``, because two headers could carry two
different keys.

Browsers keep responses from web pages of other origins, unless the response names the page's origin (CORS,
https://fetch.spec.whatwg.org). Before most requests they ask, without a key and a body, whether they may send it.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
from collections.abc import Sequence
from time import monotonic, time
from typing import TYPE_CHECKING, Final, NamedTuple

from routing.http.response import Header, LocalResponse, RejectedRequestError, ResponseHead
from routing.http.usage import generated_tokens, prompt_and_cached
from routing.limits.budgets import Budget
from routing.limits.concurrency import SharedLimits
from routing.schema import ANY_ORIGIN, ApiKey, RouterConfig

if TYPE_CHECKING:
    from routing.http.request import RequestHead
    from routing.http.response_json import Usage


SALT_HEX: Final = 32  # digits of a salt: 128 bits

REQUESTS: Final = "requests"
TOKENS: Final = "tokens"

_bearer: Final = re.compile(rb"bearer +([!-~]+)", re.IGNORECASE).fullmatch
_CHALLENGE: Final = ((b"WWW-Authenticate", b"Bearer"),)

MAX_ASKED_BYTES: Final = 4096  # of the header names that a browser asks for
_VARY: Final = (b"Vary", b"Origin")
_EXPOSE: Final = (b"Access-Control-Expose-Headers", b"*")
_MAX_AGE: Final = (b"Access-Control-Max-Age", b"600")  # seconds
_header_names: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+( *, *[A-Za-z0-9!#$%&'*+.^_`|~-]+)*").fullmatch


class Rate(NamedTuple):
    """A configured rate limit of a key."""

    digest: str  # of the key
    unit: str  # REQUESTS or TOKENS
    per_s: float
    capacity: float

    @property
    def name(self) -> str:
        """Identifies the rate among the processes of a router; another limit of the same key has another name."""
        return f"{self.digest}:{self.unit}:{self.per_s!r}:{self.capacity!r}"

    @classmethod
    def parse(cls, name: str) -> Rate:
        digest, unit, per_s, capacity = name.split(":")
        return cls(digest, unit, float(per_s), float(capacity))


def rates_of(key: ApiKey) -> list[Rate]:
    rates = []
    if key.requests_per_s is not None:
        burst = key.burst or max(1, math.ceil(key.requests_per_s))
        rates.append(Rate(key.digest, REQUESTS, key.requests_per_s, burst))
    if key.tokens_per_min is not None:
        rates.append(Rate(key.digest, TOKENS, key.tokens_per_min / 60, key.tokens_per_min))
    return rates


class Grant:
    """What one key permits, and the budgets of its rates."""

    def __init__(self, key: ApiKey, hash_secret: str, shared: SharedLimits | None) -> None:
        now = monotonic()
        self.name = key.name
        self.models = key.models
        self.groups = key.groups
        self.expires_at = key.expires_at
        self.tenant = key.tenant
        self.flow = key.name if key.tenant is None else f"tenant/{key.tenant}"  # in admission queues
        self.queue_weight = key.queue_weight
        self._secret = hash_secret.encode()
        self._budgets = {
            rate.unit: Budget(rate.per_s, rate.capacity, now, None if shared is None else shared.cell(rate.name))
            for rate in rates_of(key)
        }
        self.tokens = self._budgets.get(TOKENS)

    def salt(self, client_salt: str) -> str | None:
        """The cache salt of a request, from the tenant and the client's own salt; None for a key without a tenant.

        Clients of a tenant may separate caches among themselves, but no salt gives access to another tenant's cache.
        """
        if self.tenant is None:
            return None
        message = f"cache_salt\0{self.tenant}\0{client_salt}".encode("utf-8", "surrogatepass")
        return hmac.digest(self._secret, message, "sha256").hex()[:SALT_HEX]

    def admit(self) -> None:
        """Count a request; RejectedRequestError if a rate of the key is exceeded."""
        now = monotonic()
        for unit, budget in self._budgets.items():
            if (wait_s := budget.wait_s(now)) > 0:
                raise _rate_error(budget, unit, wait_s, now)
        if (requests := self._budgets.get(REQUESTS)) is not None:
            requests.spend(1, now)

    def give_back(self, rejection: RejectedRequestError) -> None:
        """Do not count a request that no replica got, if the router refused it only for now."""
        if rejection.retry_after_s is not None and (requests := self._budgets.get(REQUESTS)) is not None:
            requests.spend(-1, monotonic())

    def charge_prompt(self, estimated_tokens: int) -> None:
        """Count the prompt of a request that is sent to a replica."""
        if self.tokens is not None:
            self.tokens.spend(estimated_tokens, monotonic())

    def charge_usage(self, estimated_tokens: int, usage: Usage | None) -> None:
        """Correct the estimate of a request by the usage that its response reports."""
        if self.tokens is None or usage is None:
            return
        prompt_tokens, _ = prompt_and_cached(usage)
        if prompt_tokens is not None:
            self.tokens.spend(prompt_tokens + (generated_tokens(usage) or 0) - estimated_tokens, monotonic())

    def carry_over(self, previous: Grant) -> None:
        """Continue with the previous configuration's budgets, from which its requests still spend."""
        now = monotonic()
        for unit, new in self._budgets.items():
            budget = previous._budgets.get(unit)
            if budget is None:
                continue
            if new.is_shared:
                budget.share_cell(new)
            else:
                budget.configure(new.per_s, new.capacity, now)
            self._budgets[unit] = budget
        self.tokens = self._budgets.get(TOKENS)


class AccessControl:
    """The keys of one configuration."""

    def __init__(self, config: RouterConfig, shared: SharedLimits | None = None) -> None:
        """``shared``: counts rates for all processes of a router; None: this process is the only one."""
        keys = config.access.keys if config.access else ()
        self._grants = {bytes.fromhex(key.digest): Grant(key, config.hash_secret, shared) for key in keys}

    def __repr__(self) -> str:
        return f"AccessControl({len(self._grants)} keys)"

    def authenticate(self, head: RequestHead) -> Grant:
        """The grant of the request's key; RejectedRequestError if the key is missing, unknown or expired."""
        if head.authenticated_by is not self:
            bearer = _bearer(head.authorization)
            head.grant = self._grants.get(hashlib.sha256(bearer[1]).digest()) if bearer else None
            head.authenticated_by = self
        grant = head.grant
        if grant is None:
            problem = (
                "is not valid"
                if head.authorization
                else "is missing: send Authorization: Bearer KEY, or x-api-key: KEY"
            )
            raise RejectedRequestError(401, f"the API key {problem}", headers=_CHALLENGE)
        if grant.expires_at is not None and time() >= grant.expires_at:
            raise RejectedRequestError(401, "the API key has expired", headers=_CHALLENGE)
        return grant

    def grant_of(self, name: str) -> Grant | None:
        """The grant of the key with this name; None if there is no such key."""
        return next((grant for grant in self._grants.values() if grant.name == name), None)

    def carry_over(self, previous: AccessControl) -> None:
        """Continue the previous configuration's budgets: a new configuration is not a new allowance."""
        for digest, grant in self._grants.items():
            if (previous_grant := previous._grants.get(digest)) is not None:
                grant.carry_over(previous_grant)


def _rate_error(budget: Budget, unit: str, wait_s: float, now: float) -> RejectedRequestError:
    """A 429 with the headers of OpenAI's rate limits."""
    name = unit.encode()
    headers = (
        (b"x-ratelimit-limit-" + name, b"%d" % budget.capacity),
        (b"x-ratelimit-remaining-" + name, b"%d" % budget.available(now)),
        (b"x-ratelimit-reset-" + name, b"%.3fs" % budget.full_in_s(now)),
    )
    message = f"this API key sends too many {unit}: try again in {wait_s:.3g} s"
    return RejectedRequestError(429, message, retry_after_s=math.ceil(wait_s), headers=headers)


class CrossOrigin:
    """The origins of web pages that the pools of one configuration allow. Credentials of browsers are never allowed."""

    def __init__(self, config: RouterConfig) -> None:
        self._by_pool = {pool.name: frozenset(pool.allowed_origins) for pool in config.pools}
        self._all = frozenset(origin for pool in config.pools for origin in pool.allowed_origins)
        self._lines: dict[tuple[str | None, str], bytes] = {}  # by allowed origin and pool

    def headers(self, origin: str | None, pool: str) -> tuple[Header, ...]:
        """Header fields of a response to a page. ``pool``: of the request; empty, so unknown: what any pool allows."""
        allowed = self._by_pool.get(pool, self._all)
        if not allowed:
            return ()
        if ANY_ORIGIN in allowed:
            return ((b"Access-Control-Allow-Origin", b"*"), _EXPOSE)
        if origin is None or origin not in allowed:
            return (_VARY,)
        return ((b"Access-Control-Allow-Origin", origin.encode("latin-1")), _EXPOSE, _VARY)

    def decided(self, response: ResponseHead, request: RequestHead, pool: str) -> ResponseHead:
        """A replica's response with the header fields of this configuration in place of the replica's own."""
        lines, origin = response.lines, request.header(b"origin")
        if b"access-control-" in lines.lower():
            lines = b"".join([line for line in lines.splitlines(keepends=True) if not _is_cross_origin(line)])
        decided = ResponseHead(response.status, response.status_line)
        decided.lines = lines + self._header_lines(origin if origin in self._all else None, pool)
        decided.framing, decided.length, decided.is_stream = response.framing, response.length, response.is_stream
        return decided

    def _header_lines(self, origin: str | None, pool: str) -> bytes:
        """``headers`` as they are sent."""
        lines = self._lines.get((origin, pool))
        if lines is None:
            lines = b"".join([b"%b: %b\r\n" % header for header in self.headers(origin, pool)])
            self._lines[origin, pool] = lines
        return lines

    def preflight(self, request: RequestHead, methods: Sequence[bytes]) -> LocalResponse | None:
        """The response to a browser that asks what a page may send; None if it may not, or does not ask.

        Its pool is unknown, so it is what any pool allows; ``headers`` are added to it as to any response.
        """
        origin = request.header(b"origin")
        if origin is None or not (ANY_ORIGIN in self._all or origin in self._all):
            return None
        asked = request.header(b"access-control-request-headers") or ""
        if not request.header(b"access-control-request-method") or len(asked) > MAX_ASKED_BYTES:
            return None
        headers: tuple[Header, ...] = ((b"Access-Control-Allow-Methods", b", ".join(methods)), _MAX_AGE)
        if asked:
            if not _header_names(asked):
                return None
            headers = (*headers, (b"Access-Control-Allow-Headers", asked.encode()))
        return LocalResponse(200, headers=headers)


def _is_cross_origin(line: bytes) -> bool:
    return line[:15].lower() == b"access-control-"
