"""Every rule for computing figures has files that implement it and a test that names it."""

import re
from pathlib import Path

import pytest

from tests.contracts.documents.reading import ROOT

README = ROOT / "telemetry/metrics/README.md"
RULES = [*(f"H{number}" for number in range(1, 20)), *(f"T{number}" for number in range(1, 10))]
ROW = re.compile(r"^\| ([HT]\d+) \|[^|]+\| ([^|]+) \| `([^`]+)::(\w+)` \|$", re.MULTILINE)


def rows() -> dict[str, tuple[list[str], str, str]]:
    """Rule -> (files that implement it, file of its test, name of its test)."""
    matches = ROW.findall(README.read_text("utf-8"))
    return {rule: (re.findall(r"`([^`]+)`", kept), path, test) for rule, kept, path, test in matches}


def test_every_rule_has_one_row():
    assert list(rows()) == RULES


def body_of(test: str, text: str) -> str:
    """A test's function, with the decorators and the comment above it."""
    lines = text.split("\n")
    start = next(number for number, line in enumerate(lines) if re.match(rf"(async )?def {test}\(", line))
    ends = (number for number in range(start + 1, len(lines)) if re.match(r"(async def|def|class|@)", lines[number]))
    return "\n".join(lines[start : next(ends, len(lines))])


@pytest.mark.parametrize("rule", RULES)
def test_the_files_of_a_rule_exist_and_its_test_names_it(rule):
    kept, path, test = rows()[rule]

    assert [file for file in kept if not (README.parent / file).resolve().is_file()] == []
    assert re.search(rf"\b{rule}\b", body_of(test, Path(ROOT / path).read_text("utf-8")))
