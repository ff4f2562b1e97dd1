"""A README's file table lists exactly the modules of its folder.

The table is under ``## The files``. It names subfolders with a table of their own, and of others each module or the
folder. ``<strategy>.py`` stands for all modules with a document of the same name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.contracts.documents.reading import DOCUMENTS, ROOT

SECTION = "\n## The files\n"
NAME = re.compile(r"`([^`]+)`")
MAPS = [path for path in DOCUMENTS if path.name == "README.md" and SECTION in path.read_text()]


def listed(readme: Path) -> list[str]:
    """Names in the first column of a table, as paths relative to the folder."""
    section = re.split(r"^## ", readme.read_text().partition(SECTION)[2], maxsplit=1, flags=re.MULTILINE)[0]
    rows = (line.split("|")[1] for line in section.splitlines() if line.startswith("|"))
    return [name for row in rows for name in NAME.findall(row)]


def modules_of(folder: Path, names: Sequence[str] = ()) -> list[str]:
    """Modules of a folder and its subfolders, as a table that names these folders as a whole should name them."""
    modules = []
    for path in folder.iterdir():
        if path / "README.md" in MAPS or f"{path.name}/" in names:
            modules.append(f"{path.name}/")
        elif path.is_dir():
            modules += [f"{path.name}/{name}" for name in modules_of(path)]
        elif path.suffix == ".py" and path.name != "__init__.py":
            modules.append(path.name)
    return modules


@pytest.mark.parametrize("readme", MAPS, ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_every_module_is_listed_once_and_every_listed_file_exists(readme: Path) -> None:
    folder, names = readme.parent, listed(readme)
    modules = modules_of(folder, names)
    if "<strategy>.py" in names:
        modules = [name for name in modules if not (folder / name).with_suffix(".md").exists()]

    counts = Counter(name for name in names if not name.startswith("<"))
    assert [name for name in counts if not (folder / name).exists()] == []
    assert Counter({name: count for name, count in counts.items() if not name.endswith(".md")}) == Counter(modules)


def test_every_module_of_the_router_is_in_a_map() -> None:
    assert ROOT / "routing" / "README.md" in MAPS
