"""Raw requests and their expected results; ``test_requests.py`` runs them.

A request that another parser could read differently is rejected and its connection closed, so that the bytes after it,
which an attacker may have chosen, are not read. All others reach a replica as exactly the requests named, in the
router's own framing. Rules are sections of RFC 9112, or of RFC 9110 where named.
"""

from __future__ import annotations

from dataclasses import dataclass

PATH = b"/v1/completions"
BODY = b'{"n":1}'
START = b"POST /v1/completions HTTP/1.1\r\n"
OLD = b"POST /v1/completions HTTP/1.0\r\n"
HOST = b"Host: router\r\n"
LENGTH = b"Content-Length: 7\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
END = b"\r\n"
CHUNKS = b'7\r\n{"n":1}\r\n0\r\n\r\n'
FOLLOWER = b'POST /v1/completions HTTP/1.1\r\nHost: router\r\nContent-Length: 7\r\n\r\n{"n":2}'
MAX_HEADER_BYTES = 4096  # of the router that the vectors are sent to
MAX_BODY_BYTES = 32_768


@dataclass(frozen=True, slots=True)
class Vector:
    """``statuses``: of the answers, in order. ``bodies``: of the requests that replicas get, in order."""

    name: str
    rule: str
    raw: bytes
    statuses: tuple[int, ...]
    bodies: tuple[bytes, ...] = ()
    closes: bool = False  # bytes after it are not read
    is_refused: bool = False  # the client can read the rejection while it is sending
    has_end: bool = True  # another request may follow


def rejected(status: int, rule: str, name: str, raw: bytes, *, has_end: bool = True) -> Vector:
    """Rejected with ``status``; the connection closes."""
    return Vector(name, rule, raw, (status,), closes=True, is_refused=True, has_end=has_end)


def endless(status: int, rule: str, name: str, raw: bytes) -> Vector:
    """Rejected before its end."""
    return rejected(status, rule, name, raw, has_end=False)


def served(rule: str, name: str, raw: bytes, *bodies: bytes, closes: bool = False) -> Vector:
    """A replica gets one request for each body (BODY by default)."""
    bodies = bodies or (BODY,)
    return Vector(name, rule, raw, (200,) * len(bodies), bodies, closes=closes)


def answered_here(status: int, rule: str, name: str, raw: bytes) -> Vector:
    """Valid and answered by the router; the connection stays open."""
    return Vector(name, rule, raw, (status,))


def incomplete(rule: str, name: str, raw: bytes) -> Vector:
    """Incomplete: no response, and nothing is forwarded."""
    return Vector(name, rule, raw, (), has_end=False)


def line(start: bytes) -> bytes:
    """A request with this request line and no body."""
    return start + b"\r\n" + HOST + END


def head(*lines: bytes, start: bytes = START, body: bytes = BODY) -> bytes:
    """A request with a length and these headers."""
    return start + HOST + b"".join(header + b"\r\n" for header in lines) + LENGTH + END + body


def length(value: bytes, body: bytes = BODY) -> bytes:
    """A request with exactly this Content-Length."""
    return START + HOST + b"Content-Length:" + value + b"\r\n\r\n" + body


def coding(*lines: bytes, body: bytes = CHUNKS, start: bytes = START) -> bytes:
    """A request with these framing headers."""
    return start + HOST + b"".join(header + b"\r\n" for header in lines) + END + body


def chunks(body: bytes) -> bytes:
    """A chunked request with this body, framing included."""
    return START + HOST + CHUNKED + END + body


