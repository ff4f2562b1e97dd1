"""The builds of the router that are measured: plain Python, and where it can be had the compiled one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import cache

from routing.admin.api import is_compiled
from tests.compiled.package import ROOT, NotHereError, compile_router, environment


@cache
def compiled_environment() -> dict[str, str] | None:
    """Where the compiled router is found, which is made first; None where it cannot be, and a line says why."""
    try:
        compile_router()
    except NotHereError as error:
        print(error, flush=True)
        return None
    return environment()


def again_compiled(name: str, options: Sequence[str]) -> None:
    """Run a benchmark of this process's own code once more, in one that has the compiled router."""
    if not is_compiled() and (where := compiled_environment()) is not None:
        subprocess.run([sys.executable, "-m", "tests.benchmarks", name, *options], cwd=ROOT, env=where, check=True)
