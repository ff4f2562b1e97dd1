"""Files that commands read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
import yaml


class Document(click.ParamType[Any]):
    """A file in YAML, or in JSON, which is YAML; ``-`` is the standard input. Of the kind that is expected."""

    name = "file"

    def __init__(self, kind: type, what: str) -> None:
        self._kind, self._what = kind, what

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """What is in it; a usage error says what is wrong."""
        try:
            read = yaml.safe_load(sys.stdin.read() if value == "-" else Path(value).read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
            self.fail(f"{value}: {error}", param, ctx)
        if not isinstance(read, self._kind):
            self.fail(f"{value}: expected {self._what}.", param, ctx)
        return read
