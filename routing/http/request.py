"""A request's head: what HTTP allows, what a proxy must refuse, and what goes on to the replica.

llhttp has checked the grammar. It accepts what an origin may and a proxy must not, because the next hop could read
it otherwise: those rules are here. Of the headers, only end-to-end ones go on, and the framing is always our own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING, Final

from routing.http.errors import RejectedRequestError
from routing.http.headers import HOP_BY_HOP, Header, template_of, without_named
from routing.schema import Limits

if TYPE_CHECKING:
    from routing.http.auth import AccessControl, Grant
    from routing.prompt.rewrite import Layout


_REPLACED: Final = frozenset({b"host", b"content-length", b"expect", b"x-request-id"})  # ours go instead
_NOT_FOR_CLIENTS: Final = frozenset({b"forwarded", b"x-real-ip"})  # what only a trusted hop may say
_NOT_FOR_CLIENTS_PREFIXES: Final = (b"x-forwarded-", b"x-user-", b"x-warmpath-")
# Ours to read, and to pass on.
_READ: Final = frozenset({b"authorization", b"content-encoding", b"x-priority", b"x-session-id", b"x-task-group"})
_SPECIAL: Final = HOP_BY_HOP | _REPLACED | _READ | _NOT_FOR_CLIENTS
_CREDENTIALS: Final = frozenset({b"authorization", b"api-key", b"x-api-key"})
_NAMES_KNOWN: Final = 1000  # header names whose treatment is remembered
_NAME_BYTES: Final = 64  # of a longest one

_host: Final = re.compile(rb"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?").fullmatch
_request_id: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}").fullmatch
_digit: Final = re.compile(rb"[0-9]").fullmatch
_absolute: Final = re.compile(rb"https?://([^/?#]*)(.*)", re.IGNORECASE).fullmatch


class RequestHead:
    """A request's head as the router understood it; requests that repeat it share it."""

    __slots__ = (
        "_anonymous",
        "_anonymous_template",
        "_cut",
        "authorization",
        "expects_continue",
        "grant",
        "has_length",
        "http11",
        "judge",
        "keep_alive",
        "lines",
        "method",
        "path",
        "priority",
        "request_id",
        "request_id_place",
        "session_id",
        "target",
        "task_group",
        "template",
    )

    def __init__(self, method: bytes, target: bytes, *, http11: bool) -> None:
        self.method = method
        self.target = target
        self.path = target.partition(b"?")[0]
        self.http11 = http11
        self.keep_alive = False  # known when the parser has come to the message's end
        self.lines = b""  # header lines for the replica, each with its CRLF
        self.request_id = ""  # as the client gave it
        self.priority: int | None = None  # None: the client asks for none
        self.session_id: str | None = None
        self.task_group: str | None = None
        self.has_length = False  # which length, each request says for itself
        self.expects_continue = False
        self.authorization = b""  # also where it was given twice
        self.judge: AccessControl | None = None  # who looked at it, and what came of that
        self.grant: Grant | None = None
        self.template: bytes | None = None  # ``lines`` as a format of later requests' values; None: ``lines`` has none
        self.request_id_place: int | None = None  # among the values; None: all have the same id
        self._anonymous: bytes | None = None
        self._anonymous_template: bytes | None = None
        self._cut: list[Header] = []

    def lines_with(self, values: Sequence[bytes] | None, *, anonymous: bool) -> bytes:
        """Header lines for the replica of a request that has these values; None: of the one that was parsed.

        ``anonymous``: without the client's credentials, in whatever header clients carry them.
        """
        if not anonymous:
            return self.lines if values is None or self.template is None else self.template % tuple(values)
        if self._anonymous is None:
            lines = self.lines.splitlines(keepends=True)
            self._anonymous = b"".join(line for line in lines if not _is_credential(line))
        if values is None or self.template is None:
            return self._anonymous
        if self._anonymous_template is None:
            self._anonymous_template = template_of(self._anonymous, self._cut)
        return self._anonymous_template % tuple(values)

    def request_id_with(self, values: Sequence[bytes] | None) -> str:
        """The id that a client gave to a request with these values; empty if none that may go on."""
        if values is None or self.request_id_place is None:
            return self.request_id
        given = values[self.request_id_place]
        return given.decode() if _request_id(given) else ""

    def stand_for(self, cut: list[Header], headers: Sequence[Header]) -> None:
        """Stand for later requests too, in which those of its ``headers`` that are ``cut`` have other values."""
        self._cut = cut
        self.template = template_of(self.lines, cut) if len(cut) > 1 else None  # a length alone does not go on
        first = next((header for header in headers if header[0].lower() == b"x-request-id"), None)
        self.request_id_place = cut.index(first) if first is not None and first in cut else None

    @property
    def is_plain(self) -> bool:
        """Whether the head alone says all about it: nothing is to be answered in between, and its length is known."""
        return self.has_length and not self.expects_continue


