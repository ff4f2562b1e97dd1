"""Commands that documents show, and the test that executes each.

A document that shows a command missing here fails ``make check``; a test named here that does not exist does too.
"""

EXECUTED_BY: dict[str, str] = {
    "make run": "tests/end_to_end/test_make_run.py",
    "make test": "tests/contracts/documents/test_commands.py",  # this very run
    "make check": "tests/contracts/documents/test_commands.py",  # runs as a part of it
}
