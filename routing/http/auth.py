"""Who is let in: API keys, and the rates they may send at.

Theory of operation. A key is looked up by its SHA-256, so the time of a look-up tells nothing about any key: whoever
guesses does not choose the digest. What a head's key gave is kept with the head, since heads are remembered, and holds
for one configuration. Of the ways to send a key only ``Authorization: Bearer`` is read, because two ways may disagree.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
from time import monotonic, time
from typing import TYPE_CHECKING, Final

from routing.http.errors import RejectedRequestError
from routing.limits.budgets import Budget
from routing.limits.concurrency import SharedLimits
from routing.schema import ApiKey, RouterConfig

if TYPE_CHECKING:
    from routing.http.request import RequestHead
    from routing.http.response_json import Usage


SALT_HEX: Final = 32  # digits of a salt: 128 bits that nobody outside the fleet can guess

REQUESTS: Final = "requests"
TOKENS: Final = "tokens"

_bearer: Final = re.compile(rb"bearer +([!-~]+)", re.IGNORECASE).fullmatch
_CHALLENGE: Final = ((b"WWW-Authenticate", b"Bearer"),)


class Rate:
    """A rate of a key, as it is configured."""

    __slots__ = ("capacity", "digest", "per_s", "what")

    def __init__(self, digest: str, what: str, per_s: float, capacity: float) -> None:
        self.digest = digest  # the key's
        self.what = what
        self.per_s = per_s
        self.capacity = capacity

    @property
    def name(self) -> str:
        """By which processes of a router find what they share: another rate of the same key has another one."""
        return f"{self.digest}:{self.what}:{self.per_s!r}:{self.capacity!r}"

    @classmethod
    def named(cls, name: str) -> Rate:
        """The rate of a name."""
        digest, what, per_s, capacity = name.split(":")
        return cls(digest, what, float(per_s), float(capacity))

    def cell(self, shared: SharedLimits | None) -> memoryview[float] | None:
        """The number that processes share of it."""
        return None if shared is None else shared.cell(self.name)


def rates_of(key: ApiKey) -> list[Rate]:
    """The rates that a key is limited to."""
    rates = []
    if key.requests_per_s is not None:
        burst = key.burst or max(1, math.ceil(key.requests_per_s))
        rates.append(Rate(key.digest, REQUESTS, key.requests_per_s, burst))
    if key.tokens_per_min is not None:
        rates.append(Rate(key.digest, TOKENS, key.tokens_per_min / 60, key.tokens_per_min))
    return rates


class Grant:
    """One key at work: what its requests may be, and what is left of its rates."""

    __slots__ = ("_secret", "_tenant", "expires_at", "groups", "models", "name", "requests", "tokens")

    def __init__(self, key: ApiKey, hash_secret: str, shared: SharedLimits | None) -> None:
        now = monotonic()
        self.name = key.name
        self.models = key.models
        self.groups = key.groups
        self.expires_at = key.expires_at
        self._tenant = key.tenant
        self._secret = hash_secret.encode()
        budgets = {rate.what: Budget(rate.per_s, rate.capacity, now, rate.cell(shared)) for rate in rates_of(key)}
        self.requests = budgets.get(REQUESTS)
        self.tokens = budgets.get(TOKENS)

    def salt(self, given: str) -> str | None:
        """The salt of a request that brings ``given`` ("" for none); None for a key without tenant, which changes none.

        A tenant's clients may keep caches apart among themselves, but with no salt reach anybody else's.
        """
        if self._tenant is None:
            return None
        message = f"cache_salt\0{self._tenant}\0{given}".encode("utf-8", "surrogatepass")
        return hmac.digest(self._secret, message, "sha256").hex()[:SALT_HEX]

    def admit(self) -> None:
        """Count a request; RejectedRequestError where its key has sent too much."""
        now = monotonic()
        for budget, what in ((self.requests, b"requests"), (self.tokens, b"tokens")):
            if budget is not None and (wait_s := budget.wait_s(now)) > 0:
                raise _too_much(budget, what, wait_s, now)
        if self.requests is not None:
            self.requests.spend(1, now)

    def began(self, estimate: int) -> None:
        """Count the prompt of a request that goes to a replica. Tokens, as far as they are known."""
        if self.tokens is not None:
            self.tokens.spend(estimate, monotonic())

    def used(self, estimate: int, usage: Usage | None) -> None:
        """Count what a request really took, of whose prompt an estimate was counted before."""
        if self.tokens is not None and usage is not None and usage.prompt is not None:
            self.tokens.spend(usage.prompt + (usage.generated or 0) - estimate, monotonic())

    def carry_over(self, before: Grant) -> None:
        """Go on with the budgets of the configuration before, which requests that began under it spend from too."""
        now = monotonic()
        self.requests = _continued(before.requests, self.requests, now)
        self.tokens = _continued(before.tokens, self.tokens, now)


class AccessControl:
    """The keys of one configuration."""

    def __init__(self, config: RouterConfig, shared: SharedLimits | None = None) -> None:
        """``shared``: what counts rates for all processes of a router; None: this one is alone."""
        keys = config.access.keys if config.access else ()
        self._grants = {bytes.fromhex(key.digest): Grant(key, config.hash_secret, shared) for key in keys}

    def __repr__(self) -> str:
        return f"AccessControl({len(self._grants)} keys)"

    def admit(self, head: RequestHead) -> Grant:
        """Grant of the request's key, counted against its rate; RejectedRequestError as ``known``, or over the rate."""
        grant = self.known(head)
        grant.admit()
        return grant

    def known(self, head: RequestHead) -> Grant:
        """Grant of the request's key; RejectedRequestError if the key is missing, unknown or expired."""
        if head.judge is not self:
            head.grant = self._grant(head.authorization)
            head.judge = self
        grant = head.grant
        if grant is None:
            problem = "is not valid" if head.authorization else "is missing: send Authorization: Bearer KEY"
            raise RejectedRequestError(401, f"the API key {problem}", headers=_CHALLENGE)
        if grant.expires_at is not None and time() >= grant.expires_at:
            raise RejectedRequestError(401, "the API key has expired", headers=_CHALLENGE)
        return grant

    def named(self, name: str) -> Grant | None:
        """What the key of this name grants; None where there is none."""
        return next((grant for grant in self._grants.values() if grant.name == name), None)

    def carry_over(self, before: AccessControl) -> None:
        """Let rates go on where they stood: a new configuration is no new allowance."""
        for digest, grant in self._grants.items():
            if (old := before._grants.get(digest)) is not None:
                grant.carry_over(old)

    def _grant(self, authorization: bytes) -> Grant | None:
        bearer = _bearer(authorization)
        return self._grants.get(hashlib.sha256(bearer[1]).digest()) if bearer else None


def _continued(before: Budget | None, after: Budget | None, now: float) -> Budget | None:
    """The budget before, at the rate of the one after; one of them alone is no continuation."""
    if before is None or after is None:
        return after
    if after.is_shared:
        before.share_cell(after)
    else:
        before.configure(after.per_s, after.capacity, now)
    return before


def _too_much(budget: Budget, what: bytes, wait_s: float, now: float) -> RejectedRequestError:
    """A 429 in the terms of OpenAI's rate limits."""
    headers = (
        (b"x-ratelimit-limit-" + what, b"%d" % budget.capacity),
        (b"x-ratelimit-remaining-" + what, b"%d" % budget.available(now)),
        (b"x-ratelimit-reset-" + what, b"%.3fs" % budget.full_in_s(now)),
    )
    message = f"this API key sends too many {what.decode()}: try again in {wait_s:.3g} s"
    return RejectedRequestError(429, message, retry_after_s=math.ceil(wait_s), headers=headers)
