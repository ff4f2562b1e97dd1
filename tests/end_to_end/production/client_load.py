"""Clients that send chat requests all the time and record what they get."""

from __future__ import annotations

import http.client
import json
import threading
import time
from dataclasses import dataclass
from typing import Self

TIMEOUT_S = 60
PAUSE_S = 0.2
# By client: a field of the request, and the number of characters of its prompt. A long prompt is sent in many packets.
KINDS = {"streamed": (True, 300), "plain": (False, 300), "large": (False, 100_000)}


@dataclass(slots=True)
class Outcome:
    """One request."""

    kind: str
    status: int = 0  # 0: no response
    has_begun: bool = False  # whether the client got the head of a response
    problem: str = ""  # "": a complete response with status 200


class Load:
    """One client for each kind of request, each on a connection that it keeps, until the end of the block."""

    def __init__(self, port: int, model: str) -> None:
        self.outcomes: list[Outcome] = []
        self._port, self._model = port, model
        self._done = threading.Event()
        self._threads = [threading.Thread(target=self._send_all, args=(kind,)) for kind in KINDS]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(timeout=TIMEOUT_S + 10)

    @property
    def failures(self) -> list[Outcome]:
        """Requests without a complete response."""
        return [outcome for outcome in list(self.outcomes) if outcome.problem]

    def until_served(self, requests: int) -> None:
        """Wait until this many more requests have ended."""
        wanted, deadline = len(self.outcomes) + requests, time.monotonic() + TIMEOUT_S
        while len(self.outcomes) < wanted:
            assert time.monotonic() < deadline, "clients get no responses"
            time.sleep(0.02)

    def _send_all(self, kind: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        number = 0
        while not self._done.wait(PAUSE_S):
            number += 1
            outcome = Outcome(kind)
            try:
                self._send(connection, outcome, number)
            except (OSError, http.client.HTTPException) as error:
                outcome.problem = f"{type(error).__name__}: {error}"
                connection.close()
            self.outcomes.append(outcome)
        connection.close()

    def _send(self, connection: http.client.HTTPConnection, outcome: Outcome, number: int) -> None:
        stream, length = KINDS[outcome.kind]
        message = {"role": "user", "content": f"{number} " + "x " * (length // 2)}
        body = {"model": self._model, "messages": [message], "stream": stream, "max_tokens": 40}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        outcome.status, outcome.has_begun = response.status, True
        text = response.read()
        is_whole = text.endswith(b"data: [DONE]\n\n") if stream else b'"finish_reason"' in text
        if response.status != 200 or not is_whole:
            outcome.problem = f"{response.status}: {text[-200:]!r}"
