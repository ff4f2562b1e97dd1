"""The REST client: stored credentials, entity tags, idempotency keys, retries, and errors as text."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import httpx

TIMEOUT_S = 30.0
RETRY_FOR_S = 30.0  # while the site is unavailable or busy
PAGE_SIZE = 1000


@dataclass(frozen=True, slots=True)
class Site:
    """A site's address, without a final slash, and an API token."""

    url: str
    token: str

    def __repr__(self) -> str:
        return f"Site({self.url!r})"


def credentials_path() -> Path:
    """The file that ``login`` writes, readable by its owner only."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "warmpath" / "site.json"


def find_site(url: str | None, token: str | None) -> Site:
    """The site of the command line or the environment, else the stored one. UsageError without either.

    A stored token is sent only to the site that it was stored for.
    """
    stored = _stored_site()
    site_url = url or (stored and stored.url)
    token = token or (stored.token if stored and site_url == stored.url else None)
    if not site_url or not token:
        raise click.UsageError("Run 'warmpath login URL' first, or set WARMPATH_URL and WARMPATH_TOKEN.")
    return Site(validate_url(site_url), token)


def validate_url(url: str) -> str:
    """The URL without its final slash. UsageError unless it is the URL of a site."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
        raise click.UsageError(f"{url!r} is not the URL of a site, such as https://warmpath.example.com.")
    return url.rstrip("/")


def save_credentials(site: Site) -> None:
    """Write the file. Other users can never read it, not even briefly."""
    path = credentials_path()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(asdict(site), file)
    temporary.replace(path)


def delete_credentials() -> bool:
    """Delete the file. Returns whether it existed."""
    path = credentials_path()
    existed = path.exists()
    path.unlink(missing_ok=True)
    return existed


def _stored_site() -> Site | None:
    try:
        return Site(**json.loads(credentials_path().read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, OSError) as error:
        raise click.ClickException(f"{credentials_path()} cannot be read ({error}); log in again.") from None


class RequestError(click.ClickException):
    """The site rejected a request or does not respond. The text is for people."""


class RestClient:
    """A client of one site."""

    def __init__(self, site: Site, *, retry_for_s: float | None = None) -> None:
        self.site = site
        self._retry_for_s = RETRY_FOR_S if retry_for_s is None else retry_for_s
        headers = {"Authorization": f"Bearer {site.token}", "Accept": "application/json"}
        self._http = httpx.Client(base_url=f"{site.url}/api/v1/", headers=headers, timeout=TIMEOUT_S)

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, **query: Any) -> Any:
        return self._request("GET", path, params=_query_parameters(query)).json()

    def get_with_tag(self, path: str) -> tuple[Any, dict[str, str]]:
        """An object, and the ``If-Match`` header that rejects a change of it if somebody else changed it first."""
        response = self._request("GET", path)
        tag = response.headers.get("ETag")
        return response.json(), {"If-Match": tag} if tag else {}

    def rows(self, path: str, *, limit: int | None = None, **query: Any) -> list[dict[str, Any]]:
        """All rows of a list, or the first ``limit``, page by page."""
        page = self.get(path, **query, limit=min(limit or PAGE_SIZE, PAGE_SIZE))
        rows: list[dict[str, Any]] = page["results"]
        while page.get("next") and (limit is None or len(rows) < limit):
            # Only the query of ``next`` is used, so that a response cannot direct the token to another site.
            page = self._request("GET", f"{path}?{urlsplit(page['next']).query}").json()
            rows += page["results"]
        return rows[:limit]

    def send(
        self, method: str, path: str, body: Any = None, *, if_match: Mapping[str, str] | None = None, **query: Any
    ) -> Any:
        """Send a change. Its idempotency key makes a retry after a lost response harmless. None for no content."""
        headers = {"Idempotency-Key": str(uuid.uuid4())} if method == "POST" else {}
        response = self._request(
            method, path, json=body, params=_query_parameters(query), headers={**headers, **(if_match or {})}
        )
        return response.json() if response.content else None

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request, and retry it while the site is unavailable or busy. RequestError."""
        deadline_s = time.monotonic() + self._retry_for_s
        wait_s = 0.25
        while True:
            try:
                response = self._http.request(method, path, **options)
            except httpx.TransportError as error:
                if time.monotonic() + wait_s > deadline_s:
                    raise RequestError(f"{self.site.url} does not respond: {error!r}.") from None
            else:
                if response.status_code in {429, 503}:
                    retry_after = response.headers.get("Retry-After", "")
                    wait_s = max(wait_s, float(retry_after) if retry_after.isdecimal() else 0.0)
                if response.status_code not in {429, 503} or time.monotonic() + wait_s > deadline_s:
                    if response.is_success:
                        return response
                    raise RequestError(error_text(response))
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, 5.0)


def _query_parameters(params: Mapping[str, Any]) -> dict[str, str]:
    """Query parameters as text, without those that are None."""
    texts = {name: str(value) for name, value in params.items() if value is not None}
    return {name: text.lower() if isinstance(params[name], bool) else text for name, text in texts.items()}


def error_text(response: httpx.Response) -> str:
    """A problem document as lines of text."""
    try:
        problem = response.json()
        lines = [str(problem["detail"])]
    except (ValueError, KeyError, TypeError):
        return f"The site responded with {response.status_code} and no problem document: is it a Warmpath site?"
    lines += [f"  {error['pointer']}: {error['detail']}" for error in problem.get("errors", [])]
    if problem.get("request_id"):
        lines.append(f"  (status {response.status_code}, request {problem['request_id']})")
    return "\n".join(lines)
