"""Run the router's tests against the compiled router: ``python -m tests.compiled [ARGUMENTS OF PYTEST]``.

Without a path, runs all tests of compiled modules.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from tests.compiled.package import EXCLUDED, FOLDERS, ROOT, CannotCompileError, compile_router, environment


def main(arguments: Sequence[str]) -> None:
    """Compile, then exec pytest; print why if the router cannot be compiled."""
    try:
        compile_router()
    except CannotCompileError as error:
        sys.exit(str(error))
    command = [sys.executable, "-m", "pytest", "-p", "tests.compiled.plugin", "-p", "no:cacheprovider"]
    command += [
        "-o",
        "django_find_project=false",
    ]  # otherwise the checkout, with the plain router, is first on the path
    all_tests = [*FOLDERS, *(f"--ignore={path}" for path in EXCLUDED)]
    paths = () if any((ROOT / argument.partition("::")[0]).exists() for argument in arguments) else all_tests
    os.chdir(ROOT)
    os.execve(
        sys.executable, [*command, *arguments, *paths], environment()
    )  # so that a signal to this process reaches pytest


if __name__ == "__main__":
    main(sys.argv[1:])
