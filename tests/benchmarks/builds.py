"""The measured builds of the router: plain Python, and compiled where possible."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import cache

from routing.admin.api import is_compiled
from tests.compiled import package
from tests.compiled.package import ROOT, CannotCompileError, compile_router


@cache
def compiled_environment() -> dict[str, str] | None:
    """Environment that imports the compiled router, built first; None, with a message, if it cannot be built."""
    try:
        compile_router()
    except CannotCompileError as error:
        print(error, flush=True)
        return None
    return package.environment()


def run_compiled(name: str, options: Sequence[str]) -> None:
    """Run a benchmark again in a process with the compiled router."""
    if not is_compiled() and (environment := compiled_environment()) is not None:
        subprocess.run(
            [sys.executable, "-m", "tests.benchmarks", name, *options], cwd=ROOT, env=environment, check=True
        )
