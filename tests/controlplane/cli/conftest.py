"""The command line against a running site."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from click.testing import CliRunner

from controlplane.cli.__main__ import main
from controlplane.services.access.tokens import create_token


@dataclass
class Result:
    """The result of a command."""

    status: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture
def token(operator):
    """A token that may do everything."""
    return create_token(operator, name="laptop", scopes=["admin"])[1]


@pytest.fixture
def warmpath(live_server, token, tmp_path, monkeypatch):
    """Runs ``warmpath`` with arguments, signed in by the environment."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("WARMPATH_URL", live_server.url)
    monkeypatch.setenv("WARMPATH_TOKEN", token)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("no_proxy", "*")

    def run(*arguments: str, stdin: str | None = None) -> Result:
        result = CliRunner().invoke(main, list(arguments), input=stdin, prog_name="warmpath")
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Result(result.exit_code, result.stdout, result.stderr)

    return run
