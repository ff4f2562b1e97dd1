"""Rate limits of REST requests, counted in Valkey for all processes together.

Theory of operation. Each client has one counter per minute, which expires after the next minute, so storage is bounded
by the number of clients. While Valkey is unavailable no request is limited, because a limit protects the service and
must not be the reason for an outage; it is then not called for a few seconds, so that no request waits for it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import parse_qs, urlsplit

import redis
from django.conf import settings
from redis.backoff import NoBackoff
from redis.retry import Retry

WINDOW_S = 60
TIMEOUT_S = 0.25
RETRY_AFTER_S = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Allowance:
    """A client's requests in the current minute."""

    limit: int
    remaining: int  # negative: this request is over the limit
    reset_s: int  # seconds until the next minute


class Counter:
    """Counts requests by client. For any number of threads."""

    def __init__(self, url: str) -> None:
        self._server = connect(url)
        self._retry_at = 0.0  # monotonic

    def charge(self, client: str, limit: int) -> Allowance | None:
        """Count one request; None without a limit (0), or while Valkey is unavailable."""
        if not limit or time.monotonic() < self._retry_at:
            return None
        now = time.time()
        key = f"warmpath:rate:{client}:{int(now // WINDOW_S)}"
        try:
            with self._server.pipeline(transaction=False) as pipe:
                pipe.incr(key)
                pipe.expire(key, 2 * WINDOW_S)
                count = int(pipe.execute()[0])
        except redis.RedisError as error:
            if time.monotonic() >= self._retry_at:
                log.warning("rate_limits_suspended: Valkey is unavailable (%s)", type(error).__name__)
            self._retry_at = time.monotonic() + RETRY_AFTER_S
            return None
        return Allowance(limit, limit - count, WINDOW_S - int(now % WINDOW_S))


def request_counter() -> Counter:
    """The process's counter of requests by client, with its connections to the configured Valkey."""
    return _request_counter(settings.CELERY_BROKER_URL)


def connect(url: str) -> redis.Redis:
    """A client without retries; accepts Celery's URLs of Unix sockets."""
    no_retries, parts = Retry(NoBackoff(), 0), urlsplit(url)
    if parts.scheme in {"redis+socket", "socket", "unix"}:
        database = int((parse_qs(parts.query).get("virtual_host") or ["0"])[0].strip("/") or 0)
        return redis.Redis(unix_socket_path=parts.path, db=database, socket_timeout=TIMEOUT_S, retry=no_retries)
    return redis.Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=no_retries)


@lru_cache(maxsize=4)
def _request_counter(url: str) -> Counter:
    return Counter(url)
