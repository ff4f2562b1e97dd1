"""Which site is talked to, and with which token."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import click


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
