"""A stand-in replica in its own process, and an HTTP client for it."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

DEADLINE_S = 60.0


@dataclass
class Response:
    """A whole response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The events of a stream; the last is the string [DONE]."""
        data = [event.rpartition("data: ")[2] for event in self.body.decode().split("\n\n") if event]
        return [event if event == "[DONE]" else json.loads(event) for event in data]


@dataclass
class ReplicaProcess:
    """A running replica."""

    port: int
    process: subprocess.Popen[str]
    headers: dict[str, str] = field(default_factory=dict)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)

    def send(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Response:
        """One exchange on a connection of its own; a body other than str or bytes is sent as JSON."""
        connection = self.connect()
        try:
            self.start(connection, method, path, body, headers)
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return Response(response.status, names, response.read())
        finally:
            connection.close()

    def start(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Send a request and read nothing."""
        sent = dict(self.headers)
        if body is not None and not isinstance(body, str | bytes):
            body, sent["Content-Type"] = json.dumps(body), "application/json"
        connection.request(method, path, body, {**sent, **(headers or {})})

    def chat(self, content: str, max_tokens: int = 4, **fields: Any) -> Response:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": max_tokens, **fields}
        return self.send("POST", "/v1/chat/completions", body)

    def restore(self) -> None:
        """End an injected fault, wait until no request runs, and empty the cache."""
        self.fault(kind="none")
        self.wait_for(lambda: self.metric("vllm:num_requests_running") == 0, "the engine to be idle")
        assert self.send("POST", "/reset_prefix_cache").json == {"success": True}

    def fault(self, **fault: Any) -> Response:
        return self.send("POST", "/standin/fault", fault)

    def metric(self, name: str, **labels: str) -> float:
        """The value of the first sample that has these labels."""
        for line in self.send("GET", "/metrics").body.decode().splitlines():
            sample, _, value = line.rpartition(" ")
            sample_name, _, text = sample.partition("{")
            if sample_name == name and all(f'{key}="{expected}"' in text for key, expected in labels.items()):
                return float(value)
        raise AssertionError(f"no sample {name} {labels}")

    def wait_for(self, condition: Callable[[], bool], description: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {DEADLINE_S} s for {description}")
            time.sleep(0.01)


@contextmanager
def replica_process(
    *arguments: str, model: str = "tiny", stderr: int | None = None, **headers: str
) -> Iterator[ReplicaProcess]:
    """A replica on a free port until the block ends."""
    command = [sys.executable, "-m", "routing.standin.server", "--port", "0", "--model", model, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "listens on" in line, f"the replica did not start: {line!r}, {process.poll()}"
        yield ReplicaProcess(int(line.rsplit(":", 1)[1]), process, headers)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(timeout=DEADLINE_S)
        if process.stdout is not None:
            process.stdout.close()
