"""The production topology on one host, from the documented commands and the units of deploy/systemd.

One site for all tests of this folder, which run in the order of their files.
"""

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psycopg
import pytest

from controlplane.stack.paths import Child
from tests.contracts.documents.reading import ROOT, shown
from tests.end_to_end.live_stack import free_ports
from tests.end_to_end.production.client_load import Load
from tests.end_to_end.production.units import PATH, Host, Service
from tests.reliability.stand import ManagedProcess, soon
from tests.routing.standin.replica_process import replica_process

START_S = 120  # of a part, on a machine that runs the other tests too
RESUMES_S = 20.0
ROUTERS = ("1", "2")
HEADERS = {"Host": "warmpath.example.com", "X-Forwarded-Proto": "https", "X-Forwarded-For": "203.0.113.9"}
AGE = re.compile(r"^warmpath_controlplane_(?:scrape|evaluation)_age_seconds ([\d.]+)", re.MULTILINE)
REQUESTS = re.compile(r"^warmpath_router_requests_total{.*} (\S+)$", re.MULTILINE)


@dataclass
class Site:
    """The parts of one running site."""

    host: Host
    database: str
    ports: dict[str, int]
    parts: dict[str, Service]
    output: dict[str, str]  # of each documented command
    http: httpx.Client

    def get(self, path: str, headers: dict[str, str] | None = None) -> httpx.Response | None:
        """A response of the web process over plain HTTP; None without one."""
        with contextlib.suppress(httpx.TransportError):
            return self.http.get(f"http://127.0.0.1:{self.ports['web']}{path}", headers=headers)
        return None

    def works(self, since: float) -> bool:
        """Whether replicas were scraped and rules evaluated after a time of the monotonic clock."""
        response = self.get("/metrics")
        ages = [float(age) for age in AGE.findall(response.text)] if response else []
        return len(ages) == 2 and max(ages) < time.monotonic() - since

    def is_ready(self) -> bool:
        """Whether web and workers say that they are."""
        response = self.get("/readyz?require=worker")
        return response is not None and response.status_code == 200

    def until_works(self) -> None:
        """Wait until scheduled work has been done from now on, and every part says that it is ready."""
        since = time.monotonic()
        soon(lambda: self.works(since) and self.is_ready(), RESUMES_S, "scheduled work", every_s=0.5)

    def runs_release(self, name: str, version: str) -> bool:
        """Whether the process of a part is of a release."""
        return Path(f"/proc/{self.parts[name].process.pid}/cwd").readlink().name == version

    def has_requests(self, number: str) -> bool:
        """Whether the load balancer has sent requests to a router since it started."""
        response = self.http.get(f"http://127.0.0.1:{self.ports[f'admin-{number}']}/metrics")
        return any(float(count) > 0 for count in REQUESTS.findall(response.text))


# --- installation --------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def database(postgres: Path) -> Iterator[str]:
    name = f"production_{secrets.token_hex(4)}"
    with psycopg.connect(host=str(postgres), user="postgres", autocommit=True) as server:
        server.execute(f"create database {name}")
        yield f"postgresql://postgres@/{name}?host={postgres}"
        server.execute(f"drop database {name} with (force)")


@pytest.fixture(scope="session")
def replicas() -> Iterator[list[str]]:
    """Stand-ins whose streamed responses take half a second."""
    with replica_process() as first, replica_process() as second:
        yield [f"http://127.0.0.1:{replica.port}" for replica in (first, second)]


