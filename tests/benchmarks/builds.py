"""The measured builds of the router: plain Python, and compiled where possible."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import cache

from routing.admin.api import is_compiled
from tests.compiled.package import ROOT, CannotCompileError, compile_router, environment


@cache
def compiled_environment() -> dict[str, str] | None:
    """Environment that finds the compiled router, building it first; None, with a message, where that is
    impossible.
    """
    try:
        compile_router()
    except CannotCompileError as error:
        print(error, flush=True)
        return None
    return environment()


def again_compiled(name: str, options: Sequence[str]) -> None:
    """Run a benchmark again in a process with the compiled router."""
    if not is_compiled() and (where := compiled_environment()) is not None:
        subprocess.run([sys.executable, "-m", "tests.benchmarks", name, *options], cwd=ROOT, env=where, check=True)
