"""Which processes the local stack consists of, from the environment."""

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

TRACE_BLOCKS = 128_001  # of a stand-in that serves a real trace: 2 million tokens, one block never used
STANDIN_PREFILL_RATE = 8000  # tokens/s of one stand-in
STANDIN_METRICS = ("--kv-cache-metrics", "--kv-cache-metrics-sample", "0.1")
TRACE_LOAD = 0.7  # of what the stand-ins could prefill without any hit
STANDIN_RESTART_PAUSE_S = 20.0  # long enough for an operator to see a killed replica down
PROBE_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class StackSettings:
    """What an operator may say about the local stack; every field has its environment variable."""

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

    @classmethod
    def from_environment(cls, data_dir: Path) -> "StackSettings":
        """Read and check; ImproperlyConfigured names the variable."""
        replicas = tuple(env.words("REPLICAS"))
        trace = env.text("TRACE", "")
        if trace and not Path(trace).is_file():
            raise ImproperlyConfigured(f"WARMPATH_TRACE: there is no file {trace}")
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
            # Nobody's real replicas get made-up traffic unasked.
            traffic=env.flag("TRAFFIC", default=bool(trace) or not replicas),
        )

    @property
    def replica_urls(self) -> tuple[str, ...]:
        """Base URLs of the replicas behind the router, real ones or stand-ins."""
        ports = range(self.replica_port, self.replica_port + self.demo_replicas)
        return self.replicas or tuple(f"http://127.0.0.1:{port}" for port in ports)

    @property
    def web_url(self) -> str:
        """Where the UI answers."""
        return f"http://127.0.0.1:{self.web_port}"

    def own_ports(self) -> dict[int, str]:
        """Every port that this stack listens on, with the variable that moves it."""
        ports = {
            self.web_port: "WEB_PORT",
            self.router_port: "ROUTER_PORT",
            self.router_admin_port: "ROUTER_ADMIN_PORT",
        }
        if not self.replicas:
            ports |= {self.replica_port + i: "REPLICA_PORT" for i in range(self.demo_replicas)}
        return ports


def servers(settings: StackSettings) -> list[Child]:
    """The embedded servers that no URL in the environment replaces."""
    children = []
    if not env.text("DATABASE_URL", ""):
        home = paths.server_home(settings.data_dir, "postgres")
        postgres = EmbeddedPostgres(home, paths.socket_dir(settings.data_dir, "postgres"))
        postgres.prepare()
        children.append(postgres.child())
    if not env.text("REDIS_URL", ""):
        children.append(valkey_child(paths.valkey_socket(settings.data_dir)))
    return children


def preparation(settings: StackSettings) -> Child:
    """Migrate the database and seed the fleet; ends by itself."""
    arguments = [word for url in settings.replica_urls for word in ("--replica", url)]
    demo = [] if settings.replicas else ["--demo"]
    return Child("setup", [*_manage("prepare_stack"), *arguments, *demo], restart=False)


def standins(settings: StackSettings) -> list[Child]:
    """Stand-in replicas, unless real ones are named."""
    if settings.replicas:
        return []
    size = ["--blocks", str(TRACE_BLOCKS)] if settings.trace else []
    return [_standin(url, size) for url in settings.replica_urls]


def _standin(url: str, options: list[str]) -> Child:
    port = url.rpartition(":")[2]
    return Child(
        f"replica-{port}",
        [*_routing("replica"), "--port", port, "--prefill-rate", str(STANDIN_PREFILL_RATE), *STANDIN_METRICS, *options],
        ready=lambda: _answers(f"{url}/health"),
        restart_pause_s=STANDIN_RESTART_PAUSE_S,
    )


def control_plane(settings: StackSettings) -> list[Child]:
    """Web UI, worker, beat, and the router that announces itself to them."""
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
    where = ["--host", settings.bind, "--port", str(settings.web_port)]
    manners = ["--log-level", "warning", "--timeout-graceful-shutdown", "2"]
    return Child("web", [*uvicorn, *where, *manners], ready=lambda: _answers(f"{settings.web_url}/healthz"))


def _worker() -> Child:
    shape = ["--pool", "threads", "--concurrency", "8", "--without-gossip", "--without-mingle"]
    quiet = {"PYTHONWARNINGS": "ignore:You're running the worker with superuser"}  # a laptop's container often is root
    return Child("worker", [*_celery("worker"), *shape], environment=quiet)


def _beat(settings: StackSettings) -> Child:
    """A process of its own: a worker neither notices nor restarts a beat that it started itself."""
    # A beat schedule that outlived its code would keep ticking tasks that are gone, so it starts empty.
    schedule = settings.data_dir / "beat-schedule"
    schedule.unlink(missing_ok=True)
    return Child("beat", [*_celery("beat"), "--schedule", str(schedule), "--pidfile="])


def _router(settings: StackSettings) -> Child:
    where = ["--host", settings.bind, "--port", str(settings.router_port)]
    admin = ["--admin-host", "127.0.0.1", "--admin-port", str(settings.router_admin_port)]
    state = ["--name", "router-1", "--state-dir", str(settings.data_dir / "router-1")]
    return Child(
        "router",
        [*_routing("serve"), "--control-plane", settings.web_url, *where, *admin, *state],
        ready=lambda: _answers(f"http://127.0.0.1:{settings.router_admin_port}/readyz"),
        environment={
            "WARMPATH_ROUTER_ADMIN_TOKEN": _admin_token(settings),
            "WARMPATH_ROUTER_CONFIG_KEYS": public_key(_signing_secret(settings)),
        },
    )


def player(settings: StackSettings) -> list[Child]:
    """The traffic player: the named trace, or the generated mix."""
    if not settings.traffic:
        return []
    what = ["--trace", str(settings.trace)] if settings.trace else ["--mix", "1"]
    if settings.trace and not settings.replicas:
        what += ["--tokens-per-s", str(TRACE_LOAD * STANDIN_PREFILL_RATE * settings.demo_replicas)]
    router = f"http://127.0.0.1:{settings.router_port}"
    return [Child("traffic", [*_routing("play"), "--router", router, "--loop", *what])]


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


def _answers(url: str) -> bool:
    """Whether a GET is answered with 200."""
    try:
        with urllib.request.urlopen(url, timeout=PROBE_TIMEOUT_S) as answer:  # noqa: S310 - our own loopback URL
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def proxy_free_environment() -> None:
    """Keep loopback calls away from a proxy that the environment names."""
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"