def _is_credential(line: bytes) -> bool:
    return line.partition(b":")[0].lower().replace(b"_", b"-") in _CREDENTIALS


class Request:
    """One whole request."""

    __slots__ = ("arrived_at", "body", "grant", "head", "layout", "omits_usage", "request_id", "values")

    def __init__(self, head: RequestHead, body: bytes, request_id: str, values: list[bytes] | None = None) -> None:
        self.head = head
        self.body = body
        self.request_id = request_id
        self.values = values  # of its own, where another request's head was parsed; None: its own was
        self.grant: Grant | None = None  # of its key, where keys are asked for
        self.omits_usage = False  # a stream whose client did not ask for usage
        self.layout: Layout | None = None  # of a large body
        self.arrived_at = monotonic()


def parse_request_head(
    method: bytes, target: bytes, version: str, headers: Sequence[Header], *, limits: Limits
) -> RequestHead:
    """Read a parsed head; RejectedRequestError says what is wrong with it, and with which status."""
    if len(headers) > limits.max_headers:
        raise RejectedRequestError(431, f"more than {limits.max_headers} headers", must_close=True)
    if version not in {"1.1", "1.0"}:
        raise RejectedRequestError(505, "this router speaks HTTP/1.1 and HTTP/1.0", must_close=True)
    special: dict[bytes, list[bytes]] = {}
    lines: list[bytes] = []
    size = len(target)  # and of what does not go on
    for name, value in headers:
        key, goes_on = _treatments[name]
        if goes_on:
            lines.append(name + b": " + value + b"\r\n")
        else:
            size += len(name) + len(value) + 4
        if key:
            special.setdefault(key, []).append(value)
    forwarded = b"".join(lines)
    if size + len(forwarded) > limits.max_header_bytes:
        raise RejectedRequestError(431, f"more than {limits.max_header_bytes} bytes of headers", must_close=True)
    _check_framing(special, version)
    host = _checked_host(special, version)
    head = RequestHead(method, _origin_form(target, host), http11=version == "1.1")
    _read_special(head, special, limits)
    if b"connection" in special:
        forwarded = b"".join(without_named(lines, special[b"connection"]))
    head.lines = forwarded
    return head


class _Treatments(dict[bytes, tuple[bytes, bool]]):
    """What becomes of a header: the key that we read it by (empty: we do not), and whether it goes on."""

    def __missing__(self, name: bytes) -> tuple[bytes, bool]:
        lower = name.lower()
        is_special = lower in _SPECIAL
        read_by_cgi = lower.replace(b"_", b"-")  # where both signs become one, so that neither may pass for the other
        goes_on = read_by_cgi in _READ or not (
            read_by_cgi in _SPECIAL or read_by_cgi.startswith(_NOT_FOR_CLIENTS_PREFIXES)
        )
        treatment = (lower if is_special else b"", goes_on)
        if len(self) < _NAMES_KNOWN and len(name) <= _NAME_BYTES:
            self[name] = treatment
        return treatment


_treatments: Final = _Treatments()


