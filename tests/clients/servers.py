"""A router process in front of stand-in replicas, and the comparison of results with those of a stand-in."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from routing.schema import (
    Access,
    ApiKey,
    Limits,
    LowestCostSettings,
    PolicyConfig,
    PoolConfig,
    ReplicaConfig,
    ReplicaState,
    RouterConfig,
    dump_snapshot,
)
from tests.routing.standin.replica_process import ReplicaProcess

KEY, SLOW_KEY, OTHER_KEY = "sk-" + "a1" * 16, "sk-" + "b2" * 16, "sk-" + "c3" * 16
MODEL, EMBEDDER, GONE = "tiny", "embedder", "gone"
MAX_BODY_BYTES = 1 << 20
READY = " is ready: "
Client = TypeVar("Client")
Result = TypeVar("Result")
# Fields that differ between two results of the same call.
VARYING = frozenset(
    {"id", "created", "created_at", "item_id", "call_id", "tool_use_id", "previous_response_id"}
    | {"cached_tokens", "created_cache_tokens"}  # depend on the earlier requests of each replica
    | {"system_fingerprint"}  # a stream loses it with the usage event: routing/proxy/README.md
)


@dataclass(frozen=True)
class Servers:
    """The router, its replicas, and replicas with the same seeds outside the router."""

    router: str  # base URL
    replicas: list[ReplicaProcess]
    direct: str
    direct_embedder: str

    def running(self) -> float:
        """Number of requests that are running at the router's replicas."""
        return sum(replica.metric("vllm:num_requests_running") for replica in self.replicas)

    def wait_until_idle(self) -> None:
        """Wait until the replicas have aborted the request of a client that disconnected."""
        self.replicas[0].wait_for(lambda: self.running() == 0, "the replicas to be idle")


def router_config(generating: list[ReplicaProcess], embedding: list[ReplicaProcess]) -> RouterConfig:
    """One pool for each model. The pool of the model ``gone`` has no replica that accepts requests."""
    pools = (
        _pool(MODEL, generating),
        _pool(EMBEDDER, embedding),
        _pool(GONE, generating[:1], ReplicaState.DRAINING),
    )
    keys = (_key("team", KEY), _key("slow", SLOW_KEY, requests_per_s=0.5, burst=1))
    limits = Limits(max_body_bytes=MAX_BODY_BYTES)
    return RouterConfig(hash_secret="ab" * 16, pools=pools, access=Access(keys=keys), limits=limits)


def _pool(model: str, replicas: list[ReplicaProcess], state: ReplicaState = ReplicaState.ACTIVE) -> PoolConfig:
    members = tuple(
        ReplicaConfig(name=f"{model}-{number}", url=address(replica.port), block_tokens=16, state=state)
        for number, replica in enumerate(replicas)
    )
    policy = PolicyConfig(name="everyday", revision=1, settings=LowestCostSettings())
    return PoolConfig(name=model, policy=policy, models=(model,), replicas=members)


def _key(name: str, secret: str, **fields: Any) -> ApiKey:
    return ApiKey(name=name, digest=hashlib.sha256(secret.encode()).hexdigest(), **fields)


def address(port: int) -> str:
    return f"http://127.0.0.1:{port}"


@contextmanager
def router_process(folder: Path, config: RouterConfig) -> Iterator[str]:
    """Run a router with this configuration; yields its base URL."""
    file = folder / "config.json"
    file.write_bytes(dump_snapshot(config, 1).document)
    ports = ["--host=127.0.0.1", "--port=0", "--admin-host=127.0.0.1", "--admin-port=0"]
    command = [sys.executable, "-m", "routing", "serve", f"--config={file}", f"--state-dir={folder}", *ports]
    process = subprocess.Popen([*command, "--name=clients"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    reader = threading.Thread(target=process.stderr.read, daemon=True)
    try:
        line = next((line for line in process.stderr if READY in line), "")
        assert line, f"the router did not start: {process.poll()}"
        reader.start()
        yield line.partition(READY)[2].split()[0]
    finally:
        process.terminate()
        process.wait(timeout=20)
        if reader.is_alive():
            reader.join(timeout=20)
        process.stderr.close()


def plain(value: Any) -> Any:
    """A result as JSON values, without the ``VARYING`` fields."""
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json", warnings=False)
    if isinstance(value, dict):
        if value.get("cache_read_input_tokens") is not None:  # Anthropic's ``input_tokens`` leave out cached tokens
            names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
            return plain({**value, **dict.fromkeys(names), "input_tokens": sum(value[name] or 0 for name in names)})
        return {name: plain(item) for name, item in value.items() if name not in VARYING}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class ClientPair(Generic[Client]):
    """A client of the router, and one of a stand-in with the same seed."""

    routed: Client
    direct: Client

    def equal_result(self, call: Callable[[Client], Result]) -> Result:
        """The result of a call through the router; fails unless the call without the router has an equal result."""
        result, expected = call(self.routed), call(self.direct)
        assert plain(result) == plain(expected)
        return result

    async def equal_result_async(self, call: Callable[[Client], Awaitable[Result]]) -> Result:
        """``equal_result`` for an asynchronous client."""
        result, expected = await call(self.routed), await call(self.direct)
        assert plain(result) == plain(expected)
        return result
