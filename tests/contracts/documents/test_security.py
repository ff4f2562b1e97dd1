"""The list of security requirements names tests that exist, and says what is missing where something is."""

import ast
import re

from tests.contracts.documents.reading import ROOT

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "deploy/asvs.md").read_text().splitlines()
    if re.match(r"\| \d", line)
]
STATES = {"met", "part", "not", "yours"}


def functions_of(path: str) -> set[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, functions) and node.name.startswith("test_")}


def test_each_row_has_a_state_and_a_reason_where_it_is_not_met():
    assert len(ROWS) > 60
    for number, what, state, shown in ROWS:
        word, _, reason = state.partition(":")
        assert word in STATES, number
        assert bool(reason) == (word != "met"), f"{number}: {what}"
        assert shown or word != "met", f"{number}: by which test?"


def test_each_test_that_is_named_exists():
    named = [name for row in ROWS for name in re.findall(r"`(tests/[^`]+)`", row[3])]
    missing = [name for name in named if name.partition("::")[2] not in functions_of(name.partition("::")[0])]
    assert missing == []


def test_no_requirement_stands_there_twice():
    numbers = [number for row in ROWS for number in row[0].split(", ")]
    assert sorted(set(numbers)) == sorted(numbers)
