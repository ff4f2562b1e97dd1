"""Which site is talked to, and with which token.

Talking to the REST API: tags for what is changed, keys for what may be repeated, refusals in words.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import httpx


@dataclass(frozen=True, slots=True)
class Site:
    """Where to, and what to sign in with."""

    url: str  # without a final slash
    token: str

    def __repr__(self) -> str:
        return f"Site({self.url!r})"


def place() -> Path:
    """The file that ``login`` writes, readable by its owner alone."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "warmpath" / "site.json"


def known_site(url: str | None, token: str | None) -> Site:
    """What was given on the command line or in the environment, else what ``login`` kept; a UsageError if neither."""
    kept = _kept()
    site = url or (kept and kept.url)
    # A token that was kept for one site is never sent to another.
    secret = token or (kept.token if kept and site == kept.url else None)
    if not site or not secret:
        raise click.UsageError("Run 'warmpath login URL' first, or set WARMPATH_URL and WARMPATH_TOKEN.")
    return Site(checked_url(site), secret)


def checked_url(url: str) -> str:
    """The address without its final slash; a UsageError for what is none."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
        raise click.UsageError(f"{url!r} is no address of a site, such as https://warmpath.example.com.")
    return url.rstrip("/")


def keep(site: Site) -> None:
    """Write the file anew; it is never readable by others, not even for a moment."""
    path = place()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(asdict(site), file)
    fresh.replace(path)


def forget() -> bool:
    """Remove the file; whether there was one."""
    path = place()
    existed = path.exists()
    path.unlink(missing_ok=True)
    return existed


def _kept() -> Site | None:
    try:
        return Site(**json.loads(place().read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, OSError) as error:
        raise click.ClickException(f"{place()} cannot be read ({error}); log in again.") from None


TIMEOUT_S = 30.0
PATIENCE_S = 30.0  # how long a site that is away, or busy, is asked again
PAGE = 1000


class RefusedError(click.ClickException):
    """The site refused, or does not answer; the text is for people."""


class Rest:
    """One site, signed in."""

    def __init__(self, site: Site, *, patience_s: float = PATIENCE_S) -> None:
        self.site = site
        self._patience_s = patience_s
        headers = {"Authorization": f"Bearer {site.token}", "Accept": "application/json"}
        self._http = httpx.Client(base_url=f"{site.url}/api/v1/", headers=headers, timeout=TIMEOUT_S)

    def close(self) -> None:
        """Hang up."""
        self._http.close()

    def get(self, path: str, **query: Any) -> Any:
        """One answer."""
        return self._asked("GET", path, params=_given(query)).json()

    def tagged(self, path: str) -> tuple[Any, dict[str, str]]:
        """One answer, and the headers that make a change of it fail if somebody else was faster."""
        answer = self._asked("GET", path)
        tag = answer.headers.get("ETag")
        return answer.json(), {"If-Match": tag} if tag else {}

    def every(self, path: str, *, most: int | None = None, **query: Any) -> list[dict[str, Any]]:
        """All rows of a list, or the first ``most``, page after page."""
        rows: list[dict[str, Any]] = []
        for page in self._pages(path, {**query, "limit": min(most or PAGE, PAGE)}):
            rows += page
            if most is not None and len(rows) >= most:
                return rows[:most]
        return rows

    def send(
        self, method: str, path: str, body: Any = None, *, match: Mapping[str, str] | None = None, **query: Any
    ) -> Any:
        """A change; one that was sent twice because its answer was lost is done once. None for no content."""
        headers = {"Idempotency-Key": str(uuid.uuid4())} if method == "POST" else {}
        answer = self._asked(method, path, json=body, params=_given(query), headers={**headers, **(match or {})})
        return answer.json() if answer.content else None

    def _pages(self, path: str, query: Mapping[str, Any]) -> Iterator[list[dict[str, Any]]]:
        answer = self.get(path, **query)
        yield answer["results"]
        while answer.get("next"):
            answer = self._asked("GET", _own_page(path, answer["next"])).json()
            yield answer["results"]

    def _asked(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Ask until there is an answer that means something, or patience ends."""
        until = time.monotonic() + self._patience_s
        for attempt in range(1000):
            wait_s = min(0.25 * 2**attempt, 5.0)
            try:
                answer = self._http.request(method, path, **options)
            except httpx.TransportError as error:
                if time.monotonic() + wait_s > until:
                    raise RefusedError(f"{self.site.url} does not answer: {error!r}.") from None
            else:
                if answer.status_code not in {429, 503}:
                    return _accepted(answer)
                wait_s = max(wait_s, _retry_after_s(answer))
                if time.monotonic() + wait_s > until:
                    return _accepted(answer)
            time.sleep(wait_s)
        raise AssertionError("patience ends before so many attempts")


def _own_page(path: str, following: str) -> str:
    """The next page of a list at the site that is talked to: the token goes to no other that an answer names."""
    return f"{path}?{urlsplit(following).query}"


def _retry_after_s(answer: httpx.Response) -> float:
    told = answer.headers.get("Retry-After", "")
    return float(told) if told.isdecimal() else 0.0


def _given(query: Mapping[str, Any]) -> dict[str, str]:
    """A query without what was not given."""
    told = {True: "true", False: "false"}
    return {name: told.get(value, str(value)) if isinstance(value, bool) else str(value)
            for name, value in query.items() if value is not None}  # fmt: skip


def _accepted(answer: httpx.Response) -> httpx.Response:
    if answer.is_success:
        return answer
    raise RefusedError(in_words(answer))


def in_words(answer: httpx.Response) -> str:
    """A problem document as lines of text."""
    try:
        problem = answer.json()
        lines = [str(problem["detail"])]
    except (ValueError, KeyError, TypeError):
        return f"The site answered {answer.status_code} with something that no Warmpath says."
    lines += [f"  {fault['pointer']}: {fault['detail']}" for fault in problem.get("errors", [])]
    if problem.get("request_id"):
        lines.append(f"  (status {answer.status_code}, request {problem['request_id']})")
    return "\n".join(lines)
