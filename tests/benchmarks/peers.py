"""Other proxies in front of the same replicas, configured for the least work that keeps sessions on one replica.

Uses the proxies that are on PATH. Debian has nginx and haproxy; ``pyvoy`` (for ``envoy``), ``vllm-router`` and
``sglang-router`` are Python packages. ``forwarder.py`` is always included as the lower bound.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from tests.benchmarks.proxy import Proxy, free_port, listening

Start = Callable[[Path, Sequence[str]], AbstractContextManager[Proxy]]  # a folder, and replicas as host:port


def installed() -> Iterator[Start]:
    """The forwarder, then the installed proxies."""
    yield forwarder
    yield from (start for program, start in PEERS.items() if shutil.which(program))


def forwarder(_folder: Path, replicas: Sequence[str]) -> AbstractContextManager[Proxy]:
    """The lower bound: forwards bytes."""
    port = free_port()
    ports = [replica.rpartition(":")[2] for replica in replicas]
    command = [sys.executable, "-m", "tests.benchmarks.forwarder", str(port), *ports]
    return listening("forwarder", command, port)


def nginx(
    folder: Path, replicas: Sequence[str], balance: str = "hash $http_x_session_id consistent"
) -> AbstractContextManager[Proxy]:
    port, config = free_port(), folder / "nginx.conf"
    servers = "".join(f"server {replica};" for replica in replicas)
    config.write_text(
        f"daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx.log;\n"
        "events { worker_connections 4096; }\n"
        "http {\n access_log off; keepalive_requests 100000000; client_body_buffer_size 1m; client_max_body_size 8m;\n"
        + "".join(f" {kind}_temp_path {folder};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        + f"\n upstream replicas {{ {balance}; {servers} keepalive 512; }}\n"
        f" server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://replicas; proxy_http_version 1.1;\n"
        '  proxy_set_header Connection ""; proxy_buffering off; }\n }\n}\n'
    )
    return listening("nginx", ["nginx", "-c", str(config), "-p", str(folder)], port)


def haproxy(
    folder: Path, replicas: Sequence[str], balance: str = "hdr(X-Session-ID)\n  hash-type consistent"
) -> AbstractContextManager[Proxy]:
    port, config = free_port(), folder / "haproxy.cfg"
    servers = "".join(f"  server replica-{number} {replica}\n" for number, replica in enumerate(replicas))
    config.write_text(
        "global\n  nbthread 1\n  maxconn 4096\n"
        "defaults\n  mode http\n  timeout connect 5s\n  timeout client 60s\n  timeout server 60s\n  http-reuse always\n"
        f"frontend clients\n  bind 127.0.0.1:{port}\n  default_backend replicas\n"
        f"backend replicas\n  balance {balance}\n{servers}"
    )
    return listening("haproxy", ["haproxy", "-f", str(config)], port)


def envoy(folder: Path, replicas: Sequence[str], balance: str = "RING_HASH") -> AbstractContextManager[Proxy]:
    port, config = free_port(), folder / "envoy.json"
    config.write_text(json.dumps(_envoy_config(port, replicas, balance)))
    options = ["--concurrency", "1", "--disable-hot-restart", "-l", "error"]
    return listening("envoy", ["envoy", "-c", str(config), *options], port)


def _envoy_config(port: int, replicas: Sequence[str], balance: str) -> dict[str, object]:
    action = {"cluster": "replicas", "timeout": "0s", "hash_policy": [{"header": {"header_name": "x-session-id"}}]}
    host = {"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": action}]}
    router = {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network."
        "http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "bench",
        "route_config": {"virtual_hosts": [host]},
        "http_filters": [{"name": "envoy.filters.http.router", "typed_config": router}],
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    cluster = {
        "name": "replicas",
        "type": "STATIC",
        "lb_policy": balance,
        "load_assignment": {
            "cluster_name": "replicas",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(replica)}} for replica in replicas]}],
        },
    }
    return {"static_resources": {"listeners": [{"address": _address(f"127.0.0.1:{port}"), "filter_chains": [chain]}],
                                 "clusters": [cluster]}}  # fmt: skip


def _address(address: str) -> dict[str, object]:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def rust_router(program: Sequence[str], replicas: Sequence[str], *options: str) -> AbstractContextManager[Proxy]:
    """vllm-router, or a gateway of the family that it comes from; all are ``cache_aware`` by default."""
    port = free_port()
    command = [*program, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--log-level", "error", "--worker-startup-check-interval", "1", *options]
    return listening(program[0], [*command, "--worker-urls", *(f"http://{replica}" for replica in replicas)], port)


PEERS: dict[str, Start] = {"nginx": nginx, "haproxy": haproxy, "envoy": envoy}
PEERS["vllm-router"] = lambda _folder, urls: rust_router(["vllm-router"], urls, "--policy", "consistent_hash")
PEERS["sglang-router"] = lambda _folder, urls: rust_router(["sglang-router", "launch"], urls)
