"""Listening sockets that several processes share, and how one of them leaves without a connection being refused.

Theory of operation. With SO_REUSEPORT the kernel gives each listening socket a queue of its own, and closing one resets
whatever waits in its queue. So sockets that leave while others stay first send newcomers to them: a small program,
attached to the group, names the socket to use by its place in it. Places are given in the order of listening, hence
those who leave come first; a place that does not exist means the usual choice by hash. When handshakes under way are
over and the queues are empty, the program is taken off, because it would outlive those who leave, and they close. What
arrives between these two calls, a microsecond or two, is still reset.

What only this machine can reach.

What the kernel knows of how far bytes have got, by a system call each; nothing where it does not tell.
"""

from __future__ import annotations

import asyncio
import ctypes
import ipaddress
import logging
import os
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from fcntl import ioctl
from pathlib import Path
from socket import IPPROTO_TCP
from termios import TIOCOUTQ
from typing import Final

from routing.log import event

logger = logging.getLogger(__name__)

BACKLOG = 2048  # connections that the kernel may hold until they are accepted
HANDSHAKE_S = 1.0  # in which a connection that was begun towards a socket ends in its queue
QUEUE_DEADLINE_S = 5.0
_LOOK_S = 0.02

_SO_ATTACH_REUSEPORT_CBPF = 51  # asm-generic/socket.h
_SO_DETACH_REUSEPORT_BPF = 68
_LOAD_RANDOM = (0x20, 0, 0, 0xFFFFF000 + 56)  # linux/filter.h: ld [SKF_AD_OFF + SKF_AD_RANDOM]
_LISTEN = "0A"  # of /proc/net/tcp
_RETURN_A = (0x16, 0, 0, 0)
_TCP_INFO_QUEUED = 24  # linux/tcp.h: tcpi_unacked, which for a listening socket is the length of its queue


async def bind(host: str, port: int, *, count: int, beside_others: bool) -> list[list[socket.socket]]:
    """``count`` sockets for each address of ``host``, by socket and then by address; OSError if the port is taken.

    ``beside_others``: the port may be another process's too. Otherwise that is an error, as it is without sharing.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    by_address: list[list[socket.socket]] = []
    with ExitStack() as undo:
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            if not beside_others:
                _open(family, address, shared=False).close()
            sockets = [undo.enter_context(_open(family, address))]
            while len(sockets) < count:
                sockets.append(undo.enter_context(_open(family, sockets[0].getsockname())))
            by_address.append(sockets)
        undo.pop_all()
    return [list(sockets) for sockets in zip(*by_address, strict=True)]


def _open(family: int, address: tuple[object, ...], *, shared: bool = True) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.setblocking(False)
        listening.bind(address)
    except OSError:
        listening.close()
        raise
    return listening


async def send_newcomers_to_others(leaving: Sequence[socket.socket]) -> None:
    """Wait until nothing comes to these sockets any more and nothing waits there; they are accepted from meanwhile.

    The sockets are of one address and were the first to listen at it. Where the kernel cannot do this, nothing
    happens: what waits in a queue at its end is reset then.
    """
    try:
        _send_beyond(leaving[0], len(leaving))
    except OSError as error:
        event(logger, "newcomers_not_sent_on", level=logging.WARNING, reason=error.strerror)
        return
    deadline = asyncio.get_running_loop().time() + QUEUE_DEADLINE_S
    await asyncio.sleep(HANDSHAKE_S)
    while any(map(queued, leaving)) and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110 - the kernel tells nobody
        await asyncio.sleep(_LOOK_S)


def leave(leaving: Sequence[socket.socket]) -> None:
    """Close sockets after others have stopped accepting from them, and for those that have not."""
    for listening in leaving:
        with suppress(OSError):  # nothing was attached
            listening.setsockopt(socket.SOL_SOCKET, _SO_DETACH_REUSEPORT_BPF, 0)
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)  # a copy in another process kept it open
        listening.close()


def queued(listening: socket.socket) -> int:
    """Connections that wait to be accepted."""
    if not sys.platform.startswith("linux"):
        return 0
    info = listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_QUEUED + 4)
    return int.from_bytes(info[_TCP_INFO_QUEUED:], sys.byteorder)


def _send_beyond(member: socket.socket, count: int) -> None:
    """Of the group's sockets, pass over the first ``count``: choose among those behind them."""
    program = [
        _LOAD_RANDOM,
        (0x94, 0, 0, max(1, _listeners(member) - count)),  # mod as many
        (0x04, 0, 0, count),  # add count
        _RETURN_A,
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    filter_ = struct.pack("HP", len(program), ctypes.addressof(code))
    member.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, filter_)


def _listeners(member: socket.socket) -> int:
    """How many sockets listen at the same address, of all processes."""
    table = Path("/proc/net/tcp6" if member.family == socket.AF_INET6 else "/proc/net/tcp")
    rows = [line.split() for line in table.read_text("ascii").splitlines()[1:]]
    listening = {row[9]: row[1] for row in rows if row[3] == _LISTEN}  # address by inode
    mine = listening.get(str(os.fstat(member.fileno()).st_ino))
    return sum(address == mine for address in listening.values())


def is_loopback(host: str) -> bool:
    """Whether a host is the loopback, by its address or as ``localhost``; what other names resolve to may change."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


_TCP_INFO: Final = 11  # linux/tcp.h, as the place of tcpi_bytes_acked in what it gives
_ACKED: Final = slice(120, 128)


def untaken_bytes(transport: asyncio.Transport) -> int:
    """What was written and the other side's kernel has not acknowledged; 0 where nobody can tell.

    What a transport keeps, it keeps because the kernel is full.
    """
    socket = transport.get_extra_info("socket")
    try:
        return 0 if socket is None else int.from_bytes(ioctl(socket.fileno(), TIOCOUTQ, bytes(4)), sys.byteorder)
    except (OSError, ValueError):  # it has ended
        return 0


def taken_bytes(transport: asyncio.Transport) -> int | None:
    """What the other side's kernel has acknowledged, ever; None where nobody can tell."""
    socket = transport.get_extra_info("socket")
    if socket is None or not sys.platform.startswith("linux"):
        return None
    try:
        acked = socket.getsockopt(IPPROTO_TCP, _TCP_INFO, _ACKED.stop)[_ACKED]
    except OSError:
        return None
    return int.from_bytes(acked, sys.byteorder) if len(acked) == 8 else None
