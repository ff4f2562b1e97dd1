"""Request heads: the rules of HTTP for proxies, and what is forwarded to the replica. Decoding of request bodies.

llhttp has checked the grammar. It accepts some messages that an origin server may accept and a proxy must not, because
the next hop could read them differently; those rules are here. Only end-to-end headers are forwarded, and the router
writes the framing of the request itself.

A body in gzip or zstd is decoded, because placement reads it and engines understand no coding. A few bytes may stand
for gigabytes, so decoding goes in small steps, between which the caller may stop, and ends at the limit of bodies.
"""

from __future__ import annotations

import re
import zlib
from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from routing.http.response import HOP_BY_HOP, Header, RejectedRequestError, template_of, without_named
from routing.paths import ENDPOINTS
from routing.prompt.parsing import is_large
from routing.schema import DEFAULT_SESSION_KEYS, Limits

if TYPE_CHECKING:
    from routing.http.auth import AccessControl, Grant
    from routing.prompt.parsing import Layout


# The router decodes bodies and adds members, so a client's digest need not be that of the body that a replica gets.
_BODY_DIGESTS: Final = frozenset({b"content-digest", b"repr-digest", b"digest", b"content-md5"})
# The router sends its own. A response that a proxy on the way compressed could not be read: ``Accept-Encoding``.
_REPLACED: Final = frozenset(
    {b"accept-encoding", b"content-encoding", b"content-length", b"expect", b"host", b"x-request-id"}
)
_TRUSTED_HOPS_ONLY: Final = frozenset({b"forwarded", b"x-real-ip"})  # headers that a client must not set
_TRUSTED_HOPS_ONLY_PREFIXES: Final = (b"x-forwarded-", b"x-user-", b"x-warmpath-")
SESSION_HEADERS: Final = tuple(  # the first of them that a request has is its session key
    [key.removeprefix("header:").encode() for key in DEFAULT_SESSION_KEYS if key.startswith("header:")]
)
_READ_AND_FORWARDED: Final = frozenset(
    {b"authorization", b"content-type", b"x-api-key", b"x-priority", b"x-task-group", b"x-ttft-objective-ms"}
    | {*SESSION_HEADERS}
)
_SPECIAL: Final = HOP_BY_HOP | _REPLACED | _BODY_DIGESTS | _READ_AND_FORWARDED | _TRUSTED_HOPS_ONLY
_CREDENTIALS: Final = frozenset({b"authorization", b"api-key", b"x-api-key"})
GZIP: Final = b"gzip"
_CODINGS: Final = {b"gzip": GZIP, b"x-gzip": GZIP, b"zstd": b"zstd"}
_ACCEPTED_CODINGS: Final = ((b"Accept-Encoding", b"gzip, zstd"),)
STEP_BYTES: Final = 64 << 10  # of output: 0.1 to 0.5 ms
_SLICE_BYTES: Final = 16 << 10  # of input; what a step leaves is copied
_JOINED_BYTES: Final = 4096
_BLOCK_BYTES: Final = 1 << 20  # returned to the system when it is freed
MAX_MEMBERS: Final = 1000  # gzip members or zstd frames of one body; each costs up to 20 us
MAX_WINDOW_LOG: Final = 23  # of zstd: 8 MiB, as RFC 9659 requires of HTTP
_MAX_CACHED_NAMES: Final = 1000
_MAX_CACHED_NAME_BYTES: Final = 64

_host: Final = re.compile(rb"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?").fullmatch
_request_id: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}").fullmatch
_digit: Final = re.compile(rb"[0-9]").fullmatch
_objective: Final = re.compile(rb"[1-9][0-9]{0,6}").fullmatch
_absolute: Final = re.compile(rb"https?://([^/?#]*)(.*)", re.IGNORECASE).fullmatch


