"""The compared routers, each with the configuration that its documents recommend, and their environment ``.peers/``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from controlplane.stack.servers import valkey_child
from routing import __version__
from routing.schema import LowestCostSettings, ReplicaConfig
from routing.settings import STATE_URL
from tests.benchmarks.builds import compiled_environment
from tests.benchmarks.comparison.runs import Engine
from tests.benchmarks.comparison.workloads import ENGINE_BLOCK_TOKENS, MODEL, Workload
from tests.benchmarks.peers import envoy, haproxy, nginx, rust_router
from tests.benchmarks.proxy import Proxy, free_port, listening
from tests.benchmarks.router import serving_router
from tests.compiled.package import PACKAGES
from tests.conftest import running

ROOT = Path(__file__).parents[3]
PEERS = ROOT / ".peers"
LOCK = ROOT / "requirements" / "peers.txt"
# Package of each program. sglang-router has a program smg too, which the package smg, installed later, replaces.
PACKAGE = {"vllm-router": "vllm-router", "sglang-router": "sglang-router", "smg": "smg"}
PACKAGE |= {"litellm": "litellm[proxy]", "envoy": "pyvoy"}


@dataclass
class Stand:
    """What a router is started before."""

    folder: Path
    engines: Sequence[Engine]
    environment: Mapping[str, str]  # of our router

    @property
    def addresses(self) -> list[str]:
        return [engine.address for engine in self.engines]


Start = Callable[[Stand], AbstractContextManager[Proxy]]


@dataclass(frozen=True)
class Router:
    """A row of every table."""

    program: str  # "": ours
    start: Start
    configuration: str
    reason: str
    is_default: bool = False
    has_events: bool = False

    def takes_part(self, workload: Workload, *, are_given: bool) -> bool:
        """Given replicas are not killed and have no known events; a restarted stand-in publishes them elsewhere."""
        if workload.loses_engine:
            return not (self.has_events or are_given)
        return not (self.has_events and are_given)

    def version(self) -> str:
        if not self.program:
            return f"{__version__}, {'compiled' if build() else 'plain'}"
        if self.program in PACKAGE:
            return locked(PACKAGE[self.program])
        process = subprocess.run([self.program, "-v"], capture_output=True, text=True, check=True)
        return re.findall(r"\d[\d.]+\d", process.stdout + process.stderr)[0]


@cache
def build() -> dict[str, str] | None:
    """Environment of the compiled router if there is one."""
    return compiled_environment() if PACKAGES.exists() else None


def ours(stand: Stand, *, follows: bool = False) -> AbstractContextManager[Proxy]:
    """Our router. It gets the sizes of caches that the control plane reads from the engines."""
    members = tuple(
        ReplicaConfig(
            name=f"replica-{number}",
            url=engine.url,
            block_tokens=ENGINE_BLOCK_TOKENS,
            capacity_blocks=engine.blocks(),
            kv_events=engine.events if follows else None,
        )
        for number, engine in enumerate(stand.engines)
    )
    return serving_router(stand.folder, "router", members, LowestCostSettings(), dict(stand.environment))


@contextmanager
def environment(folder: Path, *, share_state: bool) -> Iterator[dict[str, str]]:
    """Environment of our routers."""
    variables = dict(build() or os.environ)
    if not share_state:
        yield variables
        return
    with running(valkey_child(folder / "valkey" / "socket")):
        yield variables | {STATE_URL: f"unix://{folder}/valkey/socket"}


def gateway(program: str, options: str, reason: str, **kind: bool) -> Router:
    """vllm-router, or one of its family."""

    def start(stand: Stand) -> AbstractContextManager[Proxy]:
        given = options.split()
        for engine in stand.engines if kind.get("has_events") else ():
            assert engine.events
            given += ["--kv-event-source", f"{engine.url}={engine.events.endpoint}"]
            given += ["--kv-event-replay-source", f"{engine.url}={engine.events.replay_endpoint}"]
        return rust_router([program, *(["launch"] if program != "vllm-router" else [])], stand.addresses, *given)

    return Router(program, start, options, reason, **kind)


def proxy(start: Callable[..., AbstractContextManager[Proxy]], balance: str, reason: str, **kind: bool) -> Router:
    return Router(start.__name__, lambda stand: start(stand.folder, stand.addresses, balance), balance, reason, **kind)


def litellm(stand: Stand) -> AbstractContextManager[Proxy]:
    port, config = free_port(), stand.folder / "litellm.json"  # JSON is YAML
    model = {"model": f"hosted_vllm/{MODEL}", "api_key": "none"}
    bases = [{"api_base": f"{engine.url}/v1"} for engine in stand.engines]
    models = [{"model_name": MODEL, "litellm_params": model | base} for base in bases]
    settings = {"optional_pre_call_checks": ["session_affinity"]}
    config.write_text(json.dumps({"model_list": models, "router_settings": settings}))
    # It downloads no price list, and needs no key on loopback.
    variables = ["LITELLM_LOCAL_MODEL_COST_MAP=True", "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY=true"]
    command = ["env", *variables, "litellm", "--config", str(config), "--telemetry", "False", "--host", "127.0.0.1"]
    return listening("litellm", [*command, "--port", str(port)], port)


DEFAULT = "its default policy"
SESSIONS = "for conversations; the traffic has X-Session-ID"
LENGTHS = "prompts differ in length"
KV_AWARE = f"--policy kv_aware --kv-event-model {MODEL} --kv-event-block-size {ENGINE_BLOCK_TOKENS}"
ROUTERS = {
    "lowest_cost": Router("", ours, "lowest_cost, state shared", DEFAULT, is_default=True),
    "lowest_cost, KV events": Router(
        "", partial(ours, follows=True), "lowest_cost, kv_events of each replica", "follows caches", has_events=True
    ),
    "vllm-router cache_aware": gateway("vllm-router", "--policy cache_aware", DEFAULT, is_default=True),
    "vllm-router kv_aware": gateway("vllm-router", KV_AWARE, "its policy with KV events", has_events=True),
    "vllm-router consistent_hash": gateway("vllm-router", "--policy consistent_hash", SESSIONS),
    "sglang-router cache_aware": gateway("sglang-router", "--policy cache_aware", DEFAULT, is_default=True),
    "smg cache_aware": gateway("smg", "--policy cache_aware", DEFAULT),
    "smg prefix_hash": gateway("smg", "--policy prefix_hash", "its cheaper alternative"),
    "litellm session_affinity": Router("litellm", litellm, "optional_pre_call_checks: session_affinity", SESSIONS),
    "nginx least_conn": proxy(nginx, "least_conn", LENGTHS, is_default=True),
    "nginx session hash": proxy(nginx, "hash $http_x_session_id consistent", SESSIONS),
    "haproxy leastconn": proxy(haproxy, "leastconn", LENGTHS),
    "envoy least request": proxy(envoy, "LEAST_REQUEST", LENGTHS),
}


def install(programs: set[str]) -> Iterator[str]:
    """Install the packages of peers that are missing, from the lock; a sentence for each that cannot be installed."""
    uv = str(ROOT / ".uv" / "bin" / "uv")
    for package in [package for program, package in PACKAGE.items() if program in programs]:
        name, version = package.partition("[")[0].replace("-", "_"), locked(package)
        if not any(PEERS.glob(f"lib/*/site-packages/{name}-{version}.dist-info")):
            subprocess.run([uv, "venv", "-q", "--allow-existing", "--python", sys.executable, str(PEERS)], check=True)
            command = [uv, "pip", "install", "-q", "--only-binary", ":all:", "--require-hashes", "-c", str(LOCK)]
            command += ["--python", str(PEERS / "bin" / "python"), f"{package}=={version}"]
            process = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
            if process.returncode:
                yield f"{package} is left out: {process.stderr.strip().splitlines()[-1]}"


def locked(package: str) -> str:
    """The locked version of a package."""
    name = package.partition("[")[0]
    return next(
        line.split()[0][len(name) + 2 :] for line in LOCK.read_text().splitlines() if line.startswith(f"{name}==")
    )
