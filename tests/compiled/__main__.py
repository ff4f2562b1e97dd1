"""Run the router's own tests against the compiled router: ``python -m tests.compiled [ARGUMENTS OF PYTEST]``.

Without a path among them, all tests that have to do with modules that are compiled.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from tests.compiled.package import ROOT, NotHereError, compile_router, environment

FOLDERS = [f"tests/routing/{name}" for name in ("core", "strategies", "proxy", "workers", "simulation/whatif")]


def main(arguments: Sequence[str]) -> int:
    """Compile and run; pytest's exit status is ours."""
    try:
        compile_router()
    except NotHereError as error:
        print(error, file=sys.stderr)  # noqa: T201 - it talks to a terminal
        return 1
    command = [sys.executable, "-m", "pytest", "-p", "tests.compiled.plugin", "-p", "no:cacheprovider"]
    command += ["-o", "django_find_project=false"]  # or the folder of manage.py, and of the plain router, comes first
    where = () if any((ROOT / argument.partition("::")[0]).exists() for argument in arguments) else FOLDERS
    return subprocess.call([*command, *arguments, *where], cwd=ROOT, env=environment())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