class RequestHead:
    """A parsed request head; requests with the same head share one."""

    def __init__(self, method: bytes, target: bytes, *, http11: bool) -> None:
        self.method = method
        self.target = target
        self.path = target.partition(b"?")[0]
        self.endpoint = ENDPOINTS.get(self.path)  # None: of a path that the router answers itself, or has not
        self.http11 = http11
        self.keep_alive = False  # set at the end of the message
        self.lines = b""  # header lines for the replica, each with its CRLF
        self.request_id = ""  # from the client; empty: none, or none that may be forwarded
        self.priority: int | None = None
        self.ttft_objective_ms: int | None = None
        self.session_id: str | None = None
        self.task_group: str | None = None
        self.has_length = False
        self.content_length = 0  # of the request whose head was parsed
        self.expects_continue = False
        self.coding = b""  # of the body: gzip or zstd; empty: none
        self.authorization = b""  # or ``x-api-key`` in its form; empty also if there is more than one of either
        self.content_type = b""  # empty also if there is more than one
        self.authenticated_by: AccessControl | None = None  # the one that returned ``grant``
        self.grant: Grant | None = None
        self.template: bytes | None = None  # format string of ``lines``; None: ``lines`` has no varying values
        self.request_id_index: int | None = None  # among the varying values; None: all requests have the same id
        self.traceparent_index: int | None = None  # the same; None: no request has one that may be used
        self._anonymous: bytes | None = None
        self._anonymous_template: bytes | None = None
        self._forwarded: dict[bytes, bytes] | None = None
        self._varying: list[Header] = []

    def header(self, name: bytes) -> str | None:
        """The value of a forwarded header, its lines joined by commas (RFC 9110, 5.3); None if it is empty.

        ``name``: in lower case, and none of ``PER_REQUEST_HEADERS``, whose values differ between requests of one head.
        """
        if self._forwarded is None:
            self._forwarded = {}
            for line in self.lines.split(b"\r\n"):
                key, _, value = line.partition(b": ")
                if value:
                    lower = key.lower()
                    earlier = self._forwarded.get(lower)
                    self._forwarded[lower] = value if earlier is None else earlier + b", " + value
        value = self._forwarded.get(name, b"")
        return value.decode("latin-1") or None

    def credentials(self) -> bytes:
        """The forwarded header lines that carry a client's key, as they came."""
        return b"\r\n".join(line for line in self.lines.split(b"\r\n") if is_credential(line.partition(b":")[0]))

    def lines_with(self, values: Sequence[bytes] | None, *, anonymous: bool) -> bytes:
        """Header lines for the replica. ``values``: of the varying headers; None: those of the parsed request.

        ``anonymous``: without the client's credentials.
        """
        if not anonymous:
            return self.lines if values is None or self.template is None else self.template % tuple(values)
        if self._anonymous is None:
            lines = self.lines.splitlines(keepends=True)
            self._anonymous = b"".join(line for line in lines if not is_credential(line.partition(b":")[0]))
        if values is None or self.template is None:
            return self._anonymous
        if self._anonymous_template is None:
            self._anonymous_template = template_of(self._anonymous, self._varying)
        return self._anonymous_template % tuple(values)

    def request_id_with(self, values: Sequence[bytes] | None) -> str:
        """The client's id of a request with these varying values; empty if there is none that may be forwarded."""
        if values is None or self.request_id_index is None:
            return self.request_id
        value = values[self.request_id_index]
        return value.decode() if _request_id(value) else ""

    def traceparent_with(self, values: Sequence[bytes] | None) -> bytes:
        """The ``traceparent`` of a request with these varying values; empty if there is none, or more than one."""
        if values is None:
            return single_value(self.lines, b"traceparent: ")
        return b"" if self.traceparent_index is None else values[self.traceparent_index]

    def share(self, varying: list[Header], headers: Sequence[Header]) -> None:
        """Prepare this head for later requests that differ in the values of ``varying``, some of the ``headers``."""
        self._varying = varying
        self.template = template_of(self.lines, varying) if len(varying) > 1 else None  # a length is not forwarded
        request_id = next((header for header in headers if header[0].lower() == b"x-request-id"), None)
        self.request_id_index = varying.index(request_id) if request_id is not None and request_id in varying else None
        traces = [header for header in headers if header[0].lower() == b"traceparent"]
        self.traceparent_index = varying.index(traces[0]) if len(traces) == 1 and traces[0] in varying else None

    @property
    def is_cacheable(self) -> bool:
        """Whether the request needs no interim response, and its length is known and that of its content."""
        return self.has_length and not (self.expects_continue or self.coding)


