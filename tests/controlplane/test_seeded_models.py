"""``seed_fleet`` with real replicas: pools by the models that they list."""

import json
import threading
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO

import pytest
from django.core.management import call_command

from controlplane.models import Pool, Replica, TaskGroup
from controlplane.services.fleet.pools import update_pool
from controlplane.services.fleet.served_models import listed_models

pytestmark = pytest.mark.django_db


def card(name, parent=None):
    """A model as vLLM 0.32 lists it."""
    return {"id": name, "object": "model", "created": 1795195659, "owned_by": "vllm", "root": "model", "parent": parent}


@contextmanager
def engine(*cards, body=None, status=200):
    """Run an engine on loopback; (its base URL, the list, which a test may change)."""
    listed = list(cards)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            text = body if body is not None else json.dumps({"object": "list", "data": listed}).encode()
            self.send_response(status if self.path == "/v1/models" and (listed or body is not None) else 503)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", listed
    finally:
        server.shutdown()
        thread.join(timeout=20)
        server.server_close()


def seed(*urls):
    out = StringIO()
    call_command("seed_fleet", "--replica", *urls, stdout=out)
    return out.getvalue()


def pools():
    """Each pool's models and the number of its replicas."""
    return {pool.name: (pool.models, pool.replicas.count()) for pool in Pool.objects.all()}


def test_real_replicas_get_lowest_cost_and_their_models():
    with engine(card("tiny"), card("tiny-sql", "tiny")) as (first_url, _), engine(card("tiny")) as (second_url, _):
        seed(first_url, second_url)
    pool = Pool.objects.get()
    assert (pool.name, pool.models, pool.replicas.count()) == ("default", ["tiny"], 2)
    assert pool.adapters == [{"name": "tiny-sql", "model": "tiny"}]
    assert pool.policies.get(group=None).live().strategy == "lowest_cost"
    assert not TaskGroup.objects.exists()


def test_each_model_gets_its_own_pool():
    with ExitStack() as stack:
        lists = ([card("tiny")], [card("Qwen/Qwen3-8B"), card("qwen")], [card("qwen")], [card("Other/Qwen3-8B")])
        seed(*(stack.enter_context(engine(*cards))[0] for cards in lists))
    assert pools() == {
        "default": (["tiny"], 1),
        "qwen3-8b": (["Qwen/Qwen3-8B", "qwen"], 2),
        "qwen3-8b-2": (["Other/Qwen3-8B"], 1),
    }


def test_a_pool_gets_its_models_at_a_later_run():
    with engine() as (url, listed):
        assert "takes any model name" in seed(url)
        assert pools() == {"default": ([], 1)}
        listed.append(card("tiny"))
        assert "takes any" not in seed(url)
        assert pools() == {"default": (["tiny"], 1)}


def test_a_changed_pool_is_not_touched():
    with engine() as (url, listed):
        seed(url)
        update_pool(Pool.objects.get(), description="any model, on purpose")
        listed.append(card("tiny"))
        seed(url)
    assert pools() == {"default": ([], 1)}


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"not json", 200), (b'{"data": [{"id": 7}]}', 200), (b"[" * 100_000, 200), (b'{"data": []}', 200), (b"{}", 401)],
)
def test_invalid_model_lists_are_ignored(body, status):
    with engine(body=body, status=status) as (url, _):
        assert listed_models([url, "http://127.0.0.1:1"]) == {url: None, "http://127.0.0.1:1": None}
        seed(url)
    assert pools() == {"default": ([], 1)}
    assert Replica.objects.get().url == url
