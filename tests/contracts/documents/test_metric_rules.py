"""Every rule of how figures are computed is kept somewhere and tested by a test that names it."""

import re
from pathlib import Path

import pytest

from tests.contracts.documents.reading import ROOT

README = ROOT / "telemetry/metrics/README.md"
RULES = [*(f"H{number}" for number in range(1, 20)), *(f"T{number}" for number in range(1, 10))]
ROW = re.compile(r"^\| ([HT]\d+) \|[^|]+\| ([^|]+) \| `([^`]+)::(\w+)` \|$", re.MULTILINE)


def rows() -> dict[str, tuple[list[str], str, str]]:
    """Rule -> where it is kept, its test's file, its test."""
    found = ROW.findall(README.read_text("utf-8"))
    return {rule: (re.findall(r"`([^`]+)`", kept), path, test) for rule, kept, path, test in found}


def test_every_rule_has_one_row():
    assert list(rows()) == RULES


def body_of(test: str, text: str) -> str:
    """A test's function, with the decorators and the comment above it."""
    lines = text.split("\n")
    start = next(number for number, line in enumerate(lines) if re.match(rf"(async )?def {test}\(", line))
    ends = (number for number in range(start + 1, len(lines)) if re.match(r"(async def|def|class|@)", lines[number]))
    return "\n".join(lines[start : next(ends, len(lines))])


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_kept_where_the_table_says_and_its_test_names_it(rule):
    kept, path, test = rows()[rule]

    assert [where for where in kept if not (README.parent / where).resolve().is_file()] == []
    assert re.search(rf"\b{rule}\b", body_of(test, Path(ROOT / path).read_text("utf-8")))
    assert any(re.search(rf"\b{rule}\b", (README.parent / where).read_text("utf-8")) for where in kept)
