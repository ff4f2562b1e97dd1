"""Every command in a document is executed by a test."""

import hypothesis
import pytest

from tests.contracts.documents.commands import EXECUTED_BY
from tests.contracts.documents.reading import DOCUMENTS, ROOT, shown
from tests.pace import ALL_EXAMPLES, FEWEST, with_fewer_examples


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_that_a_document_shows_is_executed_by_a_test(document):
    unknown = [command for command in shown(document.read_text()) if command and command not in EXECUTED_BY]
    assert not unknown, "name the test that executes the command in tests/contracts/documents/commands.py"


def test_every_test_that_executes_a_command_exists():
    missing = [test for test in EXECUTED_BY.values() if not (ROOT / test.partition("::")[0]).is_file()]
    assert not missing


def test_no_command_is_registered_that_no_document_shows():
    documented = {command for document in DOCUMENTS for command in shown(document.read_text())}
    assert not set(EXECUTED_BY) - documented


@pytest.mark.parametrize(("all_of_them", "here"), [(8, 8), (50, FEWEST), (100, FEWEST), (500, 100)])
def test_generated_tests_have_a_fifth_of_their_examples_unless_all_are_asked_for(all_of_them, here):
    assert with_fewer_examples(hypothesis.settings(max_examples=all_of_them)).max_examples == here
    (command,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if ALL_EXAMPLES in line]
    assert command.endswith('deploy/bootstrap.py test -m "hypothesis or generated"')
