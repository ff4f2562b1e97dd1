"""What a base URL may be: a replica's, or the control plane's."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from routing.schema.base import ConfigError

_host = re.compile(r"^[A-Za-z0-9._-]+$|^[0-9A-Fa-f:.]+$")


def check_base_url(url: str, path: str = "url") -> None:
    """A base URL: http or https, a host, nothing after the path; ConfigError names ``path``."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(path, f"not a URL: {error}") from None
    if parts.scheme not in {"http", "https"}:
        raise ConfigError(path, "expected http://host[:port] or https://host[:port]")
    if not parts.hostname or not _host.match(parts.hostname) or port == 0:
        raise ConfigError(path, "the host or port is missing or malformed")
    if (
        parts.username is not None
        or parts.query
        or parts.fragment
        or not url.isascii()
        or not url.isprintable()
        or " " in url
    ):
        raise ConfigError(path, "expected no credentials, query, fragment or blanks")
