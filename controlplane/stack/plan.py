"""The processes of the local stack, configured by environment variables."""

import os
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from django.core.exceptions import ImproperlyConfigured

from controlplane.encryption import public_key
from controlplane.settings import env
from controlplane.stack import paths
from controlplane.stack.paths import Child
from controlplane.stack.servers import EmbeddedPostgres, valkey_child

TRACE_BLOCKS = 128_001  # KV blocks of a stand-in that serves a trace: 2 million tokens plus vLLM's null block
STANDIN_PREFILL_RATE = 8000  # tokens/s of one stand-in
STANDIN_METRICS = ("--kv-cache-metrics", "--kv-cache-metrics-sample", "0.1")
TRACE_LOAD = 0.7  # prefill load of a trace, relative to the stand-ins' capacity without cache hits
STANDIN_RESTART_PAUSE_S = 20.0  # long enough to see a killed replica as down
PROBE_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class StackSettings:
    """Settings of the local stack, each from its environment variable."""

    data_dir: Path
    bind: str
    web_port: int
    router_port: int
    router_admin_port: int
    replica_port: int
    demo_replicas: int
    replicas: tuple[str, ...]  # base URLs of real replicas; empty: stand-ins
    trace: Path | None
    traffic: bool
    compiled: str  # folder of the compiled router; "" for the plain one

    @classmethod
    def from_environment(cls, data_dir: Path) -> "StackSettings":
        """Read and validate; ImproperlyConfigured names the variable."""
        replicas = tuple(env.words("REPLICAS"))
        trace = env.text("TRACE", "")
        if trace and not Path(trace).is_file():
            raise ImproperlyConfigured(f"WARMPATH_TRACE: file {trace} does not exist")
        return cls(
            data_dir=data_dir,
            bind=env.text("BIND", "127.0.0.1"),
            web_port=_port("WEB_PORT", 8000),
            router_port=_port("ROUTER_PORT", 8080),
            router_admin_port=_port("ROUTER_ADMIN_PORT", 8081),
            replica_port=_port("REPLICA_PORT", 9101),
            demo_replicas=int(env.number("DEMO_REPLICAS", 4, low=1, high=64)),
            replicas=replicas,
            trace=Path(trace).resolve() if trace else None,
            # No generated traffic for real replicas unless it is requested.
            traffic=env.flag("TRAFFIC", default=bool(trace) or not replicas),
            compiled=env.text("COMPILED", ""),
        )

    @property
    def replica_urls(self) -> tuple[str, ...]:
        """Base URLs of the router's replicas, real or stand-ins."""
        ports = range(self.replica_port, self.replica_port + self.demo_replicas)
        return self.replicas or tuple(f"http://127.0.0.1:{port}" for port in ports)

    @property
    def web_url(self) -> str:
        return f"http://127.0.0.1:{self.web_port}"

    def listen_ports(self) -> dict[int, str]:
        """Every port that the stack listens on, with its environment variable."""
        ports = {
            self.web_port: "WEB_PORT",
            self.router_port: "ROUTER_PORT",
            self.router_admin_port: "ROUTER_ADMIN_PORT",
        }
        if not self.replicas:
            ports |= {self.replica_port + i: "REPLICA_PORT" for i in range(self.demo_replicas)}
        return ports


def servers(settings: StackSettings) -> list[Child]:
    """The embedded servers, except those that the environment replaces by a URL."""
    children = []
    if not env.text("DATABASE_URL", ""):
        postgres = EmbeddedPostgres(
            paths.server_dir(settings.data_dir, "postgres"), paths.socket_dir(settings.data_dir, "postgres")
        )
        postgres.prepare()
        children.append(postgres.child())
    if not env.text("REDIS_URL", ""):
        children.append(valkey_child(paths.valkey_socket(settings.data_dir)))
    return children


def preparation(settings: StackSettings) -> Child:
    """A process that migrates the database, creates the initial fleet, and exits."""
    arguments = [argument for url in settings.replica_urls for argument in ("--replica", url)]
    demo = [] if settings.replicas else ["--demo"]
    return Child("setup", [*_manage("prepare_stack"), *arguments, *demo], restart=False)


def standins(settings: StackSettings) -> list[Child]:
    """Stand-in replicas, unless real replicas are configured."""
    if settings.replicas:
        return []
    cache_options = ["--blocks", str(TRACE_BLOCKS)] if settings.trace else []
    return [_standin(url, cache_options) for url in settings.replica_urls]


def _standin(url: str, options: list[str]) -> Child:
    port = url.rpartition(":")[2]
    return Child(
        f"replica-{port}",
        [*_routing("replica"), "--port", port, "--prefill-rate", str(STANDIN_PREFILL_RATE), *STANDIN_METRICS, *options],
        ready=lambda: _responds_ok(f"{url}/health"),
        restart_pause_s=STANDIN_RESTART_PAUSE_S,
    )


