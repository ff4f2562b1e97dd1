"""The list of security requirements names tests that exist, and gives a reason for each requirement that is not met."""

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


def test_each_requirement_has_a_state_and_a_reason_if_it_is_not_met():
    assert len(ROWS) > 60
    for number, requirement, state, evidence in ROWS:
        name, _, reason = state.partition(":")
        assert name in STATES, number
        assert bool(reason) == (name != "met"), f"{number}: {requirement}"
        assert evidence or name != "met", f"{number}: no test is named"


def test_each_named_test_exists():
    named = [name for row in ROWS for name in re.findall(r"`(tests/[^`]+)`", row[3])]
    missing = [name for name in named if name.partition("::")[2] not in functions_of(name.partition("::")[0])]
    assert missing == []


def test_no_requirement_is_listed_twice():
    numbers = [number for row in ROWS for number in row[0].split(", ")]
    assert sorted(set(numbers)) == sorted(numbers)
