"""How often somebody may ask: counted in Valkey, for every process together.

Theory of operation. Each minute has one counter for each who asks, which ends with it, so what is stored is bounded by
how many ask within two minutes. Where Valkey is away nobody is refused: a limit protects the service, and must not be
what takes it down. It is then left alone for a few seconds, so that no request waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import parse_qs, urlsplit

import redis
from django.conf import settings
from redis.backoff import NoBackoff
from redis.retry import Retry

WINDOW_S = 60
TIMEOUT_S = 0.25  # for Valkey to answer
NEVER = Retry(NoBackoff(), 0)
LEFT_ALONE_S = 5.0  # after it did not

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Allowance:
    """What is left of somebody's requests in the present minute."""

    limit: int
    remaining: int  # below 0: this request is one too many
    reset_s: int  # seconds until the next minute


class Counter:
    """Counts requests by who asks. For any number of threads."""

    def __init__(self, url: str) -> None:
        self._server = connect(url)
        self._lock = threading.Lock()
        self._trusted_at = 0.0  # monotonic; before it nothing is asked

    def charge(self, who: str, limit: int) -> Allowance | None:
        """Count one request; None where counting is off (a limit of 0) or Valkey is away."""
        if not limit or time.monotonic() < self._trusted_at:
            return None
        now = time.time()
        window = int(now // WINDOW_S)
        try:
            with self._server.pipeline(transaction=False) as pipe:
                name = f"warmpath:rate:{who}:{window}"
                pipe.incr(name)
                pipe.expire(name, 2 * WINDOW_S)
                asked = int(pipe.execute()[0])
        except redis.RedisError as error:
            self._leave_alone(error)
            return None
        return Allowance(limit, limit - asked, WINDOW_S - int(now % WINDOW_S))

    def _leave_alone(self, error: redis.RedisError) -> None:
        with self._lock:
            if time.monotonic() >= self._trusted_at:
                log.warning("requests are not counted: %s", type(error).__name__)
            self._trusted_at = time.monotonic() + LEFT_ALONE_S


def counter() -> Counter:
    """The counter on the server that settings name; its connections are kept."""
    return _counter(settings.CELERY_BROKER_URL)


def connect(url: str) -> redis.Redis:
    """A client that waits for nothing; Celery's spelling of a socket is understood."""
    parts = urlsplit(url)
    if parts.scheme in {"redis+socket", "socket", "unix"}:
        number = int((parse_qs(parts.query).get("virtual_host") or ["0"])[0].strip("/") or 0)
        return redis.Redis(unix_socket_path=parts.path, db=number, socket_timeout=TIMEOUT_S, retry=NEVER)
    return redis.Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=NEVER)


@lru_cache(maxsize=4)
def _counter(url: str) -> Counter:
    return Counter(url)