@pytest.fixture(scope="session")
def site(short_dir: Path, database: str, valkey: str, replicas: list[str]) -> Iterator[Site]:
    """Installed and started as deploy/systemd/README.md says."""
    host = Host(short_dir / "site")
    host.use_release("0.1.0")
    names = ("web", "clients", *(f"{kind}-{number}" for number in ROUTERS for kind in ("data", "admin")))
    ports = dict(zip(names, free_ports(len(names), spare_after_last=0), strict=True))
    secret_commands, commands = documented("/etc/warmpath"), documented("current/deploy/systemd/warmpath-manage")
    for command in secret_commands:
        host.sh(command)
    configure(host, ports, database, valkey)
    output = {command: host.sh(command.partition("http://gpu")[0]) for command in commands[:-1]}
    output["seed_fleet"] = host.sh(commands[-1].partition("http://gpu")[0] + " ".join(replicas))
    with contextlib.ExitStack() as stack:
        http = stack.enter_context(httpx.Client(timeout=10, trust_env=False, verify=False))  # nothing is encrypted
        site = Site(host, database, ports, services(host), output, http)
        for part in site.parts.values():
            stack.callback(part.close)
            part.start()
        soon(site.is_ready, START_S, "web and workers", every_s=1)
        yield site


def documented(word: str) -> list[str]:
    """The documented commands that contain a word, in order."""
    commands = shown((ROOT / "deploy/systemd/README.md").read_text())
    return [command for command in commands if word in command]


def configure(host: Host, ports: dict[str, int], database: str, broker: str) -> None:
    """Edit the copied files: addresses of the servers, and other ports."""
    etc = host.folder / "etc/warmpath"
    (etc / "secrets/database_url").write_text(database)
    (etc / "secrets/redis_url").write_text(broker)
    values = {
        "control-plane": {"WARMPATH_WEB_PORT": ports["web"], "WARMPATH_STATIC_ROOT": host.folder / "static",
                          "WEB_CONCURRENCY": 1, "WARMPATH_SCRAPE_INTERVAL_S": 2},
    }  # fmt: skip
    for number in ROUTERS:
        values[f"router-{number}"] = {
            "WARMPATH_ROUTER_PORT": ports[f"data-{number}"],
            "WARMPATH_ROUTER_ADMIN_PORT": ports[f"admin-{number}"],
            "CONTROL_PLANE_URL": f"http://127.0.0.1:{ports['web']}",
        }
    for name, variables in values.items():
        with (etc / f"{name}.env").open("a") as file:
            file.writelines(f"{variable}={value}\n" for variable, value in variables.items())


def services(host: Host) -> dict[str, Service]:
    """The units of the site, in the order in which they start."""
    return {
        "web": Service(host, "warmpath-web"),
        "worker": Service(host, "warmpath-worker"),
        "worker-2": Service(host, "warmpath-worker", "", "--hostname", "second@host"),  # of a host that is not upgraded
        "beat": Service(host, "warmpath-beat"),
    } | {f"router-{number}": Service(host, "warmpath-router@", number) for number in ROUTERS}


@pytest.fixture(scope="session")
def haproxy(site: Site) -> Iterator[int]:
    """HAProxy in front of the routers, with the file of deploy/haproxy; the port for clients."""
    program, ports = shutil.which("haproxy"), site.ports
    if program is None:
        assert os.environ.get("REQUIRE_PROGRAMS") != "1", "haproxy is missing"
        pytest.skip("haproxy is not installed")
    environment = {"LISTEN": f"127.0.0.1:{ports['clients']}", "KEEP_USER": "1", "PATH": PATH}
    environment |= {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}  # if it is unpacked
    for number in ROUTERS:
        environment[f"ROUTER_{number}"] = f"127.0.0.1:{ports[f'data-{number}']}"
        environment[f"ROUTER_{number}_ADMIN_PORT"] = str(ports[f"admin-{number}"])
    url = f"http://127.0.0.1:{ports['clients']}/health"
    child = Child("haproxy", [program, "-db", "-f", str(ROOT / "deploy/haproxy/haproxy.cfg")], lambda: answers(url))
    process = ManagedProcess(child, environment)
    process.start()
    yield ports["clients"]
    process.kill()


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    return False


@pytest.fixture
def load(haproxy: int) -> Iterator[Load]:
    """Clients that send requests during a test."""
    with Load(haproxy, "tiny") as load:
        load.until_served(3)
        yield load
