"""Run the router's own tests against the compiled router: ``python -m tests.compiled [ARGUMENTS OF PYTEST]``.

Without a path among them, all tests that have to do with modules that are compiled.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from tests.compiled.package import ROOT, NotHereError, compile_router, environment

PARTS = ("core", "strategies", "placement", "proxy", "workers", "simulation/whatif")
FOLDERS = [f"tests/routing/{part}" for part in PARTS]


def main(arguments: Sequence[str]) -> None:
    """Compile, and become pytest; say why where the router cannot be compiled."""
    try:
        compile_router()
    except NotHereError as error:
        sys.exit(str(error))
    command = [sys.executable, "-m", "pytest", "-p", "tests.compiled.plugin", "-p", "no:cacheprovider"]
    command += ["-o", "django_find_project=false"]  # or the folder of manage.py, and of the plain router, comes first
    where = () if any((ROOT / argument.partition("::")[0]).exists() for argument in arguments) else FOLDERS
    os.chdir(ROOT)
    os.execve(sys.executable, [*command, *arguments, *where], environment())  # so that who ends this ends pytest


if __name__ == "__main__":
    main(sys.argv[1:])