def single_value(lines: bytes, start: bytes) -> bytes:
    """The value of the only header line that begins with ``start``, whatever its case; empty otherwise."""
    lower = lines.lower()
    if start not in lower:
        return b""
    found = [line for line in lines.split(b"\r\n") if line[: len(start)].lower() == start]
    return found[0][len(start) :] if len(found) == 1 else b""


def is_body_digest(name: bytes) -> bool:
    """Whether a header of this name has a digest of the request's body."""
    return name.lower().replace(b"_", b"-") in _BODY_DIGESTS


def is_credential(name: bytes) -> bool:
    """Whether a header of this name carries a client's key."""
    return name.lower().replace(b"_", b"-") in _CREDENTIALS


class Request:
    """One whole request."""

    def __init__(self, head: RequestHead, body: bytes, request_id: str, values: list[bytes] | None = None) -> None:
        self.head = head
        self.body = body
        self.request_id = request_id
        self.values = values  # of the varying headers; None: the head is this request's own
        self.grant: Grant | None = None  # of its API key, if keys are required
        self.omits_usage = False  # streamed, and the client did not ask for usage
        self.is_large = is_large(body)  # another process reads it
        self.held_bytes = 0  # of a large body, as counted in the sum of all
        self.layout: Layout | None = None  # of a large body
        self.model_span: tuple[int, int] | None = None  # of the model's name in a form
        self.cache_digest = b""  # of its bytes, if its task group may have a response cache
        self.arrived_at = monotonic()


class EncodedBody:
    """A body in gzip or zstd while it is received and decoded."""

    def __init__(self, coding: bytes, limits: Limits) -> None:
        self._coding = coding
        self._limits = limits
        self._blocks = [bytearray()]  # what is decoded; one array of it all would be copied when it grows
        self._decoded_bytes = 0
        self._input: deque[bytes] = deque()
        self._rest = b""  # of the first piece of input, whose beginning was decoded
        self._member: Any = None  # the decoder of the current gzip member or zstd frame
        self._members = 0
        self._is_full = False  # the latest step had no room for all that it could decode
        self.held_bytes = 0  # received and not decoded, and decoded

    def add(self, data: bytes) -> None:
        """Append received bytes."""
        self.held_bytes += len(data)
        if self._input and len(self._input[-1]) + len(data) <= _JOINED_BYTES:
            data = self._input.pop() + data  # an object for each tiny chunk would take many times its bytes
        for start in range(0, len(data), _SLICE_BYTES):
            self._input.append(data[start : start + _SLICE_BYTES])

    @property
    def has_more(self) -> bool:
        """Whether something that was received is not decoded."""
        return bool(self._rest or self._is_full or self._input)

    def step(self) -> bool:
        """Decode at most ``STEP_BYTES``; False if all that was received is decoded. RejectedRequestError."""
        data, self._rest = self._rest, b""
        if not (data or self._is_full):
            if not self._input:
                return False
            data = self._input.popleft()
        decoded = self._decode(data)
        if len(self._blocks[-1]) >= _BLOCK_BYTES:
            self._blocks.append(bytearray())
        self._blocks[-1] += decoded
        self._decoded_bytes += len(decoded)
        self.held_bytes += len(decoded) + len(self._rest) - len(data)
        if self._decoded_bytes > self._limits.max_body_bytes:
            raise body_too_large(self._limits)
        return True

    def _decode(self, data: bytes) -> bytes:
        member = self._member
        if member is None:
            member = self._member = self._begin_member()
        room = min(STEP_BYTES, self._limits.max_body_bytes + 1 - self._decoded_bytes)
        try:
            decoded: bytes = member.decompress(data, room)
        except Exception as error:  # noqa: BLE001 - zlib.error or ZstdError
            raise self._invalid(str(error)) from None
        self._is_full = len(decoded) == room and not member.eof
        if member.eof:
            self._rest, self._member = member.unused_data, None
        elif self._coding == GZIP:
            self._rest = member.unconsumed_tail
        return decoded

    def _begin_member(self) -> Any:
        self._members += 1
        if self._members > MAX_MEMBERS:
            raise self._invalid(f"more than {MAX_MEMBERS} members")
        if self._coding == GZIP:
            return zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        try:  # here, because few routers need it
            from compression import zstd  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415
        except ImportError:  # before Python 3.14
            from backports import zstd  # noqa: PLC0415
        return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: MAX_WINDOW_LOG})

    def end(self) -> bytes:
        """The whole body, once all of it is decoded; RejectedRequestError if its end is missing."""
        if self._member is not None:
            raise self._invalid("its end is missing")
        return b"".join(self._blocks)

    def _invalid(self, problem: str) -> RejectedRequestError:
        return RejectedRequestError(400, f"the body is not valid {self._coding.decode()}: {problem}", must_close=True)