REQUEST_LINES = (
    served("3", "a plain request", head()),
    served("2.2", "empty lines before", b"\r\n\r\n" + head()),
    served("2.2", "a bare LF before", b"\n" + head()),
    served("2.2", "a bare CR before, which is dropped", b"\r" + head()),
    served("3.2.1", "a query", head(start=b"POST /v1/completions?a=b&c=%00 HTTP/1.1\r\n")),
    served("3.2.2", "absolute form of this host", head(start=b"POST http://ROUTER/v1/completions HTTP/1.1\r\n")),
    served("2.3", "HTTP/1.0", OLD + LENGTH + END + BODY, closes=True),
    served("9.3", "HTTP/1.0 kept alive", OLD + b"Connection: keep-alive\r\n" + LENGTH + END + BODY),
    served("2.3", "RTSP/1.0, read as HTTP/1.0", head(start=b"POST /v1/completions RTSP/1.0\r\n"), closes=True),
    rejected(400, "2.2", "blank before the method", b" " + head()),
    rejected(400, "2.2", "blank line before that is none", b" \r\n" + head()),
    rejected(400, "3", "tab after the method", line(b"GET\t/health HTTP/1.1")),
    rejected(400, "3", "tab after the target", line(b"GET /health\tHTTP/1.1")),
    rejected(400, "3", "form feed after the target", line(b"GET /health\x0cHTTP/1.1")),
    answered_here(200, "3", "two blanks before the version", line(b"GET /health  HTTP/1.1")),
    rejected(400, "3", "blank after the version", line(b"GET /health HTTP/1.1 ")),
    rejected(400, "3", "bare CR after the version", line(b"GET /health HTTP/1.1\r")),
    rejected(400, "3", "bare LF after the version", b"GET /health HTTP/1.1\n" + HOST + END),
    rejected(400, "2.2", "bare LF lines", b"GET /health HTTP/1.1\nHost: a\n\n"),
    rejected(400, "2.2", "bare CR lines", b"GET /health HTTP/1.1\rHost: a\r\r"),
    rejected(400, "2.2", "bare LF at the end of the head", START + HOST + LENGTH + b"\n" + BODY),
    rejected(400, "2.2", "CR CR LF at the end of the head", START + HOST + LENGTH + b"\r\r\n" + BODY),
    rejected(400, "3.2", "blank in the target", line(b"GET /a b HTTP/1.1")),
    rejected(400, "3.2", "a second request in the target", line(b"GET /x HTTP/1.1 GET /v1/models HTTP/1.1")),
    rejected(400, "3.2", "no target", line(b"GET  HTTP/1.1")),
    rejected(400, "3.2", "NUL in the target", line(b"GET /\0 HTTP/1.1")),
    rejected(400, "3.2", "DEL in the target", line(b"GET /\x7f HTTP/1.1")),
    rejected(400, "3.2", "target not ASCII", line(b"GET /he\xe9alth HTTP/1.1")),
    rejected(400, "3.2", "target without a slash", line(b"GET health HTTP/1.1")),
    rejected(400, "3.2", "a fragment alone", line(b"GET #x HTTP/1.1")),
    rejected(400, "3.2.3", "authority form", line(b"GET router:80 HTTP/1.1")),
    rejected(421, "3.2.2", "another host's absolute form", line(b"GET http://other/health HTTP/1.1")),
    rejected(421, "3.2.2", "absolute form with another port", line(b"GET http://router:81/health HTTP/1.1")),
    rejected(421, "3.2.2", "absolute form with credentials", line(b"GET http://a@router/health HTTP/1.1")),
    rejected(400, "3.2.2", "absolute form that ends in our name", line(b"GET http://other#@router/ HTTP/1.1")),
    rejected(421, "3.2.2", "absolute form without a host", line(b"GET http:///health HTTP/1.1")),
    rejected(421, "3.2.2", "absolute form in HTTP/1.0", b"GET http://other/health HTTP/1.0\r\n\r\n"),
    rejected(400, "3.2.2", "another scheme", line(b"GET ftp://router/health HTTP/1.1")),
    rejected(405, "3.2.3", "CONNECT", b"CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\n\r\n"),
    rejected(405, "3.2.3", "CONNECT with a body", b"CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\n" + LENGTH + END + BODY),
    rejected(400, "3.1", "lower-case method", head(start=START.replace(b"POST", b"post"))),
    rejected(400, "3.1", "unknown method", line(b"BREW /health HTTP/1.1")),
    rejected(400, "3.1", "method with NUL", line(b"GE\0T /health HTTP/1.1")),
    rejected(505, "2.3", "HTTP/0.9", b"GET /health\r\n\r\n"),
    rejected(505, "2.3", "HTTP/0.9 by name", b"GET /health HTTP/0.9\r\n\r\n"),
    rejected(505, "2.3", "HTTP/2.0 by name", line(b"GET /health HTTP/2.0")),
    rejected(400, "2.3", "HTTP/1.2", line(b"GET /health HTTP/1.2")),
    rejected(400, "2.3", "HTTP/1.10", line(b"GET /health HTTP/1.10")),
    rejected(400, "2.3", "HTTP/01.1", line(b"GET /health HTTP/01.1")),
    rejected(400, "2.3", "HTTP/1", line(b"GET /health HTTP/1")),
    rejected(400, "2.3", "HTTP/+1.1", line(b"GET /health HTTP/+1.1")),
    rejected(400, "2.3", "lower-case version", line(b"GET /health http/1.1")),
    rejected(400, "2.3", "HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    rejected(400, "2.3", "TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    rejected(400, "2.3", "PROXY protocol", b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n" + head()),
    rejected(400, "2.3", "an answer", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
    Vector("Icecast, read as HTTP/1.0", "2.3", b"SOURCE /health ICE/1.0\r\n\r\n", (405,), closes=True),
    rejected(431, "3", "target too large", line(b"GET /" + b"y" * 9000 + b" HTTP/1.1")),
    endless(431, "3", "target without end", b"GET /" + b"y" * 9000),
    endless(431, "2.2", "empty lines without end", b"\r\n" * 4000),
    incomplete("3", "half a request line", START[:20]),
)
HEADERS = (
    served("9110 5.5", "blanks around a value", head(b"X-A: \t a \t ")),
    served("9110 5.5", "an empty value", head(b"X-A:")),
    served("9110 5.5", "obs-text in a value", head(b"X-A: \xc3\xa9\xff")),
    served("9110 5.1", "every sign that a name may have", head(b"!#$%&'*+-.^_`|~: a")),
    served("9110 7.2", "IPv6 Host", START + b"Host: [::1]:8080\r\n" + LENGTH + END + BODY),
    rejected(400, "9110 7.2", "no Host", START + LENGTH + END + BODY),
    rejected(400, "3.2", "two Hosts", head(b"Host: other")),
    rejected(400, "3.2", "two equal Hosts", head(b"Host: router")),
    rejected(400, "3.2", "two Hosts in HTTP/1.0", head(b"Host: other", start=OLD)),
    rejected(400, "3.2", "two Hosts, one in small letters", head(b"host: other")),
    *(
        rejected(400, "9110 7.2", f"Host {value!r}", START + b"Host:" + value + END + LENGTH + END + BODY)
        for value in (
            *(b"", b" ", b" a b", b" a,b", b" a/b", b" u@a", b" a:x", b" a:", b" a:999999", b" a?b", b" a#b"),
            *(b" [::1", b" ::1]", b" a\\b", b" a%2eb", b" \xe9", b" http://a", b" a\tb"),
        )
    ),
    *(
        rejected(400, "9110 5.1", f"header name {name!r}", head(name + b": a"))
        for name in (
            *(b"", b"X ", b"X\t", b"X Y", b"X(", b"X[", b'X"', b"X/", b"X@", b"X{", b"X;", b"X,", b"X=", b"X\\", b"X?"),
            *(b"X\0", b"X\x7f", b"X\xe9", b"X\x0b", b" X", b"\tX"),
        )
    ),
    *(
        rejected(400, "9110 5.5", f"{sign!r} in a value", head(b"X-A: a" + sign + b"b"))
        for sign in (b"\0", b"\r", b"\n", b"\x01", b"\x08", b"\x0b", b"\x0c", b"\x1b", b"\x7f")
    ),
    rejected(400, "5", "header without a colon", head(b"X-A")),
    rejected(400, "5.2", "obs-fold", head(b"X-A: a\r\n b")),
    rejected(400, "5.2", "obs-fold with a tab", head(b"X-A: a\r\n\tb")),
    rejected(400, "5.2", "obs-fold of an empty value", head(b"X-A:\r\n b")),
    rejected(400, "5.2", "obs-fold before the first header", START + b" a: b\r\n" + HOST + LENGTH + END + BODY),
    rejected(400, "2.2", "a header line that ends with LF", head(b"X-A: a\nX-B: b")),
    rejected(400, "2.2", "a header line that ends with CR", head(b"X-A: a\rX-B: b")),
    rejected(400, "2.2", "a header line that ends with CR CR LF", head(b"X-A: a\r")),
    rejected(431, "9110 5.4", "too many headers", head(*[b"X: y"] * 100)),
    rejected(431, "9110 5.4", "headers too large", head(*[b"X: " + b"y" * 2000] * 3)),
    rejected(431, "9110 5.4", "one header too large", head(b"X: " + b"y" * 9000)),
    endless(431, "9110 5.4", "one header without end", START + HOST + b"X: " + b"y" * 70_000),
    endless(431, "9110 5.4", "headers without end", START + HOST + b"X: y\r\n" * 2000),
    incomplete("5", "half a head", START + HOST + LENGTH),
    incomplete("5", "a head but for its last LF", START + HOST + LENGTH + b"\r"),
    served("9110 10.1.1", "Expect: 100-continue", head(b"Expect: 100-Continue")),
    rejected(417, "9110 10.1.1", "another expectation", head(b"Expect: 200-ok")),
    rejected(417, "9110 10.1.1", "two expectations", head(*[b"Expect: 100-continue"] * 2)),
    rejected(400, "9110 8.4", "a body that is not gzip", head(b"Content-Encoding: gzip")),
    rejected(400, "9110 8.4", "a body that is not zstd", head(b"Content-Encoding: ZSTD")),
    rejected(415, "9110 8.4", "brotli body", head(b"Content-Encoding: br")),
    rejected(415, "9110 8.4", "two codings", head(b"Content-Encoding: gzip, zstd")),
    rejected(415, "9110 8.4", "two lines of codings", head(b"Content-Encoding: gzip", b"Content-Encoding: gzip")),
    served("9110 8.4", "Content-Encoding: Identity", head(b"Content-Encoding: Identity")),
    served("9.6", "Connection: close", head(b"Connection: close"), closes=True),
    served("9.6", "close behind keep-alive", head(b"Connection: keep-alive, close"), closes=True),
    served("9.6", "close in a second header", head(b"Connection: keep-alive", b"Connection: close"), closes=True),
    served("9110 7.6.1", "Connection names the length", head(b"Connection: content-length, host")),
    served("9110 7.8", "an offered upgrade", head(b"Connection: Upgrade", b"Upgrade: h2c")),
    served("9110 7.8", "an upgrade to websocket", head(b"Connection: upgrade", b"Upgrade: websocket")),
    served("9110 7.8", "an upgrade, chunked", coding(b"Connection: Upgrade", b"Upgrade: h2c", CHUNKED[:-2])),
    served("9110 7.8", "upgrades on one connection", head(b"Connection: Upgrade", b"Upgrade: h2c") * 3, *[BODY] * 3),
    rejected(400, "9110 7.8", "upgrade, two Hosts", head(b"Connection: Upgrade", b"Upgrade: h2c", b"Host: a")),
    rejected(400, "6.1", "upgrade, both lengths", head(b"Connection: Upgrade", b"Upgrade: h2c", CHUNKED[:-2])),
)
LENGTHS = (
    answered_here(400, "6.3", "length zero", length(b"0", b"")),  # no body, so nothing to place
    served("6.2", "leading zeros", length(b" 0000007")),
    served("6.2", "blanks around", length(b" \t 7 \t")),
    served("6.2", "a length in capitals", START + HOST + LENGTH.upper() + END + BODY),
    answered_here(400, "6.3", "no length", START + HOST + END),
    served("6.3", "three on one connection", head() * 3, *[BODY] * 3),
    answered_here(200, "6.3", "a GET with a length", b"GET /health HTTP/1.1\r\n" + HOST + LENGTH + END + BODY),
    answered_here(200, "6.3", "a GET with chunks", b"GET /health HTTP/1.1\r\n" + HOST + CHUNKED + END + CHUNKS),
    answered_here(405, "6.3", "a DELETE with a length", b"DELETE /health HTTP/1.1\r\n" + HOST + LENGTH + END + BODY),
    answered_here(405, "6.3", "OPTIONS *", b"OPTIONS /health HTTP/1.1\r\n" + HOST + END),
    rejected(400, "6.3", "two equal lengths", head(b"Content-Length: 7")),
    rejected(400, "6.3", "two different lengths", head(b"Content-Length: 3")),
    rejected(400, "6.3", "two lengths in different letters", head(b"CONTENT-length: 7")),
    rejected(400, "6.3", "two lengths, one empty", head(b"Content-Length:")),
    rejected(400, "6.3", "two lengths in HTTP/1.0", head(b"Content-Length: 7", start=OLD)),
    *(
        rejected(400, "6.2", f"length {value!r}", length(value))
        for value in (
            *(b"", b" ", b" +7", b" -7", b" -0", b" 0x7", b" 7.0", b" 7e0", b" 1_0", b" 7,7", b" 7, 7", b" 7,", b" ,7"),
            *(b" 7 7", b" 7;a", b" '7'", b' "7"', b" 7\x0b", b" \x0b7", b" 7\0", b" \xd9\xa7", b" \xb2", b" seven"),
            *(b" 18446744073709551616", b" 18446744073709551623", b" " + b"9" * 30, b" NaN", b" 7\r\n 7"),
        )
    ),
    endless(413, "9110 15.5.14", "announced body too large", length(b" 99999", b"")),
    endless(413, "9110 15.5.14", "body of almost 2^64", length(b" 18446744073709551615", b"")),
    incomplete("6.2", "less than its length", length(b" 8")),
)
CODINGS = (
    served("7.1", "chunked", coding(b"Transfer-Encoding: chunked")),
    served("7.1", "CHUNKED", coding(b"TRANSFER-ENCODING: CHUNKED")),
    served("7.1", "chunked behind blanks", coding(b"Transfer-Encoding: \t chunked")),
    rejected(501, "6.1", "chunked before a blank", coding(b"Transfer-Encoding: chunked ")),
    rejected(400, "6.1", "length, then chunked", coding(LENGTH[:-2], CHUNKED[:-2])),
    rejected(400, "6.1", "chunked, then length", coding(CHUNKED[:-2], LENGTH[:-2])),
    rejected(400, "6.1", "length zero and chunked", coding(b"Content-Length: 0", CHUNKED[:-2])),
    rejected(400, "6.1", "length and an unknown coding", coding(b"Transfer-Encoding: x", LENGTH[:-2], body=BODY)),
    rejected(400, "6.1", "chunked in HTTP/1.0", coding(CHUNKED[:-2], start=OLD)),
    rejected(400, "6.1", "chunked and length in HTTP/1.0", coding(CHUNKED[:-2], LENGTH[:-2], start=OLD)),
    *(
        rejected(status, "6.1", f"coding {value!r}", coding(b"Transfer-Encoding:" + value))
        for status, value in (
            *((501, b" gzip, chunked"), (501, b" identity, chunked"), (501, b" ,chunked"), (501, b" xchunked")),
            *((400, b" chunked, gzip"), (400, b" chunked, chunked"), (400, b" chunked,"), (400, b" chunked, identity")),
            *((501, b" identity"), (501, b" gzip"), (501, b' "chunked"'), (501, b" 'chunked'"), (501, b" chunke")),
            *((501, b" chunked;q=1"), (501, b" chunkedx"), (501, b" chunked chunked"), (501, b" chun ked")),
            *((400, b""), (400, b" "), (400, b" \x0bchunked"), (400, b" chunked\x0b"), (400, b" chunked\0")),
            *((400, b" chunked\rX: y"), (400, b"\r\n chunked"), (400, b"\n chunked"), (501, b" \xe7hunked")),
        )
    ),
    rejected(400, "6.1", "chunked twice", coding(CHUNKED[:-2], CHUNKED[:-2])),
    rejected(400, "6.1", "chunked, then identity", coding(CHUNKED[:-2], b"Transfer-Encoding: identity")),
    rejected(501, "6.1", "identity, then chunked", coding(b"Transfer-Encoding: identity", CHUNKED[:-2])),
    rejected(400, "5.1", "blank before the colon", coding(b"Transfer-Encoding : chunked")),
    rejected(400, "5.1", "tab before the colon", coding(b"Transfer-Encoding\t: chunked")),
    rejected(400, "5.1", "NUL before the colon", coding(b"Transfer-Encoding\0: chunked")),
    rejected(400, "5.1", "length with a blank before the colon", coding(b"Content-Length : 7", body=BODY)),
    rejected(400, "5.1", "folded to hide the coding", coding(b"X: y", b" Transfer-Encoding: chunked", LENGTH[:-2])),
)
CHUNKED_BODIES = (
    served("7.1", "one byte a chunk", chunks(b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n")),
    answered_here(400, "7.1", "no chunk", chunks(b"0\r\n\r\n")),
    served("7.1", "a size in capitals", chunks(b'0B\r\n{"n":    1}\r\n000\r\n\r\n'), b'{"n":    1}'),
    served("7.1", "a size of many zeros", chunks(b"0" * 40 + CHUNKS)),
    served("7.1.1", "an extension", chunks(CHUNKS.replace(b"\r\n", b';a=b;c="d;e"\r\n', 1))),
    served("7.1.2", "trailers", chunks(CHUNKS[:-2] + b"X-A: b\r\nHost: other\r\nAuthorization: x\r\n\r\n")),
    served("7.1.2", "an upgrade in the trailers", chunks(CHUNKS[:-2] + b"Connection: upgrade\r\nUpgrade: x\r\n\r\n")),
    *(
        rejected(400, "7.1", f"chunk size {size!r}", chunks(size + b'\r\n{"n":1}\r\n0\r\n\r\n'))
        for size in (
            *(b"", b" 7", b"7 ", b"7\t", b"\t7", b"+7", b"-7", b"0x7", b"0X7", b"x7", b"7h", b"7.0", b"7,", b"0_7"),
            *(b"7\0", b"\xef\xbc\x97", b"7\x0b", b"10000000000000007", b"f" * 17, b"7;", b"7 ;a", b"7;a\0", b'7;a="b'),
        )
    ),
    rejected(413, "7.1", "a chunk of 2^64 - 1", chunks(b"f" * 16 + b"\r\n" + b"x" * (MAX_BODY_BYTES + 1))),
    rejected(400, "7.1", "a chunk longer than its size", chunks(b'6\r\n{"n":1}\r\n0\r\n\r\n')),
    rejected(400, "7.1", "a chunk shorter than its size", chunks(b'8\r\n{"n":1}\r\n0\r\n\r\n')),
    rejected(400, "7.1", "no CRLF after a chunk", chunks(b'7\r\n{"n":1}0\r\n\r\n')),
    rejected(400, "2.2", "LF after a size", chunks(b'7\n{"n":1}\r\n0\r\n\r\n')),
    rejected(400, "2.2", "CR after a size", chunks(b'7\r{"n":1}\r\n0\r\n\r\n')),
    rejected(400, "2.2", "LF after a chunk", chunks(b'7\r\n{"n":1}\n0\r\n\r\n')),
    rejected(400, "2.2", "CR after a chunk", chunks(b'7\r\n{"n":1}\r0\r\n\r\n')),
    rejected(400, "2.2", "LF in an extension", chunks(b'7;a\n{"n":1}\r\n0\r\n\r\n')),
    rejected(400, "2.2", "LF in a quoted extension", chunks(b'7;a="\n"\r\n{"n":1}\r\n0\r\n\r\n')),
    rejected(400, "2.2", "LF after the last size", chunks(b'7\r\n{"n":1}\r\n0\n\r\n')),
    rejected(400, "2.2", "LF at the very end", chunks(b'7\r\n{"n":1}\r\n0\r\n\n')),
    rejected(400, "2.2", "CR CR LF at the very end", chunks(b'7\r\n{"n":1}\r\n0\r\n\r\r\n')),
    rejected(400, "7.1", "a last size of -0", chunks(b'7\r\n{"n":1}\r\n-0\r\n\r\n')),
    rejected(400, "7.1.2", "no empty line after the last size", chunks(b'7\r\n{"n":1}\r\n0\r\n')),
    rejected(400, "7.1.2", "a length in the trailers", chunks(CHUNKS[:-2] + b"Content-Length: 3\r\n\r\n")),
    rejected(400, "7.1.2", "a coding in the trailers", chunks(CHUNKS[:-2] + b"Transfer-Encoding: chunked\r\n\r\n")),
    rejected(400, "5.2", "obs-fold in the trailers", chunks(CHUNKS[:-2] + b"A: b\r\n c\r\n\r\n")),
    rejected(400, "2.2", "LF in the trailers", chunks(CHUNKS[:-2] + b"A: b\n\r\n")),
    rejected(400, "5", "a trailer without a colon", chunks(CHUNKS[:-2] + b"A\r\n\r\n")),
    endless(400, "7.1.1", "mostly extension", chunks(b"1;" + b"e" * 20_000)),
    endless(400, "7.1.2", "trailers without end", chunks(b"1\r\nx\r\n0\r\nT: " + b"e" * 20_000)),
    endless(413, "9110 15.5.14", "chunks too large", chunks(b"fff0\r\n" + b"x" * 0xFFF0 + END)),
    incomplete("7.1", "no last chunk", chunks(b'7\r\n{"n":1}\r\n')),
    incomplete("7.1.2", "half of the end", chunks(CHUNKS[:-2])),
)
VECTORS = REQUEST_LINES + HEADERS + LENGTHS + CODINGS + CHUNKED_BODIES
