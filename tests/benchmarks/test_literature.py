"""``docs/literature.md`` has the tables that ``python -m tests.benchmarks literature`` prints."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.benchmarks import literature
from tests.benchmarks.__main__ import main
from tests.benchmarks.literature import DOCUMENT, TABLES, rows_of
from tests.pace import some

# Rows that cost little; ``python -m tests.benchmarks literature --write`` computes all.
CHECKED = [
    ("round-robin", "short sessions: 2 turns"),
    ("workloads", list(TABLES["workloads"].rows)[2]),
    ("turns", "TTFT mean, ms: `lowest_cost`"),
    ("cache-on-off", "offered requests/s"),
    *(("break-even", row) for row in TABLES["break-even"].rows),
    *(("fetch-time", row) for row in TABLES["fetch-time"].rows),
]
LONGER = [  # some seconds of CPU time each
    ("replay-chat", "`lowest_cost`"),
    ("tiers", "`round_robin`, with CPU and remote"),
    ("replay-difficult", "`nothing_shared`"),
    ("replay-routers", "`chat`"),
    ("replay-sharing", "`coding, session keys`"),
]


@cache
def lines_of_document() -> list[str]:
    return DOCUMENT.read_text().splitlines()


@pytest.mark.parametrize("name", TABLES)
def test_the_document_has_every_row_of_a_table(name: str) -> None:
    table, rows = TABLES[name], rows_of(name)

    assert rows.pop(table.header[0]) == list(table.header[1:])
    assert list(rows) == list(table.rows)
    assert {len(cells) for cells in rows.values()} == {len(table.header) - 1}


@pytest.mark.generated
@pytest.mark.parametrize(("name", "row"), [*CHECKED, *some(LONGER)])
def test_a_row_of_the_document_is_what_the_command_prints(name: str, row: str) -> None:
    assert TABLES[name].line(row) in lines_of_document()


def test_the_command_prints_tables_and_writes_them_into_the_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = DOCUMENT.read_text()
    outdated = tmp_path / "literature.md"
    outdated.write_text(document.replace("| fetch from cpu | 10.8 |", "| fetch from cpu | 99.9 |"))
    monkeypatch.setattr(literature, "DOCUMENT", outdated)

    assert main(["literature", "--write", "--only", "fetch-time", "break-even"]) == 0

    assert outdated.read_text() == document
    printed = capsys.readouterr().out
    assert all(TABLES[name].line(row) in printed for name in ("fetch-time", "break-even") for row in TABLES[name].rows)


def test_the_document_says_how_each_table_compares_with_the_literature() -> None:
    sections = re.split(r"^## ", DOCUMENT.read_text(), flags=re.MULTILINE)[1:]

    for section in sections:
        if re.search(r"<!-- table (?!replay-)", section):
            assert "**Agrees**" in section or "**Differs**" in section, section.splitlines()[0]
