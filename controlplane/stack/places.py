"""Where the local stack keeps its things, all below the data directory."""

import hashlib
import os
import secrets
import tempfile
from pathlib import Path
from urllib.parse import quote

SOCKET_PATH_LIMIT = 90  # bytes; the kernel's is 107, and PostgreSQL adds its own file name


def secret(data_dir: Path, name: str) -> str:
    """A random value that is made once, kept in a file that only its owner reads."""
    path = data_dir / "secrets" / name
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        return path.read_text(encoding="ascii")
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(secrets.token_urlsafe(48))
    return path.read_text(encoding="ascii")


def socket_dir(data_dir: Path, name: str) -> Path:
    """A folder for a server's socket: below the data directory, or a short one where that path is too long."""
    folder = data_dir / name
    if len(os.fsencode(folder)) <= SOCKET_PATH_LIMIT:
        return folder
    digest = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"warmpath-{os.getuid()}-{digest}" / name


def postgres_url(data_dir: Path) -> str:
    """URL of the embedded PostgreSQL, which listens on a socket alone."""
    return f"postgresql://postgres@/warmpath?host={quote(str(socket_dir(data_dir, 'pg')), safe='')}"


def valkey_url(data_dir: Path) -> str:
    """URL of the embedded Valkey, which listens on a socket alone."""
    return f"redis+socket://{socket_dir(data_dir, 'valkey') / 'socket'}?virtual_host=0"
