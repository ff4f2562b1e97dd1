"""The router against direct access and other proxies, on the same replicas, interleaved in one run.

CPU is user + system time of the proxy alone (``/proc``); requests/s and events/s share the cores with load and
replicas. Figures are medians of rounds, with minimum and maximum where useful. ``wrk`` generates the load where it is
installed. A request costs more when the proxy can sleep between requests, because the kernel must wake it, so CPU is
also compared at one common rate: half of the slowest proxy's maximum. Latency is measured in the same rounds with the
proxy on a separate core.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from routing.schema import (
    LowestCostSettings,
    PolicyConfig,
    PoolConfig,
    PrefixHashSettings,
    ReplicaConfig,
    RouterConfig,
    Settings,
    dump_snapshot,
)
from tests.benchmarks.builds import compiled_environment
from tests.benchmarks.cores import can_be_split, core_of_its_own
from tests.benchmarks.load import PROMPT_BYTES, SESSIONS, request_parts, warm_up_s
from tests.benchmarks.peers import installed
from tests.benchmarks.proxy import DEADLINE_S, Proxy

POLICIES: tuple[Settings, ...] = (LowestCostSettings(), PrefixHashSettings())
REPLICAS = 4
ROUNDS = 3
LATENCY_ROUNDS = 5  # other load only adds to a latency, so the minimum of the rounds counts
SECONDS = 4.0
CONNECTIONS = 32
LARGE_PROMPT_BYTES = 128 << 10
STREAMS = 200  # at the replicas' tick: 20,000 events/s


def main() -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        replicas_pid, ports = stack.enter_context(replicas())
        builds = [None, compiled_environment()] if compiled_environment() else [None]
        routers = [
            stack.enter_context(our_router(folder, ports, settings, build)) for settings in POLICIES for build in builds
        ]
        addresses = [f"127.0.0.1:{port}" for port in ports]
        peers = [stack.enter_context(start(folder, addresses)) for start in installed()]
        proxies = [Proxy("direct", ports[0], None), *peers, *routers]
        for _ in range(ROUNDS):
            for proxy in proxies:
                measure_requests(proxy, folder)
        rate = min(router.figure("requests_per_s") or 0 for router in routers) / 2
        for _ in range(LATENCY_ROUNDS):
            for proxy in proxies:
                idle = [pid for other in proxies if other is not proxy for pid in other.pids()]
                with core_of_its_own(proxy.pids(), [replicas_pid, *idle]):
                    measure_latency(proxy, rate)
        for _ in range(ROUNDS):
            for proxy in proxies:
                measure_streams(proxy)
        report(proxies[0], peers, routers, rate)


# --- measurements -----------------------------------------------------------------------------------


def measure_requests(proxy: Proxy, folder: Path) -> None:
    """Maximum throughput on kept-alive connections."""
    before = proxy.cpu_s()
    has_wrk = shutil.which("wrk") is not None
    responses, seconds = wrk(proxy.port, folder, PROMPT_BYTES) if has_wrk else closed_load(proxy.port)
    cpu_s = proxy.cpu_s() - before
    proxy.record(requests_per_s=responses / seconds)
    if proxy.pid is not None:
        proxy.record(us_per_request=1e6 * cpu_s / responses, memory_mib=proxy.memory_mib())
        if has_wrk:
            before = proxy.cpu_s()
            responses, _ = wrk(proxy.port, folder, LARGE_PROMPT_BYTES)
            proxy.record(us_per_128_kib=1e6 * (proxy.cpu_s() - before) / responses)


def measure_latency(proxy: Proxy, rate: float) -> None:
    """Latency and CPU per request at half load."""
    before = proxy.cpu_s()
    result = load("paced", proxy.port, SECONDS, CONNECTIONS, rate)
    proxy.record(p50_ms=1e3 * result["p50_s"], p99_ms=1e3 * result["p99_s"])
    if proxy.pid is not None:  # the warm-up counts as well, at the same rate
        proxy.record(us_paced=1e6 * (proxy.cpu_s() - before) / (rate * (result["seconds"] + warm_up_s(SECONDS))))


def measure_streams(proxy: Proxy) -> None:
    before, started = proxy.cpu_s(), time.perf_counter()
    result = load("streams", proxy.port, SECONDS, STREAMS)
    cpu_s, elapsed_s = proxy.cpu_s() - before, time.perf_counter() - started
    if not result["events"]:
        return
    proxy.record(events_per_s=result["events"] / result["seconds"])
    if proxy.pid is not None:  # the warm-up and the opening count as well, at the same rate
        events = result["events"] / result["seconds"] * min(elapsed_s, result["seconds"] + warm_up_s(SECONDS))
        proxy.record(us_per_event=1e6 * cpu_s / events)


def report(direct: Proxy, peers: list[Proxy], routers: list[Proxy], rate: float) -> None:
    columns = [
        "us_per_request",
        "us_per_128_kib",
        "requests_per_s",
        "us_paced",
        "p50_ms",
        "p99_ms",
        "us_per_event",
        "memory_mib",
    ]
    print(f"8 KiB chat bodies, {CONNECTIONS} connections; paced: {rate:.0f} requests/s; {STREAMS} streams; {python()}")
    if can_be_split():
        print("us_paced, p50 and p99: the proxy has a core of its own, load and replicas have the others")
    else:
        print("us_paced, p50 and p99: one core only, so that load and replicas are in the proxy's latency")
    print(f"{'':22}" + "".join(f"{name:>26}" for name in columns))
    for proxy in (direct, *peers, *routers):
        print(f"{proxy.name:22}" + "".join(f"{proxy.text(name):>26}" for name in columns))
    for router in routers:
        added = [min(router.figures[name]) - min(direct.figures[name]) for name in ("p50_ms", "p99_ms")]
        print(f"{router.name}, paced: {added[0]:.2f} ms added at p50, {added[1]:.2f} ms at p99, minimum rounds of both")
        for peer in peers:
            maximum, large, paced, events = (
                (router.figure(name) or 0) / (peer.figure(name) or 1)
                for name in ("us_per_request", "us_per_128_kib", "us_paced", "us_per_event")
            )
            ratios = f"{maximum:.2f} per request, {large:.2f} with 128 KiB, {paced:.2f} paced"
            print(f"  CPU / {peer.name}: {ratios}, {events:.2f} per streamed event")


def python() -> str:
    """The interpreter and its compiler; distributors rarely say whether a build is profile-guided."""
    built = f"{platform.python_compiler()}, {sysconfig.get_config_var('OPT') or 'flags unknown'}"
    return f"{platform.python_implementation()} {platform.python_version()} ({built})"


# --- load --------------------------------------------------------------------------------------------


def load(kind: str, port: int, seconds: float, *numbers: float) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.benchmarks.load", kind, str(port), str(seconds), *map(str, numbers)]
    done = subprocess.run(command, capture_output=True, timeout=seconds + DEADLINE_S, check=True)
    result: dict[str, float] = json.loads(done.stdout)
    if result["lost"]:
        print(f"  {result['lost']:.0f} connections were lost", file=sys.stderr)
    return result


def closed_load(port: int) -> tuple[float, float]:
    result = load("closed", port, SECONDS, CONNECTIONS)
    return result["requests"], result["seconds"]


def wrk(port: int, folder: Path, prompt_bytes: int) -> tuple[float, float]:
    script = folder / f"requests-{prompt_bytes}.lua"
    if not script.exists():
        for session in range(SESSIONS):
            for place, part in enumerate(request_parts(session, prompt_bytes=prompt_bytes)):
                (folder / f"request-{prompt_bytes}-{session}-{place}").write_bytes(part)
        script.write_text(
            f"local parts, number = {{}}, 0\nfor i = 0, {SESSIONS - 1} do\n  parts[i] = {{}}\n  for place = 0, 2 do\n"
            f'    local f = io.open("{folder}/request-{prompt_bytes}-" .. i .. "-" .. place, "rb")\n'
            '    parts[i][place] = f:read("*a")\n    f:close()\n  end\nend\n'
            f"request = function()\n  number = number + 1\n  local part = parts[number % {SESSIONS}]\n"
            '  local name = string.format("%032x", number)\n'
            "  return part[0] .. name .. part[1] .. name .. part[2]\nend\n"
        )
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{SECONDS:g}s", "-s", str(script), f"http://127.0.0.1:{port}/"]
    text = subprocess.run(command, capture_output=True, timeout=SECONDS + DEADLINE_S, check=True, text=True).stdout
    if "Non-2xx" in text or "Socket errors" in text:
        print("  wrk: " + "; ".join(re.findall(r"(?:Non-2xx|Socket errors).*", text)), file=sys.stderr)
    match = re.search(r"(\d+) requests in ([\d.]+)s", text)
    if match is None:
        raise RuntimeError(f"unexpected output of wrk: {text}")
    return float(match[1]), float(match[2])


# --- processes --------------------------------------------------------------------------------------


@contextmanager
def replicas() -> Iterator[tuple[int, list[int]]]:
    command = [sys.executable, "-m", "tests.benchmarks.mock_upstream", str(REPLICAS)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout
        yield process.pid, json.loads(process.stdout.readline())
    finally:
        process.communicate(timeout=DEADLINE_S)


@contextmanager
def our_router(
    folder: Path, ports: list[int], settings: Settings, compiled: dict[str, str] | None = None
) -> Iterator[Proxy]:
    """The router under a policy; ``compiled`` is the environment of the compiled build."""
    name = f"{settings.name}, compiled" if compiled else settings.name
    members = tuple(
        ReplicaConfig(name=f"replica-{port}", url=f"http://127.0.0.1:{port}", block_tokens=16) for port in ports
    )
    with serving_router(folder, name, members, settings, compiled) as router:
        yield router


@contextmanager
def serving_router(
    folder: Path,
    name: str,
    members: tuple[ReplicaConfig, ...],
    settings: Settings,
    compiled: dict[str, str] | None = None,
    *options: str,
) -> Iterator[Proxy]:
    """A router before these replicas, with its files in a folder of its name."""
    folder = folder / name
    folder.mkdir(parents=True)
    policy = PolicyConfig(name="bench", revision=1, settings=settings)
    snapshot = RouterConfig(hash_secret="0" * 32, pools=(PoolConfig(name="bench", policy=policy, replicas=members),))
    file = folder / "config.json"
    file.write_bytes(dump_snapshot(snapshot, 1).document)
    command = [sys.executable, "-m", "routing", "serve", "--config", str(file), "--port=0", "--admin-port=0"]
    command += [f"--state-dir={folder}/state", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=compiled)
    try:
        assert process.stderr
        port, admin_port = _ready_ports(process.stderr)
        yield Proxy(name, port, process.pid, admin_port)
    finally:
        process.terminate()
        process.communicate(timeout=DEADLINE_S)


def _ready_ports(lines: Iterator[str]) -> tuple[int, int]:
    for line in lines:
        if found := re.search(r"is ready: http://127\.0\.0\.1:(\d+) \(admin http://127\.0\.0\.1:(\d+)", line):
            return int(found[1]), int(found[2])
    raise RuntimeError("the router ended before it was ready")
