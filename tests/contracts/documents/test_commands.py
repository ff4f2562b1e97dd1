"""Every command in a document is executed by a test."""

import pytest

from tests.contracts.documents.commands import EXECUTED_BY
from tests.contracts.documents.reading import DOCUMENTS, ROOT, shown


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
