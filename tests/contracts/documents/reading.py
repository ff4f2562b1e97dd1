"""What is documented, and where."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_SKIPPED = {".venv", ".uv", ".programs", ".compiled", ".warmpath", "node_modules", "vendor", ".git"}

DOCUMENTS = [path for path in sorted(ROOT.rglob("*.md")) if not _SKIPPED & set(path.relative_to(ROOT).parts)]


def sources(*packages: str) -> list[Path]:
    """Python files of packages."""
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
