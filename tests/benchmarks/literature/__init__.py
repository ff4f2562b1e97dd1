"""The figures that the literature gives for cache-aware routing: ``python -m tests.benchmarks literature [--write]``.

Prints every table of ``docs/literature.md``, from the engine model and the router's own strategies on seeded workloads
(``workloads.py``, ``tables.py``). ``--only NAME ...`` prints some of them. ``--write`` replaces the tables in the
document, and the charts beside it. Takes about two minutes on two cores; the same figures on every machine.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tests.benchmarks.literature.charts import CHARTS, Rows
from tests.benchmarks.literature.tables import TABLES

DOCUMENT = Path(__file__).parents[3] / "docs/literature.md"
CHART_FOLDER = DOCUMENT.parent / "literature"
_TABLE = r"(<!-- table {name} -->\n\n)((?:\|.*\n)*)"  # in the document


def main(argv: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks literature")
    parser.add_argument(
        "--only", nargs="+", choices=TABLES, default=list(TABLES), metavar="NAME", help=", ".join(TABLES)
    )
    parser.add_argument("--write", action="store_true", help=f"update {DOCUMENT.name} and its charts")
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
    """Replace tables of the document, and their charts."""
    document = DOCUMENT.read_text()
    for name, lines in found.items():
        text = "".join(f"{line}\n" for line in lines)
        document, count = re.subn(_TABLE.format(name=name), lambda match, text=text: match[1] + text, document)
        if count != 1:
            raise ValueError(f"{DOCUMENT.name} needs the line <!-- table {name} --> once, followed by an empty line")
    DOCUMENT.write_text(document)
    for chart in CHARTS:
        (CHART_FOLDER / chart.file).write_text(chart.svg(rows_of(document, chart.table)))


def rows_of(document: str, name: str) -> Rows:
    """Cells of a table in the document, by the first cell of each row; the header first."""
    match = re.search(_TABLE.format(name=name), document)
    lines = match[2].splitlines() if match else []
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line]
    return {first: rest for first, *rest in cells}
