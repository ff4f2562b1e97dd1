"""What the kernel knows of how far bytes have got, by a system call each; nothing where it does not tell."""

from __future__ import annotations

import asyncio
import sys
from fcntl import ioctl
from socket import IPPROTO_TCP
from termios import TIOCOUTQ
from typing import Final

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
