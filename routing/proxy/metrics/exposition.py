"""Prometheus text: the lines that introduce a metric, and labels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

PREFIX: Final = "warmpath_router_"


def header(name: str, kind: str, text: str, prefix: str = PREFIX) -> Iterable[str]:
    """The lines that introduce a metric."""
    return (f"# HELP {prefix}{name} {text}", f"# TYPE {prefix}{name} {kind}")


def labels(**values: object) -> str:
    """Label pairs, escaped, in the order given."""
    return ",".join(f'{name}="{_escaped(str(value))}"' for name, value in values.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
