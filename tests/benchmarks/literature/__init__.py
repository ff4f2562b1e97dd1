"""The figures that the literature gives for cache-aware routing: ``python -m tests.benchmarks literature [--write]``.

Prints every table of ``docs/literature.md``, from the engine model and the router's own strategies on seeded workloads
(``workloads.py``, ``tables.py``, ``replay.py``). ``--only NAME ...`` prints some of them. ``--write`` replaces the
tables in the document. The same figures on every machine.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tests.benchmarks.literature.replay import REPLAY_TABLES
from tests.benchmarks.literature.tables import LITERATURE_TABLES

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs/literature.md"
TABLES = {table.name: table for table in (*LITERATURE_TABLES, *REPLAY_TABLES)}
_TABLE = r"(<!-- table {name} -->\n\n)((?:\|.*\n|.*ot measured yet.*\n)*)"  # in the document


def main(argv: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks literature")
    parser.add_argument(
        "--only", nargs="+", choices=TABLES, default=list(TABLES), metavar="NAME", help=", ".join(TABLES)
    )
    parser.add_argument("--write", action="store_true", help="update the document")
    options = parser.parse_args(argv)
    found: dict[str, list[str]] = {}
    with ProcessPoolExecutor(min(len(options.only), os.cpu_count() or 1), get_context("spawn")) as workers:
        for name, lines in zip(options.only, workers.map(lines_of, options.only), strict=True):
            found[name] = lines
            print(f"{name}\n", "\n".join(lines), sep="\n", end="\n\n", flush=True)
    if options.write:
        write(found)


def lines_of(name: str) -> list[str]:
    return TABLES[name].lines()


def write(found: Mapping[str, Sequence[str]]) -> None:
    """Replace tables of the document."""
    text = DOCUMENT.read_text()
    for name, lines in found.items():
        table, pattern = "".join(f"{line}\n" for line in lines), _TABLE.format(name=name)
        text, count = re.subn(pattern, lambda match, table=table: match[1] + table, text)
        if count != 1:
            raise ValueError(f"the document needs the line <!-- table {name} --> once, followed by an empty line")
    DOCUMENT.write_text(text)


def rows_of(name: str) -> dict[str, list[str]]:
    """Cells of a table in the document, by the first cell of each row; the header first."""
    match = re.search(_TABLE.format(name=name), DOCUMENT.read_text())
    lines = match[2].splitlines() if match else []
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line]
    return {first: rest for first, *rest in cells}