class EncodedRequest:
    """A request that has arrived whole, and whose body is not decoded yet."""

    def __init__(self, head: RequestHead, body: EncodedBody) -> None:
        self.head = head
        self.body = body


def parse_request_head(
    method: bytes, target: bytes, version: str, headers: Sequence[Header], *, limits: Limits
) -> RequestHead:
    """Check and convert a parsed head; RejectedRequestError names the problem and the status."""
    if len(headers) > limits.max_headers:
        raise RejectedRequestError(431, f"more than {limits.max_headers} headers", must_close=True)
    if version not in {"1.1", "1.0"}:
        raise RejectedRequestError(505, "this router supports HTTP/1.1 and HTTP/1.0", must_close=True)
    special: dict[bytes, list[bytes]] = {}
    lines: list[bytes] = []
    size = len(target)  # of the target and of headers that are not forwarded
    for name, value in headers:
        key, is_forwarded = _header_rules[name]
        if is_forwarded:
            lines.append(name + b": " + value + b"\r\n")
        else:
            size += len(name) + len(value) + 4
        if key:
            special.setdefault(key, []).append(value)
    forwarded = b"".join(lines)
    if size + len(forwarded) > limits.max_header_bytes:
        raise head_too_large(limits)
    _check_framing(special, version)
    host = _checked_host(special, version)
    head = RequestHead(method, _origin_form(target, host), http11=version == "1.1")
    _read_special(head, special, limits)
    if b"connection" in special:
        forwarded = b"".join(without_named(lines, special[b"connection"]))
    head.lines = forwarded
    return head


class _HeaderRules(dict[bytes, tuple[bytes, bool]]):
    """By header name: the key under which the router reads it (empty: not read), and whether it is forwarded."""

    def __missing__(self, name: bytes) -> tuple[bytes, bool]:
        lower = name.lower()
        cgi_name = lower.replace(b"_", b"-")  # CGI maps both signs to one, so neither may bypass a rule
        is_forwarded = cgi_name in _READ_AND_FORWARDED or not (
            cgi_name in _SPECIAL or cgi_name.startswith(_TRUSTED_HOPS_ONLY_PREFIXES)
        )
        rules = (lower if lower in _SPECIAL else b"", is_forwarded)
        if len(self) < _MAX_CACHED_NAMES and len(name) <= _MAX_CACHED_NAME_BYTES:
            self[name] = rules
        return rules


_header_rules: Final = _HeaderRules()


def _check_framing(special: dict[bytes, list[bytes]], version: str) -> None:
    """The end of a body must be unambiguous: one length, or chunked alone, and never both."""
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
        raise RejectedRequestError(501, "the only supported Transfer-Encoding is chunked", must_close=True)


def _checked_host(special: dict[bytes, list[bytes]], version: str) -> bytes | None:
    hosts = special.get(b"host", [])
    if len(hosts) == 1 and _host(hosts[0]):
        return hosts[0]
    if not hosts and version == "1.0":
        return None
    problem = "more than one Host header" if len(hosts) > 1 else "the Host header is missing or malformed"
    raise RejectedRequestError(400, problem, must_close=True)


