"""Which build of the router runs: plain Python, or its hot modules as native code."""

from __future__ import annotations

import platform
from importlib.machinery import EXTENSION_SUFFIXES
from typing import Any

from routing.core.health import breaker


def is_compiled() -> bool:
    """Whether the hot modules are native code; one of them stands for all."""
    return breaker.__file__.endswith(tuple(EXTENSION_SUFFIXES))


def facts(version: str) -> dict[str, Any]:
    """Version, build and Python, as texts, for the log and for labels."""
    return {
        "version": version,
        "compiled": "true" if is_compiled() else "false",
        "python": platform.python_version(),
    }
