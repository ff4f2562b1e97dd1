"""Sockets: listeners that several processes share, loopback addresses, and acknowledged bytes of a connection.

Theory of operation of shared listeners. With SO_REUSEPORT, the kernel gives each listening socket its own accept queue,
and closing a socket resets the connections in its queue. So sockets that close while others stay first divert new
connections: a BPF program attached to the group selects a socket by its index. Indexes follow the order of ``listen``,
so the sockets that close come first; an index out of range falls back to the kernel's choice by hash. When pending
handshakes are over and the queues are empty, the program is detached, because it would outlive the sockets, and they
close. A connection that arrives between these two calls, a microsecond or two, is still reset.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from fcntl import ioctl
from pathlib import Path
from termios import TIOCOUTQ
from typing import Final

from routing.log import event

logger = logging.getLogger(__name__)

HANDSHAKE_S = 1.0  # a connection whose handshake has started is in the accept queue by then
QUEUE_DEADLINE_S = 5.0
_POLL_S = 0.02

_SO_ATTACH_REUSEPORT_CBPF = 51  # asm-generic/socket.h
_SO_DETACH_REUSEPORT_BPF = 68
_LOAD_RANDOM = (0x20, 0, 0, 0xFFFFF000 + 56)  # linux/filter.h: ld [SKF_AD_OFF + SKF_AD_RANDOM]
_RETURN_A = (0x16, 0, 0, 0)
_LISTEN = "0A"  # state in /proc/net/tcp
_TCP_INFO: Final = 11  # linux/tcp.h
_UNACKED = 24  # offset of tcpi_unacked, which is the length of the accept queue of a listening socket
_BYTES_ACKED: Final = slice(120, 128)  # tcpi_bytes_acked


async def bind(host: str, port: int, *, count: int, reuse_port: bool) -> list[list[socket.socket]]:
    """Bind ``count`` sockets at each address of ``host``; one list per index. OSError if the port is taken.

    ``reuse_port``: another process may have the port too. Otherwise that is an error, as without SO_REUSEPORT.
    """
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    by_address: list[list[socket.socket]] = []
    with ExitStack() as undo:
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in infos):
            if not reuse_port:
                _bound(family, address, shared=False).close()
            sockets = [undo.enter_context(_bound(family, address))]
            while len(sockets) < count:
                sockets.append(undo.enter_context(_bound(family, sockets[0].getsockname())))
            by_address.append(sockets)
        undo.pop_all()
    return [list(sockets) for sockets in zip(*by_address, strict=True)]


def _bound(family: int, address: tuple[object, ...], *, shared: bool = True) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.setblocking(False)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


async def divert_new_connections(closing: Sequence[socket.socket]) -> None:
    """Divert new connections to the other sockets of the address, and wait until the queues of ``closing`` are empty.

    ``closing`` are the first sockets that listened at the address, and are still accepted from. If the kernel cannot
    divert, nothing happens: connections in a queue are reset when its socket closes.
    """
    try:
        _attach_selector(closing[0], skip=len(closing))
    except OSError as error:
        event(logger, "new_connections_not_diverted", level=logging.WARNING, reason=error.strerror)
        return
    deadline = asyncio.get_running_loop().time() + QUEUE_DEADLINE_S
    await asyncio.sleep(HANDSHAKE_S)
    while any(map(accept_queue_length, closing)) and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110 - the kernel has no event for it
        await asyncio.sleep(_POLL_S)


def close_listeners(closing: Sequence[socket.socket]) -> None:
    """Close sockets from which no process accepts any more."""
    for listener in closing:
        with suppress(OSError):  # nothing was attached
            listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_REUSEPORT_BPF, 0)
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # also ends the copies in other processes
        listener.close()


def accept_queue_length(listener: socket.socket) -> int:
    """Connections that wait to be accepted; 0 if the system does not report it."""
    if not sys.platform.startswith("linux"):
        return 0
    info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNACKED + 4)
    return int.from_bytes(info[_UNACKED:], sys.byteorder)


def _attach_selector(member: socket.socket, *, skip: int) -> None:
    """Let the kernel choose among the group's sockets except the first ``skip``."""
    program = [
        _LOAD_RANDOM,
        (0x94, 0, 0, max(1, _group_size(member) - skip)),  # mod
        (0x04, 0, 0, skip),  # add
        _RETURN_A,
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    filter_ = struct.pack("HP", len(program), ctypes.addressof(code))
    member.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, filter_)


def _group_size(member: socket.socket) -> int:
    """Number of sockets that listen at the same address, in all processes."""
    table = Path("/proc/net/tcp6" if member.family == socket.AF_INET6 else "/proc/net/tcp")
    rows = [line.split() for line in table.read_text("ascii").splitlines()[1:]]
    addresses = {row[9]: row[1] for row in rows if row[3] == _LISTEN}  # by inode
    address = addresses.get(str(os.fstat(member.fileno()).st_ino), "")
    return list(addresses.values()).count(address)


def unacknowledged_bytes(transport: asyncio.Transport) -> int:
    """Bytes written that the peer's kernel has not acknowledged; 0 if the system does not report it.

    Bytes in the transport's own buffer do not count: there are any only while the kernel's buffer is full.
    """
    sock = transport.get_extra_info("socket")
    try:
        return 0 if sock is None else int.from_bytes(ioctl(sock.fileno(), TIOCOUTQ, bytes(4)), sys.byteorder)
    except (OSError, ValueError):  # the connection has ended
        return 0


def acknowledged_bytes(transport: asyncio.Transport) -> int | None:
    """Bytes that the peer's kernel has acknowledged so far; None if the system does not report it."""
    sock = transport.get_extra_info("socket")
    if sock is None or not sys.platform.startswith("linux"):
        return None
    try:
        acknowledged = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _BYTES_ACKED.stop)[_BYTES_ACKED]
    except OSError:
        return None
    return int.from_bytes(acknowledged, sys.byteorder) if len(acknowledged) == 8 else None