def control_plane(settings: StackSettings) -> list[Child]:
    """Web UI, worker, beat and router."""
    return [_web(settings), _worker(), _beat(settings), _router(settings)]


def _web(settings: StackSettings) -> Child:
    uvicorn = [
        sys.executable,
        "-m",
        "uvicorn",
        "controlplane.asgi:application",
        "--no-access-log",
        "--no-proxy-headers",
    ]
    address = ["--host", settings.bind, "--port", str(settings.web_port)]
    options = ["--log-level", "warning", "--timeout-graceful-shutdown", "2"]
    return Child("web", [*uvicorn, *address, *options], ready=lambda: _responds_ok(f"{settings.web_url}/healthz"))


def _worker() -> Child:
    options = ["--pool", "threads", "--concurrency", "8", "--without-gossip", "--without-mingle"]
    environment = {"PYTHONWARNINGS": "ignore:You're running the worker with superuser"}  # usual in containers
    return Child("worker", [*_celery("worker"), *options], environment=environment)


def _beat(settings: StackSettings) -> Child:
    """A separate process: a worker does not restart an embedded beat that failed."""
    # The schedule starts empty: a stored one could still name tasks that no longer exist.
    schedule = settings.data_dir / "beat-schedule"
    schedule.unlink(missing_ok=True)
    return Child("beat", [*_celery("beat"), "--schedule", str(schedule), "--pidfile="])


def _router(settings: StackSettings) -> Child:
    listener = ["--host", settings.bind, "--port", str(settings.router_port)]
    admin = ["--admin-host", "127.0.0.1", "--admin-port", str(settings.router_admin_port)]
    state = ["--name", "router-1", "--state-dir", str(settings.data_dir / "router-1")]
    return Child(
        "router",
        [*_routing("serve"), "--control-plane", settings.web_url, *listener, *admin, *state],
        ready=lambda: _responds_ok(f"http://127.0.0.1:{settings.router_admin_port}/readyz"),
        environment={
            **_import_path(settings.compiled),
            "WARMPATH_ROUTER_ADMIN_TOKEN": _admin_token(settings),
            "WARMPATH_ROUTER_CONFIG_KEYS": public_key(_signing_secret(settings)),
            "WARMPATH_ROUTER_CACHE_URL": _redis_url(settings, "ROUTER_CACHE_URL"),
            "WARMPATH_ROUTER_STATE_URL": _redis_url(settings, "ROUTER_STATE_URL"),
        },
    )


def _redis_url(settings: StackSettings, variable: str) -> str:
    """A server for routers: the configured one, else a database beside the broker's."""
    configured = env.text(variable, "") or env.text("REDIS_URL", "")
    if configured:
        return configured if configured.startswith(("redis://", "rediss://", "unix://")) else ""
    return f"unix://{paths.valkey_socket(settings.data_dir)}?db=1"


def _import_path(compiled: str) -> dict[str, str]:
    """Environment in which the compiled router is imported; empty for the plain one."""
    return {"PYTHONPATH": compiled, "PYTHONSAFEPATH": "1"} if compiled else {}


def traffic_player(settings: StackSettings) -> list[Child]:
    """The traffic player, with the configured trace or generated traffic."""
    if not settings.traffic:
        return []
    source = ["--trace", str(settings.trace)] if settings.trace else ["--mix", "1"]
    if settings.trace and not settings.replicas:
        source += ["--tokens-per-s", str(TRACE_LOAD * STANDIN_PREFILL_RATE * settings.demo_replicas)]
    router = f"http://127.0.0.1:{settings.router_port}"
    return [Child("traffic", [*_routing("play"), "--router", router, "--loop", *source])]


def _admin_token(settings: StackSettings) -> str:
    return env.text("ROUTER_ADMIN_TOKEN", "") or paths.secret(settings.data_dir, "router_admin_token")


def _signing_secret(settings: StackSettings) -> str:
    return env.text("CONFIG_SIGNING_KEY", "") or paths.secret(settings.data_dir, "config_signing_key")


def _celery(program: str) -> list[str]:
    return [sys.executable, "-m", "celery", "--quiet", "-A", "controlplane.celery", program, "--loglevel", "INFO"]


def _manage(*arguments: str) -> list[str]:
    return [sys.executable, "manage.py", *arguments]


def _routing(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "routing", *arguments]


def _port(name: str, default: int) -> int:
    return int(env.number(name, default, low=1, high=65535))


def _responds_ok(url: str) -> bool:
    """Whether a GET returns 200."""
    try:
        with urllib.request.urlopen(url, timeout=PROBE_TIMEOUT_S) as response:  # noqa: S310 - our own loopback URL
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def bypass_proxy_for_loopback() -> None:
    """Exclude loopback from a proxy that the environment configures."""
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"
