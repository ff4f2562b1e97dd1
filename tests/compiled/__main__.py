"""Run the router's tests against the compiled router: ``python -m tests.compiled [ARGUMENTS OF PYTEST]``.

Without a path, runs all tests of compiled modules.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from tests.compiled.package import ROOT, CannotCompileError, compile_router, environment

PARTS = ("prompt", "limits", "balancing", "health", "proxy", "workers", "replay")
FOLDERS = [f"tests/routing/{part}" for part in PARTS]
# What in these folders is about modules that stay plain: processes, sockets, files, certificates. It would take
# a third of the time, most of it to start processes, which test_wheel.py does as well.
LEFT_OUT = [
    f"tests/routing/{name}.py"
    for name in (
        "prompt/test_structure",
        "proxy/test_announcements",
        "proxy/test_stored_configurations",
        "proxy/test_tls",
        "workers/test_channel",
        "workers/test_processes",
        "workers/test_signals",
        "workers/test_supervisor",
        "workers/test_tls",
        "workers/test_warm_ups",
    )
]


def main(arguments: Sequence[str]) -> None:
    """Compile, then exec pytest; print why if the router cannot be compiled."""
    try:
        compile_router()
    except CannotCompileError as error:
        sys.exit(str(error))
    command = [sys.executable, "-m", "pytest", "-p", "tests.compiled.plugin", "-p", "no:cacheprovider"]
    command += ["-o", "django_find_project=false"]  # or the folder of manage.py, and of the plain router, comes first
    everything = [*FOLDERS, *(f"--ignore={path}" for path in LEFT_OUT)]
    where = () if any((ROOT / argument.partition("::")[0]).exists() for argument in arguments) else everything
    os.chdir(ROOT)
    os.execve(sys.executable, [*command, *arguments, *where], environment())  # so that who ends this ends pytest


if __name__ == "__main__":
    main(sys.argv[1:])
