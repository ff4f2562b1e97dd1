"""What a parent and a worker tell each other: how it begins, what it is to make ready, how it is."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from routing.proxy.sockets.tls import TlsFiles


class Orders(Struct, frozen=True):
    """How a worker begins; descriptors are inherited."""

    name: str  # the router's
    number: int  # the worker's slot, from 0 on
    workers: int
    channel_fd: int
    board_fd: int
    rows: int  # of the board
    row: int  # this worker's
    listening_fds: list[list[int]]  # by slot, one for each address
    tls: TlsFiles


class Preparation(Struct, frozen=True):
    """A configuration to make ready."""

    document: bytes
    columns: dict[str, int]  # of the board, by target
    rates: dict[str, int]  # slots of shared limits, by name
    gates: dict[str, int]


class WorkerStatus(Struct, frozen=True):
    """A worker at one moment."""

    metrics: str
    replicas: list[dict[str, Any]]
    in_flight: int
    first_decision: int  # the oldest that is there
    last_decision: int


def as_plain(message: Struct) -> Any:
    """For the channel."""
    return msgspec.to_builtins(message, builtin_types=(bytes,))
