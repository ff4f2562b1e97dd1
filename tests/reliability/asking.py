"""Clients that poll pages and REST during an outage."""

from __future__ import annotations

import threading
from collections import Counter
from typing import NamedTuple, Self

import httpx

ASK_EVERY_S = 0.1
PAGES = ("/", "/policies/", "/events/")
ENDPOINTS = ("pools", "policies", "routers", "events", "alerts")


class Seen(NamedTuple):
    """One response."""

    address: str
    status: int  # 0: there was none
    kind: str  # of its content


class Asking:
    """A REST client and optionally a browser that poll until the end of the block."""

    def __init__(self, rest: httpx.Client, person: httpx.Client | None = None, *, every_s: float = ASK_EVERY_S) -> None:
        self.seen: list[Seen] = []
        self._every_s = every_s
        self._done = threading.Event()
        asked = [(rest, ENDPOINTS), *([(person, PAGES)] if person else [])]
        self._threads = [threading.Thread(target=self._keep_asking, args=one) for one in asked]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(timeout=90)

    @property
    def statuses(self) -> Counter[int]:
        """Number of responses by status."""
        return Counter(seen.status for seen in self.seen)

    def addresses(self, status: int) -> set[str]:
        """URLs that returned this status."""
        return {seen.address for seen in self.seen if seen.status == status}

    def kinds(self, status: int, addresses: tuple[str, ...]) -> set[str]:
        """Content types of such responses."""
        return {seen.kind for seen in self.seen if seen.status == status and seen.address in addresses}

    def _keep_asking(self, client: httpx.Client, addresses: tuple[str, ...]) -> None:
        while not self._done.wait(self._every_s):
            for address in addresses:
                self.seen.append(_ask(client, address))


def _ask(client: httpx.Client, address: str) -> Seen:
    try:
        answer = client.get(address)
    except httpx.TransportError as error:
        return Seen(address, 0, type(error).__name__)
    return Seen(address, answer.status_code, answer.headers["content-type"].partition(";")[0])
