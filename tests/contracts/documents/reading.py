"""Reads the repository's documents and sources."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_SKIPPED = {
    ".venv",
    ".uv",
    ".programs",
    ".compiled",
    ".clients",
    ".peers",
    ".warmpath",
    "node_modules",
    "vendor",
    ".git",
}

DOCUMENTS = [path for path in sorted(ROOT.rglob("*.md")) if not _SKIPPED & set(path.relative_to(ROOT).parts)]

_commands = re.compile(r"^```(?:sh|bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL).findall


def sources(*packages: str) -> list[Path]:
    """Python files of packages."""
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def shown(text: str) -> list[str]:
    """Commands in a document's shell blocks, without comments, continued lines joined."""
    lines = "\n".join(_commands(text)).replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+", " ", line.partition(" #")[0]).strip() for line in lines if line and not line.startswith("#")]
