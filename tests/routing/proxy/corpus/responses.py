"""Raw responses of a replica and what a client must get; ``test_responses.py`` runs them.

A response whose end is ambiguous becomes a 502, or is cut short if bytes of it have been relayed. Bytes after a
complete response could be taken for the response to another request, so the connection is closed. Rules are sections of
RFC 9112, or of RFC 9110 where named.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

OK = b"HTTP/1.1 200 OK\r\n"
JSON = b"Content-Type: application/json\r\n"
LENGTH = b"Content-Length: 5\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
END = b"\r\n"
CHUNKS = b"5\r\nhello\r\n0\r\n\r\n"
STOLEN = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nstolen"  # a response without a request
INTERIM_BODY = b"HTTP/1.1 150 Soon\r\nContent-Length: %d\r\n\r\n%b"


class Fate(Enum):
    """The result of a response."""

    KEPT = "relayed whole; its connection is reused"
    CLOSED = "relayed whole; its connection is closed"
    BAD = "a 502 without a retry"
    LOST = "a 502 after retries on all replicas"
    TORN = "cut, and the client can tell"


@dataclass(frozen=True, slots=True)
class Vector:
    """``raw`` is sent for each request; if ``ends``, the replica then closes the connection."""

    name: str
    rule: str
    raw: bytes
    fate: Fate
    status: int = 200
    body: bytes = b"hello"
    ends: bool = False


def relayed(rule: str, name: str, raw: bytes, *, status: int = 200, body: bytes = b"hello") -> Vector:
    """Relayed; the connection is reused."""
    return Vector(name, rule, raw, Fate.KEPT, status, body)


def relayed_once(
    rule: str, name: str, raw: bytes, *, status: int = 200, body: bytes = b"hello", ends: bool = False
) -> Vector:
    """Relayed; the connection is closed."""
    return Vector(name, rule, raw, Fate.CLOSED, status, body, ends)


def not_http(rule: str, name: str, raw: bytes) -> Vector:
    """Not HTTP."""
    return Vector(name, rule, raw, Fate.BAD, 502)


def ended_early(rule: str, name: str, raw: bytes) -> Vector:
    """Ends before the first byte of its body."""
    return Vector(name, rule, raw, Fate.LOST, 502, ends=True)


def cut(rule: str, name: str, raw: bytes, *, body: bytes = b"hello", ends: bool = False) -> Vector:
    """Breaks after ``body``."""
    return Vector(name, rule, raw, Fate.TORN, 200, body, ends)


def head(*lines: bytes, start: bytes = OK, body: bytes = b"hello") -> bytes:
    """A response with a length and these headers."""
    return start + JSON + b"".join(header + b"\r\n" for header in lines) + LENGTH + END + body


def length(value: bytes) -> bytes:
    """A response with exactly this Content-Length."""
    return OK + JSON + b"Content-Length:" + value + b"\r\n\r\nhello"


def coding(*lines: bytes, start: bytes = OK, body: bytes = CHUNKS) -> bytes:
    """A response with these framing headers."""
    return start + JSON + b"".join(header + b"\r\n" for header in lines) + END + body


def chunks(body: bytes) -> bytes:
    """A chunked response with this body, framing included."""
    return OK + JSON + CHUNKED + END + body


STATUS_LINES = (
    relayed("4", "a plain answer", head()),
    relayed("4", "no reason phrase", head(start=b"HTTP/1.1 200\r\n")),
    relayed("4", "an empty reason phrase", head(start=b"HTTP/1.1 200 \r\n")),
    relayed("4", "obs-text in the reason phrase", head(start=b"HTTP/1.1 200 tr\xc3\xa8s bien\r\n")),
    relayed("9110 15", "an unknown status", head(start=b"HTTP/1.1 299 Fine\r\n"), status=299),
    relayed("9110 15", "an unknown error", head(start=b"HTTP/1.1 499 Oh\r\n"), status=499),
    relayed("9110 15.5", "404", head(start=b"HTTP/1.1 404 Not Found\r\n"), status=404),
    relayed("9110 15.6", "500", head(start=b"HTTP/1.1 500 Oh\r\n"), status=500),
    relayed("9.3", "HTTP/1.0 kept alive", head(b"Connection: keep-alive", start=b"HTTP/1.0 200 OK\r\n")),
    relayed_once("9.3", "HTTP/1.0", head(start=b"HTTP/1.0 200 OK\r\n")),
    not_http("4", "another protocol", b"SSH-2.0-OpenSSH\r\n\r\n"),
    not_http("4", "HTTP/0.9", b"hello, this is a body\r\n\r\n"),
    not_http("4", "a request", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"),
    not_http("2.3", "HTTP/2.0", head(start=b"HTTP/2.0 200 OK\r\n")),
    not_http("2.3", "HTTP/0.9 by name", head(start=b"HTTP/0.9 200 OK\r\n")),
    not_http("2.3", "HTTP/1.2", head(start=b"HTTP/1.2 200 OK\r\n")),
    not_http("2.3", "lower-case version", head(start=b"http/1.1 200 OK\r\n")),
    not_http("4", "blank before the version", head(start=b" HTTP/1.1 200 OK\r\n")),
    not_http("4", "tab after the version", head(start=b"HTTP/1.1\t200 OK\r\n")),
    not_http("4", "no status", head(start=b"HTTP/1.1 OK\r\n")),
    not_http("4", "a status of two digits", head(start=b"HTTP/1.1 20 OK\r\n")),
    not_http("4", "a status of four digits", head(start=b"HTTP/1.1 2000 OK\r\n")),
    not_http("4", "a status that is no number", head(start=b"HTTP/1.1 2x0 OK\r\n")),
    not_http("4", "a signed status", head(start=b"HTTP/1.1 +200 OK\r\n")),
    not_http("9110 15", "status 099", head(start=b"HTTP/1.1 099 Low\r\n")),
    not_http("9110 15", "status 000", head(start=b"HTTP/1.1 000 None\r\n")),
    not_http("4", "CR in the reason phrase", head(start=b"HTTP/1.1 200 O\rK\r\n")),
    not_http("2.2", "LF after the status line", head(start=b"HTTP/1.1 200 OK\n")),
    ended_early("4", "nothing", b""),
    ended_early("4", "half a status line", b"HTTP/1.1 20"),
)
INTERIM = (
    relayed("9110 15.2", "100 before", b"HTTP/1.1 100 Continue\r\n\r\n" + head()),
    relayed("9110 15.2", "hints before", b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + head()),
    relayed("9110 15.2", "many of them", b"HTTP/1.1 102 Processing\r\n\r\n" * 50 + head()),
    not_http("9110 15.2.2", "101", b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"),
    not_http("9110 15.2.2", "101 for no offer", b"HTTP/1.1 101 Switching Protocols\r\n\r\n" + head()),
    relayed("9110 15.2", "an unknown one", b"HTTP/1.1 150 Soon\r\n\r\n" + head()),
    *(
        not_http("9110 8.6", f"{status} with {name}", b"HTTP/1.1 %d Soon\r\n%b\r\n%b" % (status, line, body) + head())
        for status in (100, 103, 150, 199)
        for name, line, body in (
            ("a length", LENGTH, b"hello"),
            ("chunks", CHUNKED, CHUNKS),
            ("a length and no body", LENGTH, b""),
            ("length zero", b"Content-Length: 0\r\n", b""),
        )
    ),
    not_http("9110 8.6", "an answer in the body of an interim one", INTERIM_BODY % (len(STOLEN), STOLEN) + head()),
    not_http("9110 8.6", "half a body of an interim one", INTERIM_BODY % (5, b"hel")),
    not_http("9110 15.2", "100 without end", b"HTTP/1.1 100 Continue\r\nX: yyyyyyyyyyyyyyyyyyyyyyyy\r\n\r\n" * 2000),
    ended_early("9110 15.2", "100 and no more", b"HTTP/1.1 100 Continue\r\n\r\n"),
)
HEADERS = (
    relayed("9110 5.5", "blanks around a value", head(b"X-A: \t a \t ")),
    relayed("9110 5.5", "obs-text in a value", head(b"X-A: \xc3\xa9")),
    relayed_once("9.6", "Connection: close", head(b"Connection: close")),
    relayed_once("9.6", "close behind keep-alive", head(b"Connection: keep-alive, close")),
    not_http("5.1", "blank before the colon", head(b"X-A : b")),
    not_http("5.1", "length with a blank before the colon", coding(b"Content-Length : 5", body=b"hello")),
    not_http("5.1", "coding with a tab before the colon", coding(b"Transfer-Encoding\t: chunked")),
    not_http("5.2", "obs-fold", head(b"X-A: a\r\n b")),
    not_http("5.2", "obs-fold that hides a length", head(b"X-A: a\r\n Content-Length: 0")),
    not_http("5", "header without a colon", head(b"X-A")),
    not_http("5.1", "header without a name", head(b": a")),
    not_http("5.1", "header name with a blank", head(b"X Y: a")),
    not_http("5.1", "header name not ASCII", head(b"X\xe9: a")),
    *(
        not_http("9110 5.5", f"{sign!r} in a value", head(b"X-A: a" + sign + b"b"))
        for sign in (b"\0", b"\r", b"\n", b"\x01", b"\x0b", b"\x1b", b"\x7f")
    ),
    not_http("2.2", "a header line that ends with LF", head(b"X-A: a\nX-B: b")),
    not_http("2.2", "LF at the end of the head", OK + JSON + LENGTH + b"\nhello"),
    not_http("9110 5.4", "a head without end", OK + b"X: " + b"y" * 100_000),
    not_http("9110 5.4", "headers without end", OK + b"X: yyyyyyyyyyyyyyyyyyyyyyyyyyyyyy\r\n" * 3000),
    ended_early("5", "half a head", OK + JSON),
)
LENGTHS = (
    relayed("6.3", "length zero", OK + b"Content-Length: 0\r\n\r\n", body=b""),
    relayed("6.2", "leading zeros", length(b" 00005")),
    relayed("6.2", "blanks around", length(b" \t 5 \t")),
    relayed("6.3", "204", b"HTTP/1.1 204 No Content\r\n\r\n", status=204, body=b""),
    relayed("6.3", "304 with a length", b"HTTP/1.1 304 Not Modified\r\n" + LENGTH + END, status=304, body=b""),
    relayed_once("6.3", "neither length nor chunks", OK + JSON + b"\r\nhello", ends=True),
    relayed_once("6.3", "neither, and no body", OK + JSON + b"\r\n", body=b"", ends=True),
    relayed_once("6.3", "bytes after a length", head() + b"X"),
    relayed_once("6.3", "a second answer", head() + STOLEN),
    relayed_once("6.3", "a third", head() + STOLEN * 2),
    relayed("2.2", "an empty line behind", head() + b"\r\n"),
    relayed_once("6.3", "an interim answer behind", head() + b"HTTP/1.1 100 Continue\r\n\r\n"),
    relayed_once("6.3", "half an answer behind", head() + STOLEN[:30]),
    relayed_once("6.3", "an answer behind length zero", OK + b"Content-Length: 0\r\n\r\n" + STOLEN, body=b""),
    relayed_once("6.3", "204 with a body", b"HTTP/1.1 204 No Content\r\n\r\nhello", status=204, body=b""),
    relayed_once("6.3", "204 and an answer", b"HTTP/1.1 204 No Content\r\n\r\n" + STOLEN, status=204, body=b""),
    relayed_once("6.3", "304 with a body", head(start=b"HTTP/1.1 304 Not Modified\r\n"), status=304, body=b""),
    relayed_once("6.3", "204 with a length", b"HTTP/1.1 204 No\r\n" + LENGTH + END + b"hello", status=204, body=b""),
    not_http("6.3", "two equal lengths", head(b"Content-Length: 5")),
    not_http("6.3", "two different lengths", head(b"Content-Length: 3")),
    *(
        not_http("6.2", f"length {value!r}", length(value))
        for value in (
            *(
                b"",
                b" ",
                b" +5",
                b" -5",
                b" 0x5",
                b" 5.0",
                b" 5e0",
                b" 5,5",
                b" 5, 5",
                b" 5,",
                b" 5 5",
                b" 5;a",
                b' "5"',
            ),
            *(b" 5\0", b" \xd9\xa5", b" five", b" 18446744073709551621", b" " + b"9" * 30, b"\r\n 5"),
        )
    ),
    ended_early("6.3", "a length, and no byte", OK + JSON + LENGTH + END),
    cut("6.3", "less than its length", head(body=b"hell"), body=b"hell", ends=True),
    cut("6.3", "a length of almost 2^64", length(b" 18446744073709551615"), ends=True),
)
CODINGS = (
    relayed("7.1", "chunked", coding(b"Transfer-Encoding: chunked")),
    relayed("7.1", "CHUNKED", coding(b"TRANSFER-ENCODING: CHUNKED")),
    not_http("6.1", "length, then chunked", coding(LENGTH[:-2], CHUNKED[:-2])),
    not_http("6.1", "chunked, then length", coding(CHUNKED[:-2], LENGTH[:-2])),
    not_http("6.1", "length and an unknown coding", coding(b"Transfer-Encoding: x", LENGTH[:-2], body=b"hello")),
    not_http("6.1", "chunked in HTTP/1.0", coding(CHUNKED[:-2], start=b"HTTP/1.0 200 OK\r\n")),
    not_http("6.1", "chunked twice", coding(CHUNKED[:-2], CHUNKED[:-2])),
    not_http("6.1", "identity, then chunked", coding(b"Transfer-Encoding: identity", CHUNKED[:-2])),
    *(
        not_http("6.1", f"coding {value!r}", coding(b"Transfer-Encoding:" + value))
        for value in (
            *(b" gzip, chunked", b" chunked, gzip", b" chunked, chunked", b" chunked,", b" ,chunked", b" identity"),
            *(b" gzip", b" xchunked", b' "chunked"', b" chunked;q=1", b"", b" \x0bchunked", b" chunked\0"),
            b"\r\n chunked",
        )
    ),
)
CHUNKED_BODIES = (
    relayed("7.1", "no chunk", chunks(b"0\r\n\r\n"), body=b""),
    relayed("7.1", "one byte a chunk", chunks(b"".join(b"1\r\n%c\r\n" % byte for byte in b"hello") + b"0\r\n\r\n")),
    relayed("7.1", "a size of many zeros", chunks(b"0" * 40 + CHUNKS)),
    relayed("7.1.1", "an extension", chunks(CHUNKS.replace(b"\r\n", b';a=b;c="d;e"\r\n', 1))),
    relayed("7.1.2", "trailers", chunks(CHUNKS[:-2] + b"X-A: b\r\nSet-Cookie: c=d\r\n\r\n")),
    relayed_once("7.1", "bytes after the last chunk", chunks(CHUNKS + b"X")),
    relayed_once("7.1", "an answer after the last chunk", chunks(CHUNKS + STOLEN)),
    *(
        not_http("7.1", f"chunk size {size!r}", chunks(size + b"\r\nhello\r\n0\r\n\r\n"))
        for size in (
            *(b"", b" 5", b"5 ", b"5\t", b"+5", b"-5", b"0x5", b"x5", b"5h", b"5.0", b"5,", b"0_5", b"5\0", b"5;"),
            *(b"10000000000000005", b"f" * 17, b"5;a\n", b'5;a="'),
        )
    ),
    not_http("2.2", "LF after a size", chunks(b"5\nhello\r\n0\r\n\r\n")),
    not_http("2.2", "CR after a size", chunks(b"5\rhello\r\n0\r\n\r\n")),
    ended_early("7.1", "no chunk and no end", chunks(b"")),
    ended_early("7.1", "half a size", chunks(b"5")),
    cut("7.1", "a chunk longer than its size", chunks(b"4\r\nhello\r\n0\r\n\r\n"), body=b"hell"),
    cut("7.1", "no CRLF after a chunk", chunks(b"5\r\nhello0\r\n\r\n")),
    cut("2.2", "LF after a chunk", chunks(b"5\r\nhello\n0\r\n\r\n")),
    cut("7.1", "a second size that is none", chunks(b"5\r\nhello\r\nzz\r\n")),
    cut("7.1", "a last size of -0", chunks(b"5\r\nhello\r\n-0\r\n\r\n")),
    cut("2.2", "LF at the very end", chunks(b"5\r\nhello\r\n0\r\n\n")),
    cut("7.1.2", "a length in the trailers", chunks(CHUNKS[:-2] + b"Content-Length: 3\r\n\r\n")),
    cut("5.2", "obs-fold in the trailers", chunks(CHUNKS[:-2] + b"A: b\r\n c\r\n\r\n")),
    cut("7.1.2", "an answer instead of the end", chunks(CHUNKS[:-2] + STOLEN)),
    cut("7.1", "less than a chunk", chunks(b"a\r\nhello"), ends=True),
    cut("7.1", "no last chunk", chunks(b"5\r\nhello\r\n"), ends=True),
    cut("7.1", "half of the last chunk", chunks(b"5\r\nhello\r\n0\r\n"), ends=True),
    cut("7.1.2", "half of the trailers", chunks(b"5\r\nhello\r\n0\r\nA: b\r\n"), ends=True),
)
VECTORS = STATUS_LINES + INTERIM + HEADERS + LENGTHS + CODINGS + CHUNKED_BODIES
