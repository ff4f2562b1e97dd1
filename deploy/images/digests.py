"""SHA-256 digests of files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_all(paths: Iterable[Path], *more: str) -> str:
    """One digest of the contents of files and of strings."""
    digest = hashlib.sha256("\n".join(more).encode())
    for path in paths:
        digest.update(path.name.encode() + bytes.fromhex(sha256_of(path)))
    return digest.hexdigest()
