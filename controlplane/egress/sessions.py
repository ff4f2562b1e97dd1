"""The same way out for libraries that make their requests with ``requests``."""

from __future__ import annotations

from typing import Any

import httpx
import requests
from requests.adapters import BaseAdapter

from .addresses import Rules
from .client import Answer, fetch, guarded_client


class GuardedAdapter(BaseAdapter):
    """Sends what a requests.Session prepared, under the rules; a requests.ConnectionError for every way to fail."""

    def __init__(self, rules: Rules, *, deadline_s: float, max_bytes: int) -> None:
        super().__init__()
        self.rules, self.deadline_s, self.max_bytes = rules, deadline_s, max_bytes

    def send(self, request: requests.PreparedRequest, *_: Any, **__: Any) -> requests.Response:
        """One request; a redirect is a failure, as nobody checked where it leads."""
        body = request.body.encode() if isinstance(request.body, str) else request.body
        if body is not None and not isinstance(body, bytes):
            raise requests.ConnectionError("only a body that is there as a whole can be sent", request=request)
        try:
            with guarded_client(self.rules) as client:
                answer = fetch(
                    client,
                    str(request.method),
                    str(request.url),
                    deadline_s=self.deadline_s,
                    max_bytes=self.max_bytes,
                    content=body,
                    headers=_own_headers(request),
                )
        except httpx.HTTPError as error:
            raise requests.ConnectionError(str(error), request=request) from None
        if 300 <= answer.status < 400:
            raise requests.ConnectionError("it redirects, which is not followed", request=request)
        return _response(request, answer)

    def close(self) -> None:
        """Nothing is kept open."""


def guarded_session(rules: Rules, *, deadline_s: float = 5.0, max_bytes: int = 1 << 20) -> requests.Session:
    """A session whose every request goes out under the rules, and takes no proxy or password from the environment."""
    session = requests.Session()
    session.trust_env = False
    for scheme in ("https://", "http://"):
        session.mount(scheme, GuardedAdapter(rules, deadline_s=deadline_s, max_bytes=max_bytes))
    return session


def _own_headers(request: requests.PreparedRequest) -> dict[str, str]:
    """What the caller set, without what is the connection's."""
    theirs = {"accept-encoding", "connection", "user-agent", "content-length"}
    return {str(name): str(value) for name, value in request.headers.items() if name.lower() not in theirs}


def _response(request: requests.PreparedRequest, answer: Answer) -> requests.Response:
    response = requests.Response()
    response.status_code, response.url, response.request = answer.status, str(request.url), request
    response.headers = requests.structures.CaseInsensitiveDict(answer.headers.items())
    response._content = answer.body  # noqa: SLF001 - where requests keeps a body that was read
    response.encoding = "utf-8"
    return response