def _origin_form(target: bytes, host: bytes | None) -> bytes:
    """Path and query of a target, without a slash at the end of the path, as web frameworks redirect it.

    The absolute form may only name the host of the Host header.
    """
    if target.startswith(b"/") or target == b"*":
        return _without_last_slash(target)
    absolute = _absolute(target)
    if absolute is None:
        raise RejectedRequestError(400, "the request target is neither a path nor an absolute URL", must_close=True)
    authority, path = absolute.groups()
    if host is None or authority.lower() != host.lower():
        raise RejectedRequestError(421, "the request target names another host", must_close=True)
    return _without_last_slash(path) if path.startswith(b"/") else b"/" + path


def _without_last_slash(target: bytes) -> bytes:
    path, mark, query = target.partition(b"?")
    return path[:-1] + mark + query if path.endswith(b"/") and len(path) > 1 else target


def _read_special(head: RequestHead, special: dict[bytes, list[bytes]], limits: Limits) -> None:
    if b"content-length" in special:
        head.has_length = True
        head.content_length = int(special[b"content-length"][0])
        if head.content_length > limits.max_body_bytes:
            raise body_too_large(limits)
    if b"expect" in special:
        _read_expect(head, special[b"expect"])
    if b"content-encoding" in special:
        head.coding = _coding(special[b"content-encoding"])
    head.content_type = _only(special.get(b"content-type"))
    head.session_id = _session_id(special)
    if b"x-task-group" in special:
        head.task_group = special[b"x-task-group"][0].decode("latin-1") or None
    head.authorization = _authorization(special)
    if b"x-priority" in special and _digit(special[b"x-priority"][0]):
        head.priority = int(special[b"x-priority"][0])
    if b"x-ttft-objective-ms" in special and _objective(special[b"x-ttft-objective-ms"][0]):
        head.ttft_objective_ms = int(special[b"x-ttft-objective-ms"][0])
    request_ids = special.get(b"x-request-id")
    if request_ids and _request_id(request_ids[0]):
        head.request_id = request_ids[0].decode()


def _coding(values: list[bytes]) -> bytes:
    """The coding of a body, of all field lines together; empty if there is none."""
    names = [name.strip().lower() for value in values for name in value.split(b",")]
    names = [name for name in names if name not in {b"", b"identity"}]
    if not names:
        return b""
    coding = _CODINGS.get(names[0])
    if coding is None or len(names) > 1:
        message = "the body's Content-Encoding is not supported: send gzip, zstd, or none"
        raise RejectedRequestError(415, message, must_close=True, headers=_ACCEPTED_CODINGS)
    return coding


def _session_id(special: dict[bytes, list[bytes]]) -> str | None:
    for name in SESSION_HEADERS:
        if name in special and (session := special[name][0].decode("latin-1")):
            return session
    return None


def _authorization(special: dict[bytes, list[bytes]]) -> bytes:
    if b"authorization" in special:
        return _only(special[b"authorization"])
    key = _only(special.get(b"x-api-key"))  # read only without Authorization: the two could differ
    return b"Bearer " + key if key else b""


def _only(values: list[bytes] | None) -> bytes:
    """The value of a header that occurs once; empty otherwise."""
    return values[0] if values is not None and len(values) == 1 else b""


def _read_expect(head: RequestHead, values: list[bytes]) -> None:
    if [value.lower() for value in values] != [b"100-continue"]:
        raise RejectedRequestError(417, "the only supported expectation is 100-continue", must_close=True)
    head.expects_continue = head.http11


def body_too_large(limits: Limits) -> RejectedRequestError:
    return RejectedRequestError(413, f"the body is larger than {limits.max_body_bytes} bytes", must_close=True)


def head_too_large(limits: Limits) -> RejectedRequestError:
    return RejectedRequestError(431, f"more than {limits.max_header_bytes} bytes of headers", must_close=True)


def without_upgrade(method: bytes, target: bytes, version: str, headers: Sequence[Header]) -> bytes:
    """Write a head again without its Upgrade header."""
    lines = [b"%b: %b\r\n" % header for header in headers if header[0].lower() != b"upgrade"]
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, target, version.encode(), b"".join(lines))
