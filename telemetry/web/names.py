"""Names in addresses: also those that only routers and engines gave, which may hold whatever somebody sent."""

from __future__ import annotations

from urllib.parse import unquote


class NameConverter:
    """One part of an address, of a name that may hold slashes: escaped once more, since servers undo one escape."""

    regex = "[^/]+"

    def to_python(self, value: str) -> str:
        """The name."""
        return unquote(value)

    def to_url(self, value: str) -> str:
        """Without a slash; the rest is escaped with the whole address."""
        return str(value).replace("%", "%25").replace("/", "%2F")
