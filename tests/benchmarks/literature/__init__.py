"""The figures that the literature gives for cache-aware routing: ``python -m tests.benchmarks literature [--write]``.

Prints every table of ``docs/literature.md`` and of ``routing/replay/README.md``, from the engine model and the router's
own strategies on seeded workloads (``workloads.py``, ``tables.py``, ``replay.py``). ``--only NAME ...`` prints some of
them. ``--write`` replaces the tables in the documents. The same figures on every machine.
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
DOCUMENTS = (ROOT / "docs/literature.md", ROOT / "routing/replay/README.md")
TABLES = {table.name: table for table in (*LITERATURE_TABLES, *REPLAY_TABLES)}
_TABLE = r"(<!-- table {name} -->\n\n)((?:\|.*\n|.*ot measured yet.*\n)*)"  # in the document


def main(argv: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks literature")
    parser.add_argument(
        "--only", nargs="+", choices=TABLES, default=list(TABLES), metavar="NAME", help=", ".join(TABLES)
    )
    parser.add_argument("--write", action="store_true", help="update the documents")
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


def write(found: Mapping[str, Sequence[str]], documents: Sequence[Path] = ()) -> None:
    """Replace tables of the documents."""
    texts = {document: document.read_text() for document in documents or DOCUMENTS}
    for name, lines in found.items():
        table, pattern = "".join(f"{line}\n" for line in lines), _TABLE.format(name=name)
        places = [document for document, text in texts.items() for _ in re.finditer(pattern, text)]
        if len(places) != 1:
            raise ValueError(f"one document needs the line <!-- table {name} --> once, followed by an empty line")
        document = places[0]
        texts[document] = re.sub(pattern, lambda match, table=table: match[1] + table, texts[document])
    for document, text in texts.items():
        document.write_text(text)


def rows_of(name: str) -> dict[str, list[str]]:
    """Cells of a table in its document, by the first cell of each row; the header first."""
    text = "".join(document.read_text() for document in DOCUMENTS)
    match = re.search(_TABLE.format(name=name), text)
    lines = match[2].splitlines() if match else []
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line]
    return {first: rest for first, *rest in cells}
