"""Where a replica listens, and the head of a request as it gets it."""

from __future__ import annotations

import ssl
from urllib.parse import urlsplit

from routing.http.request import Request
from routing.schema import AddressRules, ReplicaNetworks


class Address:
    """Where a replica listens, out of its base URL, and what it is told of who asks.

    With a key of its own the replica gets that one; else the client's, unless ``hides_keys`` because they are ours. A
    URL with https asks for ``tls``.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        hides_keys: bool = False,
        tls: ssl.SSLContext | None = None,
        networks: ReplicaNetworks | None = None,
    ) -> None:
        self._identity = (url, api_key, hides_keys, tls, networks)
        self.rules = None if networks is None else AddressRules(networks)  # None: any address will do
        self.last_refused = ""  # of its addresses, what was logged
        parts = urlsplit(url)
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.base = parts.path.rstrip("/").encode()
        self.host_header = parts.netloc.encode()
        self.ssl_context = tls
        self.authorization = b"Authorization: Bearer %b\r\n" % api_key.encode() if api_key else b""
        self._hides_keys = hides_keys or api_key is not None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def head(self, request: Request, rank: int | None = None, *, body_bytes: int) -> bytes:
        """The head of a request as this replica gets it: its own Host, our framing, our request id, our rank."""
        head = request.head
        lines = head.lines_with(request.values, anonymous=self._hides_keys)
        if self._hides_keys:
            lines += self.authorization
        if rank is not None:
            lines = _with_rank(lines, rank)
        length = b"Content-Length: %d\r\n" % body_bytes if body_bytes or head.method == b"POST" else b""
        return b"%b %b%b HTTP/1.1\r\nHost: %b\r\n%bX-Request-Id: %b\r\n%b\r\n" % (
            head.method,
            self.base,
            head.target,
            self.host_header,
            lines,
            request.request_id.encode(),
            length,
        )


def _with_rank(lines: bytes, rank: int) -> bytes:
    """Header lines that ask for a data-parallel rank, whatever the client asked for."""
    kept = (line for line in lines.splitlines(keepends=True) if not _is_rank(line))
    return b"%bX-data-parallel-rank: %d\r\n" % (b"".join(kept), rank)


def _is_rank(line: bytes) -> bool:
    return line.partition(b":")[0].lower().replace(b"_", b"-") == b"x-data-parallel-rank"
