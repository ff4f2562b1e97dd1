"""The same way out for libraries that bring a protocol of their own and only need a connection."""

from __future__ import annotations

import socket
import time
from concurrent.futures import TimeoutError as FutureTimeoutError

import httpcore

from .addresses import Rules
from .transport import EgressRefusedError, Resolver, checked, lookup, resolve


def guarded_socket(
    host: str, port: int, rules: Rules, *, timeout_s: float, resolver: Resolver = resolve
) -> socket.socket:
    """A connection to an address of the host that was checked, within ``timeout_s``.

    EgressRefusedError where any of its addresses is not allowed, OSError for every other way to fail.
    """
    ends = time.monotonic() + timeout_s
    try:
        found = checked(host, lookup(resolver, host, port).result(timeout_s), rules, port)
    except FutureTimeoutError:
        raise TimeoutError("resolving took too long") from None
    except UnicodeError:
        raise OSError("it cannot be resolved") from None
    except EgressRefusedError:
        raise
    except httpcore.ConnectError as error:
        raise OSError(str(error)) from None
    failure = OSError("no address")
    for address in found:
        try:
            return socket.create_connection((address, port), max(ends - time.monotonic(), 0.01))
        except OSError as error:
            failure = error
    raise failure
