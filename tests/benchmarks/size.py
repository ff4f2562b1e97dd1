"""How large the code is, by part, beside its budget: ``python -m tests.benchmarks size``.

A line counts if it has code: blank lines, comments, docstrings and migrations do not. ``make check`` runs this and
fails above ``LIMITS``, which are lowered whenever the code has become smaller and raised only for a new capability.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAB = tuple(f"routing/{name}/" for name in ("standin", "simulation", "replay", "traffic"))
BUDGETS = {  # lines, in the order of the table
    "routing/ without the lab": 14_500,
    "routing/ lab": 3_600,
    "controlplane/": 13_000,
    "telemetry/": 17_500,
    "deploy/ and the rest": 1_400,
    "product": 50_000,
    "tests": 42_000,
    "modules": 360,  # files of the product without __init__.py and migrations
}
LIMITS = {"product": 71_092, "tests": 73_567, "modules": 460}
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_HAVE_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def main() -> None:
    """Print the table; exit with a sentence for each total above its limit."""
    sizes = measure()
    print(f"{'':<28}{'now':>8}{'budget':>8}{'limit':>8}")
    for part, budget in BUDGETS.items():
        limit = f"{LIMITS[part]:>8,}" if part in LIMITS else ""
        print(f"{part:<28}{sizes[part]:>8,}{budget:>8,}{limit}")
    if excess := "\n".join(above_limits(sizes)):
        raise SystemExit(excess)


def above_limits(sizes: Counter[str]) -> Iterator[str]:
    """A sentence for each limit that is exceeded."""
    for part, limit in LIMITS.items():
        if sizes[part] > limit:
            yield (
                f"{part}: {sizes[part]:,}, and the limit is {limit:,}. Remove or merge as much as you add: look for a "
                "second place with the same idea, a setting without two right values, a helper with one caller. A new "
                "capability raises LIMITS by what it needs, in its own commit."
            )


def measure() -> Counter[str]:
    """Lines of each part, and the number of modules."""
    sizes: Counter[str] = Counter()
    for path in sorted(ROOT / folder for folder in ("routing", "controlplane", "telemetry", "deploy", "tests")):
        for file in path.rglob("*.py"):
            if "migrations" not in file.parts:
                _add(sizes, file)
    _add(sizes, ROOT / "manage.py")
    return sizes


def _add(sizes: Counter[str], file: Path) -> None:
    name, lines = file.relative_to(ROOT).as_posix(), code_lines(file.read_text(encoding="utf-8"))
    part = _part(name)
    sizes[part] += lines
    if part != "tests":
        sizes["product"] += lines
        sizes["modules"] += file.name != "__init__.py"


def _part(name: str) -> str:
    folder = name.partition("/")[0]
    if folder == "routing":
        return "routing/ lab" if name.startswith(LAB) else "routing/ without the lab"
    return {"controlplane": "controlplane/", "telemetry": "telemetry/", "tests": "tests"}.get(
        folder, "deploy/ and the rest"
    )


def code_lines(source: str) -> int:
    """Number of lines with code; a docstring is no code."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _HAVE_DOCSTRINGS) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)