def _check_framing(special: dict[bytes, list[bytes]], version: str) -> None:
    """A body's end must be beyond dispute: one length, or chunked alone, and never both."""
    codings = special.get(b"transfer-encoding")
    if codings is None:
        if len(special.get(b"content-length", ())) > 1:
            raise RejectedRequestError(400, "two Content-Length headers", must_close=True)
        return
    if version == "1.0":
        raise RejectedRequestError(400, "Transfer-Encoding is not part of HTTP/1.0", must_close=True)
    if b"content-length" in special:
        raise RejectedRequestError(400, "both Transfer-Encoding and Content-Length", must_close=True)
    if len(codings) != 1 or codings[0].lower() != b"chunked":
        raise RejectedRequestError(501, "the only Transfer-Encoding understood is chunked", must_close=True)


def _checked_host(special: dict[bytes, list[bytes]], version: str) -> bytes | None:
    hosts = special.get(b"host", [])
    if len(hosts) == 1 and _host(hosts[0]):
        return hosts[0]
    if not hosts and version == "1.0":
        return None
    problem = "more than one Host header" if len(hosts) > 1 else "the Host header is missing or malformed"
    raise RejectedRequestError(400, problem, must_close=True)


def _origin_form(target: bytes, host: bytes | None) -> bytes:
    """The path and query of a target; the absolute form may name only the host that the request is for."""
    if target.startswith(b"/") or target == b"*":
        return target
    absolute = _absolute(target)
    if absolute is None:
        raise RejectedRequestError(400, "the request target is neither a path nor an absolute URL", must_close=True)
    authority, rest = absolute.groups()
    if host is None or authority.lower() != host.lower():
        raise RejectedRequestError(421, "the request target names another host", must_close=True)
    return rest if rest.startswith(b"/") else b"/" + rest


def _read_special(head: RequestHead, special: dict[bytes, list[bytes]], limits: Limits) -> None:
    if b"content-length" in special:
        head.has_length = True
        if int(special[b"content-length"][0]) > limits.max_body_bytes:
            raise body_too_large(limits)
    if b"expect" in special:
        _read_expect(head, special[b"expect"])
    if b"content-encoding" in special and special[b"content-encoding"] != [b"identity"]:
        raise RejectedRequestError(415, "compressed request bodies are not accepted", must_close=True)
    if b"x-session-id" in special:
        head.session_id = _text(special[b"x-session-id"][0])
    if b"x-task-group" in special:
        head.task_group = _text(special[b"x-task-group"][0])
    if len(special.get(b"authorization", ())) == 1:
        head.authorization = special[b"authorization"][0]
    if b"x-priority" in special and _digit(special[b"x-priority"][0]):
        head.priority = int(special[b"x-priority"][0])
    given = special.get(b"x-request-id")
    if given and _request_id(given[0]):
        head.request_id = given[0].decode()


def _text(value: bytes) -> str | None:
    return value.decode("latin-1") or None


def _read_expect(head: RequestHead, values: list[bytes]) -> None:
    if [value.lower() for value in values] != [b"100-continue"]:
        raise RejectedRequestError(417, "the only expectation understood is 100-continue", must_close=True)
    head.expects_continue = head.http11


def body_too_large(limits: Limits) -> RejectedRequestError:
    """A body over the limit: answered before the rest of it is read."""
    return RejectedRequestError(413, f"the body is larger than {limits.max_body_bytes} bytes", must_close=True)


def overhead(raw_bytes: int, body_bytes: int | None, limits: Limits) -> RejectedRequestError | None:
    """What to say to a head without end, or a body of mostly framing; None while it is neither.

    ``raw_bytes`` came since the last request, ``body_bytes`` of them are body; None where the head is not whole.
    """
    if body_bytes is None:
        return RejectedRequestError(431, f"more than {limits.max_header_bytes} bytes of headers", must_close=True)
    if raw_bytes > 2 * limits.max_header_bytes + 8 * body_bytes:
        return RejectedRequestError(400, "the chunks are mostly framing", must_close=True)
    return None


def without_upgrade(method: bytes, target: bytes, version: str, headers: Sequence[Header]) -> bytes:
    """A head as if it offered no upgrade."""
    lines = [b"%b: %b\r\n" % header for header in headers if header[0].lower() != b"upgrade"]
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, target, version.encode(), b"".join(lines))


def malformed(error: Exception) -> RejectedRequestError:
    """What the parser did not take for HTTP."""
    return RejectedRequestError(400, f"the request is not valid HTTP: {error}", must_close=True)
