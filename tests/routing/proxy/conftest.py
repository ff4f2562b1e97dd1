"""A store of response caches."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from redis import Redis

from routing.response_cache import store as store_module


@pytest.fixture
def stored(valkey: str, monkeypatch: pytest.MonkeyPatch) -> Redis:
    """The store of the routers of this test, empty. On a busy machine a lookup may take longer than its budget."""
    for name in ("LOOKUP_S", "WRITE_S", "CONNECT_S"):
        monkeypatch.setattr(store_module, name, 5.0)
    url = f"unix://{urlsplit(valkey).path}?db=9"
    monkeypatch.setenv("WARMPATH_ROUTER_CACHE_URL", url)
    store = Redis.from_url(url)
    store.flushdb()
    return store
